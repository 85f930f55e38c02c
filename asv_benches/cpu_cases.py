"""The operations of `cpu_sweep.py`: a formula of any library's arrays, and numfuse's calls.

Peers take a formula's derivatives by their own means (`cpu_contestants`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import special

import numfuse as nf
from numfuse import expr

if TYPE_CHECKING:
    from cpu_contestants import Contestants

Call = Callable[[], Any]
CUBE, SCALE = 0.044715, math.sqrt(2 / math.pi)


# --- NumPy ---------------------------------------------------------------------------------------
def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _gelu_slope(x: Any) -> Any:
    t = np.tanh(SCALE * (x + CUBE * x * x * x))
    return 0.5 * (1 + t) + (0.5 * SCALE) * x * (1 - t * t) * (1 + (3 * CUBE) * x * x)


def _silu_slope(x: Any) -> Any:
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


NUMPY = SimpleNamespace(
    tanh=np.tanh,
    exp=np.exp,
    affine=lambda a, b, bias: a @ b + bias,
    curves={
        "none": lambda x: x,
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: 0.5 * x * (1 + np.tanh(SCALE * (x + CUBE * x * x * x))),
        "gelu_erf": lambda x: 0.5 * x * (1 + special.erf(math.sqrt(0.5) * x)),
        "silu": lambda x: x * _sigmoid(x),
        "sigmoid": _sigmoid,
        "tanh": np.tanh,
        "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    },
)
#: Derivatives that one writes by hand.
SLOPES: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: 1,
    "relu": lambda x: x > 0,
    "gelu": _gelu_slope,
    "silu": _silu_slope,
    "sigmoid": lambda x: _sigmoid(x) * (1 - _sigmoid(x)),
    "tanh": lambda x: 1 - np.tanh(x) ** 2,
    "softplus": _sigmoid,
}


def layer_slopes(name: str, grad: Any, a: Any, b: Any, bias: Any, pre: Any = None) -> Any:
    pre = a @ b + bias if pre is None else pre
    g = grad * SLOPES[name](pre)
    if b.ndim == 2:
        rows, flat = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
        return g @ b.T, rows.T @ flat, flat.sum(0)
    return g @ b.mT, a.mT @ g, g.sum(-2, keepdims=True)


def gate_slopes(name: str, grad: Any, a: Any, b: Any) -> Any:
    return grad * b * SLOPES[name](a), grad * NUMPY.curves[name](a)


# --- the libraries -------------------------------------------------------------------------------
def torch_library() -> SimpleNamespace:
    """Return what the formulas need of PyTorch."""
    import torch
    from torch.nn import functional

    def affine(a: Any, b: Any, bias: Any) -> Any:
        if a.ndim == 2:
            return torch.addmm(bias, a, b)
        return functional.linear(a, b.mT, bias) if b.ndim == 2 else torch.baddbmm(bias, a, b)

    curves = {
        "none": lambda x: x, "relu": torch.relu, "gelu_erf": functional.gelu,
        "gelu": partial(functional.gelu, approximate="tanh"), "silu": functional.silu,
        "sigmoid": torch.sigmoid, "tanh": torch.tanh,
        "softplus": partial(functional.softplus, threshold=40.0),
    }  # fmt: skip
    return SimpleNamespace(tanh=torch.tanh, exp=torch.exp, affine=affine, curves=curves)


def jax_library() -> SimpleNamespace:
    """Return what the formulas need of JAX."""
    import jax
    from jax import nn, numpy

    curves = {
        "none": lambda x: x, "relu": nn.relu, "gelu_erf": partial(nn.gelu, approximate=False),
        "gelu": nn.gelu, "silu": nn.silu, "sigmoid": nn.sigmoid, "tanh": numpy.tanh,
        "softplus": nn.softplus,
    }  # fmt: skip
    jax.config.update("jax_enable_x64", True)
    return SimpleNamespace(tanh=numpy.tanh, exp=numpy.exp, affine=NUMPY.affine, curves=curves)


# --- the operations: a formula, and numfuse's calls -----------------------------------------------
def _layer(lib: Any, act: Any, a: Any, b: Any, bias: Any) -> Any:
    return act(lib.affine(a, b, bias))


def _our_layer(x: Contestants, order: str) -> Call:
    act, grad, given = x.case.activation, x.grad, x.operands
    if order == "value":
        return lambda: nf.matmul_bias_activation(*given, act)
    if order == "tangent":
        return lambda: nf.matmul_bias_activation_jvp(*given, *x.tangents, act)
    if order == "gradients":
        return lambda: nf.matmul_bias_activation_bwd(grad, *given, act)
    _, pre = nf.matmul_bias_activation(*given, act, return_pre_activation=True)
    if order == "saved":
        return lambda: nf.matmul_bias_activation_bwd(grad, *given, act, pre_activation=pre)
    double = nf.matmul_bias_activation_double_bwd
    return lambda: double(*x.tangents, grad, *given, act, pre_activation=pre)


def _residual(lib: Any, act: Any, a: Any, b: Any, bias: Any, residual: Any) -> Any:
    return lib.affine(a, b, bias) + residual


def _our_residual(x: Contestants, order: str) -> Call:
    if order == "value":
        return lambda: nf.matmul_bias_residual(*x.operands)
    return lambda: nf.matmul_bias_residual_bwd(x.grad, *x.operands)


def _gated(lib: Any, act: Any, a: Any, gate: Any, up: Any, of_gate: Any, of_up: Any) -> Any:
    return act(lib.affine(a, gate, of_gate)) * lib.affine(a, up, of_up)


def _our_gated(x: Contestants, order: str) -> Call:
    act, grad, given = x.case.activation, x.grad, x.operands
    if order == "value":
        return lambda: nf.matmul_activation_mul(*given, act)
    if order == "gradients":
        return lambda: nf.matmul_activation_mul_bwd(grad, *given, act)
    _, pre = nf.matmul_activation_mul(*given, act, return_pre_activation=True)
    return lambda: nf.matmul_activation_mul_bwd(grad, *given, act, pre_activation=pre)


def _gate(lib: Any, act: Any, a: Any, b: Any) -> Any:
    return act(a) * b


def _our_gate(x: Contestants, order: str) -> Call:
    act, grad, given = x.case.activation, x.grad, x.operands
    if order == "value":
        return lambda: nf.activation_mul(*given, act)
    if order == "tangent":
        return lambda: nf.activation_mul_jvp(*given, *x.tangents, act)
    if order == "gradients":
        return lambda: nf.activation_mul_bwd(grad, *given, act)
    return lambda: nf.activation_mul_double_bwd(*x.tangents, grad, *given, act)


def _bell(lib: Any, x: Any, y: Any, z: Any) -> Any:
    return lib.exp(-(x * x)) * y + z


def _blend(lib: Any, x: Any, y: Any, z: Any) -> Any:
    return x * z + (1 - x) * y


def _scaled(lib: Any, sums: Any, bias: Any, scale: Any, residual: Any) -> Any:
    return lib.tanh(sums * scale + bias) + residual


#: The formulas as numfuse takes them: plain functions of scalars.
OWN = {
    "bell": lambda x, y, z: _bell(expr, x, y, z),
    "blend": lambda x, y, z: _blend(expr, x, y, z),
    "scaled": lambda sums, bias, scale, residual: _scaled(expr, sums, bias, scale, residual),
}


def _our_formula(name: str, x: Contestants, order: str) -> Call:
    formula = OWN[name]
    if order == "value":
        return lambda: nf.elementwise(formula, *x.operands)
    return lambda: nf.elementwise_bwd(x.grad, formula, *x.operands)


def _our_epilogue(x: Contestants, order: str) -> Call:
    formula, (a, b, *rest) = OWN["scaled"], x.operands
    if order == "value":
        return lambda: nf.matmul_epilogue(a, b, formula, *rest)
    if order == "gradients":
        return lambda: nf.matmul_epilogue_bwd(x.grad, a, b, formula, *rest)
    _, kept = nf.matmul_epilogue(a, b, formula, *rest, return_pre_activation=True)
    return lambda: nf.matmul_epilogue_bwd(x.grad, a, b, formula, *rest, pre_activation=kept)


def _network(lib: Any, act: Any, x: Any, *given: Any) -> Any:
    half = len(given) // 2
    for w, bias in zip(given[: half - 1], given[half:-1], strict=True):
        x = act(lib.affine(x, w, bias))
    return lib.affine(x, given[half - 1], given[-1])


def _our_network(x: Contestants, order: str) -> Call:
    act, grad, depth = x.case.activation, x.grad, x.case.depth

    def parts(flat: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        return flat[0], list(flat[1 : 1 + depth]), list(flat[1 + depth :])

    given, along = parts(x.operands), parts(x.tangents)
    if order == "value":
        return lambda: nf.mlp(*given, act)
    if order == "tangent":
        return lambda: nf.mlp_jvp(*given, *along, act)
    if order == "gradients":
        return lambda: nf.mlp_bwd(grad, *given, act)
    if order == "saved":
        _, kept = nf.mlp(*given, act, keep=True)
        return lambda: nf.mlp_bwd(grad, *given, act, kept=kept)
    needs = "weights", "biases"
    return lambda: nf.mlp_double_bwd(None, *along[1:], grad, *given, act, needs=needs)


class Operation(NamedTuple):
    """What is computed: a formula of (library, activation, operands), and how often it is drawn."""

    often: int
    orders: tuple[str, ...]
    formula: Callable[..., Any]
    ours: Callable[[Contestants, str], Call]
    #: The operands beside the factors, by their shapes: "N", "M1", "MN".
    others: tuple[str, ...] = ()
    factors: int = 1
    #: Whether the formula has no product, is a network, or has members of a batch.
    pointwise: bool = False
    network: bool = False
    batches: bool = False


def _free(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return a formula that has no activation as one that is given it."""
    return lambda lib, act, *operands: formula(lib, *operands)


def _epilogue(lib: Any, act: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _scaled(lib, a @ b, *rest)


FIRST = ("value", "gradients")
OPERATIONS = {
    "layer": Operation(10, (*FIRST, "saved", "tangent", "second"), _layer, _our_layer, ("N",),
                       batches=True),
    "residual": Operation(2, FIRST, _residual, _our_residual, ("N", "MN")),
    "gated layer": Operation(3, (*FIRST, "saved"), _gated, _our_gated, ("N", "N"), 2),
    "gate": Operation(3, (*FIRST, "tangent", "second"), _gate, _our_gate, ("MN", "MN"), 0, True),
    "bell": Operation(1, FIRST, _free(_bell), partial(_our_formula, "bell"), ("MN", "MN", "N"), 0,
                      True),
    "blend": Operation(1, FIRST, _free(_blend), partial(_our_formula, "blend"), ("MN", "MN", "MN"),
                       0, True),
    "epilogue": Operation(2, (*FIRST, "saved"), _epilogue, _our_epilogue, ("N", "M1", "MN")),
    "network": Operation(5, (*FIRST, "saved", "tangent", "second"), _network, _our_network,
                         network=True),
}  # fmt: skip
