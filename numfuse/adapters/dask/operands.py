"""Operands in Dask blocks: what they must be, which axes they share, and one task a block.

Axes have letters: ``p0``, ``p1``, ... of the batch, ``m``, ``n`` and ``k``; every operand has some
of them, and a task of `numfuse.adapters.dask.blocks` is one block of the axes of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array

from numfuse.adapters.dask import blocks
from numfuse.adapters.dask.blocks import Task
from numfuse.problem.fields import FIELD_OF
from numfuse.problem.operands import as_plain, required, same_dtype
from numfuse.runtime.dispatch import adapter_of

#: What an axis is called in messages.
_NAMES = {"m": "the rows (M)", "n": "the columns (N)", "k": "K"}
Letters = tuple[str, ...]
Chunks = tuple[int, ...]
#: Cotangents and tangents: they have the axes of the operand that they move along with.
_MOVED = {"u": "a", "v": "b", "w": "bias", "z": "residual"}
#: Operands that may be NumPy arrays beside Dask arrays: they are small where A is large.
MAY_BE_NUMPY = ("b", "bias", "residual")


def checked(operands: dict[str, Any], may_be_numpy: tuple[str, ...]) -> tuple[dict[str, Any], type]:
    """The operands that are there, each a Dask array of known chunks (or of NumPy where it may),
    and the kind of array that their blocks are."""
    required(operands)
    found = {name: x for name, x in operands.items() if x is not None}
    kinds: dict[type, str] = {}
    for name, x in found.items():
        if isinstance(x, da.Array):
            if any(math.isnan(length) for length in x.shape):
                raise ValueError(
                    f"{name} must have known chunk sizes, got shape {x.shape}; "
                    f"{name}.compute_chunk_sizes() finds them"
                )
            block = meta_from_array(x)
        elif base(name) in may_be_numpy:
            block = found[name] = as_plain(name, x)
        else:
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(
                f"{name} must be a Dask array where another operand is one, got {kind}; "
                f"dask.array.from_array({name}, chunks=...) makes one"
            )
        if adapter_of(**{name: block}) is None:
            as_plain(name, block)
        kinds.setdefault(type(block), name)
    if len(kinds) > 1:
        told = ", ".join(
            f"{name} {kind.__module__}.{kind.__qualname__}" for kind, name in kinds.items()
        )
        raise TypeError(f"the blocks of all operands must be arrays of one kind, got {told}")
    return found, next(iter(kinds))


def base(name: str) -> str:
    """The operand whose axes an operand has."""
    known = _MOVED.get(FIELD_OF.get(name, name))
    return name.removeprefix("c_").removesuffix("_dot") if known is None else known


def ghost(x: Any) -> np.ndarray:
    """An array of this shape and dtype that takes no memory: what shapes are checked with."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _told(chunks: Chunks) -> str:
    if len(chunks) <= 6:
        return str(chunks)
    return f"({chunks[0]}, {chunks[1]}, ..., {chunks[-1]}: {len(chunks)} chunks)"


class Gate:
    """Operands of one shape, and block by block functions of them."""

    def __init__(self, task: Task, operands: dict[str, Any]) -> None:
        self.given, kind = checked(operands, ())
        self.task = task.on(kind)
        ghosts = {name: ghost(x) for name, x in self.given.items()}
        self.dtype, self.acc_dtype = same_dtype(ghosts)
        first, *others = self.given.items()
        for name, x in others:
            if x.shape != first[1].shape:
                raise ValueError(
                    f"{name} must have the shape of {first[0]} {first[1].shape}, got {x.shape}"
                )
        self.letters = tuple(f"p{axis}" for axis in range(first[1].ndim))
        self.axes = dict.fromkeys(self.given, self.letters)
        self._agree()

    def label(self, name: str) -> str:
        """Return what a message calls an operand."""
        return name

    def _agree(self) -> None:
        """The chunks of every axis, which all Dask operands that have it must share."""
        self.chunks: dict[str, Chunks] = {}
        self.sizes: dict[str, int] = {}
        for name, letters in self.axes.items():
            for letter, length in zip(letters, self.given[name].shape, strict=True):
                if length != 1 or letter not in self.sizes:
                    self.sizes[letter] = length
        owner: dict[str, str] = {}
        for name, letters in self.axes.items():
            x = self.given[name]
            for axis, letter in enumerate(letters):
                if not isinstance(x, da.Array) or x.shape[axis] != self.sizes[letter]:
                    continue
                wanted = self.chunks.setdefault(letter, x.chunks[axis])
                if x.chunks[axis] != wanted:
                    what = _NAMES.get(letter, f"axis {axis}")
                    mine, other = self.label(name), self.label(owner[letter])
                    raise ValueError(
                        f"{mine} must be chunked along {what} as {other} is, "
                        f"{_told(wanted)}, got {_told(x.chunks[axis])}; {mine}.rechunk(...) "
                        f"or {other}.rechunk(...) makes them equal"
                    )
                owner.setdefault(letter, name)
        for letter, size in self.sizes.items():
            self.chunks.setdefault(letter, (size,))
        for name, letters in self.axes.items():
            x = self.given[name]
            if not isinstance(x, da.Array):
                own = tuple(
                    self.chunks[letter] if length == self.sizes[letter] else (1,)
                    for length, letter in zip(x.shape, letters, strict=True)
                )
                self.given[name] = da.from_array(x, chunks=own, asarray=False)

    # --- tasks ------------------------------------------------------------------------------------

    def meta(self, ndim: int, dtype: Any) -> Any:
        """An empty array of the kind that blocks are."""
        return meta_from_array(next(iter(self.given.values())), ndim=ndim, dtype=dtype)

    def map(
        self,
        function: Callable[..., Any],
        letters: Letters,
        *operands: tuple[Any, Letters],
        dtype: Any = None,
        adjust: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """One task for every block of the axes `letters`."""
        return da.blockwise(
            function,
            letters,
            *(x for pair in operands for x in pair),
            token=f"numfuse-{function.__name__.replace('_', '-')}",
            meta=self.meta(len(letters), self.dtype if dtype is None else dtype),
            adjust_chunks=adjust,
            align_arrays=False,
            **options,
        )

    def named(self, *names: str) -> list[tuple[Any, Letters]]:
        return [(self.given[name], self.axes[name]) for name in names]

    def tasks(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        letters: Letters | None = None,
        **options: Any,
    ) -> Any:
        """Return what a function of `blocks` makes of operands by name, block by block."""
        letters = self.letters if letters is None else letters
        # Every task's place among the blocks of these axes: no task of its own once fused.
        index = da.map_blocks(
            blocks.block_index,
            chunks=tuple(self.chunks[letter] for letter in letters),
            dtype=np.intp,
            meta=np.empty((0,) * len(letters), np.intp),
        )
        return self.map(
            function,
            letters,
            (index, letters),
            *self.named(*names),
            names=tuple(names),
            task=self.task,
            **options,
        )

    def results(self, **options: Any) -> Any:
        """Return the results of the task's operation, block by block."""
        return self.tasks(blocks.results, tuple(self.given), **options)

    def item(self, made: Any, number: int, dtype: Any) -> Any:
        """One of the results of blocks that are tuples."""
        return self.map(blocks.item, self.letters, (made, self.letters), dtype=dtype, number=number)
