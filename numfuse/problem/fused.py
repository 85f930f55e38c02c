"""Hop 2 of epilogues: products over one left factor, what is done with their sums, and gradients.

A backend is given one kind of problem for a forward and all of its derivatives (`forms`): sums of
products, an epilogue, which of its results are stored or summed, and the products of those that are
gradients of factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.epilogues import Epilogue
from numfuse.language.curves import Curve
from numfuse.language.graph import topological
from numfuse.problem.arrays import ArraysByName
from numfuse.problem.folds import fold
from numfuse.problem.forms import Factor, Form, derived, products_of, sums_of
from numfuse.problem.operands import (
    array_of,
    as_plain,
    output,
    same_dtype,
    saved_pre_activation,
    shaped,
)
from numfuse.problem.product import STORED
from numfuse.problem.shapes import GemmShape, Shape, gemm_shape, residual_view


@dataclass(slots=True, eq=False, repr=False)
class FusedProblem(ArraysByName):
    """An epilogue of sums of products and of operands, and the products that follow it.

    Arrays are (..., rows, columns), with batch axes of their own that broadcast to `batch`: factors
    as a product has them, every other array (..., M or 1, N or 1).
    """

    #: What the call is named by, and whose formulas it goes with.
    activation: Any
    m: int
    n: int
    k: int
    batch: Shape
    dtype: np.dtype[Any]
    acc_dtype: np.dtype[Any]
    arrays: dict[str, ndarray]
    #: By accumulator, the factors of the one or two products that it is the sum of.
    sums: dict[str, tuple[tuple[str, str], ...]]
    #: A result is stored, summed, or a factor of `products`, by its name.
    epilogue: Epilogue
    #: The arrays that are results, as the epilogue has them, element by element.
    stored: tuple[str, ...]
    #: The arrays that are results summed over the axes that they lack, or have with length 1.
    summed: tuple[str, ...]
    #: By the array of a gradient, the products that it is the sum of.
    products: dict[str, tuple[tuple[Factor, Factor], ...]]
    #: The arrays that nothing contributes to.
    zeroed: tuple[str, ...]
    #: By result, the operand that it is written in the place of.
    in_place: dict[str, str]
    result: Any
    #: The sums that the form of the call has, those that this call does without included.
    width: int = 0
    #: Results of the caller's that are copied from others when all is done: (target, made).
    late: tuple[tuple[ndarray, ndarray], ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of all arrays that are written."""
        return (*self.stored, *self.summed, *self.products, *self.zeroed)

    @property
    def guard(self) -> bool:
        """Whether every derivative of an activation counts as 0 where it is not finite."""
        nodes = topological(self.epilogue.graphs)
        slopes = any(isinstance(e.payload, Curve) and e.payload.order for e in nodes)
        return not slopes or any(e.op == "finite" for e in nodes)


# --- checks ---------------------------------------------------------------------------------------
class _Operands:
    """The arrays of a call by name: `given` in their own shapes, `arrays` as matrices."""

    def __init__(self, form: Form, given: Mapping[str, Any]) -> None:
        self.form, self.given = form, {}
        needed = *form.factor_names, *(() if form.biases else form.others)
        for name, x in given.items():
            if x is not None or name in needed or (name == "g_0" and form.results == 1):
                self.given[name] = as_plain(form.label(name), array_of(x))
        first = {name: x for name, x in self.given.items() if not name.startswith("z_")}
        if not first:
            raise TypeError("an epilogue without a product must have an operand that is an array")
        self.dtype, self.acc_dtype = same_dtype({form.label(n): x for n, x in first.items()})
        self.arrays: dict[str, ndarray] = {}
        shape = [
            gemm_shape(self.given["a"], self.given[name], None, form.label(name))
            for name in form.right
        ]
        for (_, a, b, _), name in zip(shape, form.right, strict=True):
            self.arrays |= {"a": a, name: b}
        self.sizes = shape[0][0] if shape else self._broadcast()
        for (sizes, *_), name in zip(shape, form.right, strict=True):
            if sizes.visible != self.sizes.visible:
                raise ValueError(
                    f"the right factors must give results of one shape, got {form.label(name)} "
                    f"{self.given[name].shape} beside {self.given[form.right[0]].shape}"
                )
        for name, x in self.given.items():
            if name not in self.arrays:
                self.arrays[name] = self._promoted(name, x)

    def _broadcast(self) -> GemmShape:
        """Return the sizes of a call without a product: its operands', as NumPy broadcasts."""
        shapes = {name: x.shape for name, x in self.given.items() if name in self.form.others}
        try:
            visible = np.broadcast_shapes(*shapes.values())
        except ValueError:
            told = ", ".join(f"{self.form.label(name)} {shape}" for name, shape in shapes.items())
            raise ValueError(f"the operands must broadcast to one shape, got {told}") from None
        missing = max(0, 2 - len(visible))
        *batch, m, n = (1,) * missing + visible
        return GemmShape(m, n, 0, tuple(batch), visible, (None,) * missing or None)

    def _promoted(self, name: str, x: ndarray) -> ndarray:
        """Return an array that is no factor of a forward as a matrix."""
        form = self.form
        if name.startswith("z_"):
            x = saved_pre_activation(x, self.sizes.visible, self.dtype, self.acc_dtype)
            return self.sizes.full(x)
        like = name[2:] if name.startswith("c_") else name.removesuffix("_dot")
        if name.startswith("g_"):
            shaped(x, form.label(name), self.sizes.visible)
        elif like != name:
            if like not in self.given:
                label = form.label(like)
                raise ValueError(f"{form.label(name)} must be None where {label} is, got an array")
            shaped(x, form.label(name), self.given[like].shape, f"the shape of {form.label(like)}")
        if like in form.factor_names:
            return as_factor(x, like)
        return residual_view(self.sizes, x, form.label(name))


def as_factor(x: ndarray, name: str) -> ndarray:
    """Return a factor, or what has its shape, as a matrix."""
    return x if x.ndim > 1 else x[:, None] if name != "a" else x[None, :]


# --- problems -------------------------------------------------------------------------------------
def make(
    form: Form,
    whole: Epilogue,
    activation: Any,
    given: Mapping[str, Any],
    needs: Sequence[str] = (),
    out: Sequence[Any] | None = None,
    guard: bool = True,
    keep: bool | str = False,
    sum_batch: bool = False,
    ghosts: bool = False,
    gathered: Callable[[ndarray], ndarray] | None = None,
    scattered: Callable[[ndarray], ndarray] | None = None,
    empty: Callable[..., ndarray] = np.empty,
) -> FusedProblem:
    """Return the problem of a call.

    `given` has its arrays by the names that they have here (:class:`Form`), None where one is not
    there, and `whole` is the forward. `needs` names the operands whose gradients are wanted, `out`
    has an array, or None, for each result. `keep` asks a forward for its sums, in the operands'
    dtype if it is "stored". Of `ghosts`, arrays of a device, no copy is made; else `gathered`
    copies an operand (..., M, K) to one of (rows, K), and `scattered` returns a result of (rows, K)
    that is copied to one of (..., M, K) in the end: default NumPy's way. `empty` makes a result of
    a shape and a dtype.
    """
    x = _Operands(form, given)
    epilogue = derived(form, whole, frozenset(x.arrays), guard)
    made, result = _outputs(x, _results(x, whole, needs, keep, sum_batch), out, empty)
    known, products = dict(epilogue.results), products_of(form)
    stored, summed, zeroed, kept = [], [], [], {}
    arrays = dict(x.arrays)
    for name, y in made.items():
        if name in products:
            arrays[name] = as_factor(y, name[2:])
            there = known.keys() | arrays.keys()
            terms = [pair for pair in products[name] if {f.name for f in pair} <= there]
            if terms:
                kept[name] = tuple(terms)
            else:
                zeroed.append(name)
            continue
        arrays[name] = residual_view(x.sizes, y)
        if name not in known:
            zeroed.append(name)
        elif arrays[name].shape == (*x.sizes.batch, x.sizes.m, x.sizes.n):
            stored.append(name)
        else:
            summed.append(name)
    used = [f.name for terms in kept.values() for pair in terms for f in pair]
    chosen = epilogue.select(
        *dict.fromkeys([*stored, *summed, *(name for name in used if name in known)])
    )
    every = sums_of(form, arrays)
    sums = {name: every[name] for name in chosen.accumulators}
    used += [name for pairs in sums.values() for pair in pairs for name in pair]
    needed = {*made, *used, *chosen.operands}
    arrays = {name: y for name, y in arrays.items() if name in needed}
    head = activation, *x.sizes[:4], x.dtype, x.acc_dtype, arrays, sums, chosen
    in_place = {
        name: other
        for name, y in zip(made, out or (), strict=False)
        for other, z in given.items()
        if y is z and y is not None
    }
    p = FusedProblem(*head, tuple(stored), tuple(summed), kept, tuple(zeroed), in_place, result)
    p.width = form.factors * (1 + (form.kind in ("double_backward", "tangent")))
    if p.batch and form.factors:
        right = {x for b in form.right for x in (b, f"{b}_dot", f"c_{b}", f"d_{b}")}
        fold(p, right, ghosts, gathered=gathered, scattered=scattered)
    return p


def _results(
    x: _Operands, whole: Epilogue, needs: Sequence[str], keep: bool | str, sum_batch: bool
) -> dict[str, tuple[Shape, np.dtype[Any]] | None]:
    """Return the shape and dtype of each result, in their order; None where it is not wanted."""
    form, visible = x.form, x.sizes.visible
    found: dict[str, Any] = {}
    if "backward" not in form.kind:
        for name, _ in whole.results:
            found[name] = visible, x.dtype
            if form.kind == "tangent":
                found[f"{name}_dot"] = visible, x.dtype
        if keep:
            dtype = x.dtype if keep == STORED else x.acc_dtype
            found |= {f"pre_{i}": (visible, dtype) for i in range(form.factors)}
        return found
    names = (*form.factor_names, *form.others)
    if form.kind == "double_backward":
        names = (*(f"g_{i}" for i in range(form.results)), *names)
    for name in names:
        y = x.given.get(name)
        found[f"d_{name}"] = None
        if y is not None and name in needs:
            shape, number = y.shape, name in form.others and form.numbers[int(name[2:])]
            if sum_batch and name in form.right and len(shape) > 2:
                shape = shape[-2:]
            found[f"d_{name}"] = shape, x.acc_dtype if number else x.dtype
    return found


def _outputs(
    x: _Operands,
    specs: Mapping[str, Any],
    out: Sequence[Any] | None,
    empty: Callable[..., ndarray],
) -> tuple[dict[str, ndarray], Any]:
    """Return the results by name, new or the caller's, and what the caller gets."""
    form, others = x.form, {x.form.label(name): y for name, y in x.given.items()}
    in_place = () if form.factors or form.kind != "forward" else tuple(others)
    made: dict[str, ndarray] = {}
    found: list[Any] = []
    outs = (None,) * len(specs) if out is None else out
    for (name, spec), given in zip(specs.items(), outs, strict=True):
        if spec is None:
            if given is not None:
                label = form.label(name)
                raise ValueError(
                    f"{label} in out must be None where it is not needed, got an array"
                )
            found.append(None)
            continue
        if given is None:
            made[name] = empty(*spec)
        else:
            label = form.label(name)
            shape, dtype = spec
            made[name] = output(label, given, shape, dtype, others, in_place)
            others[label] = made[name]
        found.append(made[name] if given is None else given)
    return made, tuple(found) if len(specs) > 1 or "backward" in form.kind else found[0]
