"""Shapes, layouts and values: what a case draws from its seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
from numpy import ndarray
from numpy.lib.stride_tricks import as_strided

from .bounded import Number, Rules

#: Lengths: nothing, one, primes, around vectors and tiles.
LENGTHS = (0, 1, 1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 23, 31, 32, 33, 47, 64, 65, 97, 127, 131)
LONG_LENGTHS = (257, 300, 512, 513, 601, 1025, 2049)
BATCHES = ((), (), (), (), (1,), (2,), (3,), (2, 3), (5,), (0,), (1, 2))
#: How values are drawn: the kind, and its weight.
VALUES = {
    "normal": 8, "whole": 2, "positive": 2, "steep": 3, "wide": 2, "tiny": 1, "large": 1,
    "special": 3,
}  # fmt: skip
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0)
LAYOUTS = (
    "c", "c", "c", "transposed", "sliced", "inner", "reversed", "offset", "zero", "permuted",
)  # fmt: skip


@dataclass
class Limits:
    """What a place may be asked to compute."""

    dtypes: Sequence[str]
    #: Multiplications of a call, and elements of an array.
    work: int = 200_000
    elements: int = 40_000
    #: One case in so many may be that much larger.
    rare: int = 150
    larger: int = 20
    layouts: Sequence[str] = LAYOUTS
    values: Sequence[str] = tuple(VALUES)
    longest: int = 4096
    #: Variants of each way to draw a call in a run: each has kernels of its own.
    variants: int = 5


class Palette:
    """The choices that decide which kernels a case needs, as one of few variants makes them.

    A kernel takes as long to compile as a hundred cases. So for each way to draw a call a run of
    cases has so many variants (dtype, activation, what is None, what is asked for), and each of
    them meets many shapes, layouts and values. The next run has other variants.
    """

    def __init__(self, *seed: int) -> None:
        self.seed = seed

    def generator(self, what: str) -> np.random.Generator:
        """Return the generator of a choice, one and the same for each case of a variant."""
        return np.random.default_rng([*self.seed, crc32(what.encode())])

    def one(self, what: str, of: Sequence[Any]) -> Any:
        return of[int(self.generator(what).integers(len(of)))]

    def chance(self, what: str, p: float) -> bool:
        return bool(self.generator(what).random() < p)


@dataclass
class Draw:
    """The choices of one case; what it makes can be asked for afterwards."""

    rng: np.random.Generator
    rules: Rules
    limits: Limits
    palette: Palette
    kind: str = "normal"
    #: Each operand, in the order in which it was drawn, and the memory that it lies in.
    memory: list[tuple[ndarray, ndarray]] = field(default_factory=list)
    #: Operands whose length along an axis is given by others: one more is an error.
    bound: list[tuple[ndarray, int]] = field(default_factory=list)
    #: The number of each operand, by its identity.
    numbers: dict[int, Number] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.rules.dtype

    # --- choices ------------------------------------------------------------------------------
    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one(self, of: Sequence[Any]) -> Any:
        return of[int(self.rng.integers(len(of)))]

    def length(self, most: int) -> int:
        """Return a length of at most so much."""
        if most > 300 and self.chance(0.04):
            return min(int(self.one(LONG_LENGTHS)), most)
        return min(int(self.one(LENGTHS)), max(1, most))

    def lengths(self, count: int, work: int | None = None) -> list[int]:
        """Return lengths whose product is within the work of a case."""
        left = self.limits.work if work is None else work
        if self.chance(1 / self.limits.rare):
            left *= self.limits.larger
        found = [1] * count
        for i in self.rng.permutation(count):
            found[i] = self.length(min(left, self.limits.longest))
            left //= max(1, found[i])
        return found

    def batch(self, rows: int = 1) -> tuple[int, ...]:
        found = self.one(BATCHES)
        return found if int(np.prod(found)) * rows <= self.limits.work // 20 else ()

    def part(self, batch: tuple[int, ...]) -> tuple[int, ...]:
        """Return batch axes that broadcast to others."""
        if not batch or self.chance(0.5):
            return batch
        if self.chance(0.5):
            return batch[int(self.rng.integers(1, len(batch) + 1)) :]
        return tuple(n if self.chance(0.5) else 1 for n in batch)

    # --- values -------------------------------------------------------------------------------
    def values(self, shape: tuple[int, ...], scale: float = 1.0) -> ndarray:
        """Return values of the case's kind in the case's dtype."""
        rng, kind = self.rng, self.kind
        x = rng.standard_normal(shape) * scale
        top = float(ml_dtypes.finfo(self.dtype).max)
        if kind == "whole":
            x = rng.integers(-3, 4, shape).astype(float)
        elif kind == "positive":
            x = np.abs(x)
        elif kind == "steep":
            x = x * 12
        elif kind == "wide":
            x = x * 2.0 ** rng.integers(-12, 6, shape)
        elif kind == "tiny":
            x = x * float(ml_dtypes.finfo(self.dtype).smallest_normal) ** rng.uniform(0.3, 1.02)
        elif kind == "large":
            x = x * top ** rng.uniform(0.1, 0.45)
        x = np.clip(x, -top, top).astype(self.dtype)
        if kind == "special" and x.size and self.chance(0.6):
            flat = x.reshape(-1)
            for _ in range(int(rng.integers(1, 3))):
                least = float(ml_dtypes.finfo(self.dtype).smallest_subnormal)
                flat[int(rng.integers(flat.size))] = self.one((*SPECIAL, 3 * least))
            x = flat.reshape(shape)
        return x

    def array(self, shape: tuple[int, ...], scale: float = 1.0) -> ndarray:
        """Return an operand in some layout, often read-only."""
        return self.laid(self.values(shape, scale))

    def laid(self, x: ndarray) -> ndarray:
        """Return values in some layout, with NaN in the gaps."""
        layout = self.one(self.limits.layouts)
        view, memory = laid(x, layout, self.rng)
        if self.chance(0.5):
            view = view.view()
            view.flags.writeable = False
        self.memory.append((view, memory))
        return view

    def number(self, x: Any) -> Any:
        """Return the number of an operand, of an array one and the same each time; None of None."""
        if x is None:
            return None
        if not isinstance(x, ndarray):
            return self.rules.number(x)
        if id(x) not in self.numbers:
            self.numbers[id(x)] = self.rules.number(x)
        return self.numbers[id(x)]

    def like(self, what: str, x: ndarray | None, p: float = 0.8) -> ndarray | None:
        """Return an array of an operand's shape, or None."""
        if x is None or not self.palette.chance(what, p):
            return None
        return self.array(x.shape)

    def some(self, what: str, p: float, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, or None."""
        return make() if self.palette.chance(what, p) else None

    @property
    def guard(self) -> bool:
        return self.palette.chance("guard", 0.7)

    def needs(self, names: Sequence[Any]) -> tuple[Any, ...]:
        """Return some of the names, mostly all."""
        rng = self.palette.generator("needs")
        if rng.random() < 0.5:
            return tuple(names)
        found = tuple(x for x in names if rng.random() < 0.6)
        return found or (names[int(rng.integers(len(names)))],)

    # --- factors ------------------------------------------------------------------------------
    def factors(
        self, count: int = 1, vectors: bool = True, work: int | None = None
    ) -> tuple[ndarray, list[ndarray]]:
        """Return a left factor, and right factors of one shape each."""
        m, n, k = self.lengths(3, work)
        batch = self.batch(m)
        if self.chance(0.01):
            return self.huge(count, min(n, 8), min(k, 8))
        a_shape = (*(self.part(batch) if batch else ()), m, k)
        b_batch = self.part(batch) if self.chance(0.5) else ()
        b_shape: tuple[int, ...] = (*b_batch, k, n)
        if vectors and self.chance(0.04):
            a_shape = (k,)
        if vectors and self.chance(0.04):
            b_shape = (k,)
        a = self.array(a_shape)
        factors = [self.array(b_shape, max(1, k) ** -0.5) for _ in range(count)]
        if count > 1 and len(b_shape) == 2 and self.chance(0.4):
            factors = self.halves(factors)
        self.bound.append((a, -1))
        self.bound += [(b, -2 if b.ndim > 1 else -1) for b in factors]
        return a, factors

    def huge(self, count: int, n: int, k: int) -> tuple[ndarray, list[ndarray]]:
        """Return a left factor of very many equal rows, which take no memory."""
        rows = int(self.rng.integers(1, 1 + 40 * self.limits.elements // max(1, n, k)))
        row = self.values((k,))
        a = np.broadcast_to(row, (rows, k))
        self.memory.append((a, row))
        factors = [self.array((k, n), max(1, k) ** -0.5) for _ in range(count)]
        self.bound += [(a, -1), *((b, -2) for b in factors)]
        return a, factors

    def halves(self, factors: list[ndarray]) -> list[ndarray]:
        """Return right factors as views of one array: halves, or every other column."""
        count, n = len(factors), factors[0].shape[-1]
        whole = np.empty((factors[0].shape[0], count * n), self.dtype)
        apart = self.chance(0.5)
        parts = [slice(i, None, count) if apart else slice(i * n, i * n + n) for i in range(count)]
        found = [whole[:, part] for part in parts]
        for view, x in zip(found, factors, strict=True):
            view[...] = x
            self.memory = [pair for pair in self.memory if pair[0] is not x]
            self.memory.append((view, whole))
        return found

    def bias(self, out: tuple[int, ...], a: ndarray, b: ndarray) -> ndarray:
        """Return a bias of a product's result."""
        if b.ndim == 1:
            return self.array((1,))
        n, batch = out[-1], out[:-2]
        if a.ndim > 1 and batch and self.chance(0.3):
            return self.array((*self.part(batch), 1, n))
        made = self.array((n,))
        if n > 1:
            self.bound.append((made, -1))
        return made

    def operand(self, what: str, shape: tuple[int, ...]) -> ndarray:
        """Return an array that broadcasts to a shape."""
        how = self.palette.one(what, ("whole", "whole", "row", "column", "scalar", "any"))
        if how == "whole":
            return self.array(shape)
        if how == "row" and shape:
            return self.array(shape[-1:])
        if how == "column" and shape:
            return self.array((*shape[:-1], 1)[-2:])
        if how != "any":
            return self.array(())
        kept = tuple(n if self.chance(0.5) else 1 for n in shape)
        return self.array(kept[int(self.rng.integers(0, 1 + len(kept))) :])


def laid(x: ndarray, layout: str, rng: np.random.Generator) -> tuple[ndarray, ndarray]:
    """Return a view with the values of x (of zero strides: of its first) and the memory behind."""
    x = np.ascontiguousarray(x).reshape(x.shape)
    if not x.ndim or layout == "c":
        return x, x
    if layout == "zero":
        axis = int(rng.integers(x.ndim))
        first = np.ascontiguousarray(x[(*[slice(None)] * axis, slice(0, 1))])
        return (np.broadcast_to(first, x.shape), first) if x.size else (x, x)
    if layout in ("transposed", "permuted"):
        axes = [*range(x.ndim)]
        if layout == "permuted" or x.ndim < 2:
            axes = list(map(int, rng.permutation(x.ndim)))
        else:
            axes[-1], axes[-2] = axes[-2], axes[-1]
        memory = np.ascontiguousarray(x.transpose(axes)).reshape([x.shape[i] for i in axes])
        return memory.transpose(np.argsort(axes)), memory
    if layout == "reversed":
        flip = tuple(slice(None, None, -1 if rng.random() < 0.6 else 1) for _ in x.shape)
        memory = np.ascontiguousarray(x[flip]).reshape(x.shape)
        return memory[flip], memory
    lengths, around = list(x.shape), [slice(None)] * x.ndim
    axis = x.ndim - 1 if layout != "sliced" else int(rng.integers(x.ndim))
    step = 1 if layout == "offset" else int(rng.integers(2, 5))
    before = int(rng.integers(0, 4))
    lengths[axis] = before + step * lengths[axis] + 2
    around[axis] = slice(before, before + step * x.shape[axis], step)
    memory = np.full(lengths, np.nan, x.dtype)
    memory[tuple(around)] = x
    return memory[tuple(around)], memory


FENCE = 41


def fenced(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> tuple[ndarray, ndarray]:
    """Return an output of NaN and the memory around it, also NaN; sometimes with strides."""
    size, pitch = int(np.prod(shape)), 0
    if len(shape) > 1 and shape[-1] and rng.random() < 0.3:
        pitch = int(rng.integers(1, 4))
    inner = (*shape[:-1], shape[-1] + pitch) if shape else shape
    size = int(np.prod(inner))
    memory = np.full(size + 2 * FENCE, np.nan, dtype)
    view = memory[FENCE : FENCE + size].reshape(inner)
    if pitch:
        view = view[..., : shape[-1]]
    if len(shape) > 1 and not pitch and rng.random() < 0.15:
        turned = (*shape[:-2], shape[-1], shape[-2])
        view = memory[FENCE : FENCE + size].reshape(turned).swapaxes(-1, -2)
    return view, memory


def touched(view: ndarray, memory: ndarray) -> bool:
    """Return whether anything of the memory around an output is no NaN any more."""
    rest = memory.copy()
    offset = view.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    inside = as_strided(rest.view(np.uint8)[offset:].view(rest.dtype), view.shape, view.strides)
    if view.size:
        inside[...] = np.nan
    return not bool(np.isnan(rest.astype(np.float64)).all())
