"""A module of the shader contract beside the reference backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.activations import none
from numfuse.backends import load
from numfuse.backends.webgpu.contract.entry_points import BUILT_IN
from numfuse.problem import gates, product

if TYPE_CHECKING:
    from numfuse.backends.webgpu.contract.backend import ContractBackend

#: (batch, M, K, N): below, at and beyond a tile of 16, long sums, a batch, and sizes of 1.
_SHAPES = (
    (1, 1, 1, 1),
    (1, 15, 16, 17),
    (1, 16, 17, 15),
    (1, 17, 15, 16),
    (1, 16, 16, 16),
    (1, 33, 300, 5),
    (1, 3, 7, 301),
    (1, 290, 4, 6),
    (3, 17, 18, 19),
    (2, 5, 33, 1),
)
#: With K = N = 1 and b = 1 the pre-activation is a: from one tail to the other.
_TAILS = (1, 203, 1, 1)
#: Here a row of a is NaN: its derivative counts as 0.
_GUARD = (1, 5, 4, 3)
_LENGTHS = (1, 255, 256, 257, 5000)
_F64 = np.dtype(np.float64)


class Compared(NamedTuple):
    """The output, shape and activation that an error belongs to."""

    #: "c" (of act(A B + bias)), "c + residual", "d_a", "d_b", "d_bias"; of gates "gate out",
    #: "gate d_a", "gate d_b".
    output: str
    #: (batch, M, K, N), or (numel,).
    shape: tuple[int, ...]
    activation: str


def check(shaders: ContractBackend) -> dict[Compared, float]:
    """See :meth:`ContractBackend.check`."""
    found: dict[Compared, float] = {}
    for outputs, kind, make, shape, act, operands in _cases(set(shaders.entry_points)):
        mine = make(*operands)
        getattr(shaders, kind)(mine)
        exact = make(*(x.astype(_F64) if isinstance(x, ndarray) else x for x in operands))
        getattr(load("reference"), kind)(exact)
        results = (x if isinstance(x, tuple) else (x,) for x in (mine.result, exact.result))
        for output, *pair in zip(outputs, *results, strict=True):
            if pair[0] is not None:
                found[Compared(output, shape, act.name)] = _error(*pair)
    return found


def _error(got: ndarray, exact: ndarray) -> float:
    finite = np.isfinite(exact)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    off = np.abs(got[finite].astype(_F64) - exact[finite]).max(initial=0)
    largest = np.abs(exact[finite]).max(initial=0)
    return float(off / largest) if largest else float("inf" if off else 0)


def _operands(shape: tuple[int, ...]) -> tuple[ndarray, ...]:
    """a, b, bias and grad (or a residual); a batch of one is no batch."""
    batch, m, k, n = shape
    rng = np.random.default_rng(shape)
    if shape == _TAILS:
        x = np.concatenate([np.linspace(-100, 100, m - 2), [-1e4, 1e4]])
        a, b, bias = x[None, :, None], np.ones((1, 1, 1)), np.zeros(1)
    else:
        # pre-activations of about 2, where the activations bend
        a = 2 * rng.standard_normal((batch, m, k)) / np.sqrt(k)
        b, bias = rng.standard_normal((batch, k, n)), rng.standard_normal(n)
    grad = rng.standard_normal((batch, m, n))
    if batch == 1:
        a, b, grad = a[0], b[0], grad[0]
    return tuple(x.astype(np.float32) for x in (a, b, bias, grad))


def _cases(present: set[str]) -> Iterator[tuple[Any, ...]]:
    """Return names of the results, kind and maker of a problem, shape, activation and operands."""
    forwards = ("c", "act", product.gemm), ("c + residual", "residual", product.gemm_residual)
    for output, kind, make in forwards:
        for shape in (*_SHAPES, _TAILS):
            a, b, bias, residual = _operands(shape)
            if f"gemm_bias_{kind}{'_batched' if shape[0] > 1 else ''}_f32" not in present:
                continue  # (for a batch of this size there is no entry point)
            acts = BUILT_IN if kind == "act" else (none,) * (shape != _TAILS)
            for act in acts:
                last = act if kind == "act" else residual
                yield (output,), "forward", make, shape, act, (a, b, bias, last)
    needs = [name for name in ("a", "b", "bias") if f"gemm_bwd_d{name}_f32" in present]
    if "gemm_bwd_grad_pre_f32" not in present:
        needs = []  # nothing else of a backward can run without it
    for shape in (*_SHAPES, _TAILS, _GUARD) if needs else ():
        a, b, bias, grad = _operands(shape)
        wanted, acts = needs, BUILT_IN
        if shape == _GUARD:
            a[2] = np.nan
            wanted = [name for name in needs if name != "b"]  # NaN * 0 there
            acts = BUILT_IN[1:]  # the derivative of none is 1 everywhere
        for act in acts:
            operands = grad, a, b, bias, act, None, wanted, True
            names = "d_a", "d_b", "d_bias"
            yield names, "backward", product.gemm_backward, shape, act, operands
    for length in _LENGTHS:
        rng = np.random.default_rng(length)
        a, b, grad = (x.astype(np.float32) for x in rng.standard_normal((3, length)))
        a *= 3
        a[: length // 100] = np.linspace(-100, 100, length // 100)
        for act in BUILT_IN:
            if f"{act.name}_mul_f32" in present:
                yield ("gate out",), "gated", gates.gated, (length,), act, (a, b, act)
            if f"{act.name}_mul_bwd_f32" in present:
                outputs, back = ("gate d_a", "gate d_b"), gates.gated_backward
                yield outputs, "gated_backward", back, (length,), act, (grad, a, b, act)
