// out = act(a) * b, or d_a = grad * b * act'(a) and d_b = grad * act(a), for contiguous arrays; an
// invocation takes one element, or four where the arrays begin at a multiple of four.

$ENABLE
struct Params { first: u32, last: u32, grad: u32, a: u32, b: u32, out: u32, d_a: u32, d_b: u32 }

@group(0) @binding(0) var<uniform> p: Params;
//$ for b in BUFFERS:
@group(0) @binding(${b[0]}) var<storage, ${b[3]}> ${b[1]}: array<${b[2]}>;
//$ end

$FUNCTIONS
//$ for name in [n for n in (ACT, SLOPE) if n and WIDE]:
fn ${name}_of(x: vec4<$SCALAR>) -> vec4<$SCALAR> {
    return vec4<$SCALAR>($name(x[0]), $name(x[1]), $name(x[2]), $name(x[3]));
}
//$ end
//$ for name in [n for n in (ACT, SLOPE) if n and not WIDE]:
fn ${name}_of(x: $SCALAR) -> $SCALAR {
    return $name(x);
}
//$ end

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let i = p.first + id.x + id.y * grid.x * 256u;
    if (i >= p.last) {
        return;
    }
    //$ if READS_A:
    let x = $ACC(a[p.a + i]);
    //$ end
    //$ if BACKWARD:
    let g = $ACC(grad[p.grad + i]);
    //$ if D_A:
    //$ if SLOPE:
    let slope_value = ${SLOPE}_of(x);
    d_a[p.d_a + i] = $TYPE(g * $ACC(b[p.b + i]) * slope_value);
    //$ else:
    d_a[p.d_a + i] = $TYPE(g * $ACC(b[p.b + i]));
    //$ end
    //$ end
    //$ if D_B:
    //$ if ACT:
    d_b[p.d_b + i] = $TYPE(g * ${ACT}_of(x));
    //$ else:
    d_b[p.d_b + i] = $TYPE(g * x);
    //$ end
    //$ end
    //$ else:
    //$ if ACT:
    out[p.out + i] = $TYPE(${ACT}_of(x) * $ACC(b[p.b + i]));
    //$ else:
    out[p.out + i] = $TYPE(x * $ACC(b[p.b + i]));
    //$ end
    //$ end
}
