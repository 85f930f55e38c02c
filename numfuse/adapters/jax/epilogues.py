"""Calls of epilogues as JAX differentiates them, on NumPy arrays: layout, problem, description.

Of the operands of a kind of call, by the names of `numfuse.problem.fused`, those in which it is
linear come last:

    forward          (own)
    tangent          (own, sums | tangents) -> out_dot
    backward         (own, sums | grads) -> d_own
    double backward  (own, sums, grads | cotangents of d_own) -> d_grads, d_own

Sums are the products that a forward has kept: they save making them again, and move with `own`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse import epilogues
from numfuse.adapters.jax.operations import Shape, Taken, activation_of, ghosts, text_of
from numfuse.adapters.primitives import How, matrices
from numfuse.backends import resolve
from numfuse.definitions import UserEpilogue
from numfuse.language.curves import inputs
from numfuse.language.text import dumps, loads
from numfuse.problem import forms, fused
from numfuse.problem.shapes import gemm_shape
from numfuse.runtime.strided import ghost


class Form(NamedTuple):
    """The description of a call without its arrays; JAX compares and hashes it.

    The activation of `how` is what the call was given: a UserEpilogue, or a gated layer's.
    Every operand has `lead` mapped axes in front, of length 1 where it is the same for all. The
    last `pooled` of them are summed over in the gradient of an operand that is the same for all.
    """

    how: How
    there: tuple[bool, ...]
    lead: int
    pooled: int
    kind: forms.Form
    #: Whether a forward returns its sums, as `FusedOperation` has it.
    keep: bool | str = False
    #: Whether they are for derivatives alone, which do not go through them.
    inner: bool = False

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the operands that a call of this kind may have: others, and the linear ones."""
        of = self.kind
        own = (*of.factor_names, *of.others)
        grads = tuple([f"g_{i}" for i in range(of.results)])
        match of.kind:
            case "forward":
                return own, ()
            case "tangent":
                return (*own, *of.sums), tuple([f"{x}_dot" for x in own])
            case "backward":
                return (*own, *of.sums), grads
        return (*own, *of.sums, *grads), tuple([f"c_{x}" for x in own])

    @property
    def present(self) -> list[str]:
        """Return the names of the operands that are there."""
        before, linear = self.names
        pairs = zip((*before, *linear), self.there, strict=True)
        return [name for name, there in pairs if there]

    @property
    def made(self) -> tuple[str, ...]:
        """Return the names of the results."""
        of = self.kind
        if of.kind == "forward":
            kept = of.factors if self.keep else 0
            outs = [f"out_{i}" for i in range(of.results)]
            return (*outs, *(f"pre_{i}" for i in range(kept)))
        if of.kind == "tangent":
            return tuple([f"out_{i}_dot" for i in range(of.results)])
        return tuple([f"d_{x}" for x in self.how.needs])

    def of(self, kind: str, **changes: Any) -> Form:
        """Return the form of another kind of call of the same formula."""
        return self._replace(kind=self.kind._replace(kind=kind), **{"keep": False, **changes})

    @property
    def whole(self) -> epilogues.Epilogue:
        """Return the formulas of the forward."""
        given = self.how.activation
        if self.kind.biases:
            return epilogues.gated_layer(given.curve)
        over: epilogues.Epilogue = given.over(self.kind.factors)  # type: ignore[attr-defined]
        return over

    def bends(self) -> bool:
        """Return whether a derivative depends on the sums."""
        moved = self.whole.tangent()
        dots = [e for name, e in moved.results if name.endswith("_dot")]
        return bool(set(self.kind.sums) & set(inputs(dots)))


def base(name: str) -> str:
    """Return the operand whose shape an operand or a gradient has."""
    return name.removesuffix("_dot").removeprefix("c_").removeprefix("d_")


def is_full(name: str) -> bool:
    """Return whether an operand has the result's shape."""
    return name.startswith(("g_", "z_"))


def leads(form: Form, given: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the mapped axes that every operand has in a problem, by its `base`; "": the result."""
    n = form.lead
    own: dict[str, Shape] = {}
    batch = np.broadcast_shapes(*(shape[:n] for shape in given.values()))
    for name, shape in given.items():
        like = base(name)
        own[like] = np.broadcast_shapes(own.get(like, ()), shape[:n])
    for name in own:
        if is_full(name):
            own[name] = batch
        elif name in form.how.needs:
            own[name] = batch[: n - form.pooled] + own[name][n - form.pooled :]
    # Operands broadcast to what the factors make, all right factors alike, or to each other.
    factors = form.kind.factor_names or tuple([x for x in form.kind.others if x in own])
    if np.broadcast_shapes(*(own[x] for x in factors)) != batch:
        own[factors[0]] = batch
    for name in form.kind.right:
        if np.broadcast_shapes(own["a"], own[name]) != batch:
            own[name] = batch
    return {"": batch, **own}


class EpilogueCall(NamedTuple):
    """A call without its arrays (`numfuse.adapters.jax.calls`)."""

    form: Form
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]

    def results(self) -> list[tuple[Shape, Any]]:
        """Return the shape and dtype of each result, after every check of shapes and dtypes."""
        return _results(self)

    def taken(self, given: Sequence[Any], empty: Callable[..., ndarray] = np.empty) -> Taken:
        """Return the problem on these arrays; `empty` makes its results."""
        form, of = self.form, self.form.kind
        x = dict(zip(form.present, given, strict=True))
        mapped = self.layout() if form.lead else {}
        for name, (shape, matrix) in mapped.items():
            x[name] = np.broadcast_to(x[name], shape).reshape(matrix)
        how = form.how.needs, None, form.how.guard, form.keep, False
        p = fused.make(of, form.whole, form.how.activation, x, *how, empty=empty)
        results = dict(zip(self._every(), _tuple(p.result), strict=True))
        if of.kind == "tangent":
            _moved_alone(p, form.made)
        made = [name for name in form.made if results[name] is not None]
        own = [results[name] for name in made]
        if form.lead:
            own = [y.reshape(shape) for y, shape in zip(own, self._visible(made, own), strict=True)]
        return Taken("fused", p, form.present, made, own)

    def on_host(self, given: Sequence[Any]) -> list[ndarray]:
        """Return the results, of NumPy arrays."""
        taken, backend = self.taken(given), resolve(self.form.how.backend)
        run = getattr(backend, "fused", None)
        if run is None:
            raise ValueError(f"backend must have the operation 'fused', got {backend!r} without it")
        run(taken.problem)
        return taken.results

    def _every(self) -> list[str]:
        """Return the names of all results that the problem may have, in their order."""
        form, of = self.form, self.form.kind
        if of.kind == "tangent":
            return [f"out_{i}{dot}" for i in range(of.results) for dot in ("", "_dot")]
        if of.kind == "forward":
            return list(form.made)
        grads = range(of.results if of.kind == "double_backward" else 0)
        every = *(f"g_{i}" for i in grads), *of.factor_names, *of.others
        return [f"d_{x}" for x in every]

    def layout(self) -> dict[str, tuple[Shape, Shape]]:
        """Return the shape that each operand is broadcast to, and that of its matrices."""
        form, n = self.form, self.form.lead
        given = dict(zip(form.present, self.shapes, strict=True))
        axes, own = leads(form, given), {name: shape[n:] for name, shape in given.items()}
        factors = [own[name] for name in form.kind.factor_names]
        rank = max(2, *map(len, factors)) if factors else max(map(len, own.values()))
        row = bool(factors) and len(factors[0]) == 1
        column = bool(factors) and len(factors[1]) == 1
        found = {}
        for name, shape in own.items():
            like = base(name)
            kind = like[0] if like in form.kind.factor_names else "r"
            full = matrices(kind, shape, rank, row, column)
            found[name] = axes[like] + shape, axes[like] + full
        return found

    def _visible(self, made: Sequence[str], results: Sequence[ndarray]) -> list[Shape]:
        """Return the shapes of results that were made as matrices with mapped axes."""
        form, n = self.form, self.form.lead
        given = dict(zip(form.present, self.shapes, strict=True))
        axes, own = leads(form, given), {name: shape[n:] for name, shape in given.items()}
        if form.kind.factors:
            a, b = ghosts([own["a"], own["b_0"]], ["float32"] * 2)
            visible = gemm_shape(a, b, None)[0].visible
        else:
            visible = np.broadcast_shapes(*(own[x] for x in form.kind.others if x in own))
        found = []
        for name in made:
            like = base(name)
            is_operand = name.startswith("d_") and like in own
            found.append(axes[like] + own[like] if is_operand else axes[""] + visible)
        return found

    # --- another process --------------------------------------------------------------------------
    def described(self) -> list[Any]:
        """Return what JSON holds, and `read` reads."""
        how, act = self.form.how, self.form.how.activation
        told: Any
        if isinstance(act, UserEpilogue):
            told = act.name, dumps(act.graphs), act.parameters, act.several
        else:
            told = text_of(act)
        return [told, how.needs, how.guard, self.form[1:], self.shapes, self.dtypes]

    @classmethod
    def read(cls, what: Sequence[Any]) -> EpilogueCall:
        """Return what was described, of an epilogue that may be another object."""
        told, needs, guard, (there, lead, pooled, kind, *more), shapes, dtypes = what
        act: Any
        if len(told) == 2:
            act = activation_of(*told)
        else:
            name, text, parameters, several = told
            source = "of a compiled computation"
            act = UserEpilogue(name, source, tuple(parameters), loads(text), several)
        kind[3:5] = map(tuple, kind[3:5])
        of = forms.Form._make(kind)
        form = Form(How(act, tuple(needs), guard), tuple(there), lead, pooled, of, *more)
        return cls(form, tuple(map(tuple, shapes)), tuple(dtypes))

    @property
    def held(self) -> Any:
        """Return what the formulas go with."""
        return self.form.how.activation


# As many as the core keeps forms of calls.
@functools.lru_cache(maxsize=4096)
def _results(call: EpilogueCall) -> list[tuple[Shape, Any]]:
    return [(x.shape, x.dtype) for x in call.taken(ghosts(call.shapes, call.dtypes), ghost).results]


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _moved_alone(p: fused.FusedProblem, dots: Sequence[str]) -> None:
    """Leave the values out of a problem of forward mode."""
    p.epilogue = p.epilogue.select(*dots)
    p.stored = tuple(name for name in p.stored if name in dots)
    p.zeroed = tuple(name for name in p.zeroed if name in dots)
    p.sums = {name: p.sums[name] for name in p.epilogue.accumulators}
    factors = {name for pairs in p.sums.values() for pair in pairs for name in pair}
    used = {*dots, *factors, *p.epilogue.operands}
    p.arrays = {name: x for name, x in p.arrays.items() if name in used}
