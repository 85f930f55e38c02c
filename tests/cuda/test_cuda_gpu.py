"""What only a real GPU has: streams, graphs, other libraries' arrays, errors of kernels.

Guards: calls follow the current stream, can be captured, and leave other libraries' memory alone
(docs/cuda.md).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import tolerance
from conftest import SIMULATED, unavailable
from tolerance import assert_within

import numfuse as nf

status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))
if SIMULATED:
    pytest.skip("the simulator has no streams, graphs or errors", allow_module_level=True)

from numfuse.backends.cuda.driver.devices import device  # noqa: E402
from numfuse.backends.cuda.driver.libcuda import count  # noqa: E402
from numfuse.backends.cuda.kernels.hopper.tiling import HOPPER_SPLIT_TILES  # noqa: E402


def numbers(dtype=np.float32, m=33, k=21, n=19):
    rng = np.random.default_rng(7)
    shapes = (m, k), (k, n), (n,), (m, n)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def wanted():
    a, b, bias, grad = numbers()
    out = nf.matmul_bias_activation(a, b, bias, "gelu", backend="cuda")
    return out, nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", backend="cuda")


def calls(a, b, bias, grad):
    return (
        nf.matmul_bias_activation(a, b, bias, "gelu"),
        nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"),
    )


def check(out, gradients, kind):
    exact, exact_gradients = wanted()
    assert isinstance(out, kind)
    np.testing.assert_allclose(nf.to_numpy(out), exact, rtol=1e-5, atol=1e-5)
    for x, y in zip(gradients, exact_gradients, strict=True):
        assert isinstance(x, kind)
        np.testing.assert_allclose(nf.to_numpy(x), y, rtol=1e-4, atol=1e-4)


def torch_cuda():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA here")
    return torch


def test_tensors_of_pytorch_on_another_stream():
    torch = torch_cuda()
    arrays = [torch.from_numpy(x).cuda() for x in numbers()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(6):  # recorded, repeated, a graph
            out, gradients = calls(*arrays)
    stream.synchronize()
    check(out, gradients, torch.Tensor)
    leaf = arrays[0].clone().requires_grad_()
    nf.silu_mul(leaf, arrays[0]).sum().backward()  # a gradient is never lost
    assert leaf.grad is not None and bool((leaf.grad != 0).any())
    with torch.no_grad():
        assert nf.silu_mul(torch.nn.Parameter(arrays[0]), arrays[0]).shape == arrays[0].shape
    with pytest.raises(TypeError, match="on one device"):
        nf.silu_mul(arrays[0], arrays[0].cpu())


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64"])
def test_every_dtype_of_pytorch(name):
    torch = torch_cuda()
    dtype = getattr(torch, name)
    a, b, bias, grad = (torch.from_numpy(x).cuda().to(dtype) for x in numbers())
    out, pre = nf.matmul_bias_activation(a, b, bias, "tanh", return_pre_activation=True)
    exact = torch.tanh(a.double() @ b.double() + bias.double())
    assert out.dtype == dtype
    assert pre.dtype == (torch.float64 if name == "float64" else torch.float32)
    tolerance = {"bfloat16": 1e-2, "float16": 1e-3, "float64": 1e-14}[name]
    assert float((out.double() - exact).abs().max()) < tolerance
    again = nf.matmul_bias_activation_bwd(grad, a, b, bias, "tanh")
    saved = nf.matmul_bias_activation_bwd(grad, a, b, bias, "tanh", pre_activation=pre)
    assert torch.equal(again.d_a, saved.d_a) and torch.equal(again.d_b, saved.d_b)


def test_a_forward_and_a_backward_are_captured_in_a_graph():
    torch = torch_cuda()
    arrays = [torch.from_numpy(x).cuda() for x in numbers()]
    calls(*arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradients = calls(*arrays)
    arrays[0].mul_(2.0)
    graph.replay()
    exact, exact_gradients = calls(*arrays)  # the workspace of the graph is its own
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, exact)
    assert all(torch.equal(x, y) for x, y in zip(gradients, exact_gradients, strict=True))


def test_a_call_that_became_a_graph_reads_what_is_there_now():
    torch = torch_cuda()
    a, b, bias, grad = (torch.from_numpy(x).cuda() for x in numbers())
    for step in range(12):
        a.normal_()
        first = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
        second = nf.matmul_bias_activation_bwd(grad, a.clone(), b, bias, "gelu")
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), step


def test_arrays_of_cupy_on_another_stream():
    cupy = pytest.importorskip("cupy")
    arrays = [cupy.asarray(x) for x in numbers()]
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out, gradients = calls(*arrays)
        stream.synchronize()
    check(out, gradients, cupy.ndarray)
    turned = cupy.asarray(numbers()[0]).T
    assert float(abs(nf.relu_mul(turned, turned) - cupy.maximum(turned, 0) * turned).max()) == 0


def test_tasks_of_dask_run_one_ahead_of_the_device(monkeypatch):
    cupy = pytest.importorskip("cupy")
    da = pytest.importorskip("dask.array")
    pace, ends = type(device(0)).pace, []

    def watched(owner, stream):
        ends.append(owner.event(stream))
        pace(owner, stream)
        assert all(owner.passed(end) for end in ends[:-1])

    monkeypatch.setattr(type(device(0)), "pace", watched)
    a = cupy.random.standard_normal((16 * 2048, 1024)).astype(np.float32)
    b = a[:1024]
    found = nf.matmul_bias_activation_bwd(
        da.from_array(a, (2048, -1), asarray=False), da.from_array(a, (2048, -1), asarray=False),
        da.from_array(b, -1, asarray=False), None, "gelu", needs=("b",),
    ).d_b.compute(scheduler="synchronous")  # fmt: skip
    assert len(ends) == 16
    for end in ends:
        device(0).forget(end)
    exact = nf.matmul_bias_activation_bwd(a, a, b, None, "gelu", needs=("b",)).d_b
    assert float(abs(found - exact).max()) < 1e-5 * float(abs(exact).max())


def test_arrays_of_numba():
    cuda = pytest.importorskip("numba.cuda")
    arrays = [cuda.to_device(x) for x in numbers()]
    out, gradients = calls(*arrays)
    check(out, gradients, type(arrays[0]))


def test_arrays_of_jax():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    arrays = [jax.numpy.asarray(x) for x in numbers()]
    out, gradients = calls(*arrays)
    check(out, gradients, jax.Array)
    jitted = jax.jit(lambda x: nf.silu_mul(x, x))(arrays[0])
    np.testing.assert_allclose(jitted, nf.to_numpy(nf.silu_mul(arrays[0], arrays[0])), rtol=1e-6)


def test_operands_live_until_the_work_is_done():
    torch = torch_cuda()

    class Once:
        """The only owner of its memory, but for DLPack's capsule."""

        def __init__(self, x):
            self.x = x

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

    a, b, bias, _ = numbers(m=2049, k=1025, n=1023)
    exact = nf.matmul_bias_activation(a, b, bias, "relu", backend="cuda")
    for _ in range(5):
        out = nf.matmul_bias_activation(
            *(Once(torch.from_numpy(x).cuda()) for x in (a, b, bias)), "relu"
        )
        junk = [torch.full(x.shape, torch.nan, device="cuda") for x in (a, b, bias)]
        assert (nf.to_numpy(out) == exact).all()
        del junk


# --- sizes that few other tests have --------------------------------------------------------------


def gemm_bound(a, b, bias, unit):
    """a @ b + bias in float64, and what its error may be in sums of any order."""
    a, b = (x.astype(np.float64) for x in (a, b))
    size = abs(a) @ abs(b) + (0 if bias is None else abs(bias.astype(np.float64)))
    exact = a @ b + (0 if bias is None else bias.astype(np.float64))
    # our own product of float64 has such an error too
    return exact, (a.shape[-1] + 4) * (unit + 2.0**-53) * size


def check_within(name, given, exact, bound):
    """Every element within its bound, the rounding of the store included."""
    given = nf.to_numpy(given)
    assert_within(name, given, exact, tolerance.stored(exact, bound, given.dtype))


def checked_in_full(a, b, bias, grad, unit):
    """Forward, residual and backward of relu: values and slopes that no rounding changes much."""
    exact, bound = gemm_bound(a, b, bias, unit)
    out, pre = nf.matmul_bias_activation(
        a, b, bias, "relu", backend="cuda", return_pre_activation=True
    )
    tier, tiling = nf.last_call().tier, str(nf.last_call().tiling)
    check_within("pre", pre, exact, bound)
    check_within("out", out, np.maximum(exact, 0), bound)
    added = nf.matmul_bias_residual(a, b, bias, grad, backend="cuda")
    total = exact + grad.astype(np.float64)
    check_within("residual", added, total, bound + unit * abs(total))
    found = nf.matmul_bias_activation_bwd(grad, a, b, bias, "relu", backend="cuda")
    safe = abs(exact) > bound
    grad_pre = np.where(exact > 0, grad, 0).astype(np.float64)
    slack = np.where(safe, 0, abs(grad.astype(np.float64)))  # where the sign may be either
    wide = [x.astype(np.float64) for x in (a, b)]
    for name, given, x, y, lax in (
        ("d_a", found.d_a, grad_pre, wide[1].T, slack @ abs(wide[1].T)),
        ("d_b", found.d_b, wide[0].T, grad_pre, abs(wide[0].T) @ slack),
    ):
        product, error = gemm_bound(x, y, None, unit)
        check_within(name, given, product, error + lax)
    error = (len(a) + 4) * unit * abs(grad_pre).sum(0) + slack.sum(0)
    check_within("d_bias", found.d_bias, grad_pre.sum(0), error)
    return tier, tiling


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(9, 1024, 1088), (16, 2049, 1031), (17, 1031, 2050), (33, 1025, 1024), (64, 4096, 1500)],
)
def test_few_rows_of_float64_with_k_in_clusters(m, k, n):
    if device(0).capability < (9, 0):
        pytest.skip("this GPU has no clusters")
    tier, tiling = checked_in_full(*numbers(np.float64, m, k, n), 2.0**-53)
    assert tier == "tensor cores" and "clusters" in tiling
    a, b, bias, _ = numbers(np.float64, m, k, n)
    batch = np.stack([a, -a]), np.stack([b, b[::-1]])
    out = nf.matmul_bias_activation(*batch, bias, "gelu", backend="cuda")
    assert (out[0] == nf.matmul_bias_activation(a, b, bias, "gelu", backend="cuda")).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_d_b_of_few_rows(m, dtype):
    a, b, bias, grad = numbers(dtype, m, 516, 260)
    given = nf.matmul_bias_activation_bwd(grad, a, b, bias, "none", needs=("b",), backend="cuda")
    unit = tolerance.roundoff(tolerance.accumulator(np.dtype(dtype)))
    exact, bound = gemm_bound(a.T, grad, None, unit)
    check_within("d_b", given.d_b, exact, bound)
    stack = [np.stack([x, -x]) for x in (grad, a, b)]
    both = nf.matmul_bias_activation_bwd(*stack, None, "none", needs=("b",), backend="cuda")
    assert (both.d_b[0] == given.d_b).all() and (both.d_b[1] == given.d_b).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_odd_sizes_of_16_bits(dtype):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    operands = [x.astype(dtype) for x in numbers(np.float32, 1027, 1025, 1029)]
    operands[0] = (operands[0].astype(np.float32) / 32).astype(dtype)
    tier, _ = checked_in_full(*operands, 2.0**-22)
    assert tier == ("wgmma" if device(0).capability[0] == 9 else "tensor cores")


@pytest.mark.parametrize(("m", "k", "n"), [(600, 516, 3100), (515, 523, 3101), (1100, 260, 1040)])
def test_large_float32_whose_factors_are_laid_out_first(m, k, n):
    assert checked_in_full(*numbers(np.float32, m, k, n), 2.0**-24)[0] == "cores"


def test_an_odd_result_leaves_its_surroundings_alone():
    torch = torch_cuda()
    a, b = (torch.randn(s, device="cuda").to(torch.bfloat16) for s in ((1027, 1025), (1025, 1029)))
    for first in range(4):
        room = torch.full((1029 * 1029 + 16,), torch.nan, device="cuda", dtype=torch.bfloat16)
        place = room[first + 1029 : first + 1029 + 1027 * 1029]
        nf.matmul_bias_activation(a, b, None, "none", out=place.view(1027, 1029))
        assert bool(torch.isfinite(place).all())
        assert int(torch.isnan(room).sum()) == room.numel() - place.numel()


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda x: x.__name__)
def test_the_inverse_without_a_branch_is_rounded_correctly(dtype):
    cuda = pytest.importorskip("numba.cuda")
    from numfuse.backends.cuda.compile.scalars import inverse

    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = inverse(x[i])

    rng = np.random.default_rng(3)
    if dtype is np.float32:
        every = (np.arange(1 << 23, dtype=np.uint32) | 0x3F800000).view(np.float32)  # from 1 to 2
    else:  # a sample, and the neighbours of 1 and of 2 (but the nearest: see `inverse`)
        few, ones = np.arange(1 << 16, dtype=np.uint64), np.uint64((1 << 52) - 2)
        words = np.concatenate([rng.integers(0, 1 << 52, 1 << 23, np.uint64), few, ones - few])
        every = (words | 0x3FF << 52).view(np.float64)
    most = -np.finfo(dtype).minexp - 1
    scales = rng.integers(-most, most, every.size).astype(np.int32)
    for x in (every, np.ldexp(every, scales)):
        out = cuda.device_array_like(x)
        kernel[-(-x.size // 256), 256](cuda.to_device(x), out)
        np.testing.assert_array_equal(out.copy_to_host(), dtype(1) / x)


@pytest.mark.parametrize(("name", "dtype"), [
    pytest.param(name, dtype, id=f"{name}-{dtype.__name__}")
    for name in sorted(nf.activations()) for dtype in (np.float32, np.float64)
    # (whose long polynomial a processor adds up in two chains)
    if (name, dtype) != ("gelu_erf", np.float64)
])  # fmt: skip
def test_activations_have_the_bits_that_the_cpu_gives(name, dtype):
    words = np.random.default_rng(5).integers(0, 256, np.dtype(dtype).itemsize << 19, np.uint8)
    x = np.concatenate([words.view(dtype), np.linspace(-20, 20, 1 << 19, dtype=dtype)])
    x = x[np.isfinite(x)][:, None]
    one = np.ones((1, 1), dtype)
    grad = np.ones_like(x)
    found, wanted = (
        (
            nf.matmul_bias_activation(x, one, None, name, backend=backend),
            nf.matmul_bias_activation_bwd(
                grad, x, one, None, name, needs=("a",), backend=backend
            ).d_a,
        )
        for backend in ("cuda", "cpu")
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize("sizes", [(512, 20_000, 256), (101, 7001, 99)], ids=str)
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_long_sums_of_halves_are_within_the_bound_of_the_units_that_make_them(name, sizes, kind):
    """16 products at a time are added to a sum, which is cut off at 2^-22 of it at worst."""
    torch = torch_cuda()
    m, k, n = sizes
    draw = torch.randn if kind == "normal" else torch.rand
    a, b = (draw(s, device="cuda").to(getattr(torch, name)) for s in ((m, k), (k, n)))
    _, pre = nf.matmul_bias_activation(a, b, return_pre_activation=True)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert bool(((pre.double() - exact).abs() <= (k / 16 + 4) * 2.0**-22 * size).all())


# --- float32 on tensor cores ----------------------------------------------------------------------


@pytest.fixture(params=["bf16x6", "bf16x3", "tf32"])
def precision(request, monkeypatch):
    """On a GPU whose tensor cores take float32, for small products too."""
    if device(0).capability != (9, 0):
        pytest.skip("the tensor cores of this GPU are not used for float32")
    from numfuse.backends.cuda.call import entry
    from numfuse.backends.cuda.kernels.hopper import tier as hopper

    monkeypatch.setattr(hopper, "hopper_splits", lambda *_: True)
    entry.forget(device(0))
    with nf.use_backend("cuda", precision=request.param):
        yield request.param
    entry.forget(device(0))


#: Of |x| |y| (docs/numerics.md): with two parts the product of both second ones, 2^-16, and what
#: the parts leave of x and of y, 2^-17 each. Sums of one term have half of that or more.
LEFT_OUT = {"bf16x6": 2.0**-23, "bf16x3": 2.0**-15}


def parts(x, precision):
    """What the tensor cores multiply: bfloat16 parts, each the nearest to what is left, or tf32."""
    if precision not in LEFT_OUT:
        bits = x.view(np.uint32).astype(np.uint64)
        return [((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32).astype(float)]
    found = []
    for _ in range({"bf16x6": 3, "bf16x3": 2}[precision]):
        found.append(x.astype(ml_dtypes.bfloat16).astype(np.float32))
        x = x - found[-1]
    return [part.astype(float) for part in found]


def product_bound(x, y, precision):
    """The sum of the products that are made for x @ y, and what its error may be: 64 terms in sums
    that are cut off at 2^-22 of them, and additions in float32 of these."""
    left, right = parts(x, precision), parts(y, precision)
    made = sum(a @ b for i, a in enumerate(left) for b in right[: len(left) - i])
    sizes = abs(sum(left)) @ abs(sum(right))
    if precision in LEFT_OUT:
        exact = x.astype(float) @ y.astype(float)
        assert (abs(made - exact) <= LEFT_OUT[precision] * sizes).all()
    terms = min(x.shape[1], 64) / 8 + 4 if precision in LEFT_OUT else x.shape[1] / 8 + 4
    share = terms * 2.0**-22 + x.shape[1] / 64 * 2.0**-24
    return made, share * sizes + 2.0**-126


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(128, 64, 128), (130, 600, 72), (260, 1030, 132), (1, 256, 8), (72, 2048, 520)],
)
def test_products_on_tensor_cores_are_within_their_bound(precision, m, k, n):
    a, b, bias, grad = numbers(m=m, k=k, n=n)
    out = nf.matmul_bias_activation(a, b, bias)
    assert nf.last_call().tier == "wgmma"
    exact, bound = product_bound(a, b, precision)
    bias = bias.astype(np.float64)
    assert (abs(out - (exact + bias)) <= bound + 2.0**-23 * (abs(exact) + abs(bias))).all()
    every = nf.matmul_bias_activation_bwd(grad, a, b)
    for x, y, given in ((grad, b.T, every.d_a), (a.T, grad, every.d_b)):
        exact, bound = product_bound(np.ascontiguousarray(x), np.ascontiguousarray(y), precision)
        assert (abs(given - exact) <= bound).all()


@pytest.mark.parametrize("tile", [tile for tile, _ in HOPPER_SPLIT_TILES], ids=str)
@pytest.mark.parametrize("precision", ["bf16x6"], indirect=True)
def test_products_in_any_blocks_are_within_their_bound(precision, tile, monkeypatch):
    from numfuse.backends.cuda.kernels.hopper import tier as hopper

    monkeypatch.setattr(hopper, "hopper_tile", lambda *sizes, **features: (tile, 1))
    # several blocks for each multiprocessor, and sums that go on in float32 in the midst
    a, b, bias, grad = numbers(m=20000, k=330, n=264)
    out = nf.matmul_bias_activation(a, b, bias)
    assert str(tile) in str(nf.last_call().tiling)
    exact, bound = product_bound(a, b, precision)
    bias = bias.astype(np.float64)
    assert (abs(out - (exact + bias)) <= bound + 2.0**-23 * (abs(exact) + abs(bias))).all()
    d_a = nf.matmul_bias_activation_bwd(grad, a, b, needs=("a",)).d_a
    exact, bound = product_bound(grad, np.ascontiguousarray(b.T), precision)
    assert (abs(d_a - exact) <= bound).all()


def test_a_copy_of_a_factor_serves_two_products_and_gives_the_bits_of_its_own(precision):
    a, b, bias, grad = numbers(m=200, k=136, n=264)
    every = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
    for i, name in enumerate(("a", "b", "bias")):
        one = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", needs=(name,))
        assert (one[i] == every[i]).all()
    batch = np.stack([a, a[::-1]])
    out = nf.matmul_bias_activation(batch, b, bias, "gelu")
    assert (out[0] == nf.matmul_bias_activation(a, b, bias, "gelu")).all()


@pytest.mark.parametrize("precision", ["bf16x6", "bf16x3"], indirect=True)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(130, 64, 72), (1000, 332, 264), (20_000, 200, 136), (260, 500, 64)]
)
def test_a_left_factor_of_any_layout_has_the_same_bits(precision, m, k, n):
    """Rows, columns, members of a batch, and what the copy engine does not take."""
    a, b, bias, _ = numbers(m=m, k=k, n=n)
    wide = np.zeros((m, k + 1), np.float32)
    wide[:, 1:] = a
    out = nf.matmul_bias_activation(a, b, bias, "gelu")
    assert nf.last_call().tier == "wgmma"
    for x in (np.asfortranarray(a), wide[:, 1:]):
        np.testing.assert_array_equal(nf.matmul_bias_activation(x, b, bias, "gelu"), out)
    batch = nf.matmul_bias_activation(np.stack([a[::-1], a]), b, bias, "gelu")
    np.testing.assert_array_equal(batch, np.stack([out[::-1], out]))
    # an infinity, a NaN, and what rounds to an infinity, in two rows and a column
    out = nf.matmul_bias_activation(a, b, bias)
    a[5, 3], a[5, 7], a[7, k - 1], b[k - 2, 9] = np.inf, np.nan, 3.4e38, -np.inf
    other = nf.matmul_bias_activation(a, b, bias)
    rows, columns = (np.delete(np.arange(size), at) for size, at in ((m, (5, 7)), (n, 9)))
    np.testing.assert_array_equal(other[np.ix_(rows, columns)], out[np.ix_(rows, columns)])
    assert np.isnan(other[5]).all() and not np.isfinite(other[:, 9]).any()


def test_infinities_and_numbers_far_apart_on_tensor_cores(precision):
    a, b, _, _ = numbers(m=70, k=130, n=64)
    a[3, 5], a[9, 2], b[100, 7] = np.inf, np.nan, -np.inf
    b[40, 11] = 0
    a[20, 40] = np.inf  # times that zero: no number
    with np.errstate(invalid="ignore"):
        wanted = a.astype(np.float64) @ b.astype(np.float64)
    given = nf.matmul_bias_activation(a, b)
    assert nf.last_call().tier == "wgmma"
    assert (np.isnan(given) == np.isnan(wanted)).all()
    infinite = np.isinf(wanted)
    assert (given[infinite] == wanted[infinite]).all()
    assert np.isfinite(given[np.isfinite(wanted)]).all()
    rng = np.random.default_rng(2)
    a, b, _, _ = numbers(m=64, k=64, n=64)
    a *= 2.0 ** rng.integers(-40, 60, (64, 1))
    b *= 2.0 ** rng.integers(-40, 60, (1, 64))
    exact, bound = product_bound(a, b, precision)
    assert (abs(nf.matmul_bias_activation(a, b) - exact) <= bound).all()


def test_every_device_of_the_machine():
    torch = torch_cuda()
    if count() < 2:
        pytest.skip("one device")
    found = []
    for i in range(count()):
        arrays = [torch.from_numpy(x).to(f"cuda:{i}") for x in numbers()]
        out, gradients = calls(*arrays)
        assert out.get_device() == i and nf.last_call().device == str(device(i))
        found.append(nf.to_numpy(out))
        check(out, gradients, torch.Tensor)
    assert all((x == found[0]).all() for x in found)
    with pytest.raises(TypeError, match="on one device, got a cuda:0, b cuda:1"):
        nf.silu_mul(*(torch.ones(3, device=f"cuda:{i}") for i in range(2)))


LOST = """
import numpy as np, numfuse as nf
from numfuse.backends.cuda.call.record import REPLAY
x = nf.to_device(np.ones(64, np.float32), "cuda")
nf.silu_mul(x, x)
nf.synchronize(x)
(kept,) = REPLAY.programs()
kept.program.launch(0, [16, 16, 16])  # addresses of nothing
for call in (
    lambda: nf.synchronize(x), lambda: nf.silu_mul(x, x),
    lambda: nf.silu_mul(np.ones(3), np.ones(3), backend="cuda"),
):
    try:
        call()
    except nf.DeviceLost as error:
        print(error)
import os, sys
sys.stdout.flush()
os._exit(0)
"""


def test_after_a_fatal_error_the_device_is_lost_and_its_launches_are_named():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1, done.stderr[-2000:]
    assert "an illegal memory access" in lines[0]
    assert "launched since the last synchronise: gate" in lines[0]


# --- definitions that go --------------------------------------------------------------------------


def define(factor, name="mine"):
    return nf.activation(lambda x: factor * x * x, name=name)


@pytest.fixture
def unloaded(monkeypatch):
    """The modules that are unloaded from here on; what other tests left is given up before."""
    owner, found = device(0), []
    for name in {"mine", "again", "another", "captured"} & set(nf.activations()):
        define(1.0, name)  # (equal formulas are one: by another name it would keep its kernels)
    gc.collect()
    owner.synchronize()
    unload = type(owner).unload

    def watched(owner, module):
        done = unload(owner, module)
        if done:
            found.append(module)
        return done

    monkeypatch.setattr(type(owner), "unload", watched)
    return found


def redefined(x, factors):
    """Redefine, and make first calls, whose kernels take the places of those that went."""
    for factor in factors:
        define(factor)
        gc.collect()
        nf.activation_mul(x, x, "mine")
        nf.activation_mul_bwd(x, x, x, "mine")


def test_kernels_of_a_definition_that_is_gone_are_unloaded(unloaded):
    x = nf.to_device(np.ones((5, 3), np.float32), "cuda")
    redefined(x, (2.0, 3.0))
    nf.synchronize(x)
    assert len(unloaded) == 2  # the two kernels of the first definition
    redefined(x, (2.0, 3.0, 2.0))
    nf.synchronize(x)
    assert len(unloaded) == 8
    np.testing.assert_array_equal(nf.to_numpy(nf.activation_mul(x, x, "mine")), 2.0)


def test_a_captured_graph_of_a_definition_that_is_gone_gives_its_numbers(unloaded):
    torch = torch_cuda()
    a, b, bias, grad = (torch.from_numpy(x).cuda() for x in numbers())
    other = nf.to_device(np.ones((5, 3), np.float32), "cuda")

    def work(activation):
        return (
            nf.matmul_bias_activation(a, b, bias, activation),
            *nf.matmul_bias_activation_bwd(grad, a, b, bias, activation),
            nf.activation_mul(a, a, activation),
        )

    define(2.0)
    work("mine")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work("mine")
    redefined(other, (3.0, 4.0, 5.0))
    nf.synchronize(a)
    assert unloaded, "what was not captured goes"
    a.mul_(0.5)
    for x in found:
        x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    wanted = work(define(2.0, "again"))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    torch.testing.assert_close(found[-1], 2.0 * a**3)


def test_a_call_in_flight_on_another_stream_ends_before_its_kernel_goes(unloaded):
    torch = torch_cuda()
    x = torch.rand(1000, device="cuda")
    other = nf.to_device(np.ones((5, 3), np.float32), "cuda")
    stream = torch.cuda.Stream()
    define(2.0)
    with torch.cuda.stream(stream):
        nf.activation_mul(x, x, "mine")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # about half a second
        out = nf.activation_mul(x, x, "mine")
    nf.activation(lambda x: x, name="mine")
    gc.collect()
    (going,) = (waiting.module for waiting in device(0).retired.modules)
    for factor in (3.0, 4.0):  # first calls on another stream say nothing of this one
        nf.activation_mul(other, other, define(factor, "another"))
    assert going not in unloaded
    stream.synchronize()
    torch.testing.assert_close(out, 2.0 * x**3)
    for factor in (5.0, 6.0):  # the first has an event recorded, which has passed by the second
        with torch.cuda.stream(stream):
            nf.activation_mul(x, x, define(factor, "another"))
        stream.synchronize()
    assert going in unloaded


def test_a_graph_that_another_thread_captures_meanwhile_is_whole(unloaded):
    torch = torch_cuda()
    x = torch.rand(1000, device="cuda")
    other = nf.to_device(np.ones((5, 3), np.float32), "cuda")
    captured = define(7.0, "captured")
    nf.activation_mul(x, x, captured)
    redefined(other, (2.0, 3.0))
    torch.cuda.synchronize()
    begun, ended, found = threading.Event(), threading.Event(), []

    def capture():
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = nf.activation_mul(x, x, captured)
                begun.set()
                ended.wait(60)
                again = nf.activation_mul(out, x, captured)
            found.extend((graph, out, again))
        finally:
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(60)
    before = len(unloaded)
    try:
        redefined(other, (2.0, 3.0, 2.0, 3.0))
    finally:
        ended.set()
        thread.join()
    assert len(found) == 3 and len(unloaded) > before
    graph, out, again = found
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, 7.0 * x**3)
    torch.testing.assert_close(again, 7.0 * out**2 * x)


REDEFINED = """
import gc, json, sys
import numpy as np
import numfuse as nf
from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.driver.devices import device

rng = np.random.default_rng(1)
shapes = (64, 64), (64, 64), (64,), (64, 64)
a, b, bias, grad = (nf.to_device(rng.random(shape, np.float32), "cuda") for shape in shapes)
loads, unloads = [], []
module, unload = Device.module, Device.unload

def loaded(self, kernel):
    known = kernel in self._modules
    found = module(self, kernel)
    if not known and kernel.formulas:
        loads.append(found.handle)
    return found

def unloaded(self, handle):
    unloads.append(handle)
    return unload(self, handle)

Device.module, Device.unload = loaded, unloaded

def define(step):
    # four formulas by turns: they are compiled once, and loaded from disk at every definition
    nf.activation(lambda x: x * x * (1.5 + step % 4 / 64), name="mine")
    nf.matmul_bias_activation(a, b, bias, "mine")
    nf.matmul_bias_activation_bwd(grad, a, b, bias, "mine")
    nf.activation_mul(a, b, "mine")
    nf.activation_mul_bwd(grad, a, b, "mine")
    nf.matmul_bias_activation_double_bwd(a, b, bias, grad, a, b, bias, "mine")
    device(0).synchronize(0)  # of the stream alone: however busy others keep the device
    gc.collect()  # (an activation and its derivatives refer to each other)

def taken():
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    with device(0).current():
        return resident, -device(0).memory()[0]

def sixty():
    start, before = taken(), len(loads)
    for step in range(60):
        define(step)
    return [now - then for now, then in zip(taken(), start)] + [len(loads) - before]

for step in range(12):
    define(step)
found = sixty()
# The driver tells of the device's memory, which other processes take too: what definitions take
# they take again.
for _ in range(2):
    if found[1] > int(sys.argv[1]):
        found = sixty()
print(json.dumps([*found, len(loads) - len(unloads)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/statm")
def test_sixty_definitions_take_little_memory():
    """60 times forward, backward, both gates and double backward: some 300 kernels.

    Of the device: at any time there are the kernels of three definitions at most, 15 binaries of 7
    to 40 KiB, and the driver takes memory in pieces of 2 MiB: two, in case they lie apart (all 300
    binaries are more). Of the host: half a MiB a definition, as on the CPU.
    """
    limit = 4 << 20
    done = subprocess.run(
        [sys.executable, "-c", REDEFINED, str(limit)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    host, on_device, loaded, left = json.loads(done.stdout)
    per_definition = loaded / 60
    assert per_definition >= 5
    assert left <= 3 * per_definition, f"{left} of {loaded} kernels are there"
    assert on_device <= limit, f"{on_device / 2**20:.1f} MiB of the device"
    assert host <= 30 << 20, f"{host / 2**20:.1f} MiB of the host"
