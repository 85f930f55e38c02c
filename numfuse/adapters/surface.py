"""The public functions over the few primitives that a differentiating library's adapter has.

An adapter is a subclass of :class:`Functions`: one method that runs any of the nine primitives of
`numfuse.adapters.primitives`, with derivatives in the library's own way, and two small helpers.
None, and what is made of what, are here, once for all libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from numfuse.adapters import pieces
from numfuse.adapters.primitives import PRIMITIVES, How, backward_tangents, spread
from numfuse.adapters.signatures import NAMES, PublicFunctions, Signature
from numfuse.problem.operands import accumulator

__all__ = ["NAMES", "Functions"]


class Functions(PublicFunctions):
    """numfuse's public functions for the arrays of another library."""

    #: How the library calls what forbids `out`.
    what = "automatic differentiation"
    #: The library's module of functions on arrays.
    arrays: Any = None

    # --- an adapter's own -----------------------------------------------------------------------
    def primitive(self, name: str, how: How, *operands: Any, pre: Any = None) -> Any:
        """Run a primitive: its result, or the tuple of the gradients `how.needs` alone.

        `pre` is a saved pre-activation through which a derivative goes.
        """
        raise NotImplementedError

    def sum_to(self, x: Any, shape: Sequence[int]) -> Any:
        """Return `x` summed over the axes along which `shape` was broadcast."""
        lead = x.ndim - len(shape)
        axes = tuple(range(lead)) + tuple(
            lead + i for i, length in enumerate(shape) if length == 1 and x.shape[lead + i] != 1
        )
        if not axes:
            return x
        return self.arrays.reshape(self.arrays.sum(x, axis=axes, keepdims=True), shape)

    def widened(self, x: Any) -> Any:
        """Return a pre-activation in the accumulator's dtype."""
        return x if x.dtype == np.float64 else x.astype(np.float32)

    # --- what an adapter may know better --------------------------------------------------------
    def zeros_like(self, x: Any) -> Any:
        return self.arrays.zeros_like(x)

    def ones_like(self, x: Any) -> Any:
        return self.arrays.ones_like(x)

    def narrowed(self, x: Any, like: Any) -> Any:
        """Return `x` in the dtype of `like`."""
        return x.astype(like.dtype)

    def moves(self, x: Any) -> bool:
        """Return whether a derivative may go through an array."""
        return False

    def checked(self, **operands: Any) -> None:
        """Raise TypeError for operands that no primitive takes."""

    def saved_dtypes(self, like: Any) -> tuple[Any, ...]:
        """Return the dtypes that a saved pre-activation of such operands may have."""
        return accumulator("grad", np.dtype(like.dtype)), like.dtype

    def refuse_out(self, out: Any) -> None:
        """Raise ValueError for an `out` of the caller's."""
        if out is not None:
            raise ValueError(f"out must be None under {self.what}, got an array")

    # --- the public functions -------------------------------------------------------------------
    def call(self, signature: Signature, x: dict[str, Any]) -> Any:
        """Run a public function by the primitives that it is made of."""
        self.refuse_out(x.get("out"))
        needs = x.get("needs", ())
        if x.get("bias", self) is None:
            needs = tuple(name for name in needs if name != "bias")
        how = How(x["activation"], needs, x.get("guard", True), x["backend"])
        name = signature.name
        option = _UNLESS.get(name)
        if name in _CALLS and (option is None or x[option]):
            found = _CALLS[name](self, how, x)
        else:
            found = self.run(_PRIMITIVES[name], how, x)
        return found if signature.result is tuple else signature.result(*found)

    def run(self, name: str, how: How, x: dict[str, Any]) -> Any:
        """Run a primitive on the arguments of a call; gradients that it does not make are None."""
        primitive = PRIMITIVES[name]
        operands = [x[operand] for operand in primitive.operands]
        if primitive.names is None:
            return self.primitive(name, how, *operands)
        needs = tuple(n for n in how.needs if n != "residual")
        pre = None
        if primitive.takes_saved:
            pre = self.saved(x.get("pre_activation"), x["grad"])
            if "residual" in x:  # checked, and without a part in the gradients
                pre = None
        found = self.primitive(name, how._replace(needs=needs), *operands, pre=pre)
        return spread(found, primitive.names, needs)

    def activation(self, x: Any, activation: Any) -> Any:
        """Return the values of an activation at an array, by a gate, which has derivatives."""
        return self.activation_mul(x, self.ones_like(x), activation)

    def saved(self, pre: Any, grad: Any) -> Any:
        """Return a saved pre-activation where a derivative goes through it, else None.

        It is made again then, so that what it was made of has its derivatives.
        """
        if pre is None:
            return None
        self.checked(grad=grad, pre_activation=pre)
        dtypes = self.saved_dtypes(grad)
        if pre.dtype not in dtypes:
            *names, found = (str(x).removeprefix("torch.") for x in (*dtypes, pre.dtype))
            wanted = " or ".join(dict.fromkeys(names))
            raise TypeError(f"pre_activation must have dtype {wanted}, got {found}")
        _same_shape("pre_activation", pre, "the result's shape", grad)
        return pre if self.moves(pre) else None

    def pre_activation(self, how: How, a: Any, b: Any, bias: Any) -> Any:
        """Return a @ b + bias, with its derivatives, for what a derivative is made of."""
        return self.matmul_bias_activation(a, b, bias, backend=how.backend)

    # --- the rules of primitives that are other primitives, or fused ------------------------------
    def pulled(
        self, name: str, how: How, cotangents: Sequence[Any], x: Sequence[Any], pre: Any = None
    ) -> Sequence[Any]:
        """Return the gradients `how.needs` of a primitive's operands, None for the others.

        `pre` is a saved pre-activation whose gradient is one of them, and the last.
        """
        if name == "residual":
            return self.matmul_bias_residual_bwd(
                *cotangents, *x, needs=how.needs, backend=how.backend
            )
        primitive = PRIMITIVES[name]
        following, operands = str(primitive.derivative), (*cotangents, *x)
        if pre is None:
            found = self.primitive(following, how, *operands)
        else:
            found = self.composite(following, how, *operands, pre=pre)
        return spread(found, (*primitive.operands, "pre"), how.needs)

    def pushed(
        self, name: str, how: How, x: Sequence[Any], dots: Sequence[Any], out: Any = None
    ) -> tuple[Any, ...]:
        """Return the tangents of a primitive's results; `out` is the result, where it is there."""
        if name == "residual":
            a, b, bias, _ = x
            u, v, w, residual_dot = dots
            dot = pieces.moved(self, u, v, w, a, b, bias, how.backend)
            if dot is None:  # (the residual may enlarge nothing)
                dot = self.zeros_like(self.primitive(name, how, *x) if out is None else out)
            return (dot if residual_dot is None else dot + residual_dot,)
        primitive = PRIMITIVES[name]
        if primitive.tangent is not None:
            return (self.primitive(primitive.tangent, how, *x, *dots),)
        parts = [
            self.primitive(part.name, how, *operands)
            for part, operands in backward_tangents(name, x, dots)
        ]
        return tuple(reduce(add, some) for some in zip(*parts, strict=True))

    def composite(self, name: str, how: How, *operands: Any, **options: Any) -> Any:
        """Run what a primitive is made of."""
        return pieces.COMPOSITES[name](self, how, *operands, **options)


def _layer(ops: Functions, how: How, x: dict[str, Any]) -> Any:
    """Run a forward; a pre-activation is differentiable too, and costs a product of its own."""
    result = ops.run("product", how, x)
    pre = ops.matmul_bias_activation(x["a"], x["b"], x["bias"], backend=how.backend)
    return result, ops.widened(pre)


def _layer_bwd(ops: Functions, how: How, x: dict[str, Any]) -> list[Any]:
    d_a, d_b, d_bias = ops.run("product_bwd", how, x)
    if x["sum_batch"] and d_b is not None and d_b.ndim > 2:
        d_b = ops.sum_to(d_b, d_b.shape[-2:])
    return [d_a, d_b, d_bias]


def _residual_bwd(ops: Functions, how: How, x: dict[str, Any]) -> list[Any]:
    found = _layer_bwd(ops, how, x)
    needed = "residual" in how.needs
    d_residual = ops.sum_to(x["grad"], x["residual"].shape) if needed else None
    return [*found, d_residual]


def _residual_double(ops: Functions, how: How, x: dict[str, Any]) -> list[Any]:
    z, residual = x["z"], x["residual"]
    ops.checked(z=z, residual=residual)
    _same_shape("z", z, "the shape of residual", residual)
    d_grad, *rest = ops.run("product_double", how, x)
    if d_grad is not None and z is not None:
        d_grad = d_grad + z
    d_residual = ops.zeros_like(residual) if "residual" in how.needs else None
    return [d_grad, *rest, d_residual]


def _residual_jvp(ops: Functions, how: How, x: dict[str, Any]) -> tuple[Any, Any]:
    names = "a", "b", "bias", "residual"
    dots = {f"{name}_dot": x[f"{name}_dot"] for name in names}
    ops.checked(a=x["a"], **dots)
    for name in names:
        _same_shape(f"{name}_dot", dots[f"{name}_dot"], f"the shape of {name}", x[name])
    out = ops.run("residual", how, x)
    operands = [x[name] for name in names]
    return out, *ops.pushed("residual", how, operands, list(dots.values()), out)


#: By public function: what it is made of, where that is not one primitive alone.
_CALLS: dict[str, Callable[[Functions, How, dict[str, Any]], Any]] = {
    "matmul_bias_activation": _layer,
    "matmul_bias_activation_bwd": _layer_bwd,
    "matmul_bias_residual_bwd": _residual_bwd,
    "matmul_bias_residual_double_bwd": _residual_double,
    "matmul_bias_residual_jvp": _residual_jvp,
    "matmul_bias_activation_jvp": lambda ops, how, x: (
        ops.run("product", how, x),
        ops.run("product_tangent", how, x),
    ),
    "activation_mul_jvp": lambda ops, how, x: (
        ops.run("gate", how, x),
        ops.run("gate_tangent", how, x),
    ),
}
#: The option without which such a function is one primitive alone.
_UNLESS = {
    "matmul_bias_activation": "return_pre_activation",
    "matmul_bias_activation_bwd": "sum_batch",
}
_PRIMITIVES = {primitive.function: name for name, primitive in PRIMITIVES.items()}


def _same_shape(name: str, x: Any, what: str, like: Any) -> None:
    """Raise ValueError for a tangent, a cotangent or a pre-activation of another shape."""
    if x is None:
        return
    if like is None:
        of = what.removeprefix("the shape of ")
        raise ValueError(f"{name} must be None where {of} is None, got an array")
    if tuple(x.shape) != tuple(like.shape):
        raise ValueError(f"{name} must have {what} {tuple(like.shape)}, got {tuple(x.shape)}")
