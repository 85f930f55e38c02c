"""Shaders of others: a WGSL module that keeps the contract of docs/webgpu.md is a backend."""

from __future__ import annotations

import re
import sys

import numpy as np
import once
import pytest
import tolerance
from arrays import normal
from conftest import unavailable
from hypothesis import given
from hypothesis import strategies as st
from tolerance import assert_within

import numfuse as nf

F32 = np.dtype(np.float32)

#: A module as somebody else would write it: no tiles, one invocation a result, text book formulas.
FOREIGN = """
const SIDE: u32 = 4u * 4u;
const LINE = SIDE * SIDE;

struct Params {
    M: u32, K: u32, N: u32, batch_size: u32, activation_type: u32, p0: u32, p1: u32, p2: u32,
}
struct Sizes { M: u32, K: u32, N: u32, batch_size: u32 }
struct Count { numel: u32 }

@group(0) @binding(0) var<storage, read_write> a: array<f32>;
@group(0) @binding(1) var<storage, read_write> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> grad: array<f32>;
@group(0) @binding(4) var<storage, read_write> grad_pre: array<f32>;
@group(0) @binding(5) var<storage, read_write> d_a: array<f32>;
@group(0) @binding(6) var<storage, read_write> d_b: array<f32>;
@group(0) @binding(7) var<storage, read_write> d_bias: array<f32>;
@group(0) @binding(8) var<uniform> params: Params;

@group(0) @binding(0) var<storage, read> fa: array<f32>;
@group(0) @binding(1) var<storage, read> fb: array<f32>;
@group(0) @binding(2) var<storage, read> fbias: array<f32>;
@group(0) @binding(3) var<storage, read_write> fc: array<f32>;
@group(0) @binding(4) var<uniform> fparams: Params;

@group(0) @binding(3) var<storage, read> residual: array<f32>;
@group(0) @binding(4) var<storage, read_write> rc: array<f32>;
@group(0) @binding(5) var<uniform> sizes: Sizes;

@group(0) @binding(2) var<storage, read_write> gate: array<f32>;
@group(0) @binding(3) var<uniform> count: Count;

@group(0) @binding(0) var<storage, read> g_grad: array<f32>;
@group(0) @binding(1) var<storage, read> g_a: array<f32>;
@group(0) @binding(2) var<storage, read> g_b: array<f32>;
@group(0) @binding(3) var<storage, read_write> g_d_a: array<f32>;
@group(0) @binding(4) var<storage, read_write> g_d_b: array<f32>;
@group(0) @binding(5) var<uniform> g_count: Count;

fn logistic(x: f32) -> f32 { return 1.0 / (1.0 + exp(-clamp(x, -80.0, 80.0))); }

fn inner(x: f32) -> f32 { return 1.5957691 * (x + 0.044715 * x * x * x); }

fn act(x: f32, kind: u32) -> f32 {
    switch kind {
        case 1u: { return max(x, 0.0); }
        case 2u: { return x * logistic(inner(x)); }
        case 3u: { return x * logistic(x); }
        case 4u: { return logistic(x); }
        case 5u: { return 2.0 * logistic(2.0 * x) - 1.0; }
        default: { return x; }
    }
}

fn slope(x: f32, kind: u32) -> f32 {
    var d = 1.0;
    switch kind {
        case 1u: { d = select(0.0, 1.0, x > 0.0); }
        case 2u: {
            let s = logistic(inner(x));
            d = s + x * s * (1.0 - s) * 1.5957691 * (1.0 + 0.134145 * x * x);
        }
        case 3u: { let s = logistic(x); d = s + x * s * (1.0 - s); }
        case 4u: { let s = logistic(x); d = s * (1.0 - s); }
        case 5u: { let t = 2.0 * logistic(2.0 * x) - 1.0; d = 1.0 - t * t; }
        default: {}
    }
    // not finite, by the bits
    if ((bitcast<u32>(x) & 0x7f800000u) == 0x7f800000u) { return 0.0; }
    return d;
}

@compute @workgroup_size(SIDE, SIDE)
fn gemm_bwd_grad_pre_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    let n = id.x; let m = id.y; let z = id.z;
    if (n >= params.N || m >= params.M) { return; }
    var sum = bias[n];
    for (var k = 0u; k < params.K; k++) {
        sum += a[(z * params.M + m) * params.K + k] * b[(z * params.K + k) * params.N + n];
    }
    let at = (z * params.M + m) * params.N + n;
    grad_pre[at] = grad[at] * slope(sum, params.activation_type);
}

@compute @workgroup_size(16, 16, 1)
fn gemm_bwd_da_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    let k = id.x; let m = id.y; let z = id.z;
    if (k >= params.K || m >= params.M) { return; }
    var sum = 0.0;
    for (var n = 0u; n < params.N; n++) {
        sum += grad_pre[(z * params.M + m) * params.N + n] * b[(z * params.K + k) * params.N + n];
    }
    d_a[(z * params.M + m) * params.K + k] = sum;
}

@compute @workgroup_size(16, 16, 1)
fn gemm_bwd_db_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    let n = id.x; let k = id.y;
    if (n >= params.N || k >= params.K) { return; }
    var sum = 0.0;
    for (var row = 0u; row < params.batch_size * params.M; row++) {
        sum += a[row * params.K + k] * grad_pre[row * params.N + n];
    }
    d_b[k * params.N + n] = sum;
}

@compute @workgroup_size(LINE)
fn gemm_bwd_dbias_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= params.N) { return; }
    var sum = 0.0;
    for (var row = 0u; row < params.batch_size * params.M; row++) {
        sum += grad_pre[row * params.N + id.x];
    }
    d_bias[id.x] = sum;
}

fn forward(m: u32, n: u32, z: u32) {
    if (n >= fparams.N || m >= fparams.M) { return; }
    var sum = fbias[n];
    for (var k = 0u; k < fparams.K; k++) {
        sum += fa[(z * fparams.M + m) * fparams.K + k] * fb[(z * fparams.K + k) * fparams.N + n];
    }
    fc[(z * fparams.M + m) * fparams.N + n] = act(sum, fparams.activation_type);
}

@compute @workgroup_size(16, 16)
fn gemm_bias_act_f32(@builtin(global_invocation_id) id: vec3<u32>) { forward(id.y, id.x, 0u); }

@compute @workgroup_size(16, 16)
fn gemm_bias_act_batched_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    forward(id.y, id.x, id.z);
}

fn add_residual(m: u32, n: u32, z: u32) {
    if (n >= sizes.N || m >= sizes.M) { return; }
    var sum = fbias[n];
    for (var k = 0u; k < sizes.K; k++) {
        sum += fa[(z * sizes.M + m) * sizes.K + k] * fb[(z * sizes.K + k) * sizes.N + n];
    }
    let at = (z * sizes.M + m) * sizes.N + n;
    rc[at] = sum + residual[at];
}

@compute @workgroup_size(16, 16)
fn gemm_bias_residual_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    add_residual(id.y, id.x, 0u);
}

@compute @workgroup_size(16, 16)
fn gemm_bias_residual_batched_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    add_residual(id.y, id.x, id.z);
}

@compute @workgroup_size(256)
fn silu_mul_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < count.numel) { gate[id.x] = act(fa[id.x], 3u) * fb[id.x]; }
}

@compute @workgroup_size(256)
fn silu_mul_bwd_f32(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < g_count.numel) {
        g_d_a[id.x] = g_grad[id.x] * g_b[id.x] * slope(g_a[id.x], 3u);
        g_d_b[id.x] = g_grad[id.x] * act(g_a[id.x], 3u);
    }
}
"""

ACTIVATIONS = ("none", "relu", "gelu", "silu", "sigmoid", "tanh")


@pytest.fixture(scope="module", autouse=True)
def adapter():
    status = nf.backends()["webgpu"]
    if not status:
        unavailable("webgpu", str(status))


@pytest.fixture(scope="module")
def foreign():
    return nf.webgpu.load_shaders(FOREIGN)


@pytest.fixture(scope="module", params=["foreign", "reference"])
def shaders(request, foreign):
    return foreign if request.param == "foreign" else nf.webgpu.reference_shaders()


def operands(m, n, k, batch=(), seed=0, shared=False):
    """grad, a, b, bias"""
    rng = np.random.default_rng(seed)
    return (
        normal(rng, (*batch, m, n), F32), normal(rng, (*batch, m, k), F32, k**-0.5),
        normal(rng, (k, n) if shared else (*batch, k, n), F32), normal(rng, (n,), F32),
    )  # fmt: skip


def assert_close(got, exact, terms):
    """Within the rounding of a sum of so many terms, of the largest result; see check()."""
    error = np.abs(got - exact).max(initial=0)
    assert error <= (tolerance.gamma(terms, F32) + 1e-5) * max(1, np.abs(exact).max(initial=0))


# --- the same numbers ---------------------------------------------------------------------------


def test_check_compares_every_entry_point_with_the_reference(shaders):
    found = shaders.check()
    assert {row.output for row in found} == {
        "c", "c + residual", "d_a", "d_b", "d_bias", "gate out", "gate d_a", "gate d_b"
    }  # fmt: skip
    assert {row.activation for row in found} == set(ACTIVATIONS)
    # (textbook derivatives cancel where d_b sums over both tails)
    limit = 1e-5 if shaders is nf.webgpu.reference_shaders() else 1e-4
    assert max(found.values()) < limit, max(found, key=found.get)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("batch, shared", [((), False), ((3,), False), ((2, 2), True)])
def test_a_module_gives_the_layer_and_its_gradients(shaders, activation, batch, shared):
    grad, a, b, bias = operands(19, 33, 21, batch, shared=shared)
    out = nf.matmul_bias_activation(a, b, bias, activation, backend=shaders)
    assert nf.last_call().tier == "contract"
    exact = [x.astype(np.float64) for x in (grad, a, b, bias)]
    assert_close(out, nf.matmul_bias_activation(*exact[1:], activation, backend="reference"), 22)
    for sum_batch in (False, True):
        got = nf.matmul_bias_activation_bwd(
            grad, a, b, bias, activation, sum_batch=sum_batch, backend=shaders
        )
        wanted = nf.matmul_bias_activation_bwd(
            *exact, activation, sum_batch=sum_batch, backend="reference"
        )
        for x, y in zip(got, wanted, strict=True):
            assert x.shape == y.shape
            assert_close(x, y, 33 + 19 * 4)


def test_the_shipped_module_keeps_the_bounds_of_a_backend():
    shaders = nf.webgpu.reference_shaders()
    grad, a, b, bias = operands(37, 18, 65)
    for activation in ACTIVATIONS:
        out = nf.matmul_bias_activation(a, b, bias, activation, backend=shaders)
        forward = tolerance.forward(a, b, bias, activation, F32, backend="webgpu")
        assert_within("out", out, forward.out, forward.out_error)
        got = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, backend=shaders)
        exact = tolerance.backward(grad, a, b, bias, activation, F32, backend="webgpu")
        for name, value in zip(("d_a", "d_b", "d_bias"), got, strict=True):
            assert_within(name, value, getattr(exact, name), getattr(exact, f"{name}_error"))


def test_a_residual_is_added_and_summed_back(shaders):
    grad, a, b, bias = operands(18, 20, 9, (2,))
    residual = normal(np.random.default_rng(3), (1, 20), F32)
    got = nf.matmul_bias_residual(a, b, bias, residual, backend=shaders)
    assert_close(got, nf.matmul_bias_residual(a, b, bias, residual, backend="reference"), 11)
    d_residual = nf.matmul_bias_residual_bwd(grad, a, b, bias, residual, backend=shaders)[3]
    assert d_residual.shape == (1, 20)
    assert_close(d_residual, grad.sum((0, 1), keepdims=True)[0], 36)


def test_a_gate_runs(shaders):
    a, b, grad = (normal(np.random.default_rng(i), (7, 100), F32, 3) for i in range(3))
    assert_close(nf.silu_mul(a, b, backend=shaders), nf.silu_mul(a, b, backend="reference"), 4)
    got = nf.silu_mul_bwd(grad, a, b, backend=shaders)
    for x, y in zip(got, nf.silu_mul_bwd(grad, a, b, backend="reference"), strict=True):
        assert_close(x, y, 6)


def test_a_derivative_that_is_not_finite_counts_as_0(shaders):
    grad, a, b, bias = operands(5, 6, 4)
    a[1] = np.nan
    for activation in ACTIVATIONS[1:]:
        got = nf.matmul_bias_activation_bwd(
            grad, a, b, bias, activation, needs=("a", "bias"), backend=shaders
        )
        assert not np.isnan(got.d_a).any() and not got.d_a[1].any()
        assert np.isfinite(got.d_bias).all()


def test_empty_operands_give_empty_or_zero_gradients(shaders):
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        grad, a, b, bias = operands(m, n, max(k, 1))
        a, b = a[:, :k], b[:k]
        got = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", backend=shaders)
        wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", backend="reference")
        for x, y in zip(got, wanted, strict=True):
            assert x.shape == y.shape
            assert_close(x, y, 5)


# --- passes and limits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, shared, sum_batch, passes",
    [
        ((), False, False, 4),
        ((3,), False, False, 12),
        ((3,), False, True, 4),
        ((3,), True, False, 4),
    ],
)
def test_a_backward_is_four_passes_of_one_encoder(foreign, batch, shared, sum_batch, passes):
    grad, a, b, bias = operands(17, 16, 15, batch, shared=shared)
    device = foreign.device
    before = foreign.passes, device.submits
    nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", sum_batch=sum_batch, backend=foreign)
    assert foreign.passes - before[0] == passes
    assert device.submits - before[1] == 1  # which brings the results back too


@pytest.mark.parametrize(
    "limits",
    [{"max-compute-workgroups-per-dimension": 3}, {"max-storage-buffer-binding-size": 4096}],
)
def test_a_module_is_dispatched_in_pieces_where_a_limit_asks_for_it(limits):
    from numfuse.backends.webgpu.face import WebGpuBackend

    shaders = WebGpuBackend(limits=limits).load_shaders(FOREIGN, "foreign")
    grad, a, b, bias = operands(200, 8, 7)
    got = nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", backend=shaders)
    assert shaders.passes > 4
    wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", backend="reference")
    for x, y in zip(got, wanted, strict=True):
        assert_close(x, y, 210)
    x = normal(np.random.default_rng(1), (3000,), F32)
    assert_close(nf.silu_mul(x, x, backend=shaders), nf.silu_mul(x, x, backend="reference"), 4)


# --- errors that name what is wrong -------------------------------------------------------------


def without(name: str) -> str:
    """FOREIGN without an entry point."""
    return re.sub(rf"fn {name}\(", "fn other(", FOREIGN)


def test_an_operation_names_the_entry_points_that_are_absent():
    shaders = nf.webgpu.load_shaders(without("gemm_bwd_db_f32"))
    grad, a, b, bias = operands(4, 5, 6)
    with pytest.raises(ValueError, match="gemm_bwd_db_f32 is absent"):
        nf.matmul_bias_activation_bwd(grad, a, b, bias, backend=shaders)
    got = nf.matmul_bias_activation_bwd(grad, a, b, bias, needs=("a", "bias"), backend=shaders)
    assert got.d_b is None and got.d_a.shape == a.shape
    with pytest.raises(ValueError, match="gelu_mul_f32 is absent"):
        nf.gelu_mul(a, a, backend=shaders)
    assert not {row.output for row in shaders.check()} & {"d_b"}


BROKEN = {
    "no WGSL": ("fn f( {", "must be a module of WGSL"),
    "no entry point": ("fn helper() {}", "must have an entry point of the shader contract"),
    "a misspelt name": (
        FOREIGN.replace("fn gemm_bwd_da_f32", "fn gemm_bwd_dA_f32"),
        "no entry point 'gemm_bwd_dA_f32'; it has 'gemm_bwd_da_f32'",
    ),
    "a workgroup": (
        FOREIGN.replace("const SIDE: u32 = 4u * 4u", "const SIDE: u32 = 4u * 2u"),
        "workgroup size of 'gemm_bwd_grad_pre_f32' must be 16 x 16 x 1 .* got 8 x 8 x 1",
    ),
    "elements": (
        FOREIGN.replace("grad_pre: array<f32>", "grad_pre: array<u32>")
        .replace("grad_pre[at] = grad", "grad_pre[at] = u32(grad")
        .replace("slope(sum, params.activation_type);", "slope(sum, params.activation_type));")
        .replace("grad_pre[(z", "f32(grad_pre[(z").replace("+ n] * b[(z", "+ n]) * b[(z")
        .replace("a[row * params.K + k] * grad_pre[row * params.N + n]", "f32(grad_pre[row])")
        .replace("sum += grad_pre[row * params.N + id.x]", "sum += f32(grad_pre[row])"),
        r"binding 4 \(grad_pre\) of .* got array<u32>",
    ),
    "an access": (
        FOREIGN.replace("var<storage, read_write> bias", "var<storage, read> bias"),
        r"binding 2 \(bias\) of 'gemm_bwd_grad_pre_f32' .* got access 'read' for 'bias'",
    ),
    "a binding": (
        FOREIGN.replace("@binding(3) var<uniform> count", "@binding(7) var<uniform> count"),
        "'silu_mul_f32' does not fit the shader contract",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_module_that_breaks_the_contract_is_refused_and_says_where(what):
    source, message = BROKEN[what]
    assert source != FOREIGN
    with pytest.raises(ValueError, match=message):
        nf.webgpu.load_shaders(source)


def test_a_path_is_a_file_of_source(tmp_path):
    path = tmp_path / "mine.wgsl"
    path.write_text(FOREIGN, encoding="utf-8")
    shaders = nf.webgpu.load_shaders(path)
    assert "mine.wgsl" in repr(shaders)
    with pytest.raises(FileNotFoundError):
        nf.webgpu.load_shaders(tmp_path / "none.wgsl")
    with pytest.raises(TypeError, match=r"must be a str .* or a path, got bytes"):
        nf.webgpu.load_shaders(b"fn f() {}")


def test_what_the_contract_has_no_word_for_is_an_error(foreign):
    grad, a, b, bias = operands(3, 4, 5)
    with pytest.raises(TypeError, match="must have dtype float32, got float64"):
        nf.matmul_bias_activation(a.astype("f8"), b.astype("f8"), backend=foreign)
    with pytest.raises(ValueError, match="guard must be True for 'gelu'"):
        nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", guard=False, backend=foreign)
    with pytest.raises(ValueError, match="must be one of the shader contract's"):
        nf.matmul_bias_activation(a, b, bias, "softplus", backend=foreign)
    with pytest.raises(TypeError, match="cannot stay on"):
        nf.to_device(a, foreign)
    with pytest.raises(ValueError, match=r"got ContractBackend\('shaders'"):
        nf.matmul_bias_activation(
            nf.to_device(a, "webgpu"), nf.to_device(b, "webgpu"), backend=foreign
        )


def test_the_shipped_module_is_selected_by_name():
    _, a, b, bias = operands(20, 21, 22)
    with nf.use_backend("webgpu", shaders="reference"):
        nf.matmul_bias_activation(a, b, bias, "gelu")
        assert nf.last_call().tier == "contract"
    nf.matmul_bias_activation(a, b, bias, "gelu", backend="webgpu")
    assert nf.last_call().tier != "contract"


def test_a_loaded_module_is_a_backend_of_with(foreign):
    _, a, b, _ = operands(4, 4, 4)
    with nf.use_backend(foreign):
        nf.matmul_bias_activation(a, b)
        assert nf.last_call().kernel == "gemm_bias_act_f32"


@pytest.mark.parametrize(
    "text, size",
    [
        ("@workgroup_size(16, 16)", (16, 16, 1)),
        ("@workgroup_size(SIDE, 0x10u, 1,)", (16, 16, 1)),
        ("@workgroup_size(1 << 8u)", (256, 1, 1)),
        ("@ workgroup_size ( max(4, SIDE) /* a /* b */ c */ , u32(SIDE) % 32u) // 3", (16, 16, 1)),
    ],
)
def test_workgroup_sizes_are_read_from_constants(text, size):
    from numfuse.backends.webgpu.contract.source import Module

    module = Module(f"// @compute fn no() {{}}\nconst SIDE = 32 / 2;\n@compute {text}\nfn f() {{}}")
    assert list(module.entry_points) == ["f"]
    assert module.workgroup("f") == size


# --- modules that nest --------------------------------------------------------------------------

DEEP = """
import threading
import numfuse as nf

BEFORE = '''
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<uniform> count: vec4<u32>;
'''
def module(body, before=""):
    return BEFORE + before + (
        "@compute @workgroup_size(256) fn silu_mul_f32(@builtin(global_invocation_id) id: vec3u)"
        "{ var x = a[id.x] + b[id.x] + f32(count.x); " + body + " out[id.x] = x; }"
    )

def chain(text, n):
    return "".join(text.replace("NEXT", str(i + 1)).replace("THIS", str(i)) for i in range(n))

# What nests, and how often it may.
KINDS = {
    "calls": (250, lambda n: module("x = " + "abs(" * n + "x" + ")" * n + ";")),
    "parentheses": (250, lambda n: module("x = " + "(" * n + "x" + ")" * n + ";")),
    "indices": (250, lambda n: module(
        "var q = array<u32, 4>(); x = f32(" + "q[" * n + "0" + "]" * n + ");")),
    "lists": (250, lambda n: module("var q: " + "array<" * n + "f32" + ", 1>" * n + ";")),
    "elses": (250, lambda n: module(
        "if (x < 0.0) {}" + chain(" else if (x < THIS.0) { x = 0.0; }", n))),
    "sums": (1010, lambda n: module("x = x" + " + x" * n + ";")),
    "signs": (1010, lambda n: module("x = " + "- " * n + "x;")),
    "members": (1010, lambda n: module("x = vec4f(x)" + ".wzyx" * n + ".x;")),
    "conditions": (500, lambda n: module("if (x > 0.0" + " && x > 0.0" * n + ") { x = 1.0; }")),
    "structures": (1010, lambda n: module(
        f"var q: S{n};", "struct S0 { v: f32 }" + chain("struct SNEXT { s: STHIS }", n))),
    "aliases": (1010, lambda n: module(
        f"var q: T{n};", "alias T0 = f32;" + chain("alias TNEXT = array<TTHIS, 1>;", n))),
    "functions": (200, lambda n: module(
        f"x = g{n}(x);", "fn g0(x: f32) -> f32 { return x; }"
        + chain("fn gNEXT(x: f32) -> f32 { return gTHIS(x); }", n))),
}
failed = []
def check():
    for kind, (most, make) in KINDS.items():
        for n in (1100, 20_000):
            try:
                nf.webgpu.load_shaders(make(n))
            except ValueError as error:
                if "must nest at most 256 levels deep, got" not in str(error):
                    failed.append((kind, n, str(error)))
            else:
                failed.append((kind, n, "loaded"))
        try:
            nf.webgpu.load_shaders(make(most))
        except Exception as error:
            failed.append((kind, most, repr(error)))
nf.webgpu.reference_shaders()
threading.stack_size(1 << 20)
team = threading.Thread(target=check)
team.start()
team.join()
assert not failed, failed
"""
NESTING = once.Process(lambda _: [sys.executable, "-c", DEEP], timeout=240)


@pytest.mark.long
def test_a_module_that_nests_too_deep_is_refused_before_a_compiler_ends_the_process():
    """What is allowed compiles on a stack of 1 MiB; in a process of its own, as it would end."""
    done = NESTING.result()
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])


@st.composite
def nests(draw):
    """Text that nests, and how deep."""
    text, levels = "x", 0
    for kind in draw(st.lists(st.sampled_from(["(", "[", "{", "//", "/*", "sum", ","]))):
        if kind == "//":
            text = f"// ((( {{{{ else\n{text} // f(((\n"
        elif kind == "/*":
            text = f"/* ((( /* [[[ */ 1.0.x.x */{text}"
        elif kind == "sum":
            text = f"x + 1.5e-3 * y - 0x1p-3 / {text}"
        elif kind == ",":
            text = f"f(y + z + y + z, {text})"
        else:
            text = f"{kind}{text}{dict(zip('([{', ')]}', strict=True))[kind]}"
        levels += kind not in ("//", "/*")
    return text, levels


@given(nests())
def test_a_module_nests_as_deep_as_its_brackets_and_operators_and_not_its_comments(nest):
    from numfuse.backends.webgpu.contract.nesting import depth

    text, levels = nest
    assert levels <= depth(text) <= levels + 1
    assert depth(f"{text}; {text} ;{text}") == depth(text)


def test_a_chain_of_declarations_counts_by_fours_and_a_circle_as_all_of_them():
    """Guards: what a compiler would walk by recursion is refused before it does."""
    from numfuse.backends.webgpu.contract.nesting import depth

    chain = [f"fn f{i + 1}() {{ f{i}(); }}" for i in range(40)]
    assert depth("fn f0() {} " + " ".join(chain)) == depth(" ".join(chain[::-1])) + 1 == 11
    assert depth("fn f0() { f40(); } " + " ".join(chain)) == 11
    assert depth("alias a = b; alias b = a;") == 1
