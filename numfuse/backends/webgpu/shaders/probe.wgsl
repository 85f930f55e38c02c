// A number for each pair of factors, in one workgroup.

$HEADER

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) i: u32) {
    if (i < p.count) {
        let f = vec2<$ACC>(factors[i]);
        found[i] = $TYPE($NUMBER);
    }
}
