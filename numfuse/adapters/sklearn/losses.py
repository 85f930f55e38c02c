"""The losses: value and gradient by the logits in one pass over rows, and the links to predictions.

Logits are the sums before the output's activation. scikit-learn holds the probabilities whose
logarithm is a loss between eps and 1 - eps of their dtype: of one output it is at most 36.0 in
float64 and 15.9 in float32. By these losses it counts epochs without improvement and searches lines
in lbfgs, so they are held between the same bounds here. Gradients are not, there and here:
prediction less target.

The kernels are templates, specialised and kept on disk as those of the CPU backend are.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from numba import types
from numpy import ndarray

from numfuse import expr as ex
from numfuse.activations import Activation, formulas
from numfuse.adapters.sklearn.formulas import recorded
from numfuse.backends.cpu import host
from numfuse.backends.cpu.llvm import conversions, intrinsics, primitives
from numfuse.fusion import elementwise
from numfuse.runtime import machine_code, specialise

specialise.register(__name__.rpartition(".")[0], str(Path(__file__).with_name("__init__.py")))

# ruff: noqa: F821  (the free names of a template are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Rows whose exponentials are taken at once, so that short ones fill vectors: of 10, 2.5 KiB.
_ROWS = 32
#: Logits whose losses are made at once, at the most: 8 KiB, and as much of targets.
_ELEMENTS = 1024


# --- formulas: value and gradient of one output -------------------------------------------------
@recorded("logistic_loss", "-log of the probability of y, by its logit")
def _logistic(z: Any, y: Any) -> Any:
    value = ex.maximum(z, 0.0) - z * y + ex.log1p(ex.exp(-ex.abs(z)))
    return value, ex.sigmoid(z) - y


@recorded("squared_loss", "half of the squared error")
def _squared(z: Any, y: Any) -> Any:
    d = z - y
    return 0.5 * d * d, d


@recorded("poisson_loss", "half of the Poisson deviance")
def _poisson(z: Any, y: Any) -> Any:
    mean = ex.exp(z)
    return ex.where(y > 0.0, y * (ex.log(y) - z), 0.0) - y + mean, mean - y


@recorded("exp", "the inverse of the logarithm's link")
def _exp(z: Any) -> Any:
    return ex.exp(z)


@recorded("log", "natural")
def _log(z: Any) -> Any:
    return ex.log(z)


#: The losses of outputs that are independent of each other, by the output's activation.
_FORMULAS = {"logistic": _logistic, "identity": _squared, "exp": _poisson}
#: {output activation: numfuse's}, where there is one
_FINALS = {"logistic": formulas.sigmoid}


# --- templates ------------------------------------------------------------------------------------
def square_sum(x: Any) -> Any:
    """Return the sum of squares; its order is the processor's vectors'."""
    total = ZERO
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total


def weight_sum(index: Any, weights: Any) -> Any:
    """Return the sum of samples' weights, each of them 1 where there are none."""
    if weights.shape[0] == 0:
        return float(index.shape[0])
    total = 0.0
    for i in range(index.shape[0]):
        total += weights[index[i]]
    return total


def label(y: Any) -> Any:
    """Return a label as 0 or 1 in the logits' dtype."""
    return ONE if y != 0 else ZERO


def number(y: Any) -> Any:
    """Return a target that has the logits' dtype."""
    return y


def outputs_pass(z: Any, y: Any, index: Any, weights: Any, coefs: Any, room: Any) -> Any:
    """Replace logits by gradients of outputs that are independent of each other.

    Row i of `z` is sample ``index[i]`` of `y` and `weights`; `room` is for some rows' targets, then
    losses. Returns the weighted sum of the losses, the sum of the weights, by which gradients are
    divided, and that of the squares of `coefs`.
    """
    WIDE_VECTORS()
    weight = WEIGHT_SUM(index, weights)
    scale = ONE / REAL(weight)
    loss = 0.0
    for first in range(0, z.shape[0], room.shape[0]):
        block = z[first : first + room.shape[0]]
        for i in range(block.shape[0]):
            for j in range(z.shape[1]):
                room[i, j] = TARGET(y[index[first + i], j])
        slopes, values = block.reshape(block.size), room.reshape(room.size)
        for i in range(slopes.shape[0]):
            value, slopes[i] = FORMULA(slopes[i], values[i])
            values[i] = CLAMP(value, LOW, HIGH)
        for i in range(block.shape[0]):
            own = ONE if weights.shape[0] == 0 else weights[index[first + i]]
            row = ZERO
            for j in range(z.shape[1]):
                row += room[i, j]
                block[i, j] *= own * scale
            loss += own * row
    return loss, weight, float(SQUARE_SUM(coefs))


def softmax_pass(z: Any, y: Any, index: Any, weights: Any, coefs: Any, room: Any) -> Any:
    """`outputs_pass` of classes that exclude each other; `y` has that of each sample."""
    WIDE_VECTORS()
    weight = WEIGHT_SUM(index, weights)
    scale = ONE / REAL(weight)
    loss = 0.0
    for first in range(0, z.shape[0], ROWS):
        block = z[first : first + ROWS]
        EXPONENTIALS(block)
        for i in range(block.shape[0]):
            at = index[first + i]
            own = ONE if weights.shape[0] == 0 else weights[at]
            share = own * scale
            part = ONE / ROW_SUM(block, i)
            right = block[i, y[at]] * part
            for j in range(z.shape[1]):
                block[i, j] *= part * share
            block[i, y[at]] = (right - ONE) * share
            loss -= own * LOG(CLAMP(right, LOW, HIGH))
    return loss, weight, float(SQUARE_SUM(coefs))


def softmax(z: Any) -> Any:
    """Replace rows of logits by probabilities."""
    WIDE_VECTORS()
    for first in range(0, z.shape[0], ROWS):
        block = z[first : first + ROWS]
        EXPONENTIALS(block)
        for i in range(block.shape[0]):
            total = ROW_SUM(block, i)
            for j in range(z.shape[1]):
                block[i, j] /= total


def exponentials(z: Any) -> Any:
    """Replace rows by the exponentials of their elements, relative to the greatest."""
    for i in range(z.shape[0]):
        top = z[i, 0]
        for j in range(1, z.shape[1]):
            top = z[i, j] if z[i, j] > top else top  # (a NaN goes through the sum to all)
        for j in range(z.shape[1]):
            z[i, j] -= top
    flat = z.reshape(z.size)
    for i in range(flat.shape[0]):
        flat[i] = EXP(flat[i])


def row_sum(z: Any, i: Any) -> Any:
    """Return the sum of a row."""
    total = ZERO
    for j in range(z.shape[1]):
        total += z[i, j]
    return total


@recorded("clamp", "NaN stays NaN")
def _clamp(x: Any, low: Any, high: Any) -> Any:
    return ex.clamp(x, low, high)


def _formula(of: Any, fmt: str) -> Any:
    """Return an epilogue as a function of scalars."""
    made = of.over(0)
    return primitives.scalar_function(made.graphs, fmt, made.inputs)


@functools.cache
def _names(fmt: str, labels: bool) -> dict[str, Any]:
    """Return what the templates bind, by the logits' dtype and whether targets are labels."""
    one = np.dtype(fmt).type(1)
    names: dict[str, Any] = {"ZERO": one - one, "ONE": one, "ROWS": _ROWS}
    names["WIDE_VECTORS"] = intrinsics.make_wide_vectors(8 * host.vector_bytes())
    names["REAL"] = conversions.make_narrow(fmt, "float64")
    for formula in (_exp, _log, _clamp):
        names[formula.name.upper()] = _formula(formula, fmt)
    names["TARGET"] = specialise.device(label if labels else number, **names)
    for part in (weight_sum, exponentials, row_sum):
        names[part.__name__.upper()] = specialise.device(part, **names)
    # Lanes have sums of their own: a chain of additions would take 4 cycles for each weight.
    clone = specialise.bound(square_sum, names)
    added = machine_code.inlined(clone, forceinline=True, fastmath={"contract", "reassoc"})
    added.numfuse_key = f"{clone.__name__} reassoc"
    return names | {"SQUARE_SUM": added}


def _entry(template: Any, result: Any, fmt: str, labels: bool, *arguments: Any, **more: Any) -> Any:
    made = specialise.entry(template, result(*arguments), **_names(fmt, labels), **more)
    return made.overloads[arguments].entry_point  # (without Numba's dispatcher: 0.5 us less)


@functools.cache
def rows_pass(activation: str, fmt: str, labels: bool) -> Any:
    """Return the pass of a loss, which is that of an output's activation.

    It is a function (logits, targets, index, weights, coefs, room) -> (loss, weight, squares): see
    `outputs_pass`, and :func:`room`. Logits of dtype `fmt` are replaced; targets are labels in
    bytes, or have that dtype, as weights and coefs have, or of the softmax are numbers of classes,
    which are int64 as the index is. All are contiguous, in the order of rows.
    """
    real = types.float32 if fmt == "float32" else types.float64
    kept = functools.partial(types.Array, layout="C", readonly=True)
    exclusive = activation == "softmax"
    arguments = (
        types.Array(real, 2, "C"),
        kept(types.int64, 1) if exclusive else kept(types.uint8 if labels else real, 2),
        kept(types.int64, 1),
        kept(real, 1),
        kept(real, 1),
        types.Array(real, 2, "C"),
    )
    number, eps = np.dtype(fmt).type, float(np.finfo(fmt).eps)
    low, high = eps, 1 - eps  # of a probability
    if not exclusive:
        low, high = -math.log(high), -math.log(low)  # of a loss
    if activation in ("identity", "exp"):
        low, high = -math.inf, math.inf
    more: dict[str, Any] = {"LOW": number(low), "HIGH": number(high)}
    if not exclusive:
        more["FORMULA"] = _formula(_FORMULAS[activation], fmt)
    result = types.UniTuple(types.float64, 3)
    template = softmax_pass if exclusive else outputs_pass
    return _entry(template, result, fmt, labels, *arguments, **more)


def room(outputs: int, dtype: np.dtype[Any]) -> ndarray:
    """Return memory for the pass of a loss: of a block of rows, which stays in level 1."""
    return np.empty((max(1, _ELEMENTS // outputs), outputs), dtype)


@functools.cache
def _softmax(fmt: str) -> Any:
    real = types.float32 if fmt == "float32" else types.float64
    return _entry(softmax, types.void, fmt, False, types.Array(real, 2, "C"))


# --- links --------------------------------------------------------------------------------------
def final(activation: str) -> Activation:
    """Return the last layer's activation for numfuse, as far as that is one of numfuse's table."""
    return _FINALS.get(activation, formulas.none)


def link(activation: str, z: ndarray) -> ndarray:
    """Turn the last layer's results into predictions, in place."""
    if activation == "softmax":
        if z.size:
            _softmax(z.dtype.name)(z)
    elif activation == "exp":
        elementwise(_exp, z, out=z)
    return z
