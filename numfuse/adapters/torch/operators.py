"""The parts of an operation as an operator of PyTorch: a schema, shapes, derivatives, batches.

An operator is a custom operator over the tensors' own memory, whose backward is the next fused
operation or, where there is none, goes through its pieces (`numfuse.adapters.pieces`). Under
torch.func and in forward mode, for which custom operators have no rules, the same operator runs
inside a torch.autograd.Function. An operator cannot return None, so there is one for every set of
gradients that is asked for.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.autograd import forward_ad

from numfuse import differentials, functional
from numfuse.activations import activations, get
from numfuse.adapters.surface import NAMES, How, made
from numfuse.problem.shapes import gemm_shape, residual_view

__all__ = [
    "CORE",
    "Op",
    "fused",
    "in_functorch",
    "is_lazy",
    "moves",
    "on_cuda",
    "own_values",
    "placed",
    "sets",
    "through",
    "to_numpy",
    "to_tensor",
    "transformed",
    "wanted",
]

#: The public functions over NumPy arrays.
CORE = SimpleNamespace(
    **{n: getattr(functional if hasattr(functional, n) else differentials, n) for n in NAMES}
)


# --- memory -------------------------------------------------------------------------------------
def to_numpy(x: Any) -> Any:
    """As :func:`numfuse.to_numpy`: the same memory where that is the CPU's."""
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        return own_values(x).cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    # In one step: detached, on the CPU, and what a negative bit or a tensor of zeros stands for.
    return x.numpy(force=True)


def is_lazy(x: Tensor) -> bool:
    """Whether the memory holds the negative of the values, or a tensor of zeros has none."""
    return x.is_neg() or x._is_zerotensor()


def own_values(x: Tensor) -> Tensor:
    """The tensor over memory that holds its values."""
    x = x.detach()
    return torch.zeros_like(x) if x._is_zerotensor() else x.resolve_neg()


def _itself(x: Tensor) -> Tensor:
    return x


def to_tensor(x: ndarray) -> Tensor:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


# --- what a schema cannot name ------------------------------------------------------------------
#: Activations that are held for the strings that stand for them.
_HELD = 64


class _Activations(dict[str, Any]):
    """Activations by the strings that stand for them in a graph of PyTorch's.

    A compiled graph knows a string for as long as it lives. The object behind it holds its kernels,
    so only the latest `_HELD` are kept as objects; of the others there is a text of some kilobytes,
    from which one is made again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[str, bytes] = {}

    def hold(self, key: str, activation: Any) -> None:
        """Keep an activation; the oldest beyond `_HELD` becomes its text."""
        self[key] = activation
        while len(self) > _HELD:
            try:
                oldest = next(iter(self))
            except (RuntimeError, StopIteration):  # another thread was here
                continue
            gone = self.get(oldest)
            if gone is not None:
                self._texts.setdefault(oldest, pickle.dumps(gone))
            self.pop(oldest, None)

    def __missing__(self, key: str) -> Any:
        made = pickle.loads(self._texts[key])
        self.hold(key, made)
        return made


_ACTIVATIONS = _Activations()
_BACKENDS: dict[str, Any] = {}


# torch.compile runs it, where it cannot follow the hashing of a formula, and keeps the string.
@torch.compiler.assume_constant_result
def key_of(activation: Any) -> str:
    """A string that stands for an activation: equal for equal formulas, in any process."""
    act = get(activation)
    key = act.key
    if key is None:
        key = act.key = f"{act.name} {act.digest}"
    if key not in _ACTIVATIONS:
        _ACTIVATIONS.hold(key, act)
    return key


# torch.compile follows a call only as far as to read this string, not into the making of it.
for _act in activations().values():
    key_of(_act)


def _backend_key(backend: Any) -> str | None:
    if backend is None or isinstance(backend, str):
        return backend
    key = f"{backend.name} at {id(backend)}"
    _BACKENDS[key] = backend
    return key


def _backend(key: str | None) -> Any:
    return None if key is None else _BACKENDS.get(key, key)


def on_cuda() -> Any:
    """The public functions over tensors of a GPU, without derivatives."""
    return sys.modules.get("numfuse.adapters.cuda") or import_module("numfuse.adapters.cuda")


#: Whether torch.func is at work.
in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def transformed() -> bool:
    """Whether torch.func or forward mode is at work."""
    return in_functorch() or forward_ad._current_level >= 0


def moves(x: Tensor) -> bool:
    """Whether a derivative may go through a tensor."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():
        return False
    if in_functorch():
        return torch._C._functorch.is_functorch_wrapped_tensor(x)
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


# --- operators ----------------------------------------------------------------------------------
class Op:
    """A custom operator with everything that PyTorch asks of it.

    Parameters
    ----------
    name : str
    run : str or callable
        A public function's name; or a function of those that have them, then of arrays, the
        activation and, by keyword, `how`.
    operands : str
        Words ``name:kind``. The kind says what is done under vmap: a, b, c (bias), r (residual) and
        o (result) of a product, e of a gate; "?" marks what may be None.
    results : str
        The kind of each.
    backward : callable
        (ctx, operands, how, *cotangents) to a gradient for each operand.
    forward : callable
        (operands, how, *tangents) to the tangents of the results.
    names, needs : tuples of str
        Of gradients: all of them, and those that this operator returns.
    """

    def __init__(
        self,
        name: str,
        run: str | Callable[..., Any],
        operands: str,
        results: str,
        backward: Callable[..., Any],
        forward: Callable[..., Any],
        names: tuple[str, ...] | None = None,
        needs: tuple[str, ...] = (),
    ) -> None:
        self._run, self._names, self._needs = run, names, needs
        self._backward, self._forward = backward, forward
        self._kinds = [word.partition(":")[2].removesuffix("?") for word in operands.split()]
        self._results = list(results)
        if names is not None:
            self._results = [k for k, n in zip(results, names, strict=True) if n in needs]
            name = "_".join((name, *needs))
        parts = [
            f"Tensor{'?' if word.endswith('?') else ''} {word.partition(':')[0]}"
            for word in operands.split()
        ]
        returned = ", ".join(["Tensor"] * len(self._results))
        if len(self._results) > 1:
            returned = f"({returned})"
        self.op = torch.library.custom_op(
            f"numfuse::{name}",
            self._on_memory,
            mutates_args=(),
            schema=f"({', '.join(parts)}, str activation, bool guard, str? backend) -> {returned}",
        )
        self.op.register_fake(self._shapes)
        self.op.register_autograd(self._pull, setup_context=self._keep)
        self.op.register_vmap(self._vmapped)
        self._function = self._as_function(name)

    def __call__(self, *operands: Any, how: How) -> tuple[Any, ...]:
        key = how.activation.key or key_of(how.activation)
        args = (*operands, key, how.guard, _backend_key(how.backend))
        found = self._dispatched(*args)
        return found if len(self._results) > 1 else (found,)

    def _dispatched(self, *args: Any) -> Any:
        if not torch.compiler.is_compiling() and transformed():
            return self._function.apply(*args)
        return self.op(*args)

    def _on_memory(self, *args: Any) -> Any:
        *tensors, activation, guard, backend = args
        how = {"backend": _backend(backend), "guard": guard}
        if self._names is not None:
            how["needs"] = self._needs
        library: Any = CORE
        read: Any = to_numpy
        write: Any = to_tensor
        if any(x is not None and x.is_cuda for x in tensors):
            library, read, write = on_cuda(), own_values, _itself
        arrays = [None if x is None else read(x) for x in tensors]
        run = self._run
        if isinstance(run, str):
            found = getattr(library, run)(*arrays, _ACTIVATIONS[activation], **how)
        else:
            found = run(library, *arrays, _ACTIVATIONS[activation], **how)
        if self._names is None:
            return write(found)
        results = tuple(write(x) for x in made(found, self._names, self._needs))
        return results if len(results) > 1 else results[0]

    def _by_kind(self, operands: Sequence[Any]) -> dict[str, Any]:
        """One operand of each kind: a cotangent or a tangent looks like what it belongs to."""
        at: dict[str, Any] = {}
        for kind, x in zip(self._kinds, operands, strict=True):
            if at.get(kind) is None:
                at[kind] = x
        return at

    def _shapes(self, *args: Any) -> Any:
        """Results without values."""
        at = self._by_kind(args[: len(self._kinds)])
        found = []
        for kind in self._results:
            if kind == "o" and "o" not in at:
                shape, *_ = gemm_shape(at["a"], at["b"], at["c"])
                if "r" in at:
                    residual_view(shape, at["r"])
                found.append(at["a"].new_empty(shape.visible))
            else:
                found.append(at[kind].new_empty(at[kind].shape))
        return tuple(found) if len(found) > 1 else found[0]

    # --- derivatives ----------------------------------------------------------------------------
    def _keep(self, ctx: Any, inputs: Any, output: Any) -> None:
        count = len(self._kinds)
        ctx.save_for_backward(*inputs[:count])
        backend = _backend(inputs[-1])
        ctx.how = How(_ACTIVATIONS[inputs[count]], self._needs, inputs[count + 1], backend)
        ctx.set_materialize_grads(False)

    def _pull(self, ctx: Any, *gs: Any) -> Any:
        found: Any = [None] * len(self._kinds)
        if any(g is not None for g in gs):
            found = self._backward(ctx, ctx.saved_tensors, ctx.how, *gs)
        rest = len(self._kinds) - len(found)
        return (*found, *[None] * rest, None, None, None)

    def _push(self, ctx: Any, *tangents: Any) -> Any:
        found = self._forward(ctx.saved_tensors, ctx.how, *tangents[: len(self._kinds)])
        return tuple(found) if len(self._results) > 1 else found[0]

    def _as_function(self, name: str) -> Any:
        """The operator for torch.func and forward mode."""

        def keep(ctx: Any, inputs: Any, output: Any) -> None:
            self._keep(ctx, inputs, output)
            ctx.save_for_forward(*inputs[: len(self._kinds)])

        methods: dict[str, Any] = {
            "forward": lambda *args: self.op(*args),
            "setup_context": keep,
            "backward": self._pull,
            "jvp": self._push,
            "vmap": self._vmapped,
        }
        statics: dict[str, Any] = {}
        for key, method in methods.items():
            statics[key] = staticmethod(method)
        return type(f"numfuse_{name}", (torch.autograd.Function,), statics)

    # --- batches --------------------------------------------------------------------------------
    def _vmapped(self, info: Any, dims: Any, *args: Any) -> Any:
        """One more axis, the first: every operation has batch axes of its own."""
        count = len(self._kinds)
        operands = []
        for x, dim in zip(args[:count], dims[:count], strict=True):
            if x is not None:  # what is not batched is expanded: a view, nothing is copied
                x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            operands.append(x)
        at = self._by_kind(operands)
        if "e" in at:
            found = self._dispatched(*operands, *args[count:])
            return found, (0,) * len(found) if isinstance(found, tuple) else 0
        # Each member as matrices, with as many batch axes as the one that has the most.
        row, column = at["a"].ndim == 2, at["b"].ndim == 2
        rank = max(3, *(at[kind].ndim for kind in "abc" if at[kind] is not None))

        def matrices(x: Any, kind: str) -> Any:
            if x is None:
                return None
            if kind in "or":
                visible = rank - row - column
                x = x.reshape(x.shape[0], *(1,) * (visible - x.ndim), *x.shape[1:])
                x = x.unsqueeze(-1) if column else x
                return x.unsqueeze(-2) if row else x
            if (kind == "a" and row) or (kind == "c" and x.ndim == 2):
                x = x.unsqueeze(-2)
            elif kind == "b" and column:
                x = x.unsqueeze(-1)
            return x.reshape(x.shape[0], *(1,) * (rank - x.ndim), *x.shape[1:])

        full = [matrices(x, kind) for x, kind in zip(operands, self._kinds, strict=True)]
        found = self._dispatched(*full, *args[count:])
        outs = []
        several = found if isinstance(found, tuple) else (found,)
        for out, kind in zip(several, self._results, strict=True):
            if kind == "o":
                out = out.squeeze(-1) if column else out
                out = out.squeeze(-1 if column else -2) if row else out
            else:
                out = out.reshape(at[kind].shape)
            outs.append(out)
        return (tuple(outs), (0,) * len(outs)) if isinstance(found, tuple) else (outs[0], 0)


# --- their derivatives --------------------------------------------------------------------------
def sets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every set of names but the empty one."""
    return [
        tuple(name for i, name in enumerate(names) if bits >> i & 1)
        for bits in range(1, 1 << len(names))
    ]


def wanted(ctx: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """The operands, in front of all others, that need a gradient."""
    flags = ctx.needs_input_grad[: len(names)]
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


def placed(found: Any, names: tuple[str, ...], needs: tuple[str, ...]) -> list[Any]:
    """Results that are there, each in the place of its name."""
    parts = iter(found)
    return [next(parts) if name in needs else None for name in names]


def fused(names: tuple[str, ...], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an operator by one call: (cotangents, operands, its how, the call's how)."""

    def pull(ctx: Any, x: Any, how: How, *gs: Any) -> Any:
        needs = wanted(ctx, names)
        return placed(backward(gs, x, how, how._replace(needs=needs)), names, needs)

    return pull


def through(
    composite: Callable[..., Any], saved: int | None = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The backward and the forward mode of an operator through what it is made of.

    `saved` is the place of a pre-activation. Where no derivative goes through that, it is made
    again: it stands for what it was made of.
    """

    def replaced(operands: Any, how: How, at: Sequence[int]) -> Callable[..., tuple[Any, ...]]:
        def call(*values: Any) -> tuple[Any, ...]:
            every = list(operands)
            if saved is not None:
                every[saved] = None
            for i, value in zip(at, values, strict=True):
                every[i] = value
            outs = composite(*every, how)
            return outs if isinstance(outs, tuple) else (outs,)

        return call

    def pull(ctx: Any, operands: Any, how: How, *gs: Any) -> Any:
        at = [i for i in range(len(operands)) if ctx.needs_input_grad[i]]
        call = replaced(operands, how, at)
        found: list[Any] = [None] * len(operands)
        if in_functorch():
            outs, back, *_ = torch.func.vjp(call, *(operands[i] for i in at))
            full = (torch.zeros_like(o) if g is None else g for o, g in zip(outs, gs, strict=True))
            gradients = back(tuple(full))
        else:
            again = torch.is_grad_enabled()
            with torch.enable_grad():
                # Views of their own: an operand that was computed from another counts as an
                # operand, and the other's gradient has no part of it.
                views = [operands[i].view_as(operands[i]) for i in at]
                pairs = [
                    (out, g)
                    for out, g in zip(call(*views), gs, strict=True)
                    if g is not None and out.requires_grad
                ]
                if not pairs:
                    return found
                gradients = torch.autograd.grad(
                    [out for out, _ in pairs],
                    views,
                    [g for _, g in pairs],
                    create_graph=again,
                    allow_unused=True,
                )
        for i, gradient in zip(at, gradients, strict=True):
            found[i] = gradient
        return found

    def push(operands: Any, how: How, *tangents: Any) -> Any:
        at = [i for i, t in enumerate(tangents) if t is not None]
        call = replaced(operands, how, at)
        if in_functorch():
            primals = tuple(operands[i] for i in at)
            return torch.func.jvp(call, primals, tuple(tangents[i] for i in at))[1]
        # Outside of torch.func there is one level of forward mode, which is switched off while a
        # rule of it runs; torch.func.jvp would open a second one.
        with forward_ad._set_fwd_grad_enabled(True):
            duals = [
                forward_ad.make_dual(forward_ad.unpack_dual(operands[i]).primal, tangents[i])
                for i in at
            ]
            found = [forward_ad.unpack_dual(out) for out in call(*duals)]
        return tuple(
            torch.zeros_like(out.primal) if out.tangent is None else out.tangent for out in found
        )

    return pull, push
