"""A primitive as an operator of PyTorch: a schema, shapes, derivatives, batches.

An operator is a custom operator over the tensors' own memory, whose backward is the next fused
operation or, where there is none, goes through its pieces (`numfuse.adapters.torch.rules`). Under
torch.func and in forward mode, for which custom operators have no rules, the same operator runs
inside a torch.autograd.Function. An operator cannot return None, so there is one for every set of
gradients that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from numfuse.adapters.primitives import CORE, How, Primitive, matrices
from numfuse.adapters.torch.keys import activation_of, backend_key, backend_of, key_of
from numfuse.adapters.torch.tensors import (
    array_over,
    in_functorch,
    own_values,
    run_beside,
    to_tensor,
    transformed,
)
from numfuse.problem.shapes import gemm_shape, residual_view

#: Return the public functions over tensors of a GPU, without derivatives.
on_cuda: Callable[[], Any] = cache(partial(import_module, "numfuse.adapters.cuda"))


#: What has an `apply` with all of torch.func's rules, by name.
BY_NAME: dict[str, Any] = {}


# torch.compile does not follow it: torch.func makes of an operator what it makes of it eagerly.
@torch.compiler.allow_in_graph
def in_graph(name: str, *args: Any) -> Any:
    """Return what `BY_NAME` has of this name at arguments, in a program of torch.compile."""
    # A graph of torch.compile enters levels of forward mode without PyTorch's own count of them.
    entered = torch._C._functorch.get_interpreter_stack() or ()
    count = sum(level.key() == torch._C._functorch.TransformType.Jvp for level in entered)
    kept = eager_transforms.JVP_NESTING, forward_ad._current_level
    eager_transforms.JVP_NESTING = max(kept[0], count)
    forward_ad._current_level = max(kept[1], min(count, 1) - 1)
    try:
        return BY_NAME[name].apply(*args)
    finally:
        eager_transforms.JVP_NESTING, forward_ad._current_level = kept


class Op:
    """A custom operator with everything that PyTorch asks of it, for the gradients `needs`.

    A saved pre-activation is its last operand where the primitive takes one. `backward` is a
    function from (ctx, operands, how, *cotangents) to a gradient for each operand, `forward` from
    (operands, how, *tangents) to the tangents of the results.
    """

    def __init__(
        self,
        primitive: Primitive,
        backward: Callable[..., Any],
        forward: Callable[..., Any],
        needs: tuple[str, ...] = (),
    ) -> None:
        self._primitive, self._needs = primitive, needs
        self._backward, self._forward = backward, forward
        self._kinds = list(primitive.kinds)
        parts = [
            f"Tensor{'?' if optional else ''} {name}"
            for name, optional in zip(primitive.operands, primitive.optional, strict=True)
        ]
        if primitive.takes_saved:
            self._kinds.append("o")
            parts.append("Tensor? pre_activation")
        self._results = primitive.wanted(needs)
        name = "_".join((primitive.name, *needs))
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
        self._name, self.apply = name, self._as_function(name).apply
        BY_NAME[name] = self

    def __call__(self, *operands: Any, how: How) -> tuple[Any, ...]:
        key = how.activation.key or key_of(how.activation)
        args = (*operands, key, how.guard, backend_key(how.backend))
        found = self._dispatched(*args)
        return found if len(self._results) > 1 else (found,)

    def _dispatched(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return in_graph(self._name, *args) if in_functorch() else self.op(*args)
        return self.apply(*args) if transformed() else self.op(*args)

    def _read(self, args: Sequence[Any]) -> tuple[list[Any], How]:
        """Return the tensors and the How of an operator's arguments."""
        *tensors, activation, guard, backend = args
        how = How(activation_of(activation), self._needs, guard, backend_of(backend))
        return tensors, how

    def _on_memory(self, *args: Any) -> Any:
        tensors, how = self._read(args)
        cuda = any(x is not None and x.is_cuda for x in tensors)
        read: Any = own_values if cuda else array_over
        operands = [None if x is None else read(x) for x in tensors]
        pre = operands.pop() if self._primitive.takes_saved else None
        library = on_cuda() if cuda else CORE
        found = run_beside(self._primitive.run, library, how, *operands, pre=pre)
        several = found if isinstance(found, tuple) else (found,)
        results = several if cuda else tuple(map(to_tensor, several))
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
        tensors, ctx.how = self._read(inputs)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    def _pull(self, ctx: Any, *gs: Any) -> Any:
        found: Any = [None] * len(self._kinds)
        if any(g is not None for g in gs):
            found = self._backward(ctx, ctx.saved_tensors, ctx.how, *gs)
        rest = len(self._kinds) - len(found)
        return (*found, *[None] * rest, None, None, None)

    def _push(self, ctx: Any, *tangents: Any) -> Any:
        # PyTorch switches forward mode off while a rule runs, for all levels of torch.func: outer
        # ones watch what is done here. The operator's own level is left by its primals.
        with forward_ad._set_fwd_grad_enabled(True):
            operands = [
                None if x is None else forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors
            ]
            found = self._forward(operands, ctx.how, *tangents[: len(self._kinds)])
        return tuple(found) if len(self._results) > 1 else found[0]

    def _as_function(self, name: str) -> Any:
        """The operator for torch.func and forward mode."""

        def keep(ctx: Any, inputs: Any, output: Any) -> None:
            self._keep(ctx, inputs, output)
            ctx.save_for_forward(*inputs[: len(self._kinds)])

        methods: dict[str, Any] = {
            "forward": staticmethod(lambda *args: self.op(*args)),
            "setup_context": staticmethod(keep),
            "backward": staticmethod(self._pull),
            "jvp": staticmethod(self._push),
            "vmap": staticmethod(self._vmapped),
        }
        return type(f"numfuse_{name}", (torch.autograd.Function,), methods)

    # --- batches --------------------------------------------------------------------------------
    def _vmapped(self, info: Any, dims: Any, *args: Any) -> Any:
        """One more axis, the first: every operation has batch axes of its own."""
        count, size = len(self._kinds), info.batch_size
        operands = self._in_rows(size, dims, args[:count])
        as_matrices = operands is None and "a" in self._kinds
        if operands is None:
            operands = [  # what is not batched is expanded: a view, nothing is copied
                x if x is None else x.movedim(d, 0) if d is not None else x.expand(size, *x.shape)
                for x, d in zip(args[:count], dims, strict=False)
            ]
        at = self._by_kind(operands)
        if as_matrices:
            # Each member as matrices, with as many batch axes as the one that has the most.
            row, column = at["a"].ndim == 2, at["b"].ndim == 2
            rank = max(2, *(at[kind].ndim - 1 for kind in "abc" if at[kind] is not None))
            for i, (x, kind) in enumerate(zip(operands, self._kinds, strict=True)):
                if x is not None:
                    operands[i] = x.reshape(size, *matrices(kind, x.shape[1:], rank, row, column))
        found = self._dispatched(*operands, *args[count:])
        outs = list(found) if isinstance(found, tuple) else [found]
        if as_matrices:
            for i, kind in enumerate(self._results):
                if kind != "o":
                    outs[i] = outs[i].reshape(at[kind].shape)
                    continue
                outs[i] = outs[i].squeeze(-1) if column else outs[i]
                outs[i] = outs[i].squeeze(-1 if column else -2) if row else outs[i]
        return (tuple(outs), (0,) * len(outs)) if isinstance(found, tuple) else (outs[0], 0)

    def _in_rows(self, size: int, dims: Any, given: Sequence[Any]) -> list[Any] | None:
        """Operands of one product over the rows of all members; None if b or the bias is theirs.

        What belongs to b or the bias has to be the same for all, and no result of a member's.
        """
        if "a" not in self._kinds or any(kind in "bc" for kind in self._results):
            return None
        for kind, x, dim in zip(self._kinds, given, dims, strict=False):
            if kind in "bc" and x is not None and (dim is not None or x.ndim > 1 + (kind == "b")):
                return None
        at = self._by_kind(given)
        rank = at["a"].ndim - (dims[self._kinds.index("a")] is not None) + 3 - at["b"].ndim
        moved = []
        for kind, x, dim in zip(self._kinds, given, dims, strict=False):
            if not (x is None or kind in "bc" or (kind == "r" and dim is None)):
                x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
                ones = (1,) * (rank - x.ndim) if kind == "r" else ()
                x = x.reshape(size, *ones, *x.shape[1:])
            moved.append(x)
        return moved
