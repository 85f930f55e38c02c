"""The graphs of a product over Dask blocks: which axes operands share, and how blocks are summed.

Axes have letters: ``p0``, ``p1``, ... of the batch, ``m``, ``n`` and ``k``; every operand has some
of them, and a task of `numfuse.adapters.dask_blocks` is one block of the axes of its result. All is
`dask.array.blockwise` and `dask.array.reduction`, with meta given: nothing is computed to build a
graph, and every check is made before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array import PerformanceWarning
from dask.array.utils import meta_from_array

from numfuse import tiling
from numfuse.adapters import dask_blocks as blocks
from numfuse.adapters.dask_blocks import Task
from numfuse.kinds import adapter_of
from numfuse.layout import gemm_shape, residual_view
from numfuse.operands import as_plain, same_dtype

__all__ = ["Gate", "Product"]

#: What an axis is called in messages.
_NAMES = {"m": "the rows (M)", "n": "the columns (N)", "k": "K"}
Letters = tuple[str, ...]
Chunks = tuple[int, ...]
#: Operands that may be NumPy arrays beside Dask arrays: they are small where A is large.
_MAY_BE_NUMPY = ("b", "bias", "residual")


def _checked(operands: dict[str, Any], may_be_numpy: tuple[str, ...]) -> dict[str, Any]:
    """The operands that are there, each a Dask array of known chunks (or of NumPy where it may)."""
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
        elif name in may_be_numpy:
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
    return found


def _ghost(x: Any) -> np.ndarray:
    """An array of this shape and dtype that takes no memory: what shapes are checked with."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _told(chunks: Chunks) -> str:
    if len(chunks) <= 6:
        return str(chunks)
    return f"({chunks[0]}, {chunks[1]}, ..., {chunks[-1]}: {len(chunks)} chunks)"


class Gate:
    """Operands of one shape, and block by block functions of them."""

    def __init__(self, task: Task, operands: dict[str, Any]) -> None:
        self.task = task
        self.given = _checked(operands, ())
        ghosts = {name: _ghost(x) for name, x in self.given.items()}
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
                    raise ValueError(
                        f"{name} must be chunked along {what} as {owner[letter]} is, "
                        f"{_told(wanted)}, got {_told(x.chunks[axis])}; {name}.rechunk(...) "
                        f"or {owner[letter]}.rechunk(...) makes them equal"
                    )
                owner.setdefault(letter, name)
        for letter, size in self.sizes.items():
            self.chunks.setdefault(letter, (size,))
        for name, letters in self.axes.items():
            x = self.given[name]
            if not isinstance(x, da.Array):
                self.given[name] = da.from_array(
                    x, chunks=tuple(self._own_chunks(x.shape, letters)), asarray=False
                )

    def _own_chunks(self, shape: Sequence[int], letters: Letters) -> list[Chunks]:
        return [
            self.chunks[letter] if length == self.sizes[letter] else (1,)
            for length, letter in zip(shape, letters, strict=True)
        ]

    # --- tasks ------------------------------------------------------------------------------------

    def meta(self, ndim: int, dtype: Any) -> Any:
        """An empty array of the kind that blocks are."""
        return meta_from_array(next(iter(self.given.values())), ndim=ndim, dtype=dtype)

    def index(self, letters: Letters) -> tuple[Any, Letters]:
        """Every task's place among the blocks of these axes: no task of its own once fused."""
        array = da.map_blocks(
            blocks.block_index, chunks=tuple(self.chunks[letter] for letter in letters),
            dtype=np.intp, meta=np.empty((0,) * len(letters), np.intp),
        )  # fmt: skip
        return array, letters

    def map(
        self, function: Callable[..., Any], letters: Letters, *operands: tuple[Any, Letters],
        dtype: Any = None, adjust: dict[str, Any] | None = None, new: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """One task for every block of the axes `letters`."""
        return da.blockwise(
            function, letters, *(x for pair in operands for x in pair),
            token=f"numfuse-{function.__name__.replace('_', '-')}",
            meta=self.meta(len(letters), self.dtype if dtype is None else dtype),
            adjust_chunks=adjust, new_axes=new, align_arrays=False, **options,
        )  # fmt: skip

    def named(self, *names: str) -> list[tuple[Any, Letters]]:
        return [(self.given[name], self.axes[name]) for name in names]

    def item(self, made: Any, number: int, dtype: Any) -> Any:
        """One of the results of blocks that are tuples."""
        return self.map(blocks.item, self.letters, (made, self.letters), dtype=dtype, number=number)


class Product(Gate):
    """The axes of act(a @ b + bias) and of what belongs to it."""

    def __init__(self, task: Task, operands: dict[str, Any]) -> None:
        self.task = task
        self.given = given = _checked(operands, _MAY_BE_NUMPY)
        ghosts = {name: _ghost(x) for name, x in given.items()}
        pre = ghosts.pop("pre_activation", None)
        self.dtype, self.acc_dtype = same_dtype(ghosts)
        shape, *_ = gemm_shape(ghosts["a"], ghosts["b"], ghosts.get("bias"))
        if "residual" in given:
            residual_view(shape, ghosts["residual"])
        if pre is not None and pre.dtype not in (self.dtype, self.acc_dtype):
            raise TypeError(
                f"pre_activation must have dtype {self.acc_dtype} or {self.dtype}, got {pre.dtype}"
            )
        for name in ("grad", "pre_activation"):
            if name in given and given[name].shape != shape.visible:
                raise ValueError(
                    f"{name} must have the result's shape {shape.visible}, got {given[name].shape}"
                )
        #: What 1-D operands leave out of the results, and of their own gradients; and the axes
        #: that the residual got in front because of them.
        self.added = 0
        self.row, self.column = given["a"].ndim == 1, given["b"].ndim == 1
        if self.row:
            given["a"] = given["a"][None, :]
        if self.column:
            given["b"] = given["b"][:, None]
        for name in ("grad", "pre_activation", "residual"):
            if name in given and shape.promote is not None:
                x = given[name]
                missing = len(shape.visible) - x.ndim
                self.added = missing if name == "residual" else self.added
                given[name] = x[(None,) * missing][shape.promote]
        batch = tuple(f"p{axis}" for axis in range(len(shape.batch)))
        self.letters = (*batch, "m", "n")
        own = {"a": ("m", "k"), "b": ("k", "n"), "bias": ("m", "n")}
        self.axes = {}
        for name, x in given.items():
            letters = (*batch, *own.get(name, ("m", "n")))
            self.axes[name] = letters[len(letters) - x.ndim :]
        self._agree()

    @property
    def many_k(self) -> bool:
        return len(self.chunks["k"]) > 1

    def visible(self, x: Any) -> Any:
        """A result without the axes that 1-D operands leave out."""
        if self.row:
            x = x[..., 0, :]
        return x[..., 0] if self.column else x

    # --- K in several chunks ----------------------------------------------------------------------

    def _bytes(self, letters: Sequence[str], dtype: Any) -> int:
        return math.prod(self.sizes[letter] for letter in letters) * np.dtype(dtype).itemsize

    def join_k(self, results: int, gradients: Sequence[str] = (), split: bool = True) -> None:
        """Make K one chunk where that moves fewer bytes than `results` passes of (M, N) in parts.

        Parameters
        ----------
        results : int
            Passes of a matrix as large as the result, in the accumulator's dtype: the parts of
            a @ b that are summed, and grad_pre that goes to every chunk of K.
        gradients : sequence of str
            Those of "a" and "b" that are cut into chunks again.
        split : bool
            False: there is no graph for parts.
        """
        parts = len(self.chunks["k"])
        if parts == 1:
            return
        # Of K chunks that meet in one task, or of K parts that are added, one is there already.
        moved = results * (parts - 1) * self._bytes(self.letters, self.acc_dtype)
        cut = [name for name in ("a", "b") for _ in range(1 + (name in gradients))]
        joined = sum(self.given[name].nbytes for name in cut) * (parts - 1) // parts
        join = not split or joined < moved
        if join:
            moved = joined
            for name, axis in (("a", -1), ("b", -2)):
                self.given[name] = self.given[name].rechunk({axis: -1})
            self.own_k = self.chunks["k"]
            self.chunks["k"] = (self.sizes["k"],)
        if moved > tiling.DASK_MOVED_BYTES:
            how = "making K one chunk" if join else "adding the parts of sums over K"
            warnings.warn(
                f"K = {self.sizes['k']} is in {parts} chunks: {how} moves up to "
                f"{moved / 2**30:.1f} GiB between workers; chunk a along M instead, "
                f"with K in one chunk: a.rechunk({{-1: -1, -2: 'auto'}})",
                PerformanceWarning, stacklevel=5,
            )  # fmt: skip

    #: The chunks of K that the operands came with, where they have been joined.
    own_k: Chunks | None = None

    def sum_of_parts(self) -> tuple[Any, Letters]:
        """a @ b from the parts of each chunk of K, with an axis of length 1 in front."""
        letters = ("k", *self.letters)
        parts = self.map(
            blocks.product, letters, self.index(letters), *self.named("a", "b"),
            dtype=self.acc_dtype, adjust={"k": 1}, task=self.task,
        )  # fmt: skip
        return self.reduced(parts, [0], self.acc_dtype), letters

    # --- results ----------------------------------------------------------------------------------

    def forward(self, save_pre: bool = False) -> Any:
        """The result, or the pair of it and of the pre-activation."""
        every: tuple[str, ...] = ("a", "b", "bias", "residual")
        names = [name for name in every if name in self.given]
        self.join_k(1)
        function: Callable[..., Any] = blocks.forward
        operands = self.named(*names)
        options: dict[str, Any] = {}
        if self.many_k:
            names, function = names[2:], blocks.epilogue
            operands = [self.sum_of_parts(), *self.named(*names)]
            names, options = ["sum", *names], {"to": self.dtype}
        made = self.map(
            function, self.letters, self.index(self.letters), *operands,
            names=tuple(names), save_pre=save_pre, task=self.task, **options,
        )  # fmt: skip
        if not save_pre:
            return self.visible(made)
        pair = self.item(made, 0, self.dtype), self.item(made, 1, self.acc_dtype)
        return tuple(map(self.visible, pair))

    def backward(self, needs: Sequence[str], identity: bool) -> dict[str, Any]:
        """The gradients `needs` of "a", "b" and "bias"."""
        saved = "pre_activation" in self.given and not identity
        products = [name for name in needs if name != "bias"]
        self.join_k((not saved and not identity) + (len(products) > 0), products)
        operands = ["grad", "a", "b"]
        operands += ["bias"] if "bias" in self.given else []
        if not self.many_k:
            operands += ["pre_activation"] if saved else []
            return self._gradients(operands, self.letters, needs, self.task)
        if not identity:
            self._make_grad_pre(saved)
        task = self.task._replace(activation=blocks.NONE)
        found = self._gradients(["grad", "a", "b"], (*self.letters, "k"), products, task)
        if "bias" in needs:
            made = self.map(
                blocks.column_sums, self.letters, self.index(self.letters),
                *self.named("grad", "bias"), dtype=self.acc_dtype, task=task,
                acc_dtype=self.acc_dtype,
            )  # fmt: skip
            found |= self._summed_up(made, self.letters, ["bias"], [None])
        return found

    def _make_grad_pre(self, saved: bool) -> None:
        """grad_pre in place of grad: made once, for every chunk of K."""
        names = ["pre_activation"] if saved else ["sum"]
        operands = self.named(*names) if saved else [self.sum_of_parts()]
        if not saved and "bias" in self.given:
            names.append("bias")
            operands += self.named("bias")
        self.given["grad"] = self.map(
            blocks.grad_pre, self.letters, self.index(self.letters), *self.named("grad"), *operands,
            dtype=self.acc_dtype, names=("grad", *names), task=self.task, acc_dtype=self.acc_dtype,
        )  # fmt: skip

    def _gradients(
        self, names: Sequence[str], letters: Letters, needs: Sequence[str], task: Task
    ) -> dict[str, Any]:
        """The gradients `needs`, of blocks that make every block's part of each."""
        if not needs:
            return {}
        exact = tuple(name for name in needs if self._summed(name))
        made = self.map(
            blocks.backward, letters, self.index(letters), *self.named(*names),
            names=tuple(names), needs=tuple(needs), exact=exact, task=task,
        )  # fmt: skip
        # Those that are summed along the same axes share the tasks of one sum.
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in needs:
            groups.setdefault(tuple(self._summed(name)), []).append(name)
        found: dict[str, Any] = {}
        for group in groups.values():
            numbers = [needs.index(name) if len(needs) > 1 else None for name in group]
            found |= self._summed_up(made, letters, group, numbers)
        return found

    # --- gradients: what every block adds, and its sum --------------------------------------------

    def _own(self, name: str) -> Letters:
        """The axes of a gradient."""
        return ("k", "n") if name == "b" and self.task.sum_batch else self.axes[name]

    def _kept(self, name: str) -> set[str]:
        """Those along which it is not summed."""
        own = self._own(name)
        lengths = self.given[name].shape[-len(own) :] if own else ()
        return {
            letter
            for letter, length in zip(own, lengths, strict=True)
            if length == self.sizes[letter]
        }

    def _summed(self, name: str) -> list[str]:
        """The axes of several blocks along which it is summed."""
        kept = self._kept(name)
        return [x for x in self.letters if x not in kept and len(self.chunks[x]) > 1]

    def _summed_up(
        self, made: Any, letters: Letters, names: Sequence[str], numbers: Sequence[int | None]
    ) -> dict[str, Any]:
        """Gradients that are summed along the same axes, from their `numbers` in blocks `made`.

        A block's part has the operand's own axes, whatever the axes of the blocks.
        """
        summed = self._summed(names[0])
        if summed:
            if list(numbers) != [None]:
                made = self.map(
                    blocks.chosen, letters, (made, letters), dtype=self.acc_dtype,
                    adjust=dict.fromkeys(summed, 1), numbers=tuple(numbers),
                )  # fmt: skip
                numbers = range(len(names)) if len(names) > 1 else [None]
            made = self.reduced(made, [letters.index(letter) for letter in summed], self.acc_dtype)
        found: dict[str, Any] = {}
        for name, number in zip(names, numbers, strict=True):
            own, kept = self._own(name), self._kept(name)
            whole = self.map(
                blocks.item, own, (made, letters), number=number, to=self.dtype,
                new={"k": self.chunks["k"]} if "k" in own and "k" not in letters else None,
                adjust={letter: 1 for letter in own if letter not in kept},
            )  # fmt: skip
            found[name] = self._as_given(name, whole)
        return found

    def _as_given(self, name: str, whole: Any) -> Any:
        """A gradient in the shape and the chunks in which its operand came."""
        if name == "residual":
            return self.visible(whole)[(0,) * self.added]
        if name == "a" and self.row:
            whole = whole[..., 0, :]
        elif name == "b" and self.column:
            whole = whole[..., 0]
        if self.own_k is not None and name != "bias":
            axis = whole.ndim - (1 if name == "a" or self.column else 2)
            whole = whole.rechunk({axis: self.own_k})
        return whole

    def reduced(self, parts: Any, axes: Sequence[int], dtype: Any) -> Any:
        """Parts added along axes: in a fixed tree, whoever has them and whichever is first."""
        for axis in axes:
            parts = da.reduction(
                parts, blocks.unchanged, blocks.total, combine=blocks.total, axis=(axis,),
                keepdims=True, dtype=dtype, split_every={axis: tiling.DASK_SPLIT},
                name="numfuse-sum", concatenate=False, meta=self.meta(parts.ndim, dtype),
            )  # fmt: skip
        return parts

    def residual_gradient(self) -> Any:
        """grad summed to the residual's shape."""
        kept = self._kept("residual")
        made = self.map(
            blocks.residual_sums, self.letters, self.index(self.letters), *self.named("grad"),
            dtype=self.acc_dtype, kept=tuple(letter in kept for letter in self._own("residual")),
            task=self.task, acc_dtype=self.acc_dtype,
        )  # fmt: skip
        return self._summed_up(made, self.letters, ["residual"], [None])["residual"]
