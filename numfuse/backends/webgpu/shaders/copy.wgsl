// out[i, j, k, l] = source[i, j, k, l], each in strides of its own; l is the fastest to change.

$HEADER

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let i = id.x + id.y * grid.x * 256u;
    if (i >= p.size) {
        return;
    }
    let l = i % p.shape_3;
    let jk = i / p.shape_3;
    let k = jk % p.shape_2;
    let ij = jk / p.shape_2;
    let at = vec4<u32>(ij / p.shape_1, ij % p.shape_1, k, l);
    let from_source = at * vec4<u32>(p.source_0, p.source_1, p.source_2, p.source_3);
    let to_out = at * vec4<u32>(p.out_0, p.out_1, p.out_2, p.out_3);
    let s = p.source_first + from_source[0] + from_source[1] + from_source[2] + from_source[3];
    let o = p.out_first + to_out[0] + to_out[1] + to_out[2] + to_out[3];
    out[o] = $OUT_TYPE(source[s]);
}
