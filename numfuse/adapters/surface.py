"""The public functions over the few primitives that an array library's adapter has to write.

An adapter is a subclass of :class:`Functions`: nine primitives, each with derivatives in the
library's own way, and two small helpers. Signatures, names, None and what is made of what are here,
once for all libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from numfuse.activations import Activation, get
from numfuse.adapters import pieces
from numfuse.problem.operands import accumulator, required
from numfuse.problem.results import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    GEMM_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_NEEDS,
    RESIDUAL_SECOND_NEEDS,
    GatedGradients,
    GatedSecondGradients,
    GemmGradients,
    GemmResidualGradients,
    GemmResidualSecondGradients,
    GemmSecondGradients,
    Tangent,
    check_needs,
)

__all__ = ["NAMES", "Functions", "How", "chosen", "gate_of", "made", "served", "spread"]

_GATES = ("silu", "gelu", "relu", "sigmoid")
#: What an adapter's module offers.
NAMES = (
    "activation_mul",
    "activation_mul_bwd",
    "activation_mul_double_bwd",
    "activation_mul_jvp",
    "matmul_bias_activation",
    "matmul_bias_activation_bwd",
    "matmul_bias_activation_double_bwd",
    "matmul_bias_activation_jvp",
    "matmul_bias_residual",
    "matmul_bias_residual_bwd",
    "matmul_bias_residual_double_bwd",
    "matmul_bias_residual_jvp",
    *(f"{name}_mul" for name in _GATES),
    *(f"{name}_mul_bwd" for name in _GATES),
)


class How(NamedTuple):
    """The arguments of a call other than its arrays."""

    activation: Activation
    needs: tuple[str, ...] = ()
    guard: bool = True
    backend: Any = None


def gate_of(name: str) -> tuple[str, tuple[str, ...]]:
    """The function that a gate's own function is, and its last operand: silu_mul's and "silu"."""
    gate, found, rest = name.partition("_mul")
    return (f"activation_mul{rest}", (gate,)) if found and gate in _GATES else (name, ())


def served(library: Any, name: str) -> Callable[..., Any]:
    """A function of `NAMES`, of a module that may lack the gates' own names."""
    found: Callable[..., Any] | None = getattr(library, name, None)
    if found is not None:
        return found
    name, gate = gate_of(name)
    function = getattr(library, name)

    def call(*operands: Any, **options: Any) -> Any:
        return function(*operands, *gate, **options)

    return call


def made(found: Any, names: tuple[str, ...], needs: Sequence[str]) -> tuple[Any, ...]:
    """The needed ones of a named tuple of gradients, as a plain tuple without None."""
    return tuple(x for name, x in zip(names, found, strict=True) if name in needs)


def spread(found: Any, names: tuple[str, ...], needs: Sequence[str]) -> list[Any]:
    """Return the gradients from :func:`made` in their places in `names`, and None elsewhere."""
    at = {name: i for i, name in enumerate(name for name in names if name in needs)}
    return [found[at[name]] if name in at else None for name in names]


def chosen(places: Iterable[int], names: tuple[str, ...]) -> tuple[str, ...]:
    """The names at these places, in their order."""
    wanted = {names[i] for i in places}
    return tuple(name for name in names if name in wanted)


class Functions:
    """numfuse's public functions for the arrays of another library."""

    #: How the library calls what forbids `out`.
    what = "automatic differentiation"
    #: The library's module of functions on arrays.
    arrays: Any = None

    # --- the primitives, an adapter's own -------------------------------------------------------
    def product(self, a: Any, b: Any, bias: Any, how: How) -> Any:
        raise NotImplementedError

    def product_bwd(self, grad: Any, a: Any, b: Any, bias: Any, how: How) -> Any:
        """The gradients `how.needs` alone."""
        raise NotImplementedError

    def product_double(
        self, u: Any, v: Any, w: Any, grad: Any, a: Any, b: Any, bias: Any, how: How
    ) -> Any:
        raise NotImplementedError

    def product_tangent(self, a: Any, b: Any, bias: Any, u: Any, v: Any, w: Any, how: How) -> Any:
        raise NotImplementedError

    def residual(self, a: Any, b: Any, bias: Any, residual: Any, how: How) -> Any:
        raise NotImplementedError

    def gate(self, a: Any, b: Any, how: How) -> Any:
        raise NotImplementedError

    def gate_bwd(self, grad: Any, a: Any, b: Any, how: How) -> Any:
        raise NotImplementedError

    def gate_double(self, u: Any, v: Any, grad: Any, a: Any, b: Any, how: How) -> Any:
        raise NotImplementedError

    def gate_tangent(self, a: Any, b: Any, u: Any, v: Any, how: How) -> Any:
        raise NotImplementedError

    def sum_to(self, x: Any, shape: Sequence[int]) -> Any:
        """`x` summed over the axes along which `shape` was broadcast."""
        raise NotImplementedError

    def widened(self, x: Any) -> Any:
        """A pre-activation in the accumulator's dtype."""
        raise NotImplementedError

    # --- what an adapter may know better --------------------------------------------------------
    def zeros_like(self, x: Any) -> Any:
        return self.arrays.zeros_like(x)

    def ones_like(self, x: Any) -> Any:
        return self.arrays.ones_like(x)

    def narrowed(self, x: Any, like: Any) -> Any:
        """`x` in the dtype of `like`."""
        return x.astype(like.dtype)

    def moves(self, x: Any) -> bool:
        """Whether a derivative may go through an array."""
        return False

    def checked(self, **operands: Any) -> None:
        """TypeError for operands that no primitive takes."""

    def saved_dtypes(self, like: Any) -> tuple[Any, ...]:
        """The dtypes that a saved pre-activation of such operands may have."""
        return accumulator("grad", np.dtype(like.dtype)), like.dtype

    def product_bwd_saved(self, grad: Any, a: Any, b: Any, bias: Any, pre: Any, how: How) -> Any:
        """As `product_bwd`, with a saved pre-activation through which a derivative goes."""
        return self.product_bwd_pieces(grad, a, b, bias, how, pre, how.guard)

    def product_double_saved(
        self, u: Any, v: Any, w: Any, grad: Any, a: Any, b: Any, bias: Any, pre: Any, how: How
    ) -> Any:
        """As `product_double`, with a saved pre-activation through which a derivative goes."""
        return self.product_double_pieces(u, v, w, grad, a, b, bias, how, pre, how.guard)

    # --- the public functions -------------------------------------------------------------------
    def _no_out(self, out: Any) -> None:
        if out is not None:
            raise ValueError(f"out must be None under {self.what}, got an array")

    def _saved(self, pre: Any, grad: Any) -> Any:
        """A saved pre-activation where a derivative goes through it, else None: it is made again,
        so that what it was made of has its derivatives.
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

    def activation(self, x: Any, activation: Any) -> Any:
        """The values of an activation at an array: of a gate beside ones, which has derivatives."""
        return self.activation_mul(x, self.ones_like(x), activation)

    def matmul_bias_activation(
        self,
        a: Any,
        b: Any,
        bias: Any = None,
        activation: Any = "none",
        *,
        return_pre_activation: bool = False,
        out: Any = None,
        backend: Any = None,
    ) -> Any:
        """As :func:`numfuse.matmul_bias_activation`.

        With `return_pre_activation`, that is differentiable too, and costs a product of its own.
        """
        required({"a": a, "b": b})
        self._no_out(out)
        result = self.product(a, b, bias, How(get(activation), backend=backend))
        if not return_pre_activation:
            return result
        return result, self.widened(self.product(a, b, bias, How(get("none"), backend=backend)))

    def matmul_bias_residual(
        self, a: Any, b: Any, bias: Any, residual: Any, *, out: Any = None, backend: Any = None
    ) -> Any:
        """As :func:`numfuse.matmul_bias_residual`."""
        required({"a": a, "b": b, "residual": residual})
        self._no_out(out)
        return self.residual(a, b, bias, residual, How(get("none"), backend=backend))

    def matmul_bias_activation_bwd(
        self,
        grad: Any,
        a: Any,
        b: Any,
        bias: Any = None,
        activation: Any = "none",
        *,
        pre_activation: Any = None,
        needs: Iterable[str] = GEMM_NEEDS,
        sum_batch: bool = False,
        guard: bool = True,
        out: Any = None,
        backend: Any = None,
    ) -> GemmGradients:
        """As :func:`numfuse.matmul_bias_activation_bwd`.

        A saved pre-activation is an operand like the others where a derivative goes through it, and
        is made again where none does.
        """
        required({"grad": grad, "a": a, "b": b})
        self._no_out(out)
        needs = _there(check_needs(needs, GEMM_NEEDS), bias)
        how = How(get(activation), needs, guard, backend)
        pre = self._saved(pre_activation, grad)
        if pre is None:
            found = self.product_bwd(grad, a, b, bias, how)
        else:
            found = self.product_bwd_saved(grad, a, b, bias, pre, how)
        d_a, d_b, d_bias = spread(found, GEMM_NEEDS, needs)
        if sum_batch and d_b is not None and d_b.ndim > 2:
            d_b = self.sum_to(d_b, d_b.shape[-2:])
        return GemmGradients(d_a, d_b, d_bias)

    def matmul_bias_residual_bwd(
        self,
        grad: Any,
        a: Any,
        b: Any,
        bias: Any,
        residual: Any,
        *,
        pre_activation: Any = None,
        needs: Iterable[str] = RESIDUAL_NEEDS,
        sum_batch: bool = False,
        guard: bool = True,
        out: Any = None,
        backend: Any = None,
    ) -> GemmResidualGradients:
        """As :func:`numfuse.matmul_bias_residual_bwd`."""
        required({"grad": grad, "a": a, "b": b, "residual": residual})
        needs = check_needs(needs, RESIDUAL_NEEDS)
        self._saved(pre_activation, grad)
        found = self.matmul_bias_activation_bwd(
            grad,
            a,
            b,
            bias,
            needs=tuple(name for name in needs if name != "residual"),
            sum_batch=sum_batch,
            guard=guard,
            out=out,
            backend=backend,
        )
        d_residual = self.sum_to(grad, residual.shape) if "residual" in needs else None
        return GemmResidualGradients(*found, d_residual)

    def activation_mul(
        self, a: Any, b: Any, activation: Any, *, out: Any = None, backend: Any = None
    ) -> Any:
        """As :func:`numfuse.activation_mul`."""
        required({"a": a, "b": b})
        self._no_out(out)
        return self.gate(a, b, How(get(activation), backend=backend))

    def activation_mul_bwd(
        self,
        grad: Any,
        a: Any,
        b: Any,
        activation: Any,
        *,
        needs: Iterable[str] = GATED_NEEDS,
        guard: bool = True,
        out: Any = None,
        backend: Any = None,
    ) -> GatedGradients:
        """As :func:`numfuse.activation_mul_bwd`."""
        required({"grad": grad, "a": a, "b": b})
        self._no_out(out)
        needs = check_needs(needs, GATED_NEEDS)
        found = self.gate_bwd(grad, a, b, How(get(activation), needs, guard, backend))
        return GatedGradients(*spread(found, GATED_NEEDS, needs))

    def matmul_bias_activation_double_bwd(
        self,
        u: Any,
        v: Any,
        w: Any,
        grad: Any,
        a: Any,
        b: Any,
        bias: Any = None,
        activation: Any = "none",
        *,
        needs: Iterable[str] = GEMM_SECOND_NEEDS,
        pre_activation: Any = None,
        guard: bool = True,
        backend: Any = None,
    ) -> GemmSecondGradients:
        """As :func:`numfuse.matmul_bias_activation_double_bwd`."""
        required({"grad": grad, "a": a, "b": b})
        needs = _there(check_needs(needs, GEMM_SECOND_NEEDS), bias)
        how = How(get(activation), needs, guard, backend)
        pre = self._saved(pre_activation, grad)
        if pre is None:
            found = self.product_double(u, v, w, grad, a, b, bias, how)
        else:
            found = self.product_double_saved(u, v, w, grad, a, b, bias, pre, how)
        return GemmSecondGradients(*spread(found, GEMM_SECOND_NEEDS, needs))

    def matmul_bias_residual_double_bwd(
        self,
        u: Any,
        v: Any,
        w: Any,
        z: Any,
        grad: Any,
        a: Any,
        b: Any,
        bias: Any,
        residual: Any,
        *,
        needs: Iterable[str] = RESIDUAL_SECOND_NEEDS,
        guard: bool = True,
        backend: Any = None,
    ) -> GemmResidualSecondGradients:
        """As :func:`numfuse.matmul_bias_residual_double_bwd`."""
        required({"grad": grad, "a": a, "b": b, "residual": residual})
        needs = check_needs(needs, RESIDUAL_SECOND_NEEDS)
        self.checked(z=z, residual=residual)
        _same_shape("z", z, "the shape of residual", residual)
        found = self.matmul_bias_activation_double_bwd(
            u,
            v,
            w,
            grad,
            a,
            b,
            bias,
            needs=tuple(name for name in needs if name != "residual"),
            guard=guard,
            backend=backend,
        )
        d_grad = found.d_grad
        if d_grad is not None and z is not None:
            d_grad = d_grad + z
        d_residual = self.zeros_like(residual) if "residual" in needs else None
        return GemmResidualSecondGradients(d_grad, found.d_a, found.d_b, found.d_bias, d_residual)

    def activation_mul_double_bwd(
        self,
        u: Any,
        v: Any,
        grad: Any,
        a: Any,
        b: Any,
        activation: Any,
        *,
        needs: Iterable[str] = GATED_SECOND_NEEDS,
        guard: bool = True,
        backend: Any = None,
    ) -> GatedSecondGradients:
        """As :func:`numfuse.activation_mul_double_bwd`."""
        required({"grad": grad, "a": a, "b": b})
        needs = check_needs(needs, GATED_SECOND_NEEDS)
        found = self.gate_double(u, v, grad, a, b, How(get(activation), needs, guard, backend))
        return GatedSecondGradients(*spread(found, GATED_SECOND_NEEDS, needs))

    def matmul_bias_activation_jvp(
        self,
        a: Any,
        b: Any,
        bias: Any,
        a_dot: Any,
        b_dot: Any,
        bias_dot: Any,
        activation: Any = "none",
        *,
        guard: bool = True,
        backend: Any = None,
    ) -> Tangent:
        """As :func:`numfuse.matmul_bias_activation_jvp`."""
        required({"a": a, "b": b})
        how = How(get(activation), (), guard, backend)
        out = self.product(a, b, bias, how)
        return Tangent(out, self.product_tangent(a, b, bias, a_dot, b_dot, bias_dot, how))

    def matmul_bias_residual_jvp(
        self,
        a: Any,
        b: Any,
        bias: Any,
        residual: Any,
        a_dot: Any,
        b_dot: Any,
        bias_dot: Any,
        residual_dot: Any,
        *,
        backend: Any = None,
    ) -> Tangent:
        """As :func:`numfuse.matmul_bias_residual_jvp`."""
        required({"a": a, "b": b, "residual": residual})
        dots = {"a_dot": a_dot, "b_dot": b_dot, "bias_dot": bias_dot, "residual_dot": residual_dot}
        self.checked(a=a, **dots)
        for (name, x), like in zip(dots.items(), (a, b, bias, residual), strict=True):
            _same_shape(name, x, f"the shape of {name.removesuffix('_dot')}", like)
        out = self.residual(a, b, bias, residual, How(get("none"), backend=backend))
        dot = pieces.moved(self, a_dot, b_dot, bias_dot, a, b, bias, backend)
        # The residual has no part in T, and may enlarge nothing.
        dot = self.zeros_like(out) if dot is None else dot
        return Tangent(out, dot if residual_dot is None else dot + residual_dot)

    def activation_mul_jvp(
        self,
        a: Any,
        b: Any,
        a_dot: Any,
        b_dot: Any,
        activation: Any,
        *,
        guard: bool = True,
        backend: Any = None,
    ) -> Tangent:
        """As :func:`numfuse.activation_mul_jvp`."""
        required({"a": a, "b": b})
        how = How(get(activation), (), guard, backend)
        return Tangent(self.gate(a, b, how), self.gate_tangent(a, b, a_dot, b_dot, how))

    # --- the primitives' pieces -----------------------------------------------------------------
    def product_bwd_pieces(
        self, grad: Any, a: Any, b: Any, bias: Any, how: How, pre: Any = None, guard: bool = False
    ) -> tuple[Any, ...]:
        found = pieces.backward(
            self, grad, a, b, bias, how.activation, how.needs, how.backend, pre, guard
        )
        return tuple(found[name] for name in GEMM_NEEDS if name in how.needs)

    def product_double_pieces(
        self,
        u: Any,
        v: Any,
        w: Any,
        grad: Any,
        a: Any,
        b: Any,
        bias: Any,
        how: How,
        pre: Any = None,
        guard: bool = False,
    ) -> tuple[Any, ...]:
        found = pieces.double_backward(
            self, u, v, w, grad, a, b, bias, how.activation, how.needs, how.backend, pre, guard
        )
        return tuple(found[name] for name in GEMM_SECOND_NEEDS if name in how.needs)

    def product_tangent_pieces(
        self, a: Any, b: Any, bias: Any, u: Any, v: Any, w: Any, how: How
    ) -> Any:
        return pieces.tangent(self, a, b, bias, u, v, w, how.activation, how.backend)

    def gate_bwd_pieces(self, grad: Any, a: Any, b: Any, how: How) -> tuple[Any, ...]:
        found = pieces.gated_backward(self, grad, a, b, how.activation, how.needs, how.backend)
        return tuple(found[name] for name in GATED_NEEDS if name in how.needs)

    def gate_double_pieces(
        self, u: Any, v: Any, grad: Any, a: Any, b: Any, how: How
    ) -> tuple[Any, ...]:
        found = pieces.gated_double_backward(
            self, u, v, grad, a, b, how.activation, how.needs, how.backend
        )
        return tuple(found[name] for name in GATED_SECOND_NEEDS if name in how.needs)

    def gate_tangent_pieces(self, a: Any, b: Any, u: Any, v: Any, how: How) -> Any:
        return pieces.gated_tangent(self, a, b, u, v, how.activation, how.backend)


def _same_shape(name: str, x: Any, what: str, like: Any) -> None:
    """ValueError for a tangent, a cotangent or a pre-activation of another shape."""
    if x is None:
        return
    if like is None:
        of = what.removeprefix("the shape of ")
        raise ValueError(f"{name} must be None where {of} is None, got an array")
    if tuple(x.shape) != tuple(like.shape):
        raise ValueError(f"{name} must have {what} {tuple(like.shape)}, got {tuple(x.shape)}")


def _there(needs: tuple[str, ...], bias: Any) -> tuple[str, ...]:
    return needs if bias is not None else tuple(name for name in needs if name != "bias")


def _add_gates() -> None:
    """silu_mul and the others, and their backwards."""

    def add(gate: str) -> None:
        def forward(
            self: Functions, a: Any, b: Any, *, out: Any = None, backend: Any = None
        ) -> Any:
            return self.activation_mul(a, b, gate, out=out, backend=backend)

        def backward(
            self: Functions,
            grad: Any,
            a: Any,
            b: Any,
            *,
            needs: Iterable[str] = GATED_NEEDS,
            guard: bool = True,
            out: Any = None,
            backend: Any = None,
        ) -> GatedGradients:
            return self.activation_mul_bwd(
                grad, a, b, gate, needs=needs, guard=guard, out=out, backend=backend
            )

        for function, name in ((forward, f"{gate}_mul"), (backward, f"{gate}_mul_bwd")):
            function.__name__ = name
            function.__qualname__ = f"Functions.{name}"
            function.__doc__ = f"As :func:`numfuse.{name}`."
            setattr(Functions, name, function)

    for gate in _GATES:
        add(gate)


_add_gates()
