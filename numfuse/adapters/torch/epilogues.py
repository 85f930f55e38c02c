"""Epilogues and gated layers of tensors: nodes of PyTorch's graph, and what their derivatives are.

An eager call is one node, and its backward one call of the core. Everything else (a backward that
is to be differentiated, torch.func, forward mode beside gradients, tracers) is made of pieces that
have derivatives of every order: products, gates, and formulas element by element, whose derivative
is a formula too (:func:`elements`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from numfuse import gated
from numfuse.activations import get
from numfuse.adapters.torch import eager
from numfuse.adapters.torch.eager import (
    LAYER,
    asked,
    gate_gradients,
    is_small,
    layer_gradients,
    mode,
)
from numfuse.adapters.torch.formulas import backward_of, operator, plain, tangent_of
from numfuse.adapters.torch.kept import Way
from numfuse.adapters.torch.keys import backend_key, backend_of, formula_key, formula_of
from numfuse.adapters.torch.operators import BY_NAME, in_graph
from numfuse.adapters.torch.tensors import with_tensors
from numfuse.definitions import UserEpilogue
from numfuse.fused_operations import NUMBERS, FusedOperation, operation
from numfuse.operations import OPERATIONS

GATE = OPERATIONS["activation_mul"]
_GATE_BACKWARD = OPERATIONS["activation_mul_bwd"]
_NONE = get("none")
_NAMES = {"forward": "", "backward": "_bwd", "tangent": "_jvp"}
#: The flags of a backward: `guard`, and not `sum_batch`.
_GUARDED = True, False
#: Elements of a formula that are made sooner than it is known who asks.
_SMALL = 1 << 15


def sibling(op: FusedOperation, f: Any, kind: str, keep: bool | str = False) -> FusedOperation:
    """Return the operation of another kind on the same operands."""
    form = op.form
    if form.biases:
        return gated.layer(kind, keep)
    name = f"{'matmul_epilogue' if form.factors else 'elementwise'}{_NAMES[kind]}"
    return operation(f, name, kind, form.factors, form.several, form.numbers, keep)[0]


def run_backward(
    op: FusedOperation, f: Any, gs: Sequence[Any], operands: Sequence[Any], kept: Sequence[Any],
    needs: tuple[str, ...], backend: Any, flipped: tuple[int, ...] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of a forward's operands, without derivatives."""
    places = tuple([place + len(gs) for place in flipped])
    x = *gs, *operands, *(kept or (None,) * op.form.factors)
    f = plain(f)
    back = sibling(op, f, "backward")
    return tuple(eager.run(back, x, f, _GUARDED, needs, backend, places))


# --- nodes --------------------------------------------------------------------------------------
class How(NamedTuple):
    """How a forward is made, beside its operands."""

    operation: FusedOperation
    activation: Any
    #: The places of right factors that are given transposed.
    flipped: tuple[int, ...]
    backend: Any


class _Node(Function):
    """A forward: its results, then the sums that it keeps, to which gradients come, too."""

    @staticmethod
    def forward(ctx: Any, *x: Any) -> Any:
        *operands, how = x
        op = how.operation
        found = eager.run(op, operands, how.activation, (), (), how.backend, how.flipped)
        results = found if type(found) is tuple else (found,)
        ctx.how, ctx.numbers = how, [y if type(y) in NUMBERS else None for y in operands]
        given = [y if isinstance(y, Tensor) else None for y in operands]
        ctx.save_for_backward(*given, *results[op.form.results :])
        ctx.set_materialize_grads(False)
        return results if len(results) > 1 else found

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        how, count = ctx.how, len(ctx.numbers)
        op, f = how.operation, how.activation
        tensors, kept = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        gs, moved = gs[: op.form.results], gs[op.form.results :]
        pairs = zip(tensors, ctx.numbers, strict=True)
        x: list[Any] = [y if n is None else n for y, n in pairs]
        if op.form.factors:
            small = is_small(*tensors[:2])
        else:
            small = next(y for y in (*gs, *tensors) if y is not None).numel() < _SMALL
        needs = asked(ctx, op.operands, tensors, small)
        there = [g for g in (*gs, *moved) if g is not None]
        if not needs or not there:
            return (None,) * (count + 1)
        alone = all(g is None for g in moved) and not torch.is_grad_enabled()
        if alone and mode(there):
            made = run_backward(op, f, gs, x, kept, needs, how.backend, how.flipped)
            return (*made, None)
        x = with_tensors(x)
        found = gradients(op, f, gs, x, needs, True, how.backend, kept, moved, how.flipped)
        return (*found, None)


_apply = super(Function, _Node).apply


def record(
    op: FusedOperation,
    f: Any,
    operands: Sequence[Any],
    keep: bool | str,
    backend: Any,
    flipped: tuple[int, ...] = (),
) -> Any:
    """Run a forward as a node of PyTorch's graph; it keeps its sums with `keep`."""
    if keep and op.form.factors:
        op = sibling(op, f, "forward", keep)
    like = next(y for y in operands if isinstance(y, Tensor))
    found = _apply(*operands, How(op, f, flipped, eager.lasting(backend, like)))
    if type(found) is not tuple or len(found) == op.form.results:
        return found
    return found[: op.form.results] if op.form.results > 1 else found[0]


# --- formulas element by element ----------------------------------------------------------------
def pulled(
    f: UserEpilogue,
    gs: Sequence[Any],
    operands: Sequence[Any],
    needs: Sequence[int],
    guard: bool,
    backend: Any,
) -> dict[int, Any]:
    """Return by their positions the gradients of a formula's operands, in the results' shape.

    One that is zero everywhere is left out.
    """
    there = tuple([i for i, g in enumerate(gs) if g is not None])
    derived, names = backward_of(f, there, tuple(needs), guard)
    if not names:
        return {}
    found = elements(derived, [*(gs[i] for i in there), *operands], backend)
    return dict(zip(names, found, strict=True))


def pushed(
    f: UserEpilogue, operands: Sequence[Any], dots: Sequence[Any], guard: bool, backend: Any
) -> tuple[Any, ...]:
    """Return the tangents of a formula's results."""
    moving = tuple([i for i, dot in enumerate(dots) if dot is not None])
    derived = tangent_of(f, moving, guard)
    return elements(derived, [*operands, *(dots[i] for i in moving)], backend)


def elements(f: UserEpilogue, operands: Sequence[Any], backend: Any) -> tuple[Any, ...]:
    """Return a formula's results at tensors, with derivatives of every order."""
    compiling = torch.compiler.is_compiling()
    how = 0 if compiling else mode(operands)
    if how:
        numbers = (False,) * len(operands)
        op = operation(f, "elementwise", "forward", 0, False, numbers)[0]
        if how == 2:
            found = record(op, f, operands, False, backend)
        else:
            found = eager.run(op, operands, f, (), (), backend)
        return found if type(found) is tuple else (found,)
    where = None if backend is None else backend_key(backend)
    if compiling:
        return tuple(in_graph("elements", formula_key(f), where, *operands))
    return tuple(_Elements.apply(f, where, *operands))


def _pull(ctx: Any, flags: Sequence[bool], gs: Sequence[Any]) -> list[Any]:
    """Return the gradients of a formula's operands that flags ask for."""
    operands = [torch._C._functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
    found: list[Any] = [None] * len(operands)
    needs = [i for i, flag in enumerate(flags) if flag]
    if needs and any(g is not None for g in gs):
        f, backend = ctx.how
        for i, d in pulled(f, gs, operands, needs, True, backend).items():
            found[i] = d.sum_to_size(operands[i].shape)
    return found


class _Elements(Function):
    """A formula as torch.func, forward mode and tracers have it."""

    @staticmethod
    def forward(f: UserEpilogue | str, backend: str | None, *operands: Any) -> Any:
        results = len(formula_of(f).graphs)
        found = operator(len(operands), results, _pull)(*operands, formula_key(f), backend)
        return found if results > 1 else (found,)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        f, backend, *operands = inputs
        ctx.how = formula_of(f), backend_of(backend)
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        return None, None, *_pull(ctx, ctx.needs_input_grad[2:], gs)

    @staticmethod
    def jvp(ctx: Any, _f: Any, _backend: Any, *dots: Any) -> Any:
        # (see `Op` for levels of forward mode)
        with forward_ad._set_fwd_grad_enabled(True):
            operands = [forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
            f, backend = ctx.how
            return pushed(f, operands, dots, True, backend)

    @staticmethod
    def vmap(info: Any, dims: Any, f: Any, backend: str | None, *operands: Any) -> Any:
        pairs = list(zip(operands, dims[2:], strict=True))
        rank = max(x.ndim - (dim is not None) for x, dim in pairs)
        moved = []
        for x, dim in pairs:
            if dim is not None:
                x = x.movedim(dim, 0)
                x = x.reshape(x.shape[0], *(1,) * (rank + 1 - x.ndim), *x.shape[1:])
            moved.append(x)
        found = elements(formula_of(f), moved, backend_of(backend))
        return found, (0,) * len(found)


BY_NAME["elements"] = _Elements


# --- what a call is made of -----------------------------------------------------------------------
def product(a: Any, b: Any, bias: Any, backend: Any) -> Any:
    """Return a @ b, with a bias of any shape that broadcasts to it, or None."""
    fits = bias is not None and bias.ndim == 1 and b.ndim > 1 and bias.shape[0] == b.shape[-1]
    found = LAYER((a, b, bias if fits else None), _NONE, (False,), (), None, backend)
    return found if fits or bias is None else found + bias


def gradients(
    op: FusedOperation, f: Any, gs: Sequence[Any], operands: Sequence[Any], needs: Sequence[str],
    guard: bool, backend: Any, kept: Sequence[Any] = (), moved: Sequence[Any] = (),
    flipped: tuple[int, ...] = (),
) -> list[Any]:  # fmt: skip
    """Return the gradients of a forward's operands by differentiable pieces; None where zero.

    What flows to a sum that was `kept` and is `moved` from elsewhere is added before it is
    multiplied.
    """
    form = op.form
    names = (*form.factor_names, *form.others)
    x = dict(zip(names, operands, strict=True))
    wanted = [i for i, b in enumerate(form.right) if "a" in needs or b in needs]
    others = [i for i, name in enumerate(form.others) if name in needs]
    if form.biases:
        wanted = sorted({*wanted, *others})
    slopes: dict[int, Any] = {}
    if any(g is not None for g in gs):
        z = kept or sums(op, x, backend, flipped)
        if form.biases:
            slots = tuple(["ab"[i] for i in wanted])
            made = gate_gradients(f, gs[0], z[0], z[1], slots, guard, backend)
            slopes = {i: made[i] for i in wanted}
        else:
            every = [*z, *(x[name] for name in form.others)]
            at = [*wanted, *(len(z) + i for i in others)]
            slopes = pulled(f, gs, every, at, guard, backend)
    for i, g in enumerate(moved):
        if g is not None:
            slopes[i] = slopes[i] + g if i in slopes else g
    found: dict[str, Any] = dict.fromkeys(names)
    for i in others:
        slope = slopes.get(i if form.biases else form.factors + i)
        if slope is not None:
            name = f"x_{i}"
            found[name] = slope.sum_to_size(x[name].shape)
    for i in wanted:
        b, slope = form.right[i], slopes.get(i)
        asks = tuple([n for n, name in (("a", "a"), ("b", b)) if name in needs])
        if slope is not None and asks:
            way = Way(_NONE, None, "", False, i + 1 in flipped, backend)
            d_a, found[b], _ = layer_gradients(way, asks, (x["a"], x[b], None), None, slope, None)
            found["a"] = d_a if found["a"] is None else found["a"] + d_a
    return list(found.values())


def sums(
    op: FusedOperation, x: dict[str, Any], backend: Any, flipped: tuple[int, ...] = ()
) -> list[Any]:
    """Return the sums of a forward."""
    found = []
    for i, name in enumerate(op.form.right):
        b = x[name].t() if i + 1 in flipped else x[name]
        found.append(product(x["a"], b, x[f"x_{i}"] if op.form.biases else None, backend))
    return found


def second(
    op: FusedOperation, f: Any, cs: Sequence[Any], x: Sequence[Any], needs: Sequence[str],
    guard: bool, backend: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of a backward's cotangent and operands `x`, weighted with `cs`."""
    form = op.form
    names = (*form.factor_names, *form.others)
    at = [i for i, y in enumerate(x) if y is not None]
    wanted = [name for name, c in zip(names, cs, strict=True) if c is not None]

    def first(*values: Any) -> tuple[Any, ...]:
        every: list[Any] = [None] * len(x)
        for i, value in zip(at, values, strict=True):
            every[i] = value
        g, *operands = every
        made = gradients(op, f, (g,), operands, wanted, guard, backend)
        return tuple([d for name, d in zip(names, made, strict=True) if name in wanted])

    found: list[Any] = [None] * len(x)
    if wanted and needs:
        _, back, *_ = torch.func.vjp(first, *[x[i] for i in at])
        made = back(tuple([c for c in cs if c is not None]))
        for i, d in zip(at, made, strict=True):
            found[i] = d if ("g_0", *names)[i] in needs else None
    return tuple(found)
