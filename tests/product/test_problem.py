"""What a backend is handed: the promises at the top of problem.py.

Guards: a view gives the bits of its copy and takes no copy; results are new, contiguous and of the
operands' shapes (`numfuse.functional`, "Conventions").
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from arrays import address

from numfuse.problem import gates, product
from numfuse.problem.shapes import as_one, runs_of_rows

F32 = np.float32


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def same_memory(x, y):
    return address(x) == address(y)


def test_two_axes_pass_through_without_a_copy():
    a, b, bias = ones(4, 3), ones(3, 5), ones(5)
    p = product.gemm(a, b, bias, "relu", True)
    assert (p.m, p.n, p.k, p.batch) == (4, 5, 3, ())
    assert p.a is a and p.b is b and same_memory(p.bias, bias) and p.bias.shape == (1, 5)
    assert p.result == (p.out, p.pre)
    assert p.activation.name == "relu"


@pytest.mark.parametrize("dtype", [np.float64, F32, np.float16, ml_dtypes.bfloat16])
def test_a_saved_pre_activation_has_the_dtype_of_the_accumulator(dtype):
    a, b = ones(4, 3, dtype=dtype), ones(3, 5, dtype=dtype)
    p = product.gemm(a, b, ones(5, dtype=dtype), "silu", True)
    assert p.acc_dtype == p.pre.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert p.dtype == p.out.dtype == dtype


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::-1],
        lambda x: x[:, ::-1],
        lambda x: np.asfortranarray(x),
        lambda x: np.broadcast_to(x[:1], x.shape),
    ],
    ids=["reversed", "columns reversed", "transposed", "broadcast"],
)
def test_strides_are_passed_on(view):
    a = view(ones(4, 3))
    p = product.gemm(a, ones(3, 5), None, "none")
    assert same_memory(p.a, a) and p.a.strides == a.strides


def test_a_batch_over_one_b_is_folded_into_m_without_a_copy():
    a, b, bias = ones(2, 6, 4, 3), ones(3, 5), ones(5)
    p = product.gemm(a, b, bias, "none", True)
    assert (p.m, p.batch) == (48, ())
    assert p.a.shape == (48, 3) and same_memory(p.a, a)
    assert p.out.shape == p.pre.shape == (48, 5)
    assert same_memory(p.result[0], p.out) and p.result[0].shape == (2, 6, 4, 5)

    grad = ones(2, 6, 4, 5)
    p = product.gemm_backward(grad, a, b, bias, "none")
    assert (p.m, p.batch) == (48, ())
    assert p.grad.shape == (48, 5) and same_memory(p.grad, grad)
    assert p.d_a.shape == (48, 3) and p.result.d_a.shape == a.shape
    assert p.d_b.shape == (3, 5) and p.d_bias.shape == (1, 5) and p.result.d_bias.shape == (5,)


def test_axes_of_length_one_do_not_stop_the_folding():
    a, b, bias = ones(2, 4, 3), ones(1, 3, 5), ones(1, 1, 5)
    p = product.gemm_backward(ones(2, 4, 5), a, b, bias, "none")
    assert (p.m, p.batch, p.b.shape, p.bias.shape) == (8, (), (3, 5), (1, 5))
    assert (p.d_b.shape, p.d_bias.shape) == ((3, 5), (1, 5))
    assert (p.result.d_b.shape, p.result.d_bias.shape) == ((1, 3, 5), (1, 1, 5))
    p = product.gemm(ones(4, 3), b, None, "none")
    assert (p.m, p.batch, p.result.shape) == (4, (), (1, 4, 5))


@pytest.mark.parametrize(
    "a,b,bias",
    [
        (ones(2, 4, 3), ones(2, 3, 5), None),
        (ones(4, 3), ones(2, 3, 5), None),
        (ones(2, 4, 3), ones(3, 5), ones(2, 1, 5)),
        (np.broadcast_to(ones(4, 3), (2, 4, 3)), ones(3, 5), None),
        (ones(2, 5, 3)[:, :4], ones(3, 5), None),
        (ones(2, 4, 3)[::-1], ones(3, 5), None),
    ],
    ids=["batched b", "batched b alone", "batched bias", "broadcast a", "sliced a", "reversed a"],
)
def test_a_batch_that_cannot_be_folded_is_left(a, b, bias):
    p = product.gemm(a, b, bias, "none")
    assert (p.m, p.batch, p.out.shape) == (4, (2,), (2, 4, 5))
    assert same_memory(p.a, a) and p.a.strides == a.strides


@pytest.mark.parametrize(
    "shape,wanted",
    [
        ((2, 4, 5), (8, 5)),
        ((2, 4, 1), (8, 1)),
        ((5,), (1, 5)),
        ((1, 5), (1, 5)),
        ((), (1, 1)),
        ((1, 1, 5), (1, 5)),
    ],
)
def test_a_residual_folds_where_it_can(shape, wanted):
    p = product.gemm_residual(ones(2, 4, 3), ones(3, 5), None, ones(*shape))
    assert (p.batch, p.residual.shape) == ((), wanted)


@pytest.mark.parametrize("shape", [(4, 5), (4, 1), (2, 1, 5), (2, 1, 1)])
def test_a_residual_that_repeats_within_the_batch_keeps_it(shape):
    p = product.gemm_residual(ones(2, 4, 3), ones(3, 5), None, ones(*shape))
    assert p.batch == (2,)
    assert np.broadcast_shapes(p.residual.shape, (2, 4, 5)) == (2, 4, 5)


def test_one_dimensional_operands_are_promoted_and_results_are_views():
    a, b = ones(3), ones(3)
    p = product.gemm(a, b, ones(1), "none")
    assert (p.a.shape, p.b.shape, p.bias.shape, p.out.shape) == ((1, 3), (3, 1), (1, 1), (1, 1))
    assert p.result.shape == () and same_memory(p.result, p.out)
    p = product.gemm_backward(np.array(1, F32), a, b, ones(1), "none")
    assert (p.d_a.shape, p.d_b.shape) == ((1, 3), (3, 1))
    assert (p.result.d_a.shape, p.result.d_b.shape) == ((3,), (3,))


def test_a_scalar_gradient_of_two_vectors_is_accepted():
    # NumPy turns 0-d arrays into scalars in arithmetic: grad = out - target is one.
    p = product.gemm_backward(np.float32(2), ones(3), ones(3), None, "none")
    assert p.grad.shape == (1, 1) and p.grad[0, 0] == 2


def test_only_what_is_needed_is_allocated():
    p = product.gemm_backward(ones(4, 5), ones(4, 3), ones(3, 5), ones(5), "relu", needs=("bias",))
    assert p.d_a is None and p.d_b is None and p.d_bias is not None
    assert p.result.d_a is None and p.result.d_bias.shape == (5,)
    p = product.gemm_backward(ones(4, 5), ones(4, 3), ones(3, 5), None, "relu")
    assert p.d_bias is None and p.result.d_bias is None


def test_sum_batch_gives_d_b_the_shape_of_one_member():
    a, b, grad = ones(2, 4, 3), ones(2, 3, 5), ones(2, 4, 5)
    p = product.gemm_backward(grad, a, b, None, "none", sum_batch=True)
    assert p.batch == (2,) and p.b.shape == (2, 3, 5)
    assert p.d_b.shape == p.result.d_b.shape == (3, 5)


def test_the_gradient_of_a_residual_is_a_result_like_any_other():
    a, b, grad = ones(2, 4, 3), ones(3, 5), ones(2, 4, 5)

    def problem(*residual, **how):
        return product.gemm_backward(grad, a, b, None, residual=ones(*residual), **how)

    for residual, shape in (((5,), (1, 5)), ((2, 4, 1), (8, 1)), ((1,), (1, 1))):
        p = problem(*residual)
        assert (p.batch, p.m, p.d_residual.shape) == ((), 8, shape)
        assert same_memory(p.d_residual, p.result.d_residual)
        assert p.result.d_residual.shape == residual
    # One array for every member of the batch: its sum keeps the batch, all others do not.
    p = problem(4, 5)
    assert (p.batch, p.m, p.d_residual.shape) == ((2,), 4, (1, 4, 5))
    rest = as_one(p)
    assert (rest.batch, rest.m, rest.d_residual) == ((), 8, None)
    assert rest.d_a.shape == (8, 3) and same_memory(rest.d_a, p.d_a)
    assert problem(4, 5, needs=("a", "b")).d_residual is None
    assert problem(4, 5, needs=("a", "b")).batch == ()


def test_a_saved_pre_activation_may_have_the_storage_dtype():
    half = [
        ones(4, 5, dtype=np.float16),
        ones(4, 3, dtype=np.float16),
        ones(3, 5, dtype=np.float16),
    ]
    for dtype in (np.float16, F32):
        pre = ones(4, 5, dtype=dtype)
        assert product.gemm_backward(*half, None, "tanh", pre).pre is pre


def test_an_unaligned_operand_alone_is_copied():
    record = np.zeros((4, 3), [("flag", "u1"), ("x", F32)])
    record["x"] = np.arange(12).reshape(4, 3)
    x = record["x"]
    assert x.strides[1] % x.itemsize  # no whole number of items
    b = ones(3, 5)
    p = product.gemm(x, b, None, "none")
    assert p.a.flags.aligned and (p.a == x).all() and p.b is b


def test_a_file_mapped_array_is_a_plain_one(tmp_path):
    a = np.memmap(tmp_path / "a.bin", F32, "w+", shape=(4, 3))
    p = product.gemm(a, ones(3, 5), None, "none")
    assert type(p.a) is np.ndarray and same_memory(p.a, a)
    out = np.memmap(tmp_path / "out.bin", F32, "w+", shape=(4, 5))
    p = product.gemm(a, ones(3, 5), None, "none", out=out)
    assert p.result is out and same_memory(p.out, out)


def test_results_are_new_and_contiguous_whatever_the_operands_are():
    a, b = np.asfortranarray(ones(4, 3)), np.asfortranarray(ones(3, 5))
    p = product.gemm_backward(np.asfortranarray(ones(4, 5)), a, b, None, "none")
    assert p.d_a.flags.c_contiguous and p.d_b.flags.c_contiguous
    assert product.gemm(a, b, None, "none").out.flags.c_contiguous
    assert gates.gated(a, a, "relu").out.flags.c_contiguous


def test_a_given_out_is_used_and_returned():
    out, d_b = ones(2, 4, 5), ones(3, 5)
    p = product.gemm(ones(2, 4, 3), ones(3, 5), None, "none", out=out)
    assert p.result is out and same_memory(p.out, out) and p.out.shape == (8, 5)
    p = product.gemm_backward(
        ones(4, 5), ones(4, 3), ones(3, 5), None, "none", out=(None, d_b, None)
    )
    assert p.d_b is d_b and p.result.d_b is d_b


@pytest.mark.parametrize("shape", [(7, 2), (3, 5, 2), (2, 3, 5, 2), (4, 1, 2), (2, 1, 3, 1, 2)])
def test_runs_of_rows_are_those_rows(shape):
    x = np.arange(np.prod(shape)).reshape(shape)
    rows = x.reshape(-1, shape[-1])
    for first in range(len(rows) + 1):
        for last in range(first, len(rows) + 1):
            found = np.full((last - first, shape[-1]), -1)
            pieces = list(runs_of_rows(shape, first, last))
            for index, start, stop in pieces:
                target = found[start - first : stop - first]
                assert (target == -1).all()
                target[...] = x[index].reshape(target.shape)
            assert (found == rows[first:last]).all()
            assert len(pieces) <= 2 * len(shape) - 3


def test_what_cannot_be_folded_is_one_problem_where_its_rows_are_summed():
    a, grad, b = ones(2, 3, 4, 5)[:, :, 1:], ones(2, 3, 3, 6), ones(5, 6)
    p = product.gemm_backward(grad, a, b, None, "gelu")
    assert (p.batch, p.m) == ((2, 3), 3)
    whole = as_one(p)
    assert (whole.batch, whole.m) == ((), 18)
    assert whole.a is a  # its rows have to be gathered
    assert whole.grad.shape == (18, 6) and np.shares_memory(whole.grad, grad)
    assert whole.d_a.shape == (18, 5) and np.shares_memory(whole.d_a, p.d_a)
    assert (p.batch, p.m) == ((2, 3), 3)
    for other in (
        product.gemm_backward(grad, a, b, None, "gelu", needs=("a",)),
        product.gemm_backward(grad, a, ones(2, 3, 5, 6), None, "gelu"),
        product.gemm_backward(grad, a, b, ones(3, 1, 6), "gelu"),
    ):
        assert as_one(other) is other
