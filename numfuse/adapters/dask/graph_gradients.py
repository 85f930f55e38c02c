"""The graphs of a product's gradients over Dask blocks: every block's part, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da

from numfuse.adapters.dask import block_gradients, blocks
from numfuse.adapters.dask.blocks import Task
from numfuse.adapters.dask.graph import LENT, Product, in_one_block
from numfuse.adapters.dask.operands import Letters

__all__ = ["Gradients"]


class Gradients(Product):
    """The gradients of act(a @ b + bias), of its backward, and of a residual."""

    def backward(self, needs: Sequence[str], identity: bool) -> dict[str, Any]:
        """Return the gradients `needs` of "a", "b", "bias" and "residual"."""
        found = {}
        if "residual" in needs:
            found["residual"] = self.residual_gradient()
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
            return found | self._gradients(operands, self.letters, needs, self.task)
        if not identity:
            self._make_grad_pre(saved)
        task = self.task._replace(activation=blocks.NONE)
        operands = ["grad", "a", "b"]
        # A bias of its own batch enlarges the result, and with it what blocks of a and b belong to.
        operands += ["bias"] if len(self.axes.get("bias", ())) > 2 else []
        found |= self._gradients(operands, (*self.letters, "k"), products, task)
        if "bias" in needs:
            made = self.tasks(
                block_gradients.column_sums,
                ("grad", "bias"),
                task=task,
                dtype=self.acc_dtype,
                acc_dtype=self.acc_dtype,
            )
            found |= self._summed_up(made, self.letters, ["bias"], [0])
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
            list(self.given), self.letters, rest, self.task, block_gradients.double_backward
        )

    def _make_grad_pre(self, saved: bool) -> None:
        """grad_pre in place of grad: made once, for every chunk of K."""
        names = ["grad", "pre_activation" if saved else "sum"]
        operands = self.named("grad")
        operands += self.named("pre_activation") if saved else [self.sum_of_parts()]
        if not saved and "bias" in self.given:
            names.append("bias")
            operands += self.named("bias")
        dtype = self.acc_dtype
        self.given["grad"] = self.tasks(
            block_gradients.grad_pre, names, operands, dtype=dtype, acc_dtype=dtype
        )

    def _gradients(
        self,
        names: Sequence[str],
        letters: Letters,
        needs: Sequence[str],
        task: Task,
        function: Callable[..., Any] = block_gradients.backward,
    ) -> dict[str, Any]:
        """The gradients `needs`, of blocks that make every block's part of each."""
        if not needs:
            return {}
        # Of all gradients, needed or not: which ones are asked for changes no bit of the others.
        every = [name for name in ("a", "b", "bias") if name in self.given]
        exact = tuple(name for name in every if self._summed(name))
        made = self.tasks(
            function, names, letters=letters, task=task, needs=tuple(needs), exact=exact
        )
        # Those that are summed along the same axes share the tasks of one sum.
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in needs:
            groups.setdefault(tuple(self._summed(name)), []).append(name)
        found: dict[str, Any] = {}
        for group in groups.values():
            found |= self._summed_up(made, letters, group, [needs.index(x) for x in group])
        return found

    # --- gradients: what every block adds, and its sum --------------------------------------------

    def _own(self, name: str) -> Letters:
        """The axes of a gradient."""
        return ("k", "n") if name == "b" and self.task.sum_batch else self.axes[name]

    def _kept(self, name: str) -> set[str]:
        """Return the axes of a gradient along which the gradient is not summed."""
        own = zip(reversed(self._own(name)), reversed(self.given[name].shape), strict=False)
        return {letter for letter, length in own if length == self.sizes[letter]}

    def _summed(self, name: str) -> list[str]:
        """The axes of several blocks along which it is summed."""
        kept = self._kept(name)
        return [x for x in self.letters if x not in kept and len(self.chunks[x]) > 1]

    def _summed_up(
        self, made: Any, letters: Letters, names: Sequence[str], numbers: Sequence[int]
    ) -> dict[str, Any]:
        """Gradients that are summed along the same axes, from their `numbers` in blocks `made`.

        A block's part has the operand's own axes, whatever the axes of the blocks.
        """
        summed = self._summed(names[0])
        if summed:
            made = self.map(
                blocks.chosen,
                letters,
                (made, letters),
                dtype=self.acc_dtype,
                adjust=dict.fromkeys(summed, 1),
                numbers=tuple(numbers),
            )
            numbers = range(len(names))
            made = self.reduced(made, [letters.index(letter) for letter in summed], self.acc_dtype)
        found: dict[str, Any] = {}
        for name, number in zip(names, numbers, strict=True):
            own, kept = self._own(name), self._kept(name)
            adjust: dict[str, Any] = {letter: 1 for letter in own if letter not in kept}
            if "k" not in letters:
                own = in_one_block(name, own)
                if name in LENT:
                    adjust[LENT[name]] = self.chunks["k"]
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
        if self.own_k is not None and name in LENT:
            axis = whole.ndim - (1 if name == "a" or self.column else 2)
            whole = whole.rechunk({axis: self.own_k})
        return whole

    def residual_gradient(self) -> Any:
        """grad summed to the residual's shape."""
        kept = self._kept("residual")
        made = self.tasks(
            block_gradients.residual_sums,
            ("grad",),
            dtype=self.acc_dtype,
            kept=tuple(letter in kept for letter in self._own("residual")),
            acc_dtype=self.acc_dtype,
        )
        return self._summed_up(made, self.letters, ["residual"], [0])["residual"]
