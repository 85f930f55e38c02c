// Values made of values, element by element of contiguous arrays; an invocation takes one element.

$ENABLE
struct Params {
    first: u32, last: u32,
//$ for b in BUFFERS:
    ${b[1]}: u32,
//$ end
}

@group(0) @binding(0) var<uniform> p: Params;
//$ for b in BUFFERS:
@group(0) @binding(${b[0]}) var<storage, ${b[3]}> ${b[1]}: array<${b[2]}>;
//$ end

$FUNCTIONS

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let i = p.first + id.x + id.y * grid.x * 256u;
    if (i >= p.last) {
        return;
    }
    //$ for name in READ:
    let ${name}_here = $ACC(${name}[p.$name + i]);
    //$ end
    //$ for v in VALUES:
    let ${v[0]} = ${v[1]};
    //$ end
    //$ for w in WRITTEN:
    ${w[0]}[p.${w[0]} + i] = ${w[1]}(${w[2]});
    //$ end
}
