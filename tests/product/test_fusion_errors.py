"""What is wrong in a call of an epilogue is told by its name, before anything is computed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from arrays import unwritten

import numfuse as nf
from numfuse import expr as ex

A = np.linspace(-1, 1, 35).reshape(5, 7)
B = np.linspace(0, 1, 28).reshape(7, 4)
GRAD = np.ones((5, 4))
ROW = np.ones(4)


def scaled(z, bias, scale):
    return ex.tanh(z + bias) * scale


def gated(z, w):
    return ex.sigmoid(z) * w


def two(x, y):
    return x * y, x + y


def forward(*operands, b=B, f=scaled, **options):
    return nf.matmul_epilogue(A, b, f, *operands, **options)


def backward(*operands, b=B, f=scaled, grad=GRAD, **options):
    return nf.matmul_epilogue_bwd(grad, A, b, f, *operands, **options)


def layer(**options):
    return nf.matmul_activation_mul_bwd(GRAD, A, B, B, **options)


def single(x):
    return x.astype(np.float32)


NO = None, None
ERRORS = [
    (lambda: nf.elementwise(two, np.ones(3, np.uint8), -1.25), TypeError, "got uint8"),
    (lambda: nf.elementwise(two, np.ones(3, np.complex64), 1e9), TypeError, "got complex64"),
    (lambda: forward(ROW), TypeError, "'scaled' takes 3 arguments, 1 product (z) and 2 "
     "operands (bias, scale), got 1 operand"),
    (lambda: forward(ROW, ROW, ROW), TypeError, "got 3 operands"),
    (lambda: forward(b=(B, B, B), f=gated), TypeError, "'gated' must have a parameter for each of "
     "3 products, got 2 (z, w)"),
    (lambda: forward(b=(B,) * 4, f=gated), ValueError, "b must be an array or a tuple of 1 to 3"),
    (lambda: forward(b=(), f=gated), ValueError, "b must be an array or a tuple of 1 to 3"),
    (lambda: forward(ROW, f=two), TypeError, "'two' of a product must return one value, got a "
     "tuple of 2"),
    (lambda: forward(ROW, True), TypeError, "scale must be a NumPy array, got bool"),
    (lambda: forward(ROW, 1j), TypeError, "scale must be a NumPy array, got complex"),
    (lambda: forward(ROW, None), TypeError, "scale must be an array, got None"),
    (lambda: forward(ROW, [1.0] * 4), TypeError, "scale must be a NumPy array, got list"),
    (lambda: forward(ROW, np.ones(4, int)), TypeError, "scale must have dtype float64, float32, "
     "float16 or ml_dtypes.bfloat16, got int64"),
    (lambda: forward(ROW, np.ones(4, bool)), TypeError, "scale must have dtype"),
    (lambda: forward(ROW, ROW * 1j), TypeError, "scale must have dtype"),
    (lambda: forward(ROW, np.int64(2)), TypeError, "scale must be a NumPy array, got numpy.int64"),
    (lambda: forward(ROW, np.float32(2)), TypeError, "a, b, bias and scale must have the same "
     "dtype, got a float64, b float64, bias float64, scale float32"),
    (lambda: forward(ROW, np.ma.ones(4)), TypeError, "scale must be a plain numpy.ndarray"),
    (lambda: forward(ROW, np.ones((5, 2))), ValueError, "scale must broadcast to the result's "
     "shape (5, 4), got (5, 2)"),
    (lambda: forward(ROW, np.ones((3, 5, 4))), ValueError, "scale must broadcast to the result's"),
    (lambda: forward(b=(B, B[:3]), f=gated), ValueError, "b[1] must have shape (..., K, N) with "
     "K = 7, the last axis of a (5, 7), got (3, 4)"),
    (lambda: forward(b=(B, B[:, :2]), f=gated), ValueError, "right factors must give results of "
     "one shape, got b[1] (7, 2) beside (7, 4)"),
    (lambda: forward(ROW, ROW, out=np.ones((4, 4))), ValueError, "out must have shape (5, 4)"),
    (lambda: forward(ROW, ROW, out=single(GRAD)), TypeError, "out must have dtype float64"),
    (lambda: forward(ROW, GRAD, out=GRAD), ValueError, "out must not share memory with scale"),
    (lambda: forward(ROW, ROW, out=B[:5]), ValueError, "out must not share memory with b"),
    (lambda: forward(ROW, ROW, backend="cpuu"), ValueError, "backend must be one of"),
    (lambda: backward(ROW, ROW, grad=None), TypeError, "grad must be an array, got None"),
    (lambda: backward(ROW, ROW, grad=GRAD.T), ValueError, "grad must have the result's shape "
     "(5, 4), got (4, 5)"),
    (lambda: backward(ROW, ROW, needs=("bias",)), ValueError, "needs must hold names out of"),
    (lambda: backward(ROW, ROW, needs=(2,)), ValueError, "needs must hold names out of"),
    (lambda: backward(ROW, ROW, needs=[["a"]]), ValueError, "needs must hold names out of"),
    (lambda: backward(ROW, ROW, needs="a"), TypeError, "needs must be a tuple of names out of"),
    (lambda: backward(ROW, ROW, needs=0), TypeError, "needs must be a tuple of names out of"),
    (lambda: backward(ROW, ROW, pre_activation=GRAD), TypeError, "pre_activation must be a tuple "
     "of 1, got ndarray"),
    (lambda: backward(ROW, ROW, pre_activation=(GRAD, GRAD)), ValueError, "pre_activation must "
     "have 1 entries, got 2"),
    (lambda: backward(ROW, ROW, pre_activation=(single(GRAD),)), TypeError, "pre_activation must "
     "have dtype float64, got float32"),
    (lambda: backward(ROW, ROW, pre_activation=(GRAD.T,)), ValueError, "pre_activation must have"),
    (lambda: backward(ROW, ROW, out=(None,)), ValueError, "out must have 3 entries, got 1"),
    (lambda: backward(ROW, ROW, out=A), TypeError, "out must be a tuple of 3, got ndarray"),
    (lambda: backward(ROW, ROW, out=(*NO, (None,))), ValueError, "d_operands in out must have 2 "
     "entries, got 1"),
    (lambda: backward(b=(B, B), f=gated, out=(None, B, None)), TypeError, "d_b in out must be a "
     "tuple of 2, got ndarray"),
    (lambda: backward(ROW, ROW, out=(*NO, (ROW, None))), ValueError, "d_bias must not share "
     "memory with bias"),
    (lambda: backward(ROW, 2.0, out=(*NO, (None, np.ones(1)))), ValueError, "d_scale must have "
     "shape ()"),
    (lambda: backward(ROW, ROW, needs=("b",), out=(A.copy(), *NO)), ValueError, "d_a in out must "
     "be None where it is not needed"),
    (lambda: nf.matmul_epilogue_jvp(A, B, scaled, 2.0, A, B), TypeError, "operands must be a "
     "tuple, one for each operand of the formula, got float"),
    (lambda: nf.matmul_epilogue_jvp(A, B, scaled, (ROW, 2.0), A, B, (ROW,)), ValueError,
     "operand_dots must have 2 entries, got 1"),
    (lambda: nf.matmul_epilogue_jvp(A, B, scaled, (ROW, 2.0), A, B, (2.0, 2.0)), ValueError,
     "bias_dot must have the shape of bias (4,), got ()"),
    (lambda: nf.matmul_epilogue_jvp(A, (B, B), gated, (), A, (B,)), ValueError, "b_dot must have "
     "2 entries, got 1"),
    (lambda: nf.matmul_epilogue_jvp(A, B, scaled, (ROW, 2.0), A[0], B), ValueError, "a_dot must "
     "have the shape of a (5, 7), got (7,)"),
    (lambda: nf.elementwise(two, GRAD, np.ones(3)), ValueError, "the operands must broadcast to "
     "one shape, got x (5, 4), y (3,)"),
    (lambda: nf.elementwise(two, GRAD, ROW, out=GRAD), TypeError, "out must be a tuple of 2, got "
     "ndarray"),
    (lambda: nf.elementwise(two, GRAD, ROW, out=(GRAD,)), ValueError, "out must have 2 entries"),
    (lambda: nf.elementwise(two, GRAD, ROW, out=(GRAD, GRAD)), ValueError, "out[1] must not share "
     "memory with out[0]"),
    (lambda: nf.elementwise(gated, GRAD[:4], GRAD[:4], out=GRAD[1:]), ValueError, "out must be "
     "exactly z or apart from it"),
    (lambda: nf.elementwise(gated, GRAD), TypeError, "'gated' takes 2 arguments (z, w), got 1"),
    (lambda: nf.elementwise_bwd(GRAD, two, GRAD, ROW), TypeError, "grads must be a tuple of 2, "
     "got ndarray"),
    (lambda: nf.elementwise_bwd((GRAD,), two, GRAD, ROW), ValueError, "grads must have 2 entries"),
    (lambda: nf.elementwise_bwd(None, gated, GRAD, ROW), TypeError, "grad must be an array"),
    (lambda: nf.elementwise_bwd(ROW, gated, GRAD, ROW), ValueError, "grad must have the result's "
     "shape (5, 4), got (4,)"),
    (lambda: nf.matmul_activation_mul(A, B, None), TypeError, "b_up must be an array, got None"),
    (lambda: nf.matmul_activation_mul(A, B, B[:, :2]), ValueError, "b_up (7, 2) beside (7, 4)"),
    (lambda: nf.matmul_activation_mul(A, B, single(B)), TypeError, "a, b_gate and b_up must have"),
    (lambda: nf.matmul_activation_mul(A, B, B, np.ones(5)), ValueError, "bias_gate must broadcast "
     "to the result's shape (5, 4), got (5,)"),
    (lambda: nf.matmul_activation_mul(A, B, B, activation="gelo"), ValueError, "did you mean"),
    (lambda: layer(needs=("b",)), ValueError, "needs must hold names out of"),
    (lambda: layer(pre_activation=GRAD), TypeError, "pre_activation must be a tuple of 2"),
    (lambda: layer(pre_activation=(GRAD,)), ValueError, "pre_activation must have 2 entries"),
    (lambda: layer(out=(None,)), ValueError, "out must have 5 entries, got 1"),
    (lambda: nf.matmul_activation_mul_double_bwd(*NO, None, ROW, None, GRAD, A, B, B), ValueError,
     "d_bias_gate must be None where bias_gate is"),
    (lambda: nf.matmul_activation_mul_jvp(A, B, B, *NO, A, *NO, ROW), ValueError, "bias_gate_dot "
     "must be None where bias_gate is"),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("case", ERRORS, ids=range(len(ERRORS)))
def test_a_wrong_call_is_told_by_name_and_the_next_one_works(case, backend):
    call, kind, told = case
    with nf.use_backend(backend):
        for _ in range(2):
            with unwritten(A, B, GRAD, ROW), pytest.raises(kind, match=re.escape(told)):
                call()
        np.testing.assert_allclose(forward(ROW, 2.0), 2 * np.tanh(A @ B + 1), 1e-12)
        backward(ROW, 2.0)
