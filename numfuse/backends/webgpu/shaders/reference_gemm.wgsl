// The shader contract in its plainest form: products in tiles of 16 x 16, an invocation for each
// element of a result. The functions of the activations come before this text, from their table.

const TILE = 16u;

// Of the forward and the backward.
struct ProductParams {
    M: u32,
    K: u32,
    N: u32,
    batch_size: u32,
    activation_type: u32,
    padding_0: u32,
    padding_1: u32,
    padding_2: u32,
}

struct ResidualParams { M: u32, K: u32, N: u32, batch_size: u32 }

@group(0) @binding(0) var<storage, read_write> a: array<f32>;
@group(0) @binding(1) var<storage, read_write> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> bias: array<f32>;

@group(0) @binding(3) var<storage, read_write> c: array<f32>;
@group(0) @binding(4) var<uniform> forward_params: ProductParams;

@group(0) @binding(3) var<storage, read_write> residual: array<f32>;
@group(0) @binding(4) var<storage, read_write> sum: array<f32>;
@group(0) @binding(5) var<uniform> residual_params: ResidualParams;

@group(0) @binding(3) var<storage, read_write> grad: array<f32>;
@group(0) @binding(4) var<storage, read_write> grad_pre: array<f32>;
@group(0) @binding(5) var<storage, read_write> d_a: array<f32>;
@group(0) @binding(6) var<storage, read_write> d_b: array<f32>;
@group(0) @binding(7) var<storage, read_write> d_bias: array<f32>;
@group(0) @binding(8) var<uniform> params: ProductParams;

var<workgroup> left: array<array<f32, TILE>, TILE>;
var<workgroup> right: array<array<f32, TILE>, TILE>;

//$ for name, of, rest in (("activate", "act", "x"), ("slope", "slope", "1.0")):
fn $name(activation_type: u32, x: f32) -> f32 {
    switch activation_type {
        //$ for act in ACTIVATIONS:
        case ${act.id}u: { return ${of}_${act.name}(x); }
        //$ end
        default: { return $rest; }
    }
}

//$ end
// Adds the products of one row of `left` and one column of `right`, all of which are there: to the sums
// of the chains that have ended, and of the one that goes on.  It ends after 256 products, for the errors
// of a chain grow with the root of its length.
fn add_tile(sums: vec2<f32>, at: vec3<u32>, first: u32) -> vec2<f32> {
    workgroupBarrier();
    var chain = sums[1];
    for (var i = 0u; i < TILE; i++) {
        chain += left[at.y][i] * right[i][at.x];
    }
    workgroupBarrier();
    if ((first / TILE) % 16u == 15u) {
        return vec2<f32>(sums[0] + chain, 0.0);
    }
    return vec2<f32>(sums[0], chain);
}

// (A[z] B[z])[row, column], of which the whole workgroup makes a tile; 0 outside. (A read outside is
// one of anything inside, which WGSL promises, and is not selected.)
fn product(M: u32, K: u32, N: u32, row: u32, column: u32, z: u32, at: vec3<u32>) -> f32 {
    var sums = vec2<f32>();
    for (var k = 0u; k < K; k += TILE) {
        let across = k + at.x;
        let down = k + at.y;
        left[at.y][at.x] = select(0.0, a[(z * M + row) * K + across], row < M && across < K);
        right[at.y][at.x] = select(0.0, b[(z * K + down) * N + column], down < K && column < N);
        sums = add_tile(sums, at, k);
    }
    return sums[0] + sums[1];
}

//$ for end, z in (("", "0u"), ("_batched", "id.z")):
@compute @workgroup_size(TILE, TILE, 1)
fn gemm_bias_act${end}_f32($IDS) {
    let p = forward_params;
    let total = product(p.M, p.K, p.N, id.y, id.x, $z, at);
    if (id.y < p.M && id.x < p.N) {
        c[($z * p.M + id.y) * p.N + id.x] = activate(p.activation_type, total + bias[id.x]);
    }
}

@compute @workgroup_size(TILE, TILE, 1)
fn gemm_bias_residual${end}_f32($IDS) {
    let p = residual_params;
    let total = product(p.M, p.K, p.N, id.y, id.x, $z, at);
    if (id.y < p.M && id.x < p.N) {
        let i = ($z * p.M + id.y) * p.N + id.x;
        sum[i] = total + bias[id.x] + residual[i];
    }
}
//$ end

// grad_pre[z, row, column] = grad * act'(A[z] B[z] + bias).
@compute @workgroup_size(TILE, TILE, 1)
fn gemm_bwd_grad_pre_f32($IDS) {
    let p = params;
    let total = product(p.M, p.K, p.N, id.y, id.x, id.z, at);
    if (id.y < p.M && id.x < p.N) {
        let i = (id.z * p.M + id.y) * p.N + id.x;
        grad_pre[i] = grad[i] * slope(p.activation_type, total + bias[id.x]);
    }
}

// d_a[z, row, column] = sum over n of grad_pre[z, row, n] B[z, column, n].
@compute @workgroup_size(TILE, TILE, 1)
fn gemm_bwd_da_f32($IDS) {
    let p = params;
    let first = id.x - at.x;
    var sums = vec2<f32>();
    for (var n = 0u; n < p.N; n += TILE) {
        let j = n + at.x;
        let k = first + at.y;
        left[at.y][at.x] = select(0.0, grad_pre[(id.z * p.M + id.y) * p.N + j], id.y < p.M && j < p.N);
        right[at.x][at.y] = select(0.0, b[(id.z * p.K + k) * p.N + j], k < p.K && j < p.N);
        sums = add_tile(sums, at, n);
    }
    if (id.y < p.M && id.x < p.K) {
        d_a[(id.z * p.M + id.y) * p.K + id.x] = sums[0] + sums[1];
    }
}

// d_b[row, column] = sum over z and m of A[z, m, row] grad_pre[z, m, column].
@compute @workgroup_size(TILE, TILE, 1)
fn gemm_bwd_db_f32($IDS) {
    let p = params;
    let first = id.y - at.y;
    let rows = p.batch_size * p.M;  // those of all elements follow one another
    var sums = vec2<f32>();
    for (var m = 0u; m < rows; m += TILE) {
        let i = m + at.y;
        let k = first + at.x;
        left[at.x][at.y] = select(0.0, a[i * p.K + k], i < rows && k < p.K);
        right[at.y][at.x] = select(0.0, grad_pre[i * p.N + id.x], i < rows && id.x < p.N);
        sums = add_tile(sums, at, m);
    }
    if (id.y < p.K && id.x < p.N) {
        d_b[id.y * p.N + id.x] = sums[0] + sums[1];
    }
}

// d_bias[n] = sum over z and m of grad_pre[z, m, n].
@compute @workgroup_size(256, 1, 1)
fn gemm_bwd_dbias_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    let p = params;
    if (id.x >= p.N) {
        return;
    }
    let rows = p.batch_size * p.M;
    var total = 0.0;
    for (var first = 0u; first < rows; first += 256u) {
        var chain = 0.0;
        for (var m = first; m < min(first + 256u, rows); m++) {
            chain += grad_pre[m * p.N + id.x];
        }
        total += chain;
    }
    d_bias[id.x] = total;
}
