"""The eager way: a call at once, and for its gradients one node of PyTorch's graph.

A node's backward is one call of the core. Where that is to be differentiated again
(`create_graph`), it is made of nodes: gates with a derivative of the activation, and products. So
what flows to one pre-activation from several places is added before it is multiplied, at any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from numpy import empty_like as empty_array_like
from numpy import ndarray
from torch import Tensor, empty_like, nn
from torch.autograd import Function

from numfuse.activations import Activation, get
from numfuse.adapters.torch import replayed
from numfuse.adapters.torch.kept import FINITE, Way, way
from numfuse.adapters.torch.operators import on_cuda
from numfuse.adapters.torch.tensors import TEAM, array_over, to_tensor, watched, with_tensors
from numfuse.backends import active
from numfuse.operations import OPERATIONS, Operation
from numfuse.runtime.threads import share

#: Classes whose instances mean no more than their values.
TENSORS = frozenset({Tensor, nn.Parameter})

LAYER = OPERATIONS["matmul_bias_activation"]
LAYER_BACKWARD = OPERATIONS["matmul_bias_activation_bwd"]
_RESIDUAL = OPERATIONS["matmul_bias_residual"]
_GATE = OPERATIONS["activation_mul"]
_GATE_BACKWARD = OPERATIONS["activation_mul_bwd"]
_GATE_DOUBLE = OPERATIONS["activation_mul_double_bwd"]
_NONE = get("none")
#: The operands of a layer, and the flags of its backward: not `sum_batch`, but `guard`.
_NAMES = "a", "b", "bias"
FLAGS = False, True

_strided = torch.strided


# --- a call at once -----------------------------------------------------------------------------
def mode(operands: Sequence[Any]) -> int:
    """Return 1 if a call may be made at once, 2 if a gradient is recorded, 0 if it is watched.

    Operands are plain tensors of one kind of device, or None.
    """
    first: Any = None
    gradient = False
    for x in operands:
        if x is not None:
            if type(x) not in TENSORS or x.layout is not _strided:
                return 0
            if first is None:
                first, on_cpu = x, x.is_cpu
            elif x.is_cpu is not on_cpu:
                return 0
            gradient = gradient or x.requires_grad
    if first is None or watched() or not (on_cpu or first.is_cuda):
        return 0
    return 2 if gradient and torch.is_grad_enabled() else 1


def lasting(backend: Any, like: Any) -> Any:
    """Return the backend with which a node runs, for its backward too.

    PyTorch runs the backward of a GPU's tensors in a thread of its own, which has no `use_backend`.
    """
    if backend is None and like.is_cuda:
        chosen: Any = active()
        if chosen is not None and chosen.name == "cuda":
            place = like.get_device()
            return chosen if chosen.ordinal == place else chosen.configure(place)
    return backend


def complete(operands: Sequence[Any]) -> bool:
    """Whether all operands of a differentiable operation are there; the third is a bias."""
    a, b, *rest = operands
    return a is not None and b is not None and (len(rest) < 2 or rest[1] is not None)


def run(
    operation: Operation,
    operands: Sequence[Any],
    activation: Any,
    flags: tuple[bool | str, ...] = (),
    needs: Any = (),
    backend: Any = None,
    flipped: tuple[int, ...] = (),
) -> Any:
    """Run an operation on tensors without derivatives.

    `flipped` are the places of right factors that are given transposed, as their gradients are
    returned then; a backward has its cotangent in front.
    """
    first = operands[0]
    if not isinstance(first, Tensor):
        first = next(x for x in operands if isinstance(x, Tensor))
    if first.is_cuda:
        cuda = on_cuda()
        if operation.kind == "fused":
            x, own, out = _turned(operation, operands, needs, flipped, empty_like)
            found = cuda.fused(operation, x, activation, flags, needs, out, backend)
            return _back(found, own)
        x = operation, operands, activation, flags, needs, None, backend
        return cuda.run(*x, cuda.checked, flipped[0]) if flipped else cuda.run(*x)
    if operation.kind == "fused":
        operands = with_tensors(operands)
    share.team = TEAM  # which the operations before have kept awake
    try:
        found = replayed.run(operation, operands, activation, flags, needs, backend, flipped)
        if found is not None:
            return found
        arrays: list[Any] = [None if x is None else array_over(x) for x in operands]
        new = partial(empty_array_like, order="C")
        x, own, out = _turned(operation, arrays, needs, flipped, new)
        found = operation(x, activation, flags, needs, out, backend)
    finally:
        share.team = None
    if type(found) is ndarray:
        return to_tensor(found)
    found = _back(found, own)
    return tuple.__new__(type(found), [None if x is None else to_tensor(x) for x in found])


def _turned(
    operation: Operation, operands: Sequence[Any], needs: Any, flipped: tuple[int, ...], new: Any
) -> tuple[tuple[Any, ...], dict[int, Any], Any]:
    """Return the operands as the core takes them, and gradients by their places, and as `out`.

    PyTorch copies a gradient that has not its weight's layout.
    """
    given, own = list(operands), {}
    for place in flipped:
        b = given[place]
        given[place] = b.T
        if operation.operands[place] in needs:
            own[place - 1] = new(b)
    out: Any = None
    if own:
        out = tuple([own[i].T if i in own else None for i in range(len(operation.needs))])
    return tuple(given), own, out


def _back(found: Any, own: dict[int, Any]) -> Any:
    """Return the results with these in their places."""
    if not own:
        return found
    return tuple.__new__(type(found), [own.get(i, x) for i, x in enumerate(found)])


# --- nodes --------------------------------------------------------------------------------------
#: Elements, or multiplications of a product, that are made sooner than it is known who asks: 20 us.
_SMALL_GATE, _SMALL_PRODUCT = 1 << 15, 1 << 19
_executed = getattr(torch._C, "_will_engine_execute_node", lambda node: True)
_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)
#: The latest run of PyTorch's engine, leaves that torch.autograd.grad was given in it, and whether
#: a b was asked for, as weights are where all gradients are.
_latest = -1
_given: set[int] = set()
_all = False


def asked(ctx: Any, names: Sequence[str], operands: Sequence[Any], small: bool) -> tuple[str, ...]:
    """Return the operands whose gradients this backward is to make.

    `ctx.needs_input_grad` says who requires grad, PyTorch's engine who is asked for it. Where it
    says so of one layer's b, the others are not asked for: a question costs a microsecond.
    """
    global _latest, _all
    named = zip(names, operands, ctx.needs_input_grad, strict=False)
    task = _task()
    if task != _latest:
        _given.clear()
        _latest, _all = task, False
    if _all or (small and not torch.is_grad_enabled()):
        return tuple([name for name, x, flag in named if flag])
    edges = iter(ctx.next_functions)
    found = []
    for name, x, flag in named:
        if x is None:
            continue
        node, _ = next(edges)
        if flag and id(x) not in _given:
            try:
                flag = _executed(node)
            except RuntimeError:  # a leaf that is given; the exception takes 17 us
                _given.add(id(x))
        if flag:
            found.append(name)
    _all = "b" in found and names is _NAMES
    return tuple(found)


def is_asked(ctx: Any, place: int, operands: Sequence[Any]) -> bool:
    """Return whether this backward is to make the gradient of one operand."""
    node, _ = ctx.next_functions[sum([x is not None for x in operands[:place]])]
    try:
        return bool(_executed(node))
    except RuntimeError:  # a leaf that is given; the exception takes 17 us
        return True


def asked_of_network(ctx: Any, x: Sequence[Tensor | None], alone: int, small: bool) -> list[bool]:
    """Return which gradients a network's backward is asked for, where the node requires them.

    So many operands are asked about by themselves, behind them one parameter for all of them: their
    products are made together, and a question may take as long as one. Where a network is small, it
    takes longer than all.
    """
    needs = list(ctx.needs_input_grad[: len(x)])
    if small and not torch.is_grad_enabled():
        return needs
    for i in range(alone):
        needs[i] = needs[i] and is_asked(ctx, i, x)
    flagged = [i for i in range(alone, len(x)) if needs[i]]
    if flagged and not is_asked(ctx, flagged[0], x):
        for i in flagged:
            needs[i] = i > flagged[0] and is_asked(ctx, i, x)
    return needs


def is_small(a: Any, b: Any) -> bool:
    """Whether a product and what it multiplies are small."""
    return bool(a.numel() * b.numel() < _SMALL_PRODUCT * max(a.shape[-1], 1))


class _Layer(Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, bias: Any, way: Way) -> Any:
        keeps, flags = way.keeps, (way.with_pre,)
        flipped = (1,) * way.flipped
        found = run(LAYER, (a, b, bias), way.activation, flags, (), way.backend, flipped)
        ctx.way = way
        if keeps == "pre":
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(a, b, bias, found[1])
        else:
            ctx.save_for_backward(a, b, bias, found if keeps else None)
        return found

    @staticmethod
    def backward(ctx: Any, g: Any, g_pre: Any = None) -> Any:
        a, b, bias, kept = ctx.saved_tensors
        operands, way = (a, b, bias), ctx.way
        needs = asked(ctx, _NAMES, operands, is_small(a, b))
        if g_pre is not None or not needs or torch.is_grad_enabled() or not mode((g,)):
            return (*layer_gradients(way, needs, operands, kept, g, g_pre), None)
        x, slope = (g, a, b, bias, kept), _NONE if way.slope is None else way.slope
        found = run(LAYER_BACKWARD, x, slope, FLAGS, needs, way.backend, (2,) * way.flipped)
        return (*found, None)


class _Residual(Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, bias: Any, residual: Any, backend: Any) -> Any:
        ctx.save_for_backward(a, b, bias)
        ctx.way, ctx.shape = Way(_NONE, None, "", False, False, backend), residual.shape
        return run(_RESIDUAL, (a, b, bias, residual), "none", backend=backend)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        operands = ctx.saved_tensors
        needs = asked(ctx, (*_NAMES, "residual"), (*operands, g), is_small(*operands[:2]))
        d_residual = g.sum_to_size(ctx.shape) if "residual" in needs else None
        needs = tuple([name for name in needs if name != "residual"])
        return (*layer_gradients(ctx.way, needs, operands, None, g, None), d_residual, None)


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, activation: Activation, backend: Any) -> Any:
        ctx.save_for_backward(a, b)
        ctx.how = activation, backend
        return run(_GATE, (a, b), activation, backend=backend)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        a, b = ctx.saved_tensors
        act, backend = ctx.how
        needs = asked(ctx, ("a", "b"), (a, b), a.numel() < _SMALL_GATE)
        return (*gate_gradients(act, g, a, b, needs, True, backend), None, None)


def gate_gradients(
    act: Activation, g: Any, a: Any, b: Any, needs: tuple[str, ...], guard: bool, backend: Any
) -> Any:
    """Return the gradients of a gate's operands."""
    if not needs:
        return None, None
    if torch.is_grad_enabled() and mode((g,)) and act.serial in FINITE:
        return _apply_gradients(g, a, b, act, needs, backend)
    return _GATE_BACKWARD((g, a, b), act, (guard,), needs, None, backend)


class _GateGradients(Function):
    """A gate's gradients, where they are to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, g: Any, a: Any, b: Any, act: Activation, needs: Any, backend: Any) -> Any:
        ctx.save_for_backward(g, a, b)
        ctx.how = act, backend
        ctx.set_materialize_grads(False)
        return run(_GATE_BACKWARD, (g, a, b), act, (True,), needs, backend)

    @staticmethod
    def backward(ctx: Any, u: Any, v: Any) -> Any:
        g, a, b = ctx.saved_tensors
        act, backend = ctx.how
        needs = asked(ctx, ("grad", "a", "b"), (g, a, b), a.numel() < _SMALL_GATE)
        if not needs or (u is None and v is None):
            return (None,) * 6
        again, slope, parts = torch.is_grad_enabled(), act.derived(1), []
        if not mode((u, v)) or ("a" in needs and not (again and slope.serial in FINITE)):
            found = _GATE_DOUBLE((u, v, g, a, b), act, (True,), needs, None, backend)
            return (*found, None, None, None)
        wanted = ("a", "b") if "a" in needs else ("b",)  # (a's are of one order more)
        if u is not None:
            parts.append(_apply_gradients(u * b, a, g, slope, wanted, backend))
        if v is not None:
            parts.append(_apply_gradients(v, a, g, act, wanted, backend))
        d_a, d_g = (x if x is None else sum(rest, x) for x, *rest in zip(*parts, strict=True))
        d_b = _gate(a, u * g, slope, backend) if u is not None and "b" in needs else None
        return d_g, d_a, d_b, None, None, None


def layer_gradients(
    way: Way, needs: tuple[str, ...], operands: Sequence[Any], kept: Any, g: Any, g_pre: Any
) -> tuple[Any, Any, Any]:
    """Return the gradients of a layer's operands, from those of its value and pre-activation."""
    if not needs:
        return None, None, None
    a, b, bias = operands
    given = g if g_pre is None else g_pre
    if not mode((given,)):
        return _watched_gradients(way, needs, operands, g, g_pre)
    if g is not None and way.slope is not None:
        if kept is None:
            kept = layer(a, b, bias, _NONE, way.backend, way.flipped)
        g = _sloped(kept, g, way.slope, way.backend)
    if g_pre is not None:
        g_pre = g_pre.to(a.dtype)
        g = g_pre if g is None else g + g_pre
    if not torch.is_grad_enabled():
        x = (g, a, b, bias, None)
        return run(LAYER_BACKWARD, x, _NONE, FLAGS, needs, way.backend, (2,) * way.flipped)
    if b.ndim != 2 or a.ndim < 2 or (bias is not None and bias.ndim != 1):
        plain = way._replace(activation=_NONE)
        return _watched_gradients(plain, needs, operands, g, None)
    rows, grads = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
    d_a = d_b = d_bias = None
    if "a" in needs:
        d_a = layer(g, b, None, _NONE, way.backend, not way.flipped)
    if "b" in needs:
        left, right = (grads, rows) if way.flipped else (rows, grads)
        d_b = layer(left.t(), right, None, _NONE, way.backend)
    if "bias" in needs:
        d_bias = grads.sum(0)
    return d_a, d_b, d_bias


def _sloped(x: Any, g: Any, act: Activation, backend: Any) -> Any:
    """Return act'(x) g in g's dtype; `x` may have the accumulator's."""
    wide = g if x.dtype == g.dtype else g.to(x.dtype)
    if act.serial in FINITE:
        found = _gate(x, wide, act.derived(1), backend)
    else:
        ones = x.new_ones(()).expand(x.shape)
        found = _GATE_BACKWARD((wide, x, ones), act, (True,), ("a",), None, backend).d_a
    return found if wide is g else found.to(g.dtype)


def _watched_gradients(
    way: Way, needs: tuple[str, ...], operands: Sequence[Any], g: Any, g_pre: Any
) -> tuple[Any, Any, Any]:
    """Return the gradients by the operators: of batches of cotangents, under modes, and others."""
    a, b, bias = operands
    b = b.t() if way.flipped else b
    total: list[Any] = [None, None, None]
    for x, act in ((g, way.activation), (g_pre, _NONE)):
        if x is None:
            continue
        x = (x.to(a.dtype), a, b, bias, None)
        found = LAYER_BACKWARD.other(x, act, FLAGS, needs, None, way.backend)
        total = [y if s is None else s + y for s, y in zip(total, found, strict=True)]
    if way.flipped and total[1] is not None:
        total[1] = total[1].t()
    return tuple(total)


#: As `apply`, without PyTorch's preparations for torch.func, which `mode` has excluded.
_apply_layer = super(Function, _Layer).apply
_apply_residual = super(Function, _Residual).apply
_apply_gate = super(Function, _Gate).apply
_apply_gradients = super(Function, _GateGradients).apply


# --- the differentiable operations --------------------------------------------------------------
def layer(
    a: Any,
    b: Any,
    bias: Any,
    act: Any,
    backend: Any = None,
    flipped: bool = False,
    keep: bool | None = None,
    with_pre: bool = False,
) -> Any:
    """Return a layer of tensors that :func:`mode` lets through; `b` may be given transposed."""
    gradient = a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)
    if not (gradient and torch.is_grad_enabled()):
        return run(LAYER, (a, b, bias), act, (with_pre,), (), backend, (1,) * flipped)
    how = way(act, a, with_pre, flipped, lasting(backend, a), keep)
    found = _apply_layer(a, b, bias, how)
    return found[0] if how.keeps == "pre" and not with_pre else found


def _gate(a: Any, b: Any, act: Any, backend: Any) -> Any:
    """Return a gate of tensors that :func:`mode` lets through."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        act = act if type(act) is Activation else get(act)
        return _apply_gate(a, b, act, lasting(backend, a))
    return run(_GATE, (a, b), act, backend=backend)


#: By operation: what records it, of operands, activation, flags and backend.
DIFFERENTIABLE = {
    LAYER: lambda x, act, flags, backend: layer(x[0], x[1], x[2], act, backend, with_pre=flags[0]),
    _RESIDUAL: lambda x, act, flags, backend: _apply_residual(*x, lasting(backend, x[0])),
    _GATE: lambda x, act, flags, backend: _gate(x[0], x[1], act, backend),
}
