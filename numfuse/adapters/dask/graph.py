"""The graphs of a product over Dask blocks: its axes and chunks, the forward and forward mode.

All is `dask.array.blockwise` and `dask.array.reduction`, with meta given: nothing is computed to
build a graph, and every check is made before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array import PerformanceWarning

from numfuse.adapters.dask import blocks
from numfuse.adapters.dask.blocks import Task
from numfuse.adapters.dask.operands import MAY_BE_NUMPY, Chunks, Gate, Letters, base, checked, ghost
from numfuse.problem.operands import same_dtype, saved_pre_activation, shaped
from numfuse.problem.shapes import gemm_shape, residual_view

__all__ = ["LENT", "MOVED_BYTES", "SPLIT", "Product", "in_one_block"]

#: Blocks that one task of a sum over Dask blocks adds.  It is a constant because the order of a sum
#: follows from it.  A task holds that many partial results and its result (36 MiB for a d_b of
#: 512 x 2048 in float32), and the tasks of a sum are a seventh of those of its blocks; the depth,
#: and with it the latency, falls with the logarithm only: 4096 blocks take 4 levels, with 4 they
#: take 6 and a third more tasks, with 16 they take 3 (docs/distributed.md counts them).
SPLIT = 8
#: Bytes that chunks along K may make move before a warning: a second at 10 Gbit/s.
MOVED_BYTES = 1 << 30
#: Which axis of the result K stands on in an operand where it is one block.
LENT = {"a": "n", "b": "m"}


def in_one_block(name: str, letters: Letters) -> Letters:
    """The axes of an operand whose K is one block: without one that the result lacks.

    Such an axis would be a sum to Dask, which hands over lists of blocks and does not fuse tasks
    that make operands with those that use them. One block serves all blocks of any axis.
    """
    place = LENT.get(base(name))
    return letters if place is None else tuple(place if x == "k" else x for x in letters)


class Product(Gate):
    """The axes of act(a @ b + bias) and of what belongs to it."""

    def __init__(self, task: Task, operands: dict[str, Any]) -> None:
        self.given, kind = checked(operands, MAY_BE_NUMPY)
        self.task = task.on(kind)
        given = self.given
        ghosts = {name: ghost(x) for name, x in given.items()}
        pre = ghosts.pop("pre_activation", None)
        self.dtype, self.acc_dtype = same_dtype(ghosts)
        shape, *_ = gemm_shape(ghosts["a"], ghosts["b"], ghosts.get("bias"))
        if "residual" in given:
            residual_view(shape, ghosts["residual"])
        if pre is not None:
            saved_pre_activation(pre, shape.visible, self.dtype, self.acc_dtype)
        for name, x in ghosts.items():
            of = base(name)
            if of not in given:
                raise ValueError(f"{name} must be None where {of} is None, got an array")
            if name == "grad":
                shaped(x, name, shape.visible)
            shaped(x, name, ghosts[of].shape, f"the shape of {of}")
        #: What 1-D operands leave out of the results, and of their own gradients; and the axes
        #: that the residual got in front because of them.
        self.added = 0
        self.row, self.column = given["a"].ndim == 1, given["b"].ndim == 1
        for name, x in given.items():
            of = base(name)
            if of == "a":
                given[name] = x[None, :] if self.row else x
            elif of == "b":
                given[name] = x[:, None] if self.column else x
            elif of != "bias" and shape.promote is not None:
                missing = len(shape.visible) - x.ndim
                self.added = missing if of == "residual" else self.added
                given[name] = x[(None,) * missing][shape.promote]
        batch = tuple(f"p{axis}" for axis in range(len(shape.batch)))
        self.letters = (*batch, "m", "n")
        own = {"a": ("m", "k"), "b": ("k", "n"), "bias": ("m", "n")}
        self.axes = {}
        for name, x in given.items():
            letters = (*batch, *own.get(base(name), ("m", "n")))
            self.axes[name] = letters[len(letters) - x.ndim :]
        self._agree()

    @property
    def many_k(self) -> bool:
        return len(self.chunks["k"]) > 1

    def named(self, *names: str) -> list[tuple[Any, Letters]]:
        found = super().named(*names)
        if self.many_k:
            return found
        return [(x, in_one_block(n, own)) for n, (x, own) in zip(names, found, strict=True)]

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
        axes = {"a": -1, "b": -2}
        whole = [name for name in self.given if base(name) in axes]
        cut = whole + [name for name in gradients if name in axes]
        joined = sum(self.given[name].nbytes for name in cut) * (parts - 1) // parts
        join = not split or joined < moved
        if join:
            moved = joined
            for name in whole:
                x = self.given[name]
                self.given[name] = x.rechunk({x.ndim + axes[base(name)]: -1})
            self.own_k = self.chunks["k"]
            self.chunks["k"] = (self.sizes["k"],)
        if moved > MOVED_BYTES:
            how = "making K one chunk" if join else "adding the parts of sums over K"
            warnings.warn(
                f"K = {self.sizes['k']} is in {parts} chunks: {how} moves up to "
                f"{moved / 2**30:.1f} GiB between workers; chunk a along M instead, "
                f"with K in one chunk: a.rechunk({{-1: -1, -2: 'auto'}})",
                PerformanceWarning,
                stacklevel=8,  # the caller of the public function
            )

    #: The chunks of K that the operands came with, where they have been joined.
    own_k: Chunks | None = None

    def sum_of_parts(self) -> tuple[Any, Letters]:
        """a @ b from the parts of each chunk of K; its blocks have an axis of length 1 in front."""
        parts = self.tasks(
            blocks.product,
            ("a", "b"),
            letters=("k", *self.letters),
            dtype=self.acc_dtype,
            adjust={"k": 1},
        )
        return self.reduced(parts, [0], self.acc_dtype, keepdims=False), self.letters

    def reduced(self, parts: Any, axes: Sequence[int], dtype: Any, keepdims: bool = True) -> Any:
        """Add parts along axes: in a fixed tree, whoever has them and whichever is first."""
        for axis in axes:
            parts = da.reduction(
                parts,
                blocks.unchanged,
                blocks.total,
                combine=blocks.total,
                axis=(axis,),
                keepdims=keepdims,
                dtype=dtype,
                split_every={axis: SPLIT},
                name="numfuse-sum",
                concatenate=False,
                meta=self.meta(parts.ndim - (not keepdims), dtype),
            )
        return parts

    # --- results ----------------------------------------------------------------------------------

    def forward(self, save_pre: bool = False) -> Any:
        """The result, or the pair of it and of the pre-activation."""
        names: list[str] = [x for x in ("a", "b", "bias", "residual") if x in self.given]
        self.join_k(1)
        if self.many_k:
            operands = [self.sum_of_parts(), *self.named(*names[2:])]
            names = ["sum", *names[2:]]
            made = self.tasks(blocks.epilogue, names, operands, save_pre=save_pre, to=self.dtype)
        else:
            made = self.tasks(blocks.results, names, return_pre_activation=save_pre)
        if not save_pre:
            return self.visible(made)
        pair = self.item(made, 0, self.dtype), self.item(made, 1, self.acc_dtype)
        return tuple(map(self.visible, pair))

    def tangent(self) -> tuple[Any, Any]:
        """The result and its derivative along the tangents."""
        self.join_k(0, split=False)
        made = self.results()
        pair = (self.item(made, number, self.dtype) for number in range(2))
        out, out_dot = map(self.visible, pair)
        return out, out_dot
