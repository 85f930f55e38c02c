"""Epilogues and the gated layer over Dask blocks: rows and batch axes in blocks, weights whole.

A formula without a product may be cut along any axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np

from numfuse.adapters.dask import blocks
from numfuse.adapters.dask.blocks import Task
from numfuse.adapters.dask.graph import Product, factor
from numfuse.adapters.dask.operands import base, checked
from numfuse.fused_operations import NUMBERS, FusedOperation
from numfuse.problem.fused import make
from numfuse.runtime.strided import ghost


class Fused(Product):
    """The axes of a call's operands, which are named as in `numfuse.problem.fused`."""

    def __init__(
        self, task: Task, operation: FusedOperation, operands: dict[str, Any], p: Any
    ) -> None:
        self.given, kind = checked(operands, tuple(map(base, operands)))
        self.task, self.operation = task.on(kind), operation
        self.dtype, self.acc_dtype = p.dtype, p.acc_dtype
        self.row = self.column = False
        form, shapes = operation.form, [x.shape for x in self.given.values()]
        matrix = ("m", "n") if form.factors else ()
        lengths = np.broadcast_shapes(*(shape[: len(shape) - len(matrix)] for shape in shapes))
        if not form.factors:
            lengths = np.broadcast_shapes(*shapes)
        self.letters = (*(f"p{axis}" for axis in range(len(lengths))), *matrix)
        ends = {"a": ("m", "k"), "b": ("k", "n")}
        self.axes = {}
        for name, x in self.given.items():
            end = ends.get(factor(name), ("m", "n")) if form.factors else ()
            letters = (*self.letters[: len(self.letters) - len(matrix)], *end)
            self.axes[name] = letters[len(letters) - x.ndim :]
        for name, x in self.given.items():
            label = form.label(name)
            for axis, letter in enumerate(self.axes[name]):
                cut = isinstance(x, da.Array) and len(x.chunks[axis]) > 1
                if letter in ("k", "n") and cut:
                    what = "K" if letter == "k" else "the columns (N)"
                    raise ValueError(
                        f"{label} must have {what} in one chunk, got {len(x.chunks[axis])}: "
                        f"an epilogue's rows can be cut, its weights are whole; "
                        f"{label}.rechunk({{{axis}: -1}}) makes it one"
                    )
        self._agree()
        self.chunks.setdefault("k", (1,))
        numbers = (f"x_{i}" for i, number in enumerate(form.numbers) if number)
        self.dtypes = dict.fromkeys(numbers, self.acc_dtype)

    def label(self, name: str) -> str:
        """Return what a message calls an operand."""
        return self.operation.form.label(name)

    def made(self, needs: Sequence[str]) -> tuple[Any, ...]:
        """Return the results, in the order of the operation's."""
        op, form = self.operation, self.operation.form
        options: dict[str, Any] = {"form": form, "keep": op.keep}
        names = tuple(self.given)
        if "backward" not in form.kind:
            made = self.tasks(blocks.fused, names, **options)
            wide = self.acc_dtype if op.keep is True else self.dtype
            return tuple(
                [
                    self.item(made, i, wide if name.startswith("pre_") else self.dtype)
                    for i, name in enumerate(op.results)
                ]
            )
        exact = tuple(name for name in op.needs if name in self.given and self._summed(name))
        wanted = [name for name in op.needs if name in needs and name in self.given]
        found = {}
        if wanted:
            options |= {"needs": tuple(wanted), "exact": exact}
            found = self._added(self.tasks(blocks.fused, names, **options), self.letters, wanted)
        return tuple([found.get(name) for name in op.needs])


def fused(
    task: Any, operation: FusedOperation, operands: Sequence[Any], activation: Any,
    flags: Sequence[Any], needs: Any, out: Any, backend: Any,
) -> Any:  # fmt: skip
    """Run a call of a public function; `task` makes the description that all tasks share."""
    options = dict(zip(operation.flags, flags, strict=True))
    act, form = operation.known(activation), operation.form
    pairs = zip(operation.operands, operands, strict=True)
    given = {name: x for name, x in pairs if x is not None}
    dtype = next(x.dtype for x in given.values() if hasattr(x, "dtype"))
    for name, x in given.items():
        if type(x) in NUMBERS:
            given[name] = np.array(x, dtype)
        elif not isinstance(x, (da.Array, np.ndarray, np.generic)):
            label, kind = form.label(name), type(x).__qualname__
            raise TypeError(f"{label} must be a Dask array or NumPy's, got {kind}")
        elif name in form.factor_names and x.ndim < 2:
            label = form.label(name)
            raise ValueError(f"{label} must have 2 or more axes as a Dask array, got {x.shape}")
    ghosts = {name: ghost(x.shape, x.dtype) for name, x in given.items()}
    guard, sum_batch = options.get("guard", True), options.get("sum_batch", False)
    how = needs, None, guard, operation.keep, sum_batch
    p = make(
        form, operation.whole(act), act, ghosts, *how, empty=ghost
    )  # (every check, and no memory)
    described = task(operation.name, {"activation": act, "backend": backend, "out": out, **options})
    found = Fused(described, operation, given, p).made(needs)
    return found if operation.several else found[0]
