"""The graphs of a product over Dask blocks: forward, backward, second order and forward mode.

All is `dask.array.blockwise` and `dask.array.reduction`, with meta given: nothing is computed to
build a graph, and every check is made before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array import PerformanceWarning

from numfuse.adapters.dask import blocks, tiling
from numfuse.adapters.dask.blocks import Task
from numfuse.adapters.dask.operands import MAY_BE_NUMPY, Chunks, Gate, Letters, base, checked, ghost
from numfuse.problem.operands import same_dtype
from numfuse.problem.shapes import gemm_shape, residual_view

__all__ = ["Product"]

#: Which axis of the result K stands on in an operand where it is one block.
_LENT = {"a": "n", "b": "m"}


def _in_one_block(name: str, letters: Letters) -> Letters:
    """The axes of an operand whose K is one block: without one that the result lacks.

    Such an axis would be a sum to Dask, which hands over lists of blocks and does not fuse tasks
    that make operands with those that use them. One block serves all blocks of any axis.
    """
    place = _LENT.get(base(name))
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
        if pre is not None and pre.dtype not in (self.dtype, self.acc_dtype):
            raise TypeError(
                f"pre_activation must have dtype {self.acc_dtype} or {self.dtype}, got {pre.dtype}"
            )
        for name in ("grad", "pre_activation"):
            if name in given and given[name].shape != shape.visible:
                raise ValueError(
                    f"{name} must have the result's shape {shape.visible}, got {given[name].shape}"
                )
        for name, x in given.items():
            of = base(name)
            if of not in given:
                raise ValueError(f"{name} must be None where {of} is None, got an array")
            if x.shape != ghosts.get(of, x).shape:
                raise ValueError(
                    f"{name} must have the shape of {of} {given[of].shape}, got {x.shape}"
                )
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
        return [(x, _in_one_block(n, own)) for n, (x, own) in zip(names, found, strict=True)]

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
        if moved > tiling.MOVED_BYTES:
            how = "making K one chunk" if join else "adding the parts of sums over K"
            warnings.warn(
                f"K = {self.sizes['k']} is in {parts} chunks: {how} moves up to "
                f"{moved / 2**30:.1f} GiB between workers; chunk a along M instead, "
                f"with K in one chunk: a.rechunk({{-1: -1, -2: 'auto'}})",
                PerformanceWarning,
                stacklevel=5,
            )

    #: The chunks of K that the operands came with, where they have been joined.
    own_k: Chunks | None = None

    def sum_of_parts(self) -> tuple[Any, Letters]:
        """a @ b from the parts of each chunk of K; its blocks have an axis of length 1 in front."""
        letters = ("k", *self.letters)
        parts = self.map(
            blocks.product,
            letters,
            self.index(letters),
            *self.named("a", "b"),
            dtype=self.acc_dtype,
            adjust={"k": 1},
            task=self.task,
        )
        return self.reduced(parts, [0], self.acc_dtype, keepdims=False), self.letters

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
            function,
            self.letters,
            self.index(self.letters),
            *operands,
            names=tuple(names),
            save_pre=save_pre,
            task=self.task,
            **options,
        )
        if not save_pre:
            return self.visible(made)
        pair = self.item(made, 0, self.dtype), self.item(made, 1, self.acc_dtype)
        return tuple(map(self.visible, pair))

    def backward(self, needs: Sequence[str], identity: bool) -> dict[str, Any]:
        """The gradients `needs` of "a", "b" and "bias"."""
        saved = "pre_activation" in self.given and not identity
        products = [name for name in needs if name != "bias"]
        # As if all were needed: which ones are changes no bit of the others.
        self.join_k(2 - (saved or identity), ("a", "b"))
        operands = ["grad", "a", "b"]
        operands += ["bias"] if "bias" in self.given else []
        if not self.many_k:
            operands += ["pre_activation"] if saved else []
            return self._gradients(operands, self.letters, needs, self.task)
        if not identity:
            self._make_grad_pre(saved)
        task = self.task._replace(activation=blocks.NONE)
        operands = ["grad", "a", "b"]
        # A bias of its own batch enlarges the result, and with it what blocks of a and b belong to.
        operands += ["bias"] if len(self.axes.get("bias", ())) > 2 else []
        found = self._gradients(operands, (*self.letters, "k"), products, task)
        if "bias" in needs:
            made = self.map(
                blocks.column_sums,
                self.letters,
                self.index(self.letters),
                *self.named("grad", "bias"),
                dtype=self.acc_dtype,
                task=task,
                acc_dtype=self.acc_dtype,
            )
            found |= self._summed_up(made, self.letters, ["bias"], [None])
        return found

    def double_backward(self, needs: Sequence[str]) -> dict[str, Any]:
        """The gradients `needs` of "grad", "a", "b" and "bias"."""
        self.join_k(0, ("a", "b"), split=False)
        found = {}
        if "residual" in self.given:
            for name in ("bias", "residual"):
                if name in needs:  # the operation is linear in both
                    found[name] = self._as_given(name, da.zeros_like(self.given[name]))
        rest = [name for name in needs if name not in found]
        return found | self._gradients(
            list(self.given), self.letters, rest, self.task, blocks.double_backward
        )

    def tangent(self) -> tuple[Any, Any]:
        """The result and its derivative along the tangents."""
        self.join_k(0, split=False)
        made = self.map(
            blocks.tangent,
            self.letters,
            self.index(self.letters),
            *self.named(*self.given),
            names=tuple(self.given),
            task=self.task,
        )
        pair = (self.item(made, number, self.dtype) for number in range(2))
        out, out_dot = map(self.visible, pair)
        return out, out_dot

    def _make_grad_pre(self, saved: bool) -> None:
        """grad_pre in place of grad: made once, for every chunk of K."""
        names = ["pre_activation"] if saved else ["sum"]
        operands = self.named(*names) if saved else [self.sum_of_parts()]
        if not saved and "bias" in self.given:
            names.append("bias")
            operands += self.named("bias")
        self.given["grad"] = self.map(
            blocks.grad_pre,
            self.letters,
            self.index(self.letters),
            *self.named("grad"),
            *operands,
            dtype=self.acc_dtype,
            names=("grad", *names),
            task=self.task,
            acc_dtype=self.acc_dtype,
        )

    def _gradients(
        self,
        names: Sequence[str],
        letters: Letters,
        needs: Sequence[str],
        task: Task,
        function: Callable[..., Any] = blocks.backward,
    ) -> dict[str, Any]:
        """The gradients `needs`, of blocks that make every block's part of each."""
        if not needs:
            return {}
        # Of all gradients, needed or not: which ones are asked for changes no bit of the others.
        every = [name for name in ("a", "b", "bias") if name in self.given]
        exact = tuple(name for name in every if self._summed(name))
        made = self.map(
            function,
            letters,
            self.index(letters),
            *self.named(*names),
            names=tuple(names),
            needs=tuple(needs),
            exact=exact,
            task=task,
        )
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
        """Return the axes of a gradient along which the gradient is not summed."""
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
                    blocks.chosen,
                    letters,
                    (made, letters),
                    dtype=self.acc_dtype,
                    adjust=dict.fromkeys(summed, 1),
                    numbers=tuple(numbers),
                )
                numbers = range(len(names)) if len(names) > 1 else [None]
            made = self.reduced(made, [letters.index(letter) for letter in summed], self.acc_dtype)
        found: dict[str, Any] = {}
        for name, number in zip(names, numbers, strict=True):
            own, kept = self._own(name), self._kept(name)
            adjust: dict[str, Any] = {letter: 1 for letter in own if letter not in kept}
            if "k" not in letters:
                own = _in_one_block(name, own)
                if name in _LENT:
                    adjust[_LENT[name]] = self.chunks["k"]
            whole = self.map(
                blocks.item, own, (made, letters), number=number, to=self.dtype, adjust=adjust
            )
            found[name] = self._as_given(name, whole)
        return found

    def _as_given(self, name: str, whole: Any) -> Any:
        """A gradient in the shape and the chunks in which its operand came."""
        if name in ("grad", "residual"):
            return self.visible(whole)[(0,) * (self.added if name == "residual" else 0)]
        if name == "a" and self.row:
            whole = whole[..., 0, :]
        elif name == "b" and self.column:
            whole = whole[..., 0]
        if self.own_k is not None and name in _LENT:
            axis = whole.ndim - (1 if name == "a" or self.column else 2)
            whole = whole.rechunk({axis: self.own_k})
        return whole

    def reduced(self, parts: Any, axes: Sequence[int], dtype: Any, keepdims: bool = True) -> Any:
        """Parts added along axes: in a fixed tree, whoever has them and whichever is first."""
        for axis in axes:
            parts = da.reduction(
                parts,
                blocks.unchanged,
                blocks.total,
                combine=blocks.total,
                axis=(axis,),
                keepdims=keepdims,
                dtype=dtype,
                split_every={axis: tiling.SPLIT},
                name="numfuse-sum",
                concatenate=False,
                meta=self.meta(parts.ndim - (not keepdims), dtype),
            )
        return parts

    def residual_gradient(self) -> Any:
        """grad summed to the residual's shape."""
        kept = self._kept("residual")
        made = self.map(
            blocks.residual_sums,
            self.letters,
            self.index(self.letters),
            *self.named("grad"),
            dtype=self.acc_dtype,
            kept=tuple(letter in kept for letter in self._own("residual")),
            task=self.task,
            acc_dtype=self.acc_dtype,
        )
        return self._summed_up(made, self.letters, ["residual"], [None])["residual"]
