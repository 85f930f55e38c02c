// out[o, g, i] = sum of planes[o, q, i] over the q of group g, one after another: the order that
// makes the sum the same every time.

$ENABLE
struct Params {
    size: u32, depth: u32, width: u32, groups: u32,
    planes: u32, out: u32, total: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
//$ for b in BUFFERS:
@group(0) @binding(${b[0]}) var<storage, ${b[3]}> ${b[1]}: array<${b[2]}>;
//$ end

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let number = id.x + id.y * grid.x * 256u;
    if (number >= p.total) {
        return;
    }
    let i = number % p.size;
    let o = number / p.size / p.groups;
    let g = number / p.size % p.groups;
    let first = g * p.width;
    let last = min(first + p.width, p.depth);
    var at = p.planes + (o * p.depth + first) * p.size + i;
    //$ if ADD:
    var sum = $ACC(out[p.out + number]);
    //$ else:
    var sum = $ACC();
    //$ end
    for (var q = first; q < last; q++) {
        sum += planes[at];
        at += p.size;
    }
    out[p.out + number] = $OUT_TYPE(sum);
}
