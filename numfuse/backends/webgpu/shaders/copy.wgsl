// out[i, j, k, l] = source[i, j, k, l], each in strides of its own; l is the fastest to change.

$HEADER

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let i = id.x + id.y * grid.x * 256u;
    if (i >= p.size) {
        return;
    }
    let l = i % p.shape[3];
    let jk = i / p.shape[3];
    let k = jk % p.shape[2];
    let ij = jk / p.shape[2];
    let at = vec4<u32>(ij / p.shape[1], ij % p.shape[1], k, l);
    let from_source = at * p.source;
    let to_out = at * p.out;
    let s = p.source_first + from_source[0] + from_source[1] + from_source[2] + from_source[3];
    let o = p.out_first + to_out[0] + to_out[1] + to_out[2] + to_out[3];
    out[o] = $OUT_TYPE(source[s]);
}
