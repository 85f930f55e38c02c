"""The public functions on Dask arrays: graphs, numbers, errors and threads, on local schedulers.

`test_dask_cluster.py` has the tests on a cluster of processes.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time

import hypothesis
import numpy as np
import pytest
import tolerance
from arrays import bits, normal
from hypothesis import strategies as st
from tolerance import DTYPES, assert_within

import numfuse as nf

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from numfuse.adapters import dask as adapter  # noqa: E402
from numfuse.adapters.dask import blocks as dask_blocks  # noqa: E402
from numfuse.adapters.dask import graph as sizes  # noqa: E402

M, N, K = 13, 7, 11
#: Chunks of M, N and K.
CHUNKINGS = [(13, 7, 11), (5, 7, 11), (13, 3, 11), (5, 3, 11), (13, 7, 4), (5, 3, 4)]
HALVES = ("float16", "bfloat16")


@pytest.fixture(autouse=True)
def local_scheduler(monkeypatch):
    module = sys.modules["numfuse.activations.table"]
    monkeypatch.setattr(module, "TABLE", dict(module.TABLE))  # for those that a test registers
    with dask.config.set(scheduler="threads", num_workers=4):
        yield


def operands(dtype, m=M, n=N, k=K, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"grad": (m, n), "a": (m, k), "b": (k, n), "bias": (n,)}
    return {name: normal(rng, shape, DTYPES[dtype]) for name, shape in shapes.items()}


def chunked(x, mc, nc, kc):
    sizes = {"grad": (mc, nc), "a": (mc, kc), "b": (kc, nc), "bias": (nc,), "residual": (mc, nc)}
    return {name: da.from_array(array, chunks=sizes[name]) for name, array in x.items()}


def gradients(found):
    return {name: x for name, x in found._asdict().items() if x is not None}


def assert_right(lazy, exact, error):
    """Shape, dtype, chunks and every component of a lazy array."""
    lazy = lazy.persist()
    result = lazy.compute()
    assert isinstance(lazy, da.Array) and type(result) is np.ndarray
    assert result.shape == lazy.shape and result.dtype == lazy.dtype
    shapes = [block.shape for block in dask.compute(*lazy.to_delayed().ravel())]
    assert shapes == list(itertools.product(*lazy.chunks))  # as promised without computing
    assert_within(lazy.name, result, exact, error)


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_is_within_the_bound_of_one_machine(dtype, chunks):
    x = operands(dtype)
    d = chunked(x, *chunks)
    wanted = tolerance.forward(x["a"], x["b"], x["bias"], "gelu", DTYPES[dtype])
    out = nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu")
    assert out.chunks == d["grad"].chunks
    assert_right(out, wanted.out, wanted.out_error)
    again, pre = nf.matmul_bias_activation(
        d["a"], d["b"], d["bias"], "gelu", return_pre_activation=True
    )
    assert pre.dtype == tolerance.accumulator(DTYPES[dtype])
    assert_right(again, wanted.out, wanted.out_error)
    assert_right(pre, wanted.pre, wanted.pre_error)
    wanted = tolerance.forward(x["a"], x["b"], None, "none", DTYPES[dtype])
    assert_right(nf.matmul_bias_activation(d["a"], d["b"]), wanted.out, wanted.out_error)


@pytest.mark.parametrize("saved", [False, True, "storage"])
@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_is_within_the_bound_of_one_machine(dtype, chunks, saved):
    x = operands(dtype)
    d = chunked(x, *chunks)
    pre = kept = None
    if saved:
        pre = nf.matmul_bias_activation(x["a"], x["b"], x["bias"], return_pre_activation=True)[1]
        pre = pre.astype(dtype) if saved == "storage" else pre
        kept = da.from_array(pre, chunks=chunks[:2])
    wanted = tolerance.backward(
        **x, activation="gelu", dtype=DTYPES[dtype], pre=pre, rounded_grad_pre=dtype in HALVES
    )
    found = nf.matmul_bias_activation_bwd(**d, activation="gelu", pre_activation=kept)
    for name, lazy in gradients(found).items():
        assert lazy.chunks == d[name[2:]].chunks and lazy.dtype == DTYPES[dtype]
        assert_right(lazy, getattr(wanted, name), getattr(wanted, f"{name}_error"))


@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_identity_has_no_pre_activation_and_no_bias_is_none(dtype, chunks):
    x = operands(dtype)
    d = chunked(x, *chunks)
    wanted = tolerance.backward(x["grad"], x["a"], x["b"], None, "none", DTYPES[dtype])
    found = nf.matmul_bias_activation_bwd(d["grad"], d["a"], d["b"])
    assert found.d_bias is None
    for name, lazy in gradients(found).items():
        assert_right(lazy, getattr(wanted, name), getattr(wanted, f"{name}_error"))
    assert not any("grad-pre" in str(key) for key in found.d_b.__dask_graph__())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunks", [(5, 3, 11), (5, 3, 4), (13, 3, 11), (5, 7, 11)])
@pytest.mark.parametrize("needs", [(), ("a",), ("b",), ("bias",), ("bias", "a"), ("b", "bias")])
def test_needs_leaves_the_others_none_and_changes_no_bit(chunks, needs, dtype):
    d = chunked(operands(dtype), *chunks)
    full = nf.matmul_bias_activation_bwd(**d, activation="gelu")
    found = nf.matmul_bias_activation_bwd(**d, activation="gelu", needs=needs)
    assert gradients(found).keys() == {f"d_{name}" for name in needs}
    for name, lazy in gradients(found).items():
        assert (bits(lazy.compute()) == bits(getattr(full, name).compute())).all()


@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize("shape", [(M, N), (N,), (M, 1), (1, N), (1, 1), ()])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_residual_and_its_gradient(dtype, shape, chunks):
    x = operands(dtype)
    d = chunked(x, *chunks)
    residual = normal(np.random.default_rng(1), shape, DTYPES[dtype])
    own = [chunk if n != 1 else 1 for n, chunk in zip((M, N), chunks, strict=False)]
    own = [1 if n == 1 else c for n, c in zip(shape, own[2 - len(shape) :], strict=True)]
    lazy = da.from_array(residual, chunks=tuple(own))
    wanted = tolerance.forward(x["a"], x["b"], x["bias"], "none", DTYPES[dtype], residual=residual)
    for given in (lazy, residual):
        out = nf.matmul_bias_residual(d["a"], d["b"], d["bias"], given)
        assert_right(out, wanted.out, wanted.out_error)
    found = nf.matmul_bias_residual_bwd(**d, residual=lazy)
    whole = nf.matmul_bias_residual_bwd(**x, residual=residual, backend="reference")
    assert found.d_residual.chunks == lazy.chunks
    np.testing.assert_allclose(
        found.d_residual.compute().astype(float), whole.d_residual.astype(float),
        rtol=4 * M * N * tolerance.roundoff(DTYPES[dtype]),
        atol=4 * M * N * tolerance.roundoff(np.dtype(np.float32)),
    )  # fmt: skip
    wanted = tolerance.backward(**x, activation="none", dtype=DTYPES[dtype])
    for name in ("d_a", "d_b", "d_bias"):
        assert_right(getattr(found, name), getattr(wanted, name), getattr(wanted, f"{name}_error"))


BATCHES = [
    # a, b, bias, chunks of the batch axes, of M, N and K
    ((4, 6, 5), (5, 3), (3,), (2,), 6, 3, 5),
    ((4, 6, 5), (5, 3), (3,), (3,), 4, 2, 3),
    ((4, 6, 5), (4, 5, 3), (4, 1, 3), (2,), 4, 3, 5),
    ((4, 6, 5), (4, 5, 3), (4, 1, 3), (1,), 6, 2, 2),
    ((4, 6, 5), (1, 5, 3), (3,), (2,), 4, 3, 5),
    ((1, 6, 5), (4, 5, 3), None, (2,), 4, 2, 5),
    ((6, 5), (4, 5, 3), (4, 1, 3), (1,), 6, 3, 3),
    ((2, 4, 6, 5), (4, 5, 3), (3,), (1, 2), 4, 3, 5),
    ((2, 1, 6, 5), (4, 5, 3), (2, 1, 1, 3), (1, 2), 4, 2, 3),
]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("case", BATCHES, ids=str)
def test_batches_and_sums_over_broadcast_axes(case, dtype):
    a_shape, b_shape, bias_shape, batch_chunks, mc, nc, kc = case
    rng = np.random.default_rng(2)
    a, b = (normal(rng, shape, DTYPES[dtype]) for shape in (a_shape, b_shape))
    bias = None if bias_shape is None else normal(rng, bias_shape, DTYPES[dtype])
    wanted = tolerance.forward(a, b, bias, "tanh", DTYPES[dtype])
    grad = normal(rng, wanted.out.shape, DTYPES[dtype])

    def lazy(x, *last):
        if x is None:
            return None
        sizes = (*batch_chunks, *last)[-x.ndim :]
        return da.from_array(
            x, chunks=tuple(1 if n == 1 else c for n, c in zip(x.shape, sizes, strict=True))
        )

    one = () if bias is not None and bias.ndim == 1 else (1,)
    d = lazy(grad, mc, nc), lazy(a, mc, kc), lazy(b, kc, nc), lazy(bias, *one, nc)
    assert_right(nf.matmul_bias_activation(*d[1:], "tanh"), wanted.out, wanted.out_error)
    half = dtype in HALVES
    for sum_batch in (False, True):
        shape = b_shape[-2:] if sum_batch else None
        exact = tolerance.backward(
            grad, a, b, bias, "tanh", DTYPES[dtype], d_b_shape=shape, rounded_grad_pre=half
        )
        found = nf.matmul_bias_activation_bwd(*d, "tanh", sum_batch=sum_batch)
        for name, x in gradients(found).items():
            assert_right(x, getattr(exact, name), getattr(exact, f"{name}_error"))
    assert found.d_a.chunks == d[1].chunks


@pytest.mark.parametrize("a_shape, b_shape", [((5,), (5, 3)), ((4, 5), (5,)), ((5,), (5,))])
@pytest.mark.parametrize("kc", [5, 2])
def test_one_dimensional_operands_are_those_of_matmul(a_shape, b_shape, kc):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal(a_shape), rng.standard_normal(b_shape)
    bias = rng.standard_normal(1 if len(b_shape) == 1 else b_shape[-1])
    grad = np.asarray(rng.standard_normal((a @ b).shape))
    residual = np.asarray(rng.standard_normal((a @ b).shape))
    first = () if len(a_shape) == 1 else (3,)
    last = () if len(b_shape) == 1 else (2,)
    d_grad = da.from_array(grad, chunks=(*first, *last))
    d_a = da.from_array(a, chunks=(*first, kc))
    d_b = da.from_array(b, chunks=(kc, *last))
    d_bias = da.from_array(bias, chunks=last or (1,))
    wanted = nf.matmul_bias_activation(a, b, bias, "silu")
    out = nf.matmul_bias_activation(d_a, d_b, d_bias, "silu")
    assert out.shape == wanted.shape
    np.testing.assert_allclose(out.compute(), wanted, rtol=1e-13)
    found = nf.matmul_bias_activation_bwd(d_grad, d_a, d_b, d_bias, "silu")
    for x, y in zip(found, nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu"), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x.compute(), y, rtol=1e-12)
    d_residual = da.from_array(residual, chunks=(*first, *last))
    out = nf.matmul_bias_residual(d_a, d_b, d_bias, d_residual)
    np.testing.assert_allclose(
        out.compute(), nf.matmul_bias_residual(a, b, bias, residual), rtol=1e-13
    )
    found = nf.matmul_bias_residual_bwd(d_grad, d_a, d_b, d_bias, d_residual)
    np.testing.assert_allclose(found.d_residual.compute(), grad, rtol=1e-13)
    assert found.d_residual.shape == residual.shape


@pytest.mark.parametrize("shape", [(0, 7, 11), (13, 0, 11), (13, 7, 0), (0, 0, 0)])
def test_sizes_of_zero(shape):
    x = operands("float32", *shape)
    d = chunked(x, *(max(1, n // 2) for n in shape))
    out = nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu")
    np.testing.assert_array_equal(
        out.compute(), nf.matmul_bias_activation(x["a"], x["b"], x["bias"], "gelu")
    )
    found = nf.matmul_bias_activation_bwd(**d, activation="gelu")
    whole = nf.matmul_bias_activation_bwd(**x, activation="gelu")
    for lazy, wanted in zip(found, whole, strict=True):
        np.testing.assert_allclose(lazy.compute(), wanted, rtol=1e-5, atol=1e-5)


@st.composite
def chunked_problems(draw):
    """{axis: length}, {axis: chunks}, and the axes of each operand, None where it is broadcast."""
    lengths = {"m": draw(st.integers(1, 3)), "n": draw(st.integers(1, 3))}
    lengths["k"] = draw(st.integers(1, 9))  # so that K often stays in chunks, and often does not
    batch = [f"p{i}" for i in range(draw(st.integers(0, 2)))]
    lengths |= {axis: draw(st.integers(1, 3)) for axis in batch}
    chunks = {axis: draw(st.integers(1, length)) for axis, length in lengths.items()}

    def axes(*own, missing=False):
        own_batch = batch[draw(st.integers(0, len(batch))) :]
        kept = [*own_batch, *own]
        return [None if draw(st.booleans()) and (missing or x in batch) else x for x in kept]

    operands = {"a": [*axes(), "m", "k"], "b": [*axes(), "k", "n"]}
    if draw(st.booleans()):
        operands["bias"] = draw(st.sampled_from([["n"], [*axes(), None, "n"]]))
    residual = axes("m", "n", missing=True) if draw(st.booleans()) else None
    return lengths, chunks, operands, residual


#: The bias alone has a batch, and K stays in its chunks.
ENLARGED = (
    {"m": 2, "n": 4, "k": 4, "p0": 3},
    {"m": 2, "n": 4, "k": 2, "p0": 3},
    {"a": ["m", "k"], "b": ["k", "n"], "bias": ["p0", None, "n"]},
    None,
)


@hypothesis.settings(max_examples=25)
@hypothesis.example(ENLARGED, "none")
@hypothesis.example(ENLARGED, "tanh")
@hypothesis.given(chunked_problems(), st.sampled_from(["none", "tanh"]))
def test_every_shape_in_any_chunks_is_that_of_numpy(problem, activation):
    lengths, chunks, axes, residual = problem
    rng = np.random.default_rng(0)

    def array(letters):
        x = rng.standard_normal([1 if x is None else lengths[x] for x in letters])
        return x, da.from_array(x, chunks=tuple(1 if x is None else chunks[x] for x in letters))

    def pairs(letters):
        return {name: array(x) for name, x in letters.items()}

    own = pairs(axes)
    out = nf.matmul_bias_activation(**{name: x for name, (x, _) in own.items()})
    every = [*[f"p{i}" for i in range(2) if f"p{i}" in lengths], "m", "n"][-out.ndim :]
    # An axis that every operand leaves out has length 1 in the result.
    visible = [x if lengths[x] == n else None for x, n in zip(every, out.shape, strict=True)]
    own.setdefault("bias", (None, None))
    grad, dots = array(visible), pairs(axes)
    dots.setdefault("bias", (None, None))
    rows = [(own[name], dots[name]) for name in ("a", "b", "bias")]
    primal, tangent = [x for x, _ in rows], [x for _, x in rows]
    calls = [
        (nf.matmul_bias_activation, primal),
        (nf.matmul_bias_activation_bwd, [grad, *primal]),
        (nf.matmul_bias_activation_double_bwd, [*tangent, grad, *primal]),
        (nf.matmul_bias_activation_jvp, [*primal, *tangent]),
    ]  # fmt: skip
    if residual is not None:
        residual = residual[-out.ndim :]
        there = [
            x if y is not None else None
            for x, y in zip(visible[-len(residual) :], residual, strict=True)
        ]
        extra, dot = array(there), array(there)
        calls = [
            (nf.matmul_bias_residual, [*primal, extra]),
            (nf.matmul_bias_residual_bwd, [grad, *primal, extra]),
            (nf.matmul_bias_residual_double_bwd, [*tangent, dot, grad, *primal, extra]),
            (nf.matmul_bias_residual_jvp, [*primal, extra, *tangent, dot]),
        ]
    with dask.config.set(scheduler="synchronous"):
        for function, pairs_of in calls:
            end = () if residual is not None else (activation,)
            wanted = function(*(x for x, _ in pairs_of), *end)
            lazy = function(*(x for _, x in pairs_of), *end)
            if not isinstance(wanted, tuple):
                wanted, lazy = (wanted,), (lazy,)
            for x, y in zip(dask.compute(*lazy), wanted, strict=True):
                assert (x is None) == (y is None)
                if y is not None:
                    assert x.shape == y.shape
                    np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_operations_have_the_bits_of_one_machine(dtype):
    rng = np.random.default_rng(4)
    _, a, b = x = [normal(rng, (9, 4, 10), DTYPES[dtype]) for _ in range(3)]
    _, d_a, d_b = d = [da.from_array(array, chunks=(4, 2, 10)) for array in x]
    for name in ("silu", "gelu", "relu", "sigmoid"):
        one, two = getattr(nf, f"{name}_mul"), getattr(nf, f"{name}_mul_bwd")
        out = one(d_a, d_b)
        assert out.chunks == d_a.chunks and out.dtype == DTYPES[dtype]
        assert (bits(out.compute()) == bits(one(a, b))).all()
        for needs in (("a", "b"), ("a",), ("b",)):
            found, wanted = two(*d, needs=needs), two(*x, needs=needs)
            for lazy, array in zip(found, wanted, strict=True):
                assert (lazy is None) == (array is None)
                if array is not None:
                    assert (bits(lazy.compute()) == bits(array)).all()
    assert nf.silu_mul_bwd(*d, needs=()) == (None, None)


def test_numpy_weights_beside_a_chunked_a():
    x = operands("float32")
    d = chunked(x, 5, N, 4)
    out = nf.matmul_bias_activation(d["a"], x["b"], x["bias"], "gelu")
    lazy = nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu")
    assert (bits(out.compute()) == bits(lazy.compute())).all()
    found = nf.matmul_bias_activation_bwd(d["grad"], d["a"], x["b"], x["bias"], "gelu")
    assert found.d_b.shape == (K, N) and found.d_bias.shape == (N,)
    wanted = nf.matmul_bias_activation_bwd(**d, activation="gelu")
    for x, y in zip(found, wanted, strict=True):
        assert (bits(x.compute()) == bits(y.compute())).all()


def test_partial_sums_are_never_rounded_to_a_half():
    """3 x 2049 is 6147 or, rounded once to float16, 6148; 2049 alone would round to 2048."""
    ones = da.ones((3 * 2049, 1), chunks=2049, dtype=np.float16)
    bias = da.zeros(1, dtype=np.float16)
    found = nf.matmul_bias_activation_bwd(ones, ones, bias[None], bias)
    assert found.d_b.compute().item() == found.d_bias.compute().item() == 6148
    parts = nf.matmul_bias_activation(ones.T, ones)  # the same along K
    assert parts.compute().item() == 6148
    residual = da.zeros((), dtype=np.float16)
    found = nf.matmul_bias_residual_bwd(ones, ones, bias[None], bias, residual)
    assert found.d_residual.compute().item() == 6148


def test_the_guard_travels_with_the_graph():
    @nf.activation(source="a test", name="dask_root")
    def root(x):
        return x**0.5  # its derivative at 0 is infinite

    zero = da.zeros((4, 4), chunks=(2, 4))
    for guard, wanted in ((True, 0.0), (False, np.inf)):
        found = nf.activation_mul_bwd(zero + 1, zero, zero + 1, root, guard=guard)
        assert (found.d_a.compute() == wanted).all()
        eye = da.from_array(np.eye(4), chunks=4)
        found = nf.matmul_bias_activation_bwd(zero + 1, zero, eye, None, root, guard=guard)
        wanted_sum = 0.0 if guard else np.nan  # 0 * inf
        np.testing.assert_array_equal(found.d_b.compute(), np.full((4, 4), wanted_sum))


# --- second order and forward mode ----------------------------------------------------------------

PATTERNS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_second_order_is_within_the_bound_of_one_machine(dtype, chunks, pattern):
    x = operands(dtype)
    names = {"u": "a", "v": "b", "w": "bias"}
    moved = {
        letter: operands(dtype, seed=1)[name] if there else None
        for (letter, name), there in zip(names.items(), pattern, strict=True)
    }
    d = chunked(x, *chunks)
    lazy = {
        letter: None if y is None else da.from_array(y, chunks=d[names[letter]].chunks)
        for letter, y in moved.items()
    }
    wanted = tolerance.double_backward(
        *moved.values(), None, **x, activation="gelu", dtype=DTYPES[dtype],
        rounded_grad_pre=dtype in HALVES,
    )  # fmt: skip
    found = nf.matmul_bias_activation_double_bwd(*lazy.values(), **d, activation="gelu")
    for name, result in gradients(found).items():
        assert result.chunks == d[name[2:]].chunks
        assert_right(result, *wanted[name])
    some = nf.matmul_bias_activation_double_bwd(
        *lazy.values(), **d, activation="gelu", needs=("b", "grad")
    )
    assert gradients(some).keys() == {"d_grad", "d_b"}
    assert (bits(some.d_b.compute()) == bits(found.d_b.compute())).all()


@pytest.mark.parametrize("chunks", CHUNKINGS)
def test_forward_mode_is_that_of_one_machine(chunks):
    x, y = operands("float64"), operands("float64", seed=1)
    d, dots = chunked(x, *chunks), chunked(y, *chunks)
    one = nf.matmul_bias_activation_jvp(x["a"], x["b"], x["bias"], y["a"], None, y["bias"], "gelu")
    found = nf.matmul_bias_activation_jvp(
        d["a"], d["b"], d["bias"], dots["a"], None, dots["bias"], "gelu"
    )
    for lazy, wanted in zip(found, one, strict=True):
        assert lazy.chunks == d["grad"].chunks
        np.testing.assert_allclose(lazy.compute(), wanted, rtol=1e-12, atol=1e-12)
    residual = x["grad"], y["grad"]
    one = nf.matmul_bias_residual_jvp(
        x["a"], x["b"], x["bias"], residual[0], y["a"], y["b"], None, residual[1]
    )
    found = nf.matmul_bias_residual_jvp(
        d["a"], d["b"], d["bias"], d["grad"], dots["a"], dots["b"], None, dots["grad"]
    )
    for lazy, wanted in zip(found, one, strict=True):
        np.testing.assert_allclose(lazy.compute(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunks", CHUNKINGS)
def test_second_order_of_a_residual_is_that_of_one_machine(chunks):
    x, y = operands("float64"), operands("float64", seed=1)
    d, dots = chunked(x, *chunks), chunked(y, *chunks)
    one = nf.matmul_bias_residual_double_bwd(
        y["a"], y["b"], y["bias"], y["grad"], **x, residual=x["grad"]
    )
    found = nf.matmul_bias_residual_double_bwd(
        dots["a"], dots["b"], dots["bias"], dots["grad"], **d, residual=d["grad"]
    )
    for lazy, wanted in zip(found, one, strict=True):
        assert lazy.shape == wanted.shape
        np.testing.assert_allclose(lazy.compute(), wanted, rtol=1e-12, atol=1e-12)


def test_second_order_of_batches_and_one_dimensional_operands():
    rng = np.random.default_rng(5)
    batched = (4, 6, 5), (4, 5, 3), (4, 1, 3)
    for shapes in (batched, ((4, 6, 5), (5, 3), (3,)), ((5,), (5, 3), (3,))):
        a, b, bias = (rng.standard_normal(shape) for shape in shapes)
        u, v, w = (rng.standard_normal(shape) for shape in shapes)
        grad = rng.standard_normal(nf.matmul_bias_activation(a, b, bias).shape)
        one = nf.matmul_bias_activation_double_bwd(u, v, w, grad, a, b, bias, "silu")

        def rows(x):
            return da.from_array(x, chunks=(*(2 for _ in x.shape[:-1]), x.shape[-1]))

        def weights(x, own=shapes is batched):
            return da.from_array(x, chunks=(2, *x.shape[1:]) if own else -1)

        d = [rows(u), weights(v), weights(w), rows(grad), rows(a), weights(b), weights(bias)]
        found = nf.matmul_bias_activation_double_bwd(*d, "silu")
        for result, wanted in zip(found, one, strict=True):
            assert result.shape == wanted.shape
            np.testing.assert_allclose(result.compute(), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("needs", [("grad", "a", "b"), ("a",), ("b", "grad"), ()])
def test_higher_derivatives_of_gates_have_the_bits_of_one_machine(needs):
    rng = np.random.default_rng(6)
    u, _, _, a, b = x = [rng.standard_normal((9, 10)).astype("f4") for _ in range(5)]
    d = [da.from_array(y, chunks=(4, 5)) for y in x]
    one = nf.activation_mul_double_bwd(*x, "gelu", needs=needs)
    found = nf.activation_mul_double_bwd(*d, "gelu", needs=needs)
    for lazy, wanted in zip(found, one, strict=True):
        assert (lazy is None) == (wanted is None)
        if wanted is not None:
            assert (bits(lazy.compute()) == bits(wanted)).all()
    one = nf.activation_mul_jvp(a, b, u, None, "gelu")
    found = nf.activation_mul_jvp(d[3], d[4], d[0], None, "gelu")
    for lazy, wanted in zip(found, one, strict=True):
        assert (bits(lazy.compute()) == bits(wanted)).all()


def test_cotangents_that_do_not_fit_are_an_error():
    d = chunked(operands("float32"), 5, 7, 11)
    with pytest.raises(ValueError, match=r"u must have the shape of a \(13, 11\), got \(13, 7\)"):
        nf.matmul_bias_activation_double_bwd(d["grad"], None, None, **d)
    d["bias"] = None
    with pytest.raises(ValueError, match="w must be None where bias is None"):
        nf.matmul_bias_activation_double_bwd(None, None, d["b"][0], **d)


# --- the same bits --------------------------------------------------------------------------------


def all_results(d):
    out, pre = nf.matmul_bias_activation(
        d["a"], d["b"], d["bias"], "gelu", return_pre_activation=True
    )
    return [out, pre, *nf.matmul_bias_activation_bwd(**d, activation="gelu")]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("chunks", [(3, 7, 11), (3, 3, 4)])
def test_the_order_in_which_tasks_end_changes_no_bit(dtype, chunks):
    x = operands(dtype, m=61)

    def late(block, seed):
        time.sleep(random.Random(f"{seed} {block[0]}").random() / 100)
        return block

    found = []
    for seed, how in enumerate(
        [{"scheduler": "sync"}, {"num_workers": 1}, {"num_workers": 3}, {"num_workers": 8}]
    ):
        d = chunked(x, *chunks)
        d["a"] = d["a"].map_blocks(late, seed, meta=d["a"]._meta)
        d["grad"] = d["grad"].map_blocks(late, seed + 9, meta=d["grad"]._meta)
        found.append([array.tobytes() for array in dask.compute(*all_results(d), **how)])
    assert all(results == found[0] for results in found)


def test_the_tree_of_sums_is_numfuses_own(monkeypatch):
    """Not that of Dask's configuration, which could differ from one user to the next."""
    x = operands("float32", m=201)
    results = []
    for split in (2, 16):
        with dask.config.set(split_every=split):
            found = nf.matmul_bias_activation_bwd(**chunked(x, 3, 7, 11), activation="gelu")
            results.append(b"".join(array.tobytes() for array in dask.compute(*found)))
    assert results[0] == results[1]


# --- graphs ---------------------------------------------------------------------------------------


class Calls:
    """The public functions as tasks call them, counted."""

    def __init__(self, monkeypatch):
        self.names, self.blocks = [], []
        for name in nf.__all__:
            if hasattr(dask_blocks.functional, name) and name.startswith(("matmul", "activation_")):
                self._spy(monkeypatch, name)

    def _spy(self, monkeypatch, name):
        plain = getattr(dask_blocks.functional, name)

        def spied(*args, **kwargs):
            self.names.append(name)
            self.blocks.append([x for x in args if isinstance(x, np.ndarray)])
            return plain(*args, **kwargs)

        monkeypatch.setattr(dask_blocks.functional, name, spied)

    def count(self, name):
        return self.names.count(name)


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def made(shape, chunks, add=0.0):
    """Blocks that a task makes, and another one adds to."""

    def make(block_id):
        return np.full(chunks, 1 + sum(block_id), np.float32)

    blocks = tuple((c,) * (n // c) for n, c in zip(shape, chunks, strict=True))
    return da.map_blocks(make, chunks=blocks, meta=np.empty((0, 0), np.float32)) + np.float32(add)


@pytest.mark.parametrize("needs", [("a",), ("b",), ("bias",), ("b", "bias")])
def test_a_block_is_one_task_with_what_makes_its_operands(needs):
    x = operands("float32")
    a, grad = made((64, K), (4, K), 0.5), made((64, N), (4, N), 0.25)

    def tasks(lazy):
        """Those that need no other but the weights, and the others."""
        needed = dask.optimize(*lazy)[0].__dask_graph__().get_all_dependencies()
        own = {key for key in needed if isinstance(key, tuple) and "array" not in key[0]}
        first = {key for key in own if not needed[key] & own}
        return len(first), len(own - first)

    if tasks([a]) != (16, 0):
        pytest.skip("this version of Dask does not fuse map_blocks with arithmetic")
    assert tasks([nf.matmul_bias_activation(a, x["b"], x["bias"], "gelu")]) == (16, 0)
    found = nf.matmul_bias_activation_bwd(grad, a, x["b"], x["bias"], "gelu", needs=needs)
    first, others = tasks(gradients(found).values())
    assert first == 16
    # 16 blocks, 8 at a time, and what takes the results from the sum
    assert others <= (0 if needs == ("a",) else 3 + 2 * len(needs))


@pytest.mark.parametrize("split", ["m", "mn"])
def test_gradients_of_a_block_are_made_in_one_call(calls, split):
    nc = N if split == "m" else 3
    d = chunked(operands("float32", m=40), 5, nc, K)
    dask.compute(*nf.matmul_bias_activation_bwd(**d, activation="gelu"))
    assert calls.names == ["matmul_bias_activation_bwd"] * (8 if split == "m" else 24)


def test_grad_pre_is_made_once_for_all_chunks_of_k(calls):
    d = chunked(operands("float32", m=40, n=4, k=400), 5, 4, 40)
    found = nf.matmul_bias_activation_bwd(**d, activation="gelu")
    assert not any("rechunk" in str(key) for key in found.d_b.__dask_graph__())
    dask.compute(*found)
    assert calls.count("activation_mul_bwd") == 8
    assert calls.count("matmul_bias_activation") == 8 * 10
    assert calls.count("matmul_bias_activation_bwd") == 8 * 10 + 8  # and the columns


def plan(graph):
    """How a graph treats K in several chunks."""
    names = {str(key[0] if isinstance(key, tuple) else key) for key in graph}
    joined = any("rechunk" in name for name in names)
    parts = any("numfuse-product" in name for name in names)
    assert joined != parts
    return "join" if joined else "parts"


@pytest.mark.parametrize(
    "m, n, k, wanted",
    [(40, 4, 400, "parts"), (4, 40, 400, "parts"), (40, 40, 40, "join"), (400, 400, 8, "join")],
)
def test_k_in_chunks_takes_the_way_that_moves_fewer_bytes(m, n, k, wanted):
    d = chunked(operands("float64", m, n, k), m // 2, n, k // 4)
    out = nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu")
    # three of four parts move, or three quarters of a and b
    parts, joined = 3 * m * n, 3 * (m * k + k * n) // 4
    assert wanted == ("parts" if parts <= joined else "join")
    assert plan(out.__dask_graph__()) == wanted


def test_a_saved_pre_activation_spares_the_parts_of_a_product():
    m, n, k = 64, 64, 100
    x = operands("float64", m, n, k)
    pre = nf.matmul_bias_activation(x["a"], x["b"], x["bias"], return_pre_activation=True)[1]
    d = chunked(x, 32, n, 50)
    kept = da.from_array(pre, chunks=(32, n))
    found = nf.matmul_bias_activation_bwd(**d, activation="gelu", pre_activation=kept)
    assert not any("numfuse-product" in str(key) for key in found.d_b.__dask_graph__())


def test_many_bytes_along_k_are_a_warning(monkeypatch):
    d = chunked(operands("float64"), 5, 7, 4)
    monkeypatch.setattr(sizes, "MOVED_BYTES", 100)
    with pytest.warns(da.PerformanceWarning, match=r"K = 11 is in 3 chunks") as caught:
        nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu")
    assert caught[0].filename == __file__
    monkeypatch.setattr(sizes, "MOVED_BYTES", 1 << 30)
    nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu")  # warnings are errors here


def test_nothing_is_computed_before_it_is_asked_for():
    def poisoned(block_id):
        raise AssertionError("a block was computed")

    def lazy(*chunks):
        return da.map_blocks(poisoned, chunks=chunks, meta=np.empty((0,) * len(chunks)))

    a, b, bias = lazy((5, 8), (11,)), lazy((11,), (3, 4)), lazy((3, 4))
    grad = lazy((5, 8), (3, 4))
    all_results({"grad": grad, "a": a, "b": b, "bias": bias})
    nf.silu_mul(grad, grad)
    nf.silu_mul_bwd(grad, grad, grad)


def test_persisted_blocks_are_read_where_they_are(calls):
    d = chunked(operands("float32", m=40), 5, N, K)
    d = dict(zip(d, dask.persist(*d.values()), strict=True))
    own = {
        block.__array_interface__["data"][0]
        for x in d.values()
        for block in dask.compute(*x.to_delayed().ravel())
    }
    dask.compute(*nf.matmul_bias_activation_bwd(**d, activation="gelu"))
    nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu").compute()
    assert len(calls.blocks) == 16
    for blocks in calls.blocks:
        assert {x.__array_interface__["data"][0] for x in blocks} <= own


# --- errors ---------------------------------------------------------------------------------------


def test_unknown_chunks_are_an_error():
    d = chunked(operands("float32"), 5, 7, 11)
    a = d["a"][d["a"][:, 0] > 0]
    with pytest.raises(ValueError, match=r"a must have known chunk sizes, got shape \(nan, 11\)"):
        nf.matmul_bias_activation(a, d["b"])
    with pytest.raises(ValueError, match="grad must have known chunk sizes"):
        nf.silu_mul_bwd(a, d["a"], d["a"])


@pytest.mark.parametrize(
    "name, chunks, message",
    [
        ("b", (11, 7), r"b must be chunked along K as a is, \(4, 4, 3\), got \(11,\)"),
        ("grad", (4, 7), r"along the rows \(M\) as grad is, \(4, 4, 4, 1\), got \(5, 5, 3\)"),
        ("bias", (3,), r"bias must be chunked along the columns \(N\) as grad is, \(7,\), got"),
    ],
)
def test_mismatched_chunks_are_an_error(name, chunks, message):
    x = operands("float32")
    d = chunked(x, 5, 7, 4)
    d[name] = d[name].rechunk(chunks)
    with pytest.raises(ValueError, match=message):
        nf.matmul_bias_activation_bwd(**d)


def test_mismatched_chunks_of_a_gate_are_an_error():
    x = da.zeros((100, 4), chunks=(10, 4))
    with pytest.raises(ValueError, match=r"along axis 0 as a is, \(10, 10, ..., 10: 10 chunks\)"):
        nf.silu_mul(x, x.rechunk((20, 4)))
    with pytest.raises(ValueError, match=r"b must have the shape of a \(100, 4\), got \(4, 100\)"):
        nf.silu_mul(x, x.T)


@pytest.mark.parametrize("name", ["a", "grad", "pre_activation"])
def test_large_operands_must_be_dask_arrays(name):
    x = operands("float32")
    d = chunked(x, 5, 7, 11) | {"pre_activation": da.zeros((M, N), chunks=(5, 7), dtype="f4")}
    d[name] = d[name].compute()
    with pytest.raises(TypeError, match=f"{name} must be a Dask array where another operand is"):
        nf.matmul_bias_activation_bwd(**d)


def test_blocks_of_several_kinds_are_an_error():
    class Other(np.ndarray):
        pass

    d = chunked(operands("float32"), 5, 7, 11)
    with pytest.raises(TypeError, match=r"b must be a plain numpy\.ndarray, got its subclass"):
        nf.matmul_bias_activation(d["a"], d["b"].map_blocks(lambda x: x.view(Other)))


def test_what_one_machine_refuses_is_refused_before_anything_is_built():
    d = chunked(operands("float32"), 5, 7, 11)
    a, b, bias, grad = d["a"], d["b"], d["bias"], d["grad"]
    with pytest.raises(ValueError, match="b must have shape"):
        nf.matmul_bias_activation(a, b.T)
    with pytest.raises(ValueError, match=r"bias must have shape \(N,\) = \(7,\), got \(13,\)"):
        nf.matmul_bias_activation(a, b, a[:, 0])
    with pytest.raises(TypeError, match="same dtype, got a float32, b float64"):
        nf.matmul_bias_activation(a, b.astype("f8"))
    with pytest.raises(TypeError, match="a must have dtype"):
        nf.matmul_bias_activation(a.astype("i4"), b.astype("i4"))
    with pytest.raises(ValueError, match="activation"):
        nf.matmul_bias_activation(a, b, bias, "geluu")
    with pytest.raises(ValueError, match="backend must be one of"):
        nf.matmul_bias_activation(a, b, bias, backend="gpu")
    with pytest.raises(ValueError, match="out must be None for Dask arrays"):
        nf.matmul_bias_activation(a, b, bias, out=grad)
    with pytest.raises(ValueError, match=r"grad must have the result's shape \(13, 7\)"):
        nf.matmul_bias_activation_bwd(a, a, b, bias)
    with pytest.raises(TypeError, match="pre_activation must have dtype float32"):
        nf.matmul_bias_activation_bwd(grad, a, b, bias, pre_activation=grad.astype("f8"))
    with pytest.raises(ValueError, match="needs must hold names out of"):
        nf.matmul_bias_activation_bwd(grad, a, b, bias, needs=("c",))
    with pytest.raises(ValueError, match="residual must broadcast"):
        nf.matmul_bias_residual(a, b, bias, a)


def test_a_poisoned_block_raises_its_own_error_with_its_index():
    x = operands("float32", m=40)
    d = chunked(x, 5, 3, K)

    def poisoned(block, block_id):
        return block.astype(np.float64) if block_id == (6, 0) else block

    a = d["a"].map_blocks(poisoned, dtype=np.float32, meta=d["a"]._meta)
    with pytest.raises(TypeError, match=r"(?s)same dtype.*in block \(6, \d\) of numfuse.matmul_"):
        nf.matmul_bias_activation(a, d["b"], d["bias"], "gelu").compute()
    with pytest.raises(TypeError, match=r"in block \(6, \d\) of numfuse.matmul_bias_activation_b"):
        dask.compute(*nf.matmul_bias_activation_bwd(**d | {"a": a}))


# --- where it runs --------------------------------------------------------------------------------


def test_the_backend_around_the_call_travels_with_the_graph():
    d = chunked(operands("float32"), 5, 7, 11)
    wanted = nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu", backend="reference")
    with nf.use_backend("reference"):
        out = nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu")
    cpu = nf.matmul_bias_activation(d["a"], d["b"], d["bias"], "gelu", backend="cpu")
    assert out.name == wanted.name != cpu.name
    used = {nf.last_call().backend for _ in [out.compute(scheduler="sync")]}
    assert used == {"reference"}


def test_a_users_own_activation_reaches_other_processes():
    @nf.activation(source="a test", name="dask_cubed")
    def cubed(x):
        return x * x * x

    x = np.linspace(-1, 1, 12).reshape(6, 2)
    lazy = da.from_array(x, chunks=(3, 2))
    out = nf.activation_mul(lazy, lazy, cubed)
    with dask.config.set(scheduler="processes", num_workers=1):
        np.testing.assert_allclose(out.compute(), x**4, rtol=1e-14)


def test_to_numpy_computes():
    x = operands("float32")
    lazy = da.from_array(x["a"], chunks=(5, 11))
    assert (nf.to_numpy(lazy) == x["a"]).all()
    nf.synchronize(lazy.persist())


# --- threads --------------------------------------------------------------------------------------

PRELUDE = """
import os, threading
import dask, dask.array as da, numba, numpy as np
import numfuse as nf
from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.face import BACKEND

tiling.PARALLEL_FMAS = 0  # every product may take several threads
counts = []
plain = BACKEND.launch
def spied(program, arrays):
    counts.append((threading.get_ident(), program.threads))
    plain(program, arrays)
BACKEND.launch = spied

rng = np.random.default_rng(0)
x, g, w, c = (
    rng.standard_normal(shape).astype("f4") for shape in ((900, 96), (900, 128), (96, 128), (128,))
)
def results(workers):
    a, grad = da.from_array(x, chunks=(60, 96)), da.from_array(g, chunks=(60, 128))
    found = [nf.matmul_bias_activation(a, w, c, "gelu")]
    found += nf.matmul_bias_activation_bwd(grad, a, w, c, "gelu")
    with dask.config.set(scheduler="threads", num_workers=workers):
        return [array.tobytes() for array in dask.compute(*found)]
"""


def run(code, layer, threads=4):
    env = os.environ | {"NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True, text=True, timeout=120, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_a_task_uses_one_thread_and_starts_no_pool(layer):
    run(
        """
found = results(4)
assert {threads for _, threads in counts} == {1} and len(counts) == 30, counts
try:
    raise SystemExit(f"Numba's pool was started: {numba.threading_layer()}")
except ValueError:
    pass  # "Threading layer is not initialized"
assert results(1) == found
""",
        layer,
    )


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_a_task_uses_the_threads_that_were_asked_for(layer):
    """Under workqueue too, whose pool aborts the process when two threads enter it."""
    run(
        """
one = results(3)
counts.clear()
with dask.config.set({"numfuse.threads": 2}):
    two = results(3)
assert {threads for _, threads in counts} == {2}, counts
with dask.config.set({"numfuse.threads": 9}):
    assert results(3) == one == two
assert max(threads for _, threads in counts) == 4  # never more than Numba has
counts.clear()
nf.matmul_bias_activation(x, w, c, "gelu")
assert [threads for _, threads in counts] == [4]  # outside of a task as before
""",
        layer,
    )


@pytest.mark.parametrize("threads", [0, -1, 2.0, "2", True])
def test_a_wrong_number_of_threads_is_an_error(threads):
    x = da.ones((4, 4))
    with dask.config.set({"numfuse.threads": threads}):
        with pytest.raises(ValueError, match=r"numfuse.threads .* got"):
            nf.silu_mul(x, x)


def test_importing_the_adapter_starts_no_compiler():
    code = "import sys, numfuse.adapters.dask; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_activation_of_a_dask_array_is_lazy():
    x = np.linspace(-3, 3, 24).reshape(4, 6)
    lazy = da.from_array(x, chunks=(2, 3))
    act = nf.activations()["gelu"]
    for of in (act, act.derived(1)):
        out = adapter.activation(lazy, of)
        assert isinstance(out, da.Array) and out.chunks == lazy.chunks and out.dtype == x.dtype
        np.testing.assert_array_equal(out.compute(scheduler="processes"), of(x))
