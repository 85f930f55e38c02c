r"""Numbers that know how far a computation may be off them, and how they came about.

A :class:`Number` is an array of exact values `v` (long double where numfuse computes in float64,
else float64), of sizes `m` and of errors `e`. The size is what the value would be if nothing
cancelled: sums of absolute values of products. The error bounds what any order of evaluation in the
accumulator's dtype, of unit roundoff u, may be off:

- a sum of n products, in any order: gamma_n times the sum of their sizes (N. J. Higham, Accuracy
  and Stability of Numerical Algorithms, chapter 3), beside what the errors of the factors hand on;
- a sum or a product of two: u times its size, and what is handed on;
- a function f: mixed forward-backward stable, so the change of f over v +- (e + c u \|v\|), doubled
  for the curvature between, and c u \|f\|; c is 16 for values, more for derivatives, whose largest
  errors `docs/numerics.md` lists in units in the last place;
- underflow of a product adds the smallest subnormal number, where a device or an instruction
  flushes, the smallest normal one times the size of the factors;
- where half types are stored between two products, their rounding.

What may overflow on the way has the error inf: nothing is said of it. So have values behind a NaN
that stems from such a one. The tape gives reverse mode, and, as its own steps are on the tape,
every derivative of a derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
from numpy import ndarray

from numfuse.moduli import DEFAULT, residues

#: What products of parts leave out, as a share of their terms' sizes.
LEFT_OUT = {"bf16x6": 2.0**-23, "bf16x3": 2.0**-15}
LONG = np.dtype(np.longdouble)
F64 = np.dtype(np.float64)
_turn = count()


@dataclass(frozen=True)
class Rules:
    """What the arithmetic of a backend promises in one dtype."""

    dtype: np.dtype[Any]
    #: Dtypes of which subnormal numbers may count as zero.
    flushed: tuple[str, ...] = ()
    #: The largest error of a division, in units in the last place.
    division: float = 0.5
    #: How products are made: of bfloat16 parts (float32), or of integers of 8 bits (float64).
    precision: str = "ieee"

    @property
    def acc(self) -> np.dtype[Any]:
        return F64 if self.dtype == F64 else np.dtype(np.float32)

    @property
    def wide(self) -> np.dtype[Any]:
        return LONG if self.dtype == F64 else F64

    @property
    def half(self) -> bool:
        return self.dtype.itemsize == 2

    @property
    def u(self) -> float:
        return float(np.finfo(self.acc).eps) / 2

    @property
    def v(self) -> float:
        """The unit roundoff of a store."""
        return float(ml_dtypes.finfo(self.dtype).eps) / 2

    @property
    def normal(self) -> float:
        """The smallest normal number of the accumulator."""
        return float(np.finfo(self.acc).smallest_normal)

    @property
    def least(self) -> float:
        """What a product may lose to underflow."""
        if self.acc.name in self.flushed:
            return self.normal
        return float(np.finfo(self.acc).smallest_subnormal)

    @property
    def lost(self) -> float:
        """What a store may lose to underflow."""
        info = ml_dtypes.finfo(self.dtype)
        if self.dtype.name in self.flushed:
            return float(info.smallest_normal)
        return float(info.smallest_subnormal)

    def flushes(self, size: ndarray) -> ndarray:
        """Return which factors of these sizes a product may take as zero."""
        return (size > 0) & (size < self.normal)

    @property
    def products_flush(self) -> bool:
        """Whether a product of factors may flush them (bfloat16's instructions always may)."""
        names = {self.dtype.name, self.acc.name}
        parts = self.precision.startswith("bf16")
        return self.dtype.name == "bfloat16" or bool(names & {*self.flushed}) or parts

    @property
    def large(self) -> float:
        """Sizes beyond may overflow on the way."""
        return float(np.finfo(self.acc).max) / 64

    def number(self, x: Any) -> Number:
        """Return an exact number."""
        v = np.asarray(x).astype(self.wide)
        return Number(self, v, np.abs(v).astype(F64), np.zeros(v.shape))


class Number:
    """Values, sizes and errors, and the step of the tape that made them."""

    __slots__ = ("e", "m", "made", "parents", "pull", "rules", "terms", "turn", "v")

    def __init__(
        self, rules: Rules, v: ndarray, m: ndarray, e: ndarray,
        parents: tuple[Number, ...] = (),
        pull: Callable[[Number], Sequence[Number | None]] | None = None,
    ) -> None:  # fmt: skip
        finite = np.isfinite(v)
        # (of what is not finite in truth an error means nothing; a size may overflow on the way)
        e = np.where(finite, np.where(np.isnan(e) | (m > rules.large), np.inf, e), 0.0)
        self.rules, self.v, self.m, self.e = rules, v, m, e
        self.parents, self.pull, self.turn = parents, pull, next(_turn)
        self.made = bool(parents)
        #: Of how many terms each element is a sum.
        self.terms = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.v.shape

    # --- arithmetic ---------------------------------------------------------------------------
    def __add__(self, other: Any) -> Number:
        x, y = self, _number(self, other)
        m = x.m + y.m
        e = x.e + y.e + x.rules.u * m
        return Number(
            x.rules, x.v + y.v, m, e, (x, y), lambda g: (sum_to(g, x.shape), sum_to(g, y.shape))
        )

    def __mul__(self, other: Any) -> Number:
        x, y = self, _number(self, other)
        r, m = x.rules, x.m * y.m
        e = x.m * y.e + y.m * x.e + x.e * y.e
        e = e + r.u * (m + e) + r.least
        return Number(
            r, x.v * y.v, m, e, (x, y),
            lambda g: (sum_to(g * y, x.shape), sum_to(g * x, y.shape)),
        )  # fmt: skip

    def __truediv__(self, other: Any) -> Number:
        x, y = self, _number(self, other)
        r = x.rules
        v = x.v / y.v
        below = np.maximum(np.abs(y.v) - y.e, 0).astype(F64)
        m = (x.m / np.abs(y.v)).astype(F64)
        e = (x.e + np.abs(v) * y.e) / below
        e = e + (2 * r.division + 1) * r.u * (m + e) + r.normal * (1 + 1 / below)
        return Number(
            r, v, m, e.astype(F64), (x, y),
            lambda g: (sum_to(g / y, x.shape), sum_to(-(g * x / y / y), y.shape)),
        )  # fmt: skip

    def __neg__(self) -> Number:
        return Number(self.rules, -self.v, self.m, self.e, (self,), lambda g: (-g,))

    def __sub__(self, other: Any) -> Number:
        return self + -_number(self, other)

    def __rsub__(self, other: Any) -> Number:
        return _number(self, other) - self

    def __rtruediv__(self, other: Any) -> Number:
        return _number(self, other) / self

    __radd__, __rmul__ = __add__, __mul__

    @np.errstate(all="ignore")  # (some of NumPy's libraries warn of NaN and infinities)
    def __matmul__(self, other: Number) -> Number:
        x, y = self, other
        r, n = x.rules, x.shape[-1] + 1
        xm, xe, ym, ye = x.m, x.e, y.m, y.e
        if r.half:  # what lies between two products may be stored
            xe, ye = (_restored(z) for z in (x, y))
        v, m = x.v @ y.v, xm @ ym
        e = n * r.u / (1 - n * r.u) * m + _beside(x, y)
        if xe.any():
            e = e + xe @ ym
        if ye.any():
            e = e + xm @ ye + (xe @ ye if xe.any() else 0)
        if r.products_flush:
            # A flushed factor costs a term the other one, and a sum on the way may be flushed. Of
            # parts a split may lose 1.01 of the smallest normal number, and each of six products
            # has up to two sums a term: in its chain, and as this goes on (docs/numerics.md).
            share, each = (1.01, 7) if r.precision in LEFT_OUT else (1, 1)
            e = e + r.normal * (
                (share * xm + each).sum(axis=-1, keepdims=True)
                + (share * ym + each).sum(axis=-2, keepdims=True)
            )
            # A flushed factor times an infinite one is NaN, but IEEE's where a call has no tiles:
            # nothing is said of it, nor of what follows, which a guard may turn into 0.
            tiny, infinite = ([f(z).astype(float) for z in (xm, ym)] for f in (r.flushes, np.isinf))
            either = tiny[0] @ infinite[1] + infinite[0] @ tiny[1] > 0
            v, e = np.where(either, 0, v), np.where(either, np.inf, e)
        else:
            e = e + n * r.least
        made = Number(
            r, v, m, e, (x, y),
            lambda g: (sum_to(g @ y.t, x.shape), sum_to(x.t @ g, y.shape)),
        )  # fmt: skip
        made.terms = n
        return made

    @property
    def t(self) -> Number:
        """The last two axes exchanged."""
        x = self
        v, m, e = (y.swapaxes(-1, -2) for y in (x.v, x.m, x.e))
        return Number(x.rules, v, m, e, (x,), lambda g: (g.t,))._as(x)

    def stored(self) -> Number:
        """Return a number that half types may round here, and its gradient too."""
        x = self
        if not x.rules.half:
            return x
        return Number(x.rules, x.v, x.m, _restored(x), (x,), lambda g: (g.stored(),))._as(x)

    def reshape(self, shape: tuple[int, ...]) -> Number:
        x = self
        v, m, e = (y.reshape(shape) for y in (x.v, x.m, x.e))
        return Number(x.rules, v, m, e, (x,), lambda g: (g.reshape(x.shape),))._as(x)

    def broadcast(self, shape: tuple[int, ...]) -> Number:
        x = self
        if x.shape == shape:
            return x
        v, m, e = (np.broadcast_to(y, shape) for y in (x.v, x.m, x.e))
        return Number(x.rules, v, m, e, (x,), lambda g: (sum_to(g, x.shape),))._as(x)

    def __getitem__(self, i: int) -> Number:
        """Return a member of the first axis."""
        x = self
        return Number(
            x.rules, x.v[i], x.m[i], x.e[i], (x,), lambda g: (_placed(g, i, x.shape),)
        )._as(x)

    def _as(self, other: Number) -> Number:
        self.made = other.made
        return self

    def held(self, saved: Number) -> Number:
        """Return the same step of the tape with values that were saved."""
        return Number(self.rules, saved.v, saved.m, saved.e, (self,), lambda g: (g,))


@np.errstate(all="ignore")
def _beside(x: Number, y: Number) -> Any:
    """Return what a product's precision adds to the errors of IEEE's (docs/numerics.md)."""
    r = x.rules
    if r.precision in LEFT_OUT:
        return LEFT_OUT[r.precision] * (1 + 2.0**-6) * (x.m @ y.m) + 80 * r.u * (x.m @ y.m)
    return _scaled(r, x.m + x.e, y.m + y.e) if r.precision == "int8" else 0.0


def _scaled(r: Rules, x: ndarray, y: ndarray) -> Any:
    """Return how far products of integers may be off, whose scales are those of norms."""
    if not (x.size and y.size):
        return 0.0
    sizes, k = [], x.shape[-1]
    for size, axis in ((x, -1), (y, -2)):
        # (products that are summed over a batch have one norm)
        axes = (*range(size.ndim - 2), size.ndim + axis)
        top = size.max(axis=axes, keepdims=True)
        norm = top * np.sqrt(((size / np.where(top > 0, top, 1)) ** 2).sum(axes, keepdims=True))
        far = (norm > 0) & ((norm < 2.0**-450) | (norm > 2.0**450))
        sizes.append(norm * np.where(far, 2 * np.sqrt(k), 1.0))
    share = 4 * np.sqrt(k) / float(residues(DEFAULT).square) ** 0.5
    return share * sizes[0] * sizes[1] + r.least


@np.errstate(all="ignore")
def at_once(x: Number, lefts: Sequence[Number], slopes: Sequence[Number]) -> Number:
    """Return a gradient of a right factor that is a sum of products, made as one product.

    Of integers all have one scale then: a member of a jet that is large in one factor, and one that
    is large in the other, spoil what a third one adds.
    """
    empty = any(not y.v.size for y in (x, *lefts, *slopes))
    if x.rules.precision != "int8" or not lefts or empty:
        return x
    a, q = [], []
    for left, slope in zip(lefts, slopes, strict=True):
        size = left.m + left.e
        size = np.broadcast_to(size, (*slope.shape[:-1], size.shape[-1]))
        a.append(size.reshape(-1, size.shape[-1]))
        q.append((slope.m + slope.e).reshape(-1, slope.shape[-1]))
    e = x.e + _scaled(x.rules, np.concatenate(a).T, np.concatenate(q))
    return Number(x.rules, x.v, x.m, e)


def _number(like: Number, x: Any) -> Number:
    """Return a number, or a constant as the accumulator's dtype has it."""
    if isinstance(x, Number):
        return x
    made = like.rules.number(x)
    made.e = made.e + like.rules.u * made.m
    return made


def _restored(x: Number) -> ndarray:
    """Return the error after a store, of what was computed."""
    if not x.made:
        return x.e
    r = x.rules
    most = float(ml_dtypes.finfo(r.dtype).max)
    e = x.e + r.v * (x.m + x.e) + r.lost
    return np.where(np.isfinite(x.v) & (np.abs(x.v) + e > most / 2), np.inf, e)


def _placed(g: Number, i: int, shape: tuple[int, ...]) -> Number:
    """Return zeros but for one member of the first axis."""
    made = []
    for y in (g.v, g.m, g.e):
        z = np.zeros(shape, y.dtype)
        z[i] = y
        made.append(z)
    return Number(g.rules, *made, (g,), lambda h: (h[i],))


def sum_to(x: Number, shape: tuple[int, ...]) -> Number:
    """Sum over the axes along which `shape` was broadcast."""
    if x.shape == shape:
        return x
    lead = x.v.ndim - len(shape)
    own = (i for i, n in enumerate(shape) if n == 1 and x.shape[lead + i] != 1)
    axes = (*range(lead), *(lead + i for i in own))
    v, m, e = (y.sum(axis=axes).reshape(shape) for y in (x.v, x.m, x.e))
    n = int(np.prod([x.shape[i] for i in axes])) * x.terms
    e = e + n * x.rules.u * m
    return Number(x.rules, v, m, e, (x,), lambda g: (_spread(g, x.shape, lead),))


def stack(numbers: Sequence[Number], shape: tuple[int, ...], rules: Rules) -> Number:
    """Return numbers as members of a new first axis; `shape` is that of each."""
    if not numbers:
        return rules.number(np.zeros((0, *shape)))
    x = [y.broadcast(shape) for y in numbers]
    made = (np.stack([getattr(y, name) for y in x]) for name in "vme")
    return Number(rules, *made, tuple(x), lambda g: tuple(g[i] for i in range(len(x))))


def _spread(g: Number, shape: tuple[int, ...], lead: int) -> Number:
    return g.reshape((*[1] * lead, *g.shape)).broadcast(shape)


def where(condition: Any, x: Any, y: Any) -> Number:
    """Choose; `condition` is (truth, whether an error may turn it)."""
    truth, open_ = condition
    like = x if isinstance(x, Number) else y
    x, y = _number(like, x), _number(like, y)
    v, m = np.where(truth, x.v, y.v), np.where(truth, x.m, y.m)
    with np.errstate(invalid="ignore"):
        turned = np.abs(x.v - y.v).astype(F64) + x.e + y.e
    e = np.where(open_, turned, np.where(truth, x.e, y.e))
    return Number(
        like.rules, v, m, e, (x, y),
        lambda g: (
            sum_to(where(condition, g, 0.0), x.shape), sum_to(where(condition, 0.0, g), y.shape),
        ),
    )  # fmt: skip


def greater(x: Any, y: Any) -> tuple[ndarray, ndarray]:
    """Return whether x > y, and where that is open."""
    like = x if isinstance(x, Number) else y
    x, y = _number(like, x), _number(like, y)
    error = x.e + y.e
    return x.v > y.v, (np.abs(x.v - y.v) <= error) & (error > 0)


def larger(x: Any, y: Any) -> Number:
    """Return the larger one; NaN where either is, though the gradient is then the second's."""
    made = where(greater(x, y), x, y)
    like = x if isinstance(x, Number) else y
    nan = np.broadcast_to(np.isnan(_number(like, x).v), made.shape)
    made.v, made.e = np.where(nan, np.nan, made.v), np.where(nan, 0.0, made.e)
    return made


def in_any_order(x: Number, terms: int) -> Number:
    """Return a number that is a sum of so many terms, whose order is not that of the tape.

    A large term may come first, so that each of the others rounds it.
    """
    return Number(x.rules, x.v, x.m, x.e + terms * x.rules.u * x.m)


def gradients(
    results: Sequence[Number], cotangents: Sequence[Number | None], inputs: Sequence[Number]
) -> list[Number | None]:
    """Return the cotangents of inputs; None of one that nothing depends on."""
    order: dict[int, Number] = {}
    stack = list(results)
    while stack:
        x = stack.pop()
        if x.turn not in order:
            order[x.turn] = x
            stack.extend(x.parents)
    reached = {x.turn for x in inputs}
    for turn in sorted(order):
        if any(p.turn in reached for p in order[turn].parents):
            reached.add(turn)
    found: dict[int, Number] = {}
    for x, g in zip(results, cotangents, strict=True):
        if g is not None:
            found[x.turn] = found[x.turn] + g if x.turn in found else g
    for turn in sorted(order, reverse=True):
        x, g = order[turn], found.get(turn)
        if g is None or x.pull is None or turn not in reached:
            continue
        if not any(p.turn in reached for p in x.parents):
            continue
        for parent, part in zip(x.parents, x.pull(g), strict=True):
            if part is not None and parent.turn in reached:
                before = found.get(parent.turn)
                found[parent.turn] = part if before is None else before + part
    return [found.get(x.turn) for x in inputs]
