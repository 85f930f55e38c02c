"""Layers and gates in a program of torch.compile, and other calls that torch.func watches there.

At each call a program asks again what it depends on of the Python that torch.compile has followed
(400 questions take 60 us). So it follows no more than the way to one operator, which PyTorch takes
apart itself: into an operator of the forward, one of the backward, and between them a node, which
keeps what those of `numfuse.adapters.torch.eager` keep. No derivative belongs to the two, so that
a call costs the dispatcher's 3 us; a program of torch.compile has gradients of one order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import assume_constant_result, is_dynamo_compiling, is_exporting

from numfuse import fusion, gated
from numfuse.adapters.torch import eager, epilogues
from numfuse.adapters.torch.kept import recomputes, way
from numfuse.adapters.torch.keys import (
    activation_of,
    backend_key,
    backend_of,
    formula_key,
    formula_of,
    key_of,
)
from numfuse.adapters.torch.operators import in_graph
from numfuse.adapters.torch.tensors import autocast, checked, in_functorch, with_tensors
from numfuse.functional import activation_mul, matmul_bias_activation
from numfuse.fused_operations import NUMBERS, FusedOperation, operation
from numfuse.operations import OPERATIONS
from numfuse.problem.product import STORED
from numfuse.problem.shapes import gemm_shape, residual_view

_LIBRARY = torch.library.Library("numfuse", "FRAGMENT")
_OPERATORS = torch.ops.numfuse
#: Counts the forms of the inner operators: PyTorch keeps programs on disk by the calls that it has
#: followed, this number among them, and would run one of another form with these.
_FORM = 2
#: By operator: its operands, and the operations of its forward and its backward.
_ROWS: dict[str, Any] = {
    "layer": (("a", "b", "bias"), eager.LAYER, eager.LAYER_BACKWARD),
    "gated": (("a", "b"), OPERATIONS["activation_mul"], OPERATIONS["activation_mul_bwd"]),
}
#: By public function: its operator.
OPERATORS = {row[1].name: name for name, row in _ROWS.items()}


# Asked once, while a call is followed: PyTorch 2.11 answers wrongly where it follows the questions.
@assume_constant_result
def _alone() -> bool:
    return not (in_functorch() or is_exporting())


def follows() -> bool:
    """Whether torch.compile follows a call, and neither torch.func nor an export does."""
    return is_dynamo_compiling() and _alone()


def call(
    name: str, x: Any, act: Any, backend: Any = None, flipped: bool = False, keep: bool = True
) -> Any:
    """Return what an operator makes of its operands; a layer's b may be given transposed."""
    key, where = act.key or key_of(act), None if backend is None else backend_key(backend)
    return getattr(_OPERATORS, name)(x, key, flipped, keep and not recomputes(), _FORM, where)


class _Node(Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, activation: str, flipped: bool, keep: bool, backend: Any, *x: Any
    ) -> Any:
        how = way(activation_of(activation), x[0], keep=keep)
        layer, kept = name == "layer", None
        pre = layer and how.keeps == "pre"
        found = getattr(_OPERATORS, f"{name}_fwd")(x, activation, pre, flipped, backend)
        if layer:
            activation = key_of(how.slope or "none")
            kept = found[pre] if how.keeps else None
        ctx.save_for_backward(*x, *[kept] * layer)
        ctx.name, ctx.activation, ctx.rest = name, activation, (flipped, backend)
        return found[0]

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        names, flags = _ROWS[ctx.name][0], ctx.needs_input_grad[5:]
        needs = " ".join([name for name, flag in zip(names, flags, strict=True) if flag])
        run = getattr(_OPERATORS, f"{ctx.name}_bwd")
        found = iter(run([g, *ctx.saved_tensors], ctx.activation, needs, *ctx.rest))
        return *[None] * 5, *[next(found) if flag else None for flag in flags]


def _taken_apart(
    name: str, x: list[Any], activation: str, flipped: bool, keep: bool, form: int, backend: Any
) -> Any:
    cast = autocast(*x)
    checked(**dict(zip(_ROWS[name][0], cast, strict=True)))
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in cast):
        return _Node.apply(name, activation, flipped, keep, backend, *cast)
    return getattr(_OPERATORS, f"{name}_fwd")(cast, activation, False, flipped, backend)[0]


def _run(
    name: str, x: list[Any], activation: str, how: Any, flipped: bool, backend: Any
) -> list[Tensor]:
    """Run a forward, `how` whether its pre-activation is kept, or a backward, `how` its needs."""
    place, gated, needs = 1 + isinstance(how, str), name == "gated", ()
    flags: tuple[Any, ...] = () if gated else (how and STORED,)
    if place == 2:
        flags, needs = (True,) if gated else eager.FLAGS, tuple(how.split())
    act, where = activation_of(activation), backend_of(backend)
    found = eager.run(_ROWS[name][place], x, act, flags, needs, where, (place,) * flipped)
    several = found if isinstance(found, tuple) else (found,)
    return [y.contiguous() for y in several if y is not None]


def _results(name: str, x: list[Any], act: str, pre: bool, flipped: bool, *rest: Any) -> list[Any]:
    a, b = x[:2]
    if name == "gated":
        if a.shape != b.shape:
            raise ValueError(f"b must have the shape of a {tuple(a.shape)}, got {tuple(b.shape)}")
        return [a.new_empty(a.shape)]
    shape = gemm_shape(a, b.t() if flipped else b, x[2])[0].visible
    return [a.new_empty(shape) for _ in range(1 + pre)]


def _gradients(name: str, x: list[Any], activation: str, needs: str, *rest: Any) -> list[Any]:
    made = dict(zip(_ROWS[name][0], x[1:], strict=False))
    return [made[need].new_empty(made[need].shape) for need in needs.split()]


for _name in _ROWS:
    for _suffix, _how, _made, _fake in (
        ("", "bool flipped, bool keep, int form", _taken_apart, None),
        ("_fwd", "bool pre, bool flipped", _run, _results),
        ("_bwd", "str needs, bool flipped", _run, _gradients),
    ):
        _given = f"Tensor?[] operands, str activation, {_how}, str? backend"
        _LIBRARY.define(f"{_name}{_suffix}({_given}) -> Tensor{'[]' if _fake else ''}")
        _kernel = "CompositeExplicitAutograd" if _fake else "CompositeImplicitAutograd"
        _LIBRARY.impl(f"{_name}{_suffix}", partial(_made, _name), _kernel)
        if _fake:
            _shapes = partial(_fake, _name)
            torch.library.register_fake(f"numfuse::{_name}{_suffix}", _shapes, lib=_LIBRARY)


# --- epilogues ----------------------------------------------------------------------------------
def call_fused(
    key: str, factors: int, x: Any, backend: Any = None, flipped: bool = False, keep: bool = True
) -> Any:
    """Return the results of the operator of epilogues: of a formula with so many products, or with
    -1 of a gated layer with an activation, whose weights may be given transposed.
    """
    where = None if backend is None else backend_key(backend)
    keeps = keep and not recomputes()
    return tuple(_OPERATORS.fused(x, key, factors, flipped, keeps, _FORM, where))


def _forward(key: str, factors: int, keep: bool = False) -> tuple[FusedOperation, Any]:
    """Return the forward of a key, and what it takes as an activation."""
    stored = keep and STORED
    if factors < 0:
        return gated.layer("forward", stored), activation_of(key)
    f = formula_of(key)
    numbers = (False,) * (len(f.parameters) - factors)
    name = "matmul_epilogue" if factors else "elementwise"
    return operation(f, name, "forward", factors, factors > 1, numbers, stored and factors > 0)


class _FusedNode(Function):
    @staticmethod
    def forward(
        ctx: Any, key: str, factors: int, flipped: bool, keep: bool, backend: Any, *x: Any
    ) -> Any:
        form = _forward(key, factors)[0].form
        found = _OPERATORS.fused_fwd(x, key, factors, flipped, keep, backend)
        kept = found[form.results :] or [None] * form.factors
        ctx.save_for_backward(*x, *kept)
        ctx.set_materialize_grads(False)
        ctx.rest = key, factors, flipped, backend
        return tuple(found[: form.results])

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        key, factors, flipped, backend = ctx.rest
        names, flags = _forward(key, factors)[0].operands, ctx.needs_input_grad[5:]
        needs = " ".join([name for name, flag in zip(names, flags, strict=True) if flag])
        x = [*gs, *ctx.saved_tensors]
        found = iter(_OPERATORS.fused_bwd(x, key, factors, flipped, needs, backend))
        return *[None] * 5, *[next(found) if flag else None for flag in flags]


def _fused_apart(
    x: list[Any], key: str, factors: int, flipped: bool, keep: bool, form: int, backend: Any
) -> Any:
    op = _forward(key, factors)[0]
    cast = autocast(*x) if factors else x
    checked(**dict(zip(map(op.form.label, op.operands), cast, strict=True)))
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in cast):
        return list(_FusedNode.apply(key, factors, flipped, keep and factors != 0, backend, *cast))
    return _OPERATORS.fused_fwd(cast, key, factors, flipped, False, backend)


def _places(factors: int, flipped: bool, first: int) -> tuple[int, ...]:
    return tuple(range(first, first + abs(factors) + (factors < 0))) if flipped else ()


def _run_fused(
    x: list[Any], key: str, factors: int, flipped: bool, keep: bool, backend: Any
) -> list[Tensor]:
    op, f = _forward(key, factors, keep)
    places = _places(factors, flipped, 1)
    found = eager.run(op, x, f, (), (), backend_of(backend), places)
    return list(found) if isinstance(found, tuple) else [found]


def _run_fused_backward(
    x: list[Any], key: str, factors: int, flipped: bool, needs: str, backend: Any
) -> list[Tensor]:
    op, f = _forward(key, factors)
    count, places = op.form.results, _places(factors, flipped, 1)
    end = count + len(op.operands)
    rest = x[end:], tuple(needs.split()), backend_of(backend), places
    found = epilogues.run_backward(op, f, x[:count], x[count:end], *rest)
    return [y.contiguous() for y in found if y is not None]


def _fused_results(
    x: list[Any], key: str, factors: int, flipped: bool, keep: bool, backend: Any
) -> list[Any]:
    form = _forward(key, factors)[0].form
    first = next(y for y in x if y is not None)
    if not form.factors:
        shape: Any = torch.broadcast_shapes(*[y.shape for y in x])
        return [first.new_empty(shape) for _ in range(form.results)]
    for b in x[1 : 1 + form.factors]:
        sizes = gemm_shape(first, b.t() if flipped else b, None)[0]
    for label, y in zip(form.labels, x[1 + form.factors :], strict=True):
        if y is not None:
            residual_view(sizes, y, label)
    return [first.new_empty(sizes.visible) for _ in range(1 + keep * form.factors)]


def _fused_gradients(
    x: list[Any], key: str, factors: int, flipped: bool, needs: str, backend: Any
) -> list[Any]:
    op = _forward(key, factors)[0]
    made = dict(zip(op.operands, x[op.form.results :], strict=False))
    return [made[need].new_empty(made[need].shape) for need in needs.split()]


_GIVEN = "Tensor?[] operands, str key, int factors, bool flipped"
_EXPLICIT, _IMPLICIT = "CompositeExplicitAutograd", "CompositeImplicitAutograd"
for _name, _how, _kernel, _on in (
    ("fused", "bool keep, int form", _IMPLICIT, _fused_apart),
    ("fused_fwd", "bool keep", _EXPLICIT, _run_fused),
    ("fused_bwd", "str needs", _EXPLICIT, _run_fused_backward),
):
    _LIBRARY.define(f"{_name}({_GIVEN}, {_how}, str? backend) -> Tensor[]")
    _LIBRARY.impl(_name, _on, _kernel)
torch.library.register_fake("numfuse::fused_fwd", _fused_results, lib=_LIBRARY)
torch.library.register_fake("numfuse::fused_bwd", _fused_gradients, lib=_LIBRARY)


# --- the public functions as torch.compile follows them -----------------------------------------
@torch.compiler.assume_constant_result
def _formula(f: Any, factors: int, numbers: tuple[bool, ...]) -> tuple[str, bool]:
    """Return the key of a formula that is called so, and whether it returns a tuple."""
    name = "matmul_epilogue" if factors else "elementwise"
    made = operation(f, name, "forward", factors, factors > 1, numbers)[1]
    return formula_key(made), made.several


def _elements(key: str, backend: Any, x: Any) -> Any:
    return in_graph("elements", key, None if backend is None else backend_key(backend), *x)


@torch.compiler.substitute_in_graph(fusion.elementwise)
def _elementwise(epilogue: Any, *operands: Any, out: Any = None, backend: Any = None) -> Any:
    _refuse_out(out)
    key, several = _formula(epilogue, 0, tuple([type(x) in NUMBERS for x in operands]))
    x = with_tensors(operands)
    found = call_fused(key, 0, x, backend) if follows() else _elements(key, backend, x)
    return tuple(found) if several else found[0]


@torch.compiler.substitute_in_graph(fusion.matmul_epilogue)
def _matmul_epilogue(
    a: Any, b: Any, epilogue: Any, *operands: Any, return_pre_activation: bool = False,
    out: Any = None, backend: Any = None,
) -> Any:  # fmt: skip
    _refuse_out(out)
    right = b if isinstance(b, (tuple, list)) else (b,)
    key, _ = _formula(epilogue, len(right), tuple([type(x) in NUMBERS for x in operands]))
    x = with_tensors((a, *right, *operands))
    if follows() and not return_pre_activation:
        return call_fused(key, len(right), x, backend)[0]
    a, *rest = autocast(*x)
    z = [matmul_bias_activation(a, y, None, "none", backend=backend) for y in rest[: len(right)]]
    (found,) = _elements(key, backend, [*z, *rest[len(right) :]])
    if not return_pre_activation:
        return found
    return found, tuple([y if y.dtype == torch.float64 else y.float() for y in z])


@torch.compiler.substitute_in_graph(gated.matmul_activation_mul)
def _matmul_activation_mul(
    a: Any, b_gate: Any, b_up: Any, bias_gate: Any = None, bias_up: Any = None,
    activation: Any = "silu", *, return_pre_activation: bool = False, out: Any = None,
    backend: Any = None,
) -> Any:  # fmt: skip
    _refuse_out(out)
    x = a, b_gate, b_up, bias_gate, bias_up
    if follows() and not return_pre_activation:
        return call_fused(key_of(activation), -1, x, backend)[0]
    a, b_gate, b_up, bias_gate, bias_up = autocast(*x)
    gate = epilogues.product(a, b_gate, bias_gate, backend)
    up = epilogues.product(a, b_up, bias_up, backend)
    found = activation_mul(gate, up, activation, backend=backend)
    return (found, (gate, up)) if return_pre_activation else found


def _refuse_out(out: Any) -> None:
    if out is not None:
        raise ValueError("out must be None in a program of torch.compile, got a tensor")
