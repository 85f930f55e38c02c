"""Epilogues and the gated layer for autograd: one primitive for each kind of call.

Their fused kinds are each other's derivatives; a double backward, and forward mode in forward mode,
are differentiated through plain products and formulas (`numfuse.adapters.composites`), which are
calls of :func:`numfuse.elementwise`, and so have derivatives of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums
from numpy import ndarray

from numfuse.adapters import composites
from numfuse.adapters.autograd.boxes import items, like, primitive, through
from numfuse.definitions import UserEpilogue
from numfuse.epilogues import Epilogue
from numfuse.functional import matmul_bias_activation
from numfuse.fused_operations import NUMBERS, FusedOperation
from numfuse.fusion import elementwise
from numfuse.language.curves import leaf, replace_leaves
from numfuse.problem.product import STORED
from numfuse.runtime.strided import ghost


class How(NamedTuple):
    """The arguments of a call other than its arrays; `operation` is the forward."""

    operation: FusedOperation
    given: Any
    needs: tuple[str, ...] = ()
    guard: bool = True
    backend: Any = None
    #: Where the forward of these operands left its sums.
    saved: list[ndarray] | None = None

    @property
    def own(self) -> list[str]:
        """Return the names of the operands."""
        return self.operation.operands

    @property
    def sums(self) -> Sequence[Any]:
        """Return the sums that were kept, or None for each."""
        return self.saved or (None,) * self.operation.form.factors


# --- what runs ------------------------------------------------------------------------------------
def _forward(*args: Any) -> Any:
    *own, how = args
    op, saved = how.operation, how.saved
    if saved is None:
        return op(tuple(own), how.given, (), (), None, how.backend)
    op = op.of("forward", STORED if op.form.biases else True)
    out, *saved[:] = op(tuple(own), how.given, (), (), None, how.backend)
    return out


def _backward(*args: Any) -> Any:
    *operands, how = args
    return _gradients("backward", (*operands, *how.sums), how)


def _double(*args: Any) -> Any:
    *operands, how = args
    return _gradients("double_backward", (*operands, *how.sums), how)


def _gradients(kind: str, operands: tuple[Any, ...], how: How) -> Any:
    op = how.operation.of(kind)
    found = op(operands, how.given, (how.guard, False), how.needs, None, how.backend)
    made = tuple([x for x in found if x is not None])
    return made[0] if len(made) == 1 else made


def _tangent(*args: Any) -> Any:
    *operands, how = args
    op = how.operation.of("tangent")
    dots = op(tuple(operands), how.given, (how.guard,), (), None, how.backend)[1::2]
    return dots[0] if len(dots) == 1 else dots


_RUN = {
    "forward": primitive(_forward),
    "backward": primitive(_backward),
    "double_backward": primitive(_double),
    "tangent": primitive(_tangent),
}


def _made(kind: str, how: How, *operands: Any) -> Any:
    """Return the results of a kind of call in a sequence."""
    count = len(how.needs) if "backward" in kind else how.operation.form.results
    return items(_RUN[kind](*operands, how), count)


# --- rules ----------------------------------------------------------------------------------------
def _parts(g: Any, count: int, x: Any) -> list[Any]:
    """Return the cotangent, or the tangent, of each result in the dtype of an operand."""
    parts = (g,) if count == 1 else g
    return [None if part is None else like(part, x) for part in parts]


def _first(x: Sequence[Any]) -> Any:
    return next(y for y in x if y is not None)


def _placed(names: Sequence[str], moved: Sequence[int], dots: Sequence[Any], args: Any) -> Any:
    """Return tangents in the places of operands, None elsewhere."""
    found: list[Any] = [None] * len(names)
    for i, dot in zip(moved, dots, strict=True):
        found[i] = like(dot, args[i])
    return found


def _forward_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *own, how = args
    needs = how._replace(needs=tuple([how.own[i] for i in argnums]))

    def pull(g: Any) -> Any:
        grads = _parts(g, how.operation.form.results, _first(own))
        return _made("backward", needs, *grads, *own)

    return pull


def _forward_forward(argnums: Any, gs: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *own, how = args
    return _RUN["tangent"](*own, *_placed(own, argnums, gs, args), how)


def _backward_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *x, how = args
    names = [*(f"g_{i}" for i in range(len(x) - len(how.own))), *how.own]
    needs = how._replace(needs=tuple([names[i] for i in argnums]))

    def pull(g: Any) -> Any:
        cotangents = dict(zip(how.needs, _parts(g, len(how.needs), _first(x)), strict=True))
        return _made("double_backward", needs, *map(cotangents.get, how.own), *x)

    return pull


def _backward_forward(argnums: Any, gs: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *x, how = args
    dots, count = _placed(x, argnums, gs, args), len(x) - len(how.own)
    parts = []
    if any(dot is not None for dot in dots[:count]):
        parts.append(_made("backward", how, *dots[:count], *x[count:]))
    if any(dot is not None for dot in dots[count:]):
        parts.append(_made("double_backward", how, *dots[count:], *x))
    found = [sum(some[1:], some[0]) for some in zip(*parts, strict=True)]
    return found[0] if len(found) == 1 else tuple(found)


def _tangent_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *x, how = args
    count, names = len(how.own), how.own
    own, dots = x[:count], x[count:]
    bent = how._replace(needs=tuple([names[i] for i in argnums if i < count]))
    flat = how._replace(needs=tuple([names[i - count] for i in argnums if i >= count]))

    def pull(g: Any) -> Any:
        grads = _parts(g, how.operation.form.results, _first(own))
        found = _made("double_backward", bent, *dots, *grads, *own) if bent.needs else ()
        return (*found, *(_made("backward", flat, *grads, *own) if flat.needs else ()))

    return pull


# --- beyond what is fused -------------------------------------------------------------------------
@lru_cache(maxsize=256)
def _formula(epilogue: Epilogue) -> UserEpilogue:
    """Return derived formulas as an epilogue without a product."""
    inputs = epilogue.inputs
    places = {leaf(name): leaf(f"p_{i}") for i, name in enumerate(inputs)}
    graphs = replace_leaves(epilogue.graphs, places)
    return UserEpilogue("derived", "derived from another", inputs or ("none",), graphs, False)


def _composite(kind: str) -> Callable[..., Any]:
    """Return a function of a primitive's arguments, that is made of what has derivatives."""

    def run(*args: Any) -> Any:
        *operands, how = args
        op = how.operation.of(kind)
        names = op.operands[: len(operands)]
        given = {name: x for name, x in zip(names, operands, strict=True) if x is not None}
        ghosts = {name: ghost(x.shape, x.dtype) for name, x in given.items()}
        p = op.problem(how.given, how.needs, None, guard=False, **ghosts)
        wanted = [f"d_{x}" for x in how.needs]
        if kind == "tangent":
            wanted = [name for name in op.results if name.endswith("_dot")]

        def values(epilogue: Epilogue, inputs: Sequence[Any]) -> Any:
            # One result at a time: the derivatives of several together have too many arrays.
            known, found = dict(zip(epilogue.inputs, inputs, strict=True)), []
            for name, _ in epilogue.results:
                one = epilogue.select(name)
                given = [known[x] for x in one.inputs] or [np.zeros(())]
                found.append(elementwise(_formula(one), *given, backend=how.backend))
            return found

        def product(a: Any, b: Any) -> Any:
            return matmul_bias_activation(a, b, backend=how.backend)

        made = composites.results(anp, p, wanted, given, values, product)
        results = dict(zip(op.results, p.result, strict=True))
        return tuple(
            [anp.reshape(x, results[name].shape) for name, x in zip(wanted, made, strict=True)]
        )

    return run


defvjp_argnums(_RUN["forward"], _forward_reverse)
defjvp_argnums(_RUN["forward"], _forward_forward)
defvjp_argnums(_RUN["backward"], _backward_reverse)
defjvp_argnums(_RUN["backward"], _backward_forward)
_double_reverse, _double_forward = through(_composite("double_backward"))
defvjp_argnums(_RUN["double_backward"], _double_reverse)
defjvp_argnums(_RUN["double_backward"], _double_forward)
defvjp_argnums(_RUN["tangent"], _tangent_reverse)
defjvp_argnums(_RUN["tangent"], through(_composite("tangent"))[1])


# --- calls ----------------------------------------------------------------------------------------
def fused(
    operation: FusedOperation, operands: Sequence[Any], activation: Any, flags: Sequence[Any],
    needs: Any, out: Any, backend: Any,
) -> Any:  # fmt: skip
    """Run a call of a public function."""
    if out is not None:
        raise ValueError("out must be None under automatic differentiation, got an array")
    x = list(operands)
    dtype = next(y.dtype for y in x if hasattr(y, "dtype"))
    for i, y in enumerate(x):
        if type(y) in NUMBERS:
            x[i] = np.array(y, dtype)
    kind, form, keep = operation.form.kind, operation.form, operation.keep
    guard = bool(flags[0]) if flags else True
    how = How(operation.of("forward"), operation.known(activation), (), guard, backend)
    if kind == "forward":
        how = how._replace(saved=[] if form.factors and not keep else None)
        results = _made("forward", how, *x)
        if keep:
            results = (*results, *_sums(x, how))
        return results if operation.several else results[0]
    if kind == "tangent":
        own = x[: len(how.own)]
        results, dots = _made("forward", how, *own), x[len(own) :]
        if any(dot is not None for dot in dots):
            moved = _made("tangent", how, *x)
        else:
            moved = [anp.zeros_like(y) for y in results]
        return tuple([y for pair in zip(results, moved, strict=True) for y in pair])
    pairs = zip(operation.operands, x, strict=True)
    given = {name: y for name, y in pairs if y is not None}
    wanted = tuple([name for name in operation.needs if name in needs and name in given])
    count = len(x) - form.factors
    sums = x[count:]
    if sums and all(type(y) is ndarray for y in sums):
        how = how._replace(saved=sums)
    found = _made(kind, how._replace(needs=wanted), *x[:count]) if wanted else ()
    made = dict(zip(wanted, found, strict=True))
    if flags[1]:  # sum_batch
        for name in form.right:
            if name in made:
                made[name] = composites.summed(anp, made[name], given[name].shape[-2:])
    return tuple([made.get(name) for name in operation.needs])


def _sums(x: Sequence[Any], how: How) -> list[Any]:
    """Return the sums of a forward, with derivatives of their own."""
    form, (a, *right) = how.operation.form, x[: 1 + how.operation.form.factors]
    found = []
    for i, b in enumerate(right):
        bias = x[1 + len(right) + i] if form.biases else None
        z = matmul_bias_activation(a, b, backend=how.backend)
        z = z if bias is None else z + bias
        if not form.biases and z.dtype != np.float64:
            z = z.astype(np.float32)
        found.append(z)
    return found
