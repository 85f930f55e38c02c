"""numfuse's functions for PyTorch tensors: eager, compiled, under vmap and autocast, twice and more
often differentiable, and as modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from numfuse.activations import Activation, get
from numfuse.adapters import pieces
from numfuse.adapters.surface import NAMES, Functions, How, gate_of, served
from numfuse.adapters.torch.operators import (
    CORE,
    Op,
    fused,
    in_functorch,
    is_lazy,
    moves,
    on_cuda,
    own_values,
    placed,
    sets,
    through,
    to_numpy,
    to_tensor,
    wanted,
)
from numfuse.problem.results import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    GEMM_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_NEEDS,
)
from numfuse.runtime import dispatch

__all__ = [*NAMES, "GatedLinear", "Linear", "activation", "synchronize", "to_numpy"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`; the CPU's results are there at the return."""
    if x.is_cuda:
        on_cuda().synchronize(x)


def _checked(**operands: Any) -> None:
    """TypeError for operands that no operator takes.

    A saved pre-activation alone may have a dtype of its own (see `Functions.saved_dtypes`).
    """
    dtypes, devices = {}, {}
    for name, x in operands.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"{name} must be a torch.Tensor as the other operands, got {kind}")
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must have dtype float64, float32, float16 or bfloat16, got {x.dtype}"
            )
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a strided tensor, got the layout {x.layout}")
        devices[name] = x.device
        if name != "pre_activation":
            dtypes[name] = x.dtype
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} {str(d).removeprefix('torch.')}" for name, d in dtypes.items())
        raise TypeError(f"all operands must have the same dtype, got {found}")
    for name, device in devices.items():
        if device.type not in ("cpu", "cuda", "meta"):
            raise TypeError(
                f"{name} must be on the CPU or on a CUDA device: numfuse has no kernels for "
                f"PyTorch tensors on {device.type!r}; {name}.cpu() copies it"
            )
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} {device}" for name, device in devices.items())
        raise TypeError(f"all operands must be on one device, got {found}")


# --- the public functions -----------------------------------------------------------------------
def _autocast(*operands: Any) -> list[Any]:
    """Operands in the dtype of an autocast region, as torch.nn.functional.linear takes them."""
    kind = "cuda" if getattr(operands[0], "is_cuda", False) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return list(operands)
    dtype = torch.get_autocast_dtype(kind)
    return [
        x if x is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(dtype)
        for x in operands
    ]


class _Torch(Functions):
    """The public functions over the operators below."""

    what = "PyTorch's autograd, transformations, modes and tracing"
    arrays = torch
    checked = staticmethod(_checked)
    moves = staticmethod(moves)

    def product(self, a: Any, b: Any, bias: Any, how: How) -> Any:
        a, b, bias = _autocast(a, b, bias)
        _checked(a=a, b=b, bias=bias)
        return _PRODUCT(a, b, bias, how=how)[0]

    def product_bwd(self, grad: Any, a: Any, b: Any, bias: Any, how: How) -> Any:
        _checked(grad=grad, a=a, b=b, bias=bias)
        return _PRODUCT_BWD[how.needs](grad, a, b, bias, None, how=how) if how.needs else ()

    def product_bwd_saved(self, grad: Any, a: Any, b: Any, bias: Any, pre: Any, how: How) -> Any:
        _checked(grad=grad, a=a, b=b, bias=bias, pre_activation=pre)
        return _PRODUCT_BWD[how.needs](grad, a, b, bias, pre, how=how) if how.needs else ()

    def product_double(
        self, u: Any, v: Any, w: Any, grad: Any, a: Any, b: Any, bias: Any, how: How
    ) -> Any:
        _checked(u=u, v=v, w=w, grad=grad, a=a, b=b, bias=bias)
        op = _PRODUCT_DOUBLE.get(how.needs)
        return () if op is None else op(u, v, w, grad, a, b, bias, None, how=how)

    def product_double_saved(
        self, u: Any, v: Any, w: Any, grad: Any, a: Any, b: Any, bias: Any, pre: Any, how: How
    ) -> Any:
        _checked(u=u, v=v, w=w, grad=grad, a=a, b=b, bias=bias, pre_activation=pre)
        op = _PRODUCT_DOUBLE.get(how.needs)
        return () if op is None else op(u, v, w, grad, a, b, bias, pre, how=how)

    def product_tangent(self, a: Any, b: Any, bias: Any, u: Any, v: Any, w: Any, how: How) -> Any:
        _checked(a=a, b=b, bias=bias, a_dot=u, b_dot=v, bias_dot=w)
        return _PRODUCT_TANGENT(a, b, bias, u, v, w, how=how)[0]

    def residual(self, a: Any, b: Any, bias: Any, residual: Any, how: How) -> Any:
        a, b, bias, residual = _autocast(a, b, bias, residual)
        _checked(a=a, b=b, bias=bias, residual=residual)
        return _RESIDUAL(a, b, bias, residual, how=how)[0]

    def gate(self, a: Any, b: Any, how: How) -> Any:
        a, b = _autocast(a, b)
        _checked(a=a, b=b)
        return _GATE(a, b, how=how)[0]

    def gate_bwd(self, grad: Any, a: Any, b: Any, how: How) -> Any:
        _checked(grad=grad, a=a, b=b)
        return _GATE_BWD[how.needs](grad, a, b, how=how) if how.needs else ()

    def gate_double(self, u: Any, v: Any, grad: Any, a: Any, b: Any, how: How) -> Any:
        _checked(u=u, v=v, grad=grad, a=a, b=b)
        op = _GATE_DOUBLE.get(how.needs)
        return () if op is None else op(u, v, grad, a, b, how=how)

    def gate_tangent(self, a: Any, b: Any, u: Any, v: Any, how: How) -> Any:
        _checked(a=a, b=b, a_dot=u, b_dot=v)
        return _GATE_TANGENT(a, b, u, v, how=how)[0]

    def _no_out(self, out: Any) -> None:
        if out is not None:
            _outputs(out)
        super()._no_out(out)

    def sum_to(self, x: Any, shape: Sequence[int]) -> Any:
        # (an operator's output may not be its input, and nor may this one's)
        return x.clone() if x.shape == torch.Size(shape) else x.sum_to_size(shape)

    def widened(self, x: Any) -> Any:
        return x if x.dtype == torch.float64 else x.float()

    def ones_like(self, x: Any) -> Any:
        return x.new_ones(()).expand(x.shape)  # one element in every place

    def narrowed(self, x: Any, like: Any) -> Any:
        return x.to(like.dtype)

    def saved_dtypes(self, like: Any) -> tuple[Any, ...]:
        return torch.float64 if like.dtype == torch.float64 else torch.float32, like.dtype


FUNCTIONS: Any = _Torch()


def _bare(values: Iterable[Any]) -> Tensor | None:
    """The first tensor, where all are of one device and nothing is to be derived or traced."""
    first: Tensor | None = None
    grad = torch.is_grad_enabled()
    flat: list[Any] = []
    for x in values:  # (of needs, or of out)
        flat.extend(x) if type(x) is tuple or type(x) is list else flat.append(x)
    for x in flat:
        if type(x) in _TENSORS:
            if (grad and x.requires_grad) or x.layout != torch.strided:
                return None
            first = x if first is None else first
            if x.device != first.device:
                return None
        elif isinstance(x, (Tensor, np.ndarray)):
            return None
    if first is None or not (first.is_cpu or first.is_cuda):
        return None
    return None if _watched(first.device.type) else first


def _watched(kind: str) -> bool:
    """Whether something beside the call has a say: a transformation, forward mode, a mode of the
    user's or of PyTorch's own tracers, autocast.
    """
    # Each question is a call into C of some 30 ns, made here without another function around it.
    # CUDA's autocast is PyTorch's default, in a fifth of the time that a name takes.
    return bool(
        in_functorch()
        or forward_ad._current_level >= 0
        or _modes()
        or (_function_modes() and _functions_watched())
        or _is_tracing()
        or (torch.is_autocast_enabled() if kind == "cuda" else torch.is_autocast_enabled(kind))
    )


_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_is_tracing: Callable[[], bool] = torch._C._is_tracing


def _functions_watched() -> bool:
    """Whether a mode has a say in functions that make no tensor out of nothing."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


_TENSORS = frozenset({Tensor, nn.Parameter})


def _outputs(out: Any) -> list[Any]:
    """The tensors of `out`, which may be written to: checked before anything is computed."""
    outs = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if x is not None]
    for x in outs:
        if not isinstance(x, Tensor):
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"out must be a torch.Tensor as the operands, got {kind}")
        if is_lazy(x):
            raise ValueError(
                "out must hold its values in its memory, got a tensor with a negative bit or one "
                "of zeros without memory"
            )
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "out must be no inference tensor outside of torch.inference_mode(), where PyTorch "
                "does not let one be written to, got one: out.clone() is a tensor like others"
            )
    return outs


def _in_memory(x: Any) -> Any:
    """An argument of a call over memory that holds its values."""
    return own_values(x) if isinstance(x, Tensor) and is_lazy(x) else x


def _array(x: Any, known: dict[int, Tensor]) -> Any:
    """An argument of a call as the core takes it; `known` keeps the tensors of arrays."""
    if isinstance(x, Tensor):
        made = to_numpy(x)
        known[id(made)] = x
        return made
    if isinstance(x, (tuple, list)) and any(isinstance(y, Tensor) for y in x):
        return tuple(_array(y, known) for y in x)
    return x


def _result(x: Any, known: dict[int, Tensor]) -> Any:
    """A result of the core as tensors: the caller's own where they were given."""
    if isinstance(x, np.ndarray):
        return known[id(x)] if id(x) in known else to_tensor(x)
    if isinstance(x, tuple):
        made = [_result(y, known) for y in x]
        return x._make(made) if hasattr(x, "_make") else tuple(made)
    return x


def _public(name: str) -> Any:
    derived = getattr(FUNCTIONS, name)

    base, gate = gate_of(name)

    @functools.wraps(derived)
    def call(*args: Any, **options: Any) -> Any:
        # An operator of PyTorch costs 50 us more than the call: it is for what is differentiated.
        first: Any = None
        if not torch.compiler.is_compiling():
            first = args[0] if args else None
            if type(first) in _TENSORS and first.is_cuda and not _watched("cuda"):
                made = on_cuda().again(base, args + gate, options)
                if made is not None:
                    return made
            first = _bare((*args, *options.values()))
        if first is None:
            return derived(*args, **options)
        out = options.get("out")
        outs = () if out is None else _outputs(out)
        if first.is_cuda:
            operands = [_in_memory(x) for x in args]
            named = {key: _in_memory(x) for key, x in options.items()}
            found = served(on_cuda(), name)(*operands, **named)
        else:
            known: dict[int, Tensor] = {}
            operands = [_array(x, known) for x in args]
            named = {key: _array(x, known) for key, x in options.items()}
            found = _result(served(CORE, name)(*operands, **named), known)
        for x in outs:
            # What a backward keeps of it is noticed, as where PyTorch itself writes.
            if not x.is_inference():
                increment_version(x)
        return found

    return call


globals().update({name: _public(name) for name in NAMES})


_GATED = _public("activation_mul")


def activation(x: Any, activation: Any) -> Any:
    """The values of an activation at a tensor, on its device and differentiable."""
    return _GATED(x, FUNCTIONS.ones_like(x), activation)


# --- operators ----------------------------------------------------------------------------------
def _product(
    library: Any, a: Any, b: Any, bias: Any, act: Any, *, guard: bool, backend: Any
) -> Any:
    return library.matmul_bias_activation(a, b, bias, act, backend=backend)


def _product_tangent(
    library: Any,
    a: Any,
    b: Any,
    bias: Any,
    u: Any,
    v: Any,
    w: Any,
    act: Any,
    *,
    guard: bool,
    backend: Any,
) -> Any:
    return library.matmul_bias_activation_jvp(
        a, b, bias, u, v, w, act, guard=guard, backend=backend
    ).out_dot


def _residual(
    library: Any, a: Any, b: Any, bias: Any, residual: Any, act: Any, *, guard: bool, backend: Any
) -> Any:
    return library.matmul_bias_residual(a, b, bias, residual, backend=backend)


def _gate(library: Any, a: Any, b: Any, act: Any, *, guard: bool, backend: Any) -> Any:
    return library.activation_mul(a, b, act, backend=backend)


def _gate_tangent(
    library: Any, a: Any, b: Any, u: Any, v: Any, act: Any, *, guard: bool, backend: Any
) -> Any:
    return library.activation_mul_jvp(a, b, u, v, act, guard=guard, backend=backend).out_dot


def _product_bwd(
    library: Any, grad: Any, a: Any, b: Any, bias: Any, pre: Any, act: Any, **how: Any
) -> Any:
    return library.matmul_bias_activation_bwd(grad, a, b, bias, act, pre_activation=pre, **how)


def _product_double(
    library: Any,
    u: Any,
    v: Any,
    w: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    pre: Any,
    act: Any,
    **how: Any,
) -> Any:
    return library.matmul_bias_activation_double_bwd(
        u, v, w, grad, a, b, bias, act, pre_activation=pre, **how
    )


def _product_bwd_pieces(grad: Any, a: Any, b: Any, bias: Any, pre: Any, how: How) -> Any:
    return FUNCTIONS.product_bwd_pieces(grad, a, b, bias, how, pre)


def _product_double_pieces(
    u: Any, v: Any, w: Any, grad: Any, a: Any, b: Any, bias: Any, pre: Any, how: How
) -> Any:
    return FUNCTIONS.product_double_pieces(u, v, w, grad, a, b, bias, how, pre)


def _product_bwd_backward(ctx: Any, x: Any, how: How, *gs: Any) -> Any:
    """Gradients of the backward: fused, or beside that of a saved pre-activation."""
    u, v, w = placed(gs, GEMM_NEEDS, how.needs)
    grad, a, b, bias, pre = x
    needs = wanted(ctx, (*GEMM_SECOND_NEEDS, "pre"))
    if "pre" not in needs:
        found = FUNCTIONS.product_double(u, v, w, grad, a, b, bias, how._replace(needs=needs))
        return placed(found, GEMM_SECOND_NEEDS, needs)
    parts = pieces.double_backward(
        FUNCTIONS, u, v, w, grad, a, b, bias, how.activation, needs, how.backend, pre
    )
    return [parts.get(name) for name in (*GEMM_SECOND_NEEDS, "pre")]


def _product_bwd_forward(x: Any, how: How, *dots: Any) -> Any:
    """Forward mode of the backward: of a product alone it is bilinear."""
    if not pieces.is_linear(how.activation):
        return through(_product_bwd_pieces, 4)[1](x, how, *dots)
    grad_dot, a_dot, b_dot, _, _ = dots
    grad, a, b, bias, _ = x
    return pieces.linear_backward_tangent(FUNCTIONS, grad, a, b, bias, grad_dot, a_dot, b_dot, how)


def _residual_forward(x: Any, how: How, u: Any, v: Any, w: Any, z: Any) -> Any:
    a, b, bias, residual = x
    dots = FUNCTIONS.matmul_bias_residual_jvp(a, b, bias, residual, u, v, w, z, backend=how.backend)
    return (dots.out_dot,)


_PRODUCT = Op(
    "product",
    _product,
    "a:a b:b bias:c?",
    "o",
    fused(GEMM_NEEDS, lambda gs, x, _, how: FUNCTIONS.product_bwd(gs[0], *x, how)),
    lambda x, how, *dots: (FUNCTIONS.product_tangent(*x, *dots, how),),
)
_PRODUCT_BWD = {
    needs: Op(
        "product_bwd",
        _product_bwd,
        "grad:o a:a b:b bias:c? pre:o?",
        "abc",
        _product_bwd_backward,
        _product_bwd_forward,
        GEMM_NEEDS,
        needs,
    )
    for needs in sets(GEMM_NEEDS)
}
_PRODUCT_DOUBLE = {
    needs: Op(
        "product_double",
        _product_double,
        "u:a? v:b? w:c? grad:o a:a b:b bias:c? pre:o?",
        "oabc",
        *through(_product_double_pieces, 7),
        GEMM_SECOND_NEEDS,
        needs,
    )
    for needs in sets(GEMM_SECOND_NEEDS)
}
_PRODUCT_TANGENT = Op(
    "product_tangent",
    _product_tangent,
    "a:a b:b bias:c? u:a? v:b? w:c?",
    "o",
    *through(FUNCTIONS.product_tangent_pieces),
)
_RESIDUAL = Op(
    "residual",
    _residual,
    "a:a b:b bias:c? residual:r",
    "o",
    lambda ctx, x, how, g: FUNCTIONS.matmul_bias_residual_bwd(
        g, *x, needs=wanted(ctx, RESIDUAL_NEEDS), backend=how.backend
    ),
    _residual_forward,
)
_GATE = Op(
    "gate",
    _gate,
    "a:e b:e",
    "e",
    fused(GATED_NEEDS, lambda gs, x, _, how: FUNCTIONS.gate_bwd(gs[0], *x, how)),
    lambda x, how, *dots: (FUNCTIONS.gate_tangent(*x, *dots, how),),
)
_GATE_BWD = {
    needs: Op(
        "gate_bwd",
        "activation_mul_bwd",
        "grad:e a:e b:e",
        "ee",
        fused(
            GATED_SECOND_NEEDS,
            lambda gs, x, own, how: FUNCTIONS.gate_double(
                *placed(gs, GATED_NEEDS, own.needs), *x, how
            ),
        ),
        through(FUNCTIONS.gate_bwd_pieces)[1],
        GATED_NEEDS,
        needs,
    )
    for needs in sets(GATED_NEEDS)
}
_GATE_DOUBLE = {
    needs: Op(
        "gate_double",
        "activation_mul_double_bwd",
        "u:e? v:e? grad:e a:e b:e",
        "eee",
        *through(FUNCTIONS.gate_double_pieces),
        GATED_SECOND_NEEDS,
        needs,
    )
    for needs in sets(GATED_SECOND_NEEDS)
}
_GATE_TANGENT = Op(
    "gate_tangent",
    _gate_tangent,
    "a:e b:e u:e? v:e?",
    "e",
    *through(FUNCTIONS.gate_tangent_pieces),
)


# --- modules ------------------------------------------------------------------------------------
class Linear(nn.Linear):
    """torch.nn.Linear with its activation fused: activation(x @ weight.T + bias).

    Parameters
    ----------
    in_features, out_features : int
    bias : bool, default True
    activation : str or numfuse.Activation, default "none"
    device, dtype : optional
        As those of torch.nn.Linear, whose parameters and state these are.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: Any = "none",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation: Activation = get(activation)

    @classmethod
    def from_torch(cls, linear: nn.Linear, activation: Any = "none") -> Linear:
        """A layer with the parameters of `linear`: the same ones, not copies."""
        made = cls(1, 1, linear.bias is not None, activation, device="meta")
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made.weight, made.bias = linear.weight, linear.bias
        made.train(linear.training)
        return made

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = FUNCTIONS.matmul_bias_activation(
            x, self.weight.t(), self.bias, self.activation
        )
        return found

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation.name!r}"


class GatedLinear(nn.Module):
    """A gated layer: activation(gate(x)) * up(x), `gate` and `up` linear.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool, default False
    activation : str or numfuse.Activation, default "silu"
        SwiGLU's; "gelu" and "sigmoid" are those of GeGLU and GLU.
    device, dtype : optional
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        activation: Any = "silu",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.gate = Linear(in_features, out_features, bias, "none", device, dtype)
        self.up = Linear(in_features, out_features, bias, "none", device, dtype)
        self.activation: Activation = get(activation)

    @classmethod
    def from_torch(cls, gate: nn.Linear, up: nn.Linear, activation: Any = "silu") -> GatedLinear:
        """A layer with the parameters of `gate` and `up`: the same ones, not copies."""
        made = cls(1, 1, activation=activation, device="meta")
        made.gate, made.up = Linear.from_torch(gate), Linear.from_torch(up)
        return made

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = FUNCTIONS.activation_mul(self.gate(x), self.up(x), self.activation)
        return found

    def extra_repr(self) -> str:
        return f"activation={self.activation.name!r}"


# Imported in advance, the adapter is found where torch.compile follows a call.
dispatch.serve(sys.modules[__name__], _TENSORS)
