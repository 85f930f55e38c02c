"""The graphs of a product and of its gradients over Dask blocks: axes, chunks and sums.

All is `dask.array.blockwise` and `dask.array.reduction`, with meta given: nothing is computed to
build a graph, and every check is made before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask.array as da
from dask.array import PerformanceWarning

from numfuse.adapters.dask import blocks
from numfuse.adapters.dask.blocks import Task
from numfuse.adapters.dask.operands import MAY_BE_NUMPY, Chunks, Gate, Letters, base, checked, ghost
from numfuse.problem.operands import same_dtype, saved_pre_activation, shaped
from numfuse.problem.shapes import gemm_shape, residual_view

#: Blocks that one task of a sum over Dask blocks adds.  It is a constant because the order of a sum
#: follows from it.  A task holds that many partial results and its result (36 MiB for a d_b of
#: 512 x 2048 in float32), and the tasks of a sum are a seventh of those of its blocks; the depth,
#: and with it the latency, falls with the logarithm only: 4096 blocks take 4 levels, with 4 they
#: take 6 and a third more tasks, with 16 they take 3 (docs/distributed.md counts them).
SPLIT = 8
#: Bytes that chunks along K may make move before a warning: a second at 10 Gbit/s.
MOVED_BYTES = 1 << 30
#: Which axis of the result K stands on in an operand where it is one block.
_LENT = {"a": "n", "b": "m"}


def factor(name: str) -> str:
    """Return "a" or "b" where a name is that of such a factor, or of one of several."""
    return base(name).partition("_")[0]


def _in_one_block(name: str, letters: Letters) -> Letters:
    """The axes of an operand whose K is one block: without one that the result lacks.

    Such an axis would be a sum to Dask, which hands over lists of blocks and does not fuse tasks
    that make operands with those that use them. One block serves all blocks of any axis.
    """
    place = _LENT.get(factor(name))
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
        return [(x, _in_one_block(n, own)) for n, (x, own) in zip(names, found, strict=True)]

    def visible(self, x: Any) -> Any:
        """A result without the axes that 1-D operands leave out."""
        if self.row:
            x = x[..., 0, :]
        return x[..., 0] if self.column else x

    # --- K in several chunks ----------------------------------------------------------------------

    def join_k(self, results: int, gradients: Sequence[str] = (), split: bool = True) -> None:
        """Make K one chunk where that moves fewer bytes than `results` passes of (M, N) in parts.

        Those are passes in the accumulator's dtype: the parts of a @ b that are summed, and
        grad_pre that goes to every chunk of K. `gradients` are those of "a" and "b" that are cut
        into chunks again. Without `split` there is no graph for parts.
        """
        parts = len(self.chunks["k"])
        if parts == 1:
            return
        # Of K chunks that meet in one task, or of K parts that are added, one is there already.
        size = math.prod(self.sizes[letter] for letter in self.letters) * self.acc_dtype.itemsize
        moved = results * (parts - 1) * size
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
                stacklevel=9,  # the caller of the public function
            )

    #: The dtypes of gradients that have another than their operands.
    dtypes: Mapping[str, Any] = {}
    #: The chunks of K that the operands came with, where they have been joined.
    own_k: Chunks | None = None

    def sum_parts(self) -> None:
        """Make the operand "sum", a @ b from the parts of each chunk of K.

        Its blocks have an axis of length 1 in front.
        """
        options = {"dtype": self.acc_dtype, "adjust": {"k": 1}}
        parts = self.tasks(blocks.product, ["a", "b"], ("k", *self.letters), **options)
        self.given["sum"], self.axes["sum"] = self._reduced(parts, [0], False), self.letters

    def _reduced(self, parts: Any, axes: Sequence[int], keepdims: bool = True) -> Any:
        """Add parts along axes: in a fixed tree, whoever has them and whichever is first."""
        for axis in axes:
            parts = da.reduction(
                parts,
                blocks.unchanged,
                blocks.total,
                combine=blocks.total,
                axis=(axis,),
                keepdims=keepdims,
                dtype=self.acc_dtype,
                split_every={axis: SPLIT},
                name="numfuse-sum",
                concatenate=False,
                meta=self.meta(parts.ndim - (not keepdims), self.acc_dtype),
            )
        return parts

    # --- results ----------------------------------------------------------------------------------

    def forward(self, save_pre: bool = False) -> Any:
        """The result, or the pair of it and of the pre-activation."""
        names = list(self.given)
        self.join_k(1)
        if self.many_k:
            self.sum_parts()
            names[:2] = ["sum"]
            made = self.tasks(blocks.epilogue, names, save_pre=save_pre, to=self.dtype)
        else:
            made = self.tasks(blocks.results, names, return_pre_activation=save_pre)
        if not save_pre:
            return self.visible(made)
        pair = self.item(made, 0, self.dtype), self.item(made, 1, self.acc_dtype)
        return tuple(map(self.visible, pair))

    def tangent(self) -> list[Any]:
        """The result and its derivative along the tangents."""
        self.join_k(0, split=False)
        made = self.results()
        return [self.visible(self.item(made, number, self.dtype)) for number in range(2)]

    # --- gradients --------------------------------------------------------------------------------

    def backward(self, needs: Sequence[str], identity: bool) -> dict[str, Any]:
        """Return the gradients `needs` of "a", "b", "bias" and "residual"."""
        found = {}
        if "residual" in needs:
            kept = tuple(letter in self._kept("residual") for letter in self._own("residual"))
            found = self._gradients(
                blocks.residual_sums, ["grad"], self.letters, ["residual"], kept=kept
            )
            needs = [name for name in needs if name != "residual"]
        if not needs:
            return found
        saved = "pre_activation" in self.given and not identity
        products = [name for name in needs if name != "bias"]
        # As if all were needed: which ones are changes no bit of the others.
        self.join_k(2 - (saved or identity), ("a", "b"))
        operands = ["grad", "a", "b"]
        operands += ["bias"] if "bias" in self.given else []
        if not self.many_k:
            operands += ["pre_activation"] if saved else []
            return found | self._gradients(blocks.gradients, operands, self.letters, needs)
        if not identity:
            self._make_grad_pre(saved)
        self.task = self.task._replace(activation=blocks.NONE)
        operands = ["grad", "a", "b"]
        # A bias of its own batch enlarges the result, and with it what blocks of a and b belong to.
        operands += ["bias"] if len(self.axes.get("bias", ())) > 2 else []
        found |= self._gradients(blocks.gradients, operands, (*self.letters, "k"), products)
        if "bias" in needs:
            names = ["grad", "bias"]
            found |= self._gradients(blocks.column_sums, names, self.letters, ["bias"])
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
        return found | self._gradients(blocks.gradients, list(self.given), self.letters, rest)

    def _make_grad_pre(self, saved: bool) -> None:
        """grad_pre in place of grad: made once, for every chunk of K."""
        names = ["grad", "pre_activation"]
        if not saved:
            self.sum_parts()
            names = ["grad", "sum", *(["bias"] if "bias" in self.given else [])]
        self.given["grad"] = self.tasks(blocks.grad_pre, names, dtype=self.acc_dtype)

    def _gradients(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        letters: Letters,
        needs: Sequence[str],
        **options: Any,
    ) -> dict[str, Any]:
        """The gradients `needs`, of blocks in which a function makes every block's part of each."""
        if not needs:
            return {}
        # Of all gradients, needed or not: which ones are asked for changes no bit of the others.
        every = [name for name in ("a", "b", "bias") if name in self.given]
        exact = tuple(name for name in every if self._summed(name))
        options |= {"needs": tuple(needs), "exact": exact}
        return self._added(self.tasks(function, names, letters=letters, **options), letters, needs)

    def _added(self, made: Any, letters: Letters, needs: Sequence[str]) -> dict[str, Any]:
        """Return the gradients `needs`, of blocks that are tuples of every block's part."""
        # Those that are summed along the same axes share the tasks of one sum.
        groups: dict[tuple[str, ...], dict[str, int]] = {}
        for number, name in enumerate(needs):
            groups.setdefault(tuple(self._summed(name)), {})[name] = number
        found: dict[str, Any] = {}
        for summed, numbers in groups.items():
            found |= self._summed_up(made, letters, summed, numbers)
        return found

    # --- gradients: what every block adds, and its sum --------------------------------------------

    def _own(self, name: str) -> Letters:
        """The axes of a gradient."""
        summed = self.task.sum_batch and factor(name) == "b"
        return ("k", "n") if summed else self.axes[name]

    def _kept(self, name: str) -> set[str]:
        """Return the axes of a gradient along which the gradient is not summed."""
        own = zip(reversed(self._own(name)), reversed(self.given[name].shape), strict=False)
        return {letter for letter, length in own if length == self.sizes[letter]}

    def _summed(self, name: str) -> list[str]:
        """The axes of several blocks along which it is summed."""
        kept = self._kept(name)
        return [x for x in self.letters if x not in kept and len(self.chunks[x]) > 1]

    def _summed_up(
        self, made: Any, letters: Letters, summed: Letters, numbers: dict[str, int]
    ) -> dict[str, Any]:
        """Gradients that are summed along the axes `summed`, by their numbers in blocks `made`.

        A block's part has the operand's own axes, whatever the axes of the blocks.
        """
        if summed:
            made = self.map(
                blocks.chosen,
                letters,
                (made, letters),
                dtype=self.acc_dtype,
                adjust=dict.fromkeys(summed, 1),
                numbers=tuple(numbers.values()),
            )
            numbers = {name: i for i, name in enumerate(numbers)}
            made = self._reduced(made, [letters.index(letter) for letter in summed])
        found: dict[str, Any] = {}
        for name, number in numbers.items():
            own, kept = self._own(name), self._kept(name)
            adjust: dict[str, Any] = {letter: 1 for letter in own if letter not in kept}
            if "k" not in letters:
                own = _in_one_block(name, own)
                if factor(name) in _LENT:
                    adjust[_LENT[factor(name)]] = self.chunks["k"]
            to = self.dtypes.get(name, self.dtype)
            whole = self.map(
                blocks.item, own, (made, letters), dtype=to, number=number, to=to, adjust=adjust
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
