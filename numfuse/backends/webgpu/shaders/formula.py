"""An epilogue's formulas in a shader: the one printer, and what a lowering asks of an operation.

A :class:`Formula` names an operation of `numfuse.epilogues`, or the text of an epilogue, and holds
none of its graphs: what is kept by one (a pipeline) must not keep an activation alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from numfuse.epilogues import Epilogue
from numfuse.language import wgsl
from numfuse.language.curves import Curve, leaf
from numfuse.language.graph import Expr
from numfuse.runtime.lifetimes import formulas_of


def _identity(curve: Curve | None) -> tuple[Any, ...]:
    """Return what tells a curve from all others; one that is folded in a graph is its value."""
    if curve is None:
        return ()
    folded = curve.trace.op in ("x", "const")
    return ("value", curve.trace.serial) if folded else ("curve", curve.serial)


def _itself(epilogue: Epilogue) -> Epilogue:
    """Return an epilogue that is given whole, and not by an operation with a curve."""
    return epilogue


@dataclass(frozen=True)
class Formula:
    """Chosen results of an operation's epilogue; made by :meth:`of` or :meth:`whole`."""

    #: From a curve, if there is one, to an epilogue.
    operation: Callable[..., Epilogue]
    #: The identity of the curve.
    curve: tuple[Any, ...]
    #: Inputs that are zero.
    absent: tuple[str, ...]
    #: Whether a derivative that is not finite counts as 0.
    guard: bool
    #: The results that are stored. One that is zero everywhere may be among them.
    results: tuple[str, ...] = ()
    #: The results of which sums over rows are made, and those of which sums over columns are.
    summed: tuple[str, ...] = ()
    across: tuple[str, ...] = ()
    _curve: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        operation: Callable[..., Epilogue],
        curve: Curve | None,
        absent: tuple[str, ...] = (),
        guard: bool = False,
    ) -> Formula:
        """Return the formula of an operation with a curve; choose its results next."""
        held = None if curve is None else weakref.ref(curve)
        return cls(operation, _identity(curve), absent, guard, _curve=held)

    @classmethod
    def whole(cls, epilogue: Epilogue) -> Formula:
        """Return the formula of an epilogue; who has it made keeps the epilogue meanwhile."""
        return cls(_itself, epilogue.named(), (), False, _curve=weakref.ref(epilogue))

    def choose(
        self, *results: str, summed: tuple[str, ...] = (), across: tuple[str, ...] = ()
    ) -> Formula:
        """Return the formula of these results."""
        return replace(self, results=results, summed=summed, across=across)

    @property
    def name(self) -> str:
        """The name of its operation, for labels."""
        name = self.operation.__name__ if self.operation is not _itself else str(self.curve[0])
        return name.replace("_", " ")

    @property
    def totals(self) -> tuple[str, ...]:
        """The names of the sums over rows."""
        return tuple([f"sum_{i}" if i else "sum" for i in range(len(self.summed))])

    @property
    def summands(self) -> tuple[str, ...]:
        """The names of what sums over columns add up."""
        return tuple([f"summand_{i}" for i in range(len(self.across))])

    def formulas(self) -> list[Expr]:
        """Return the graphs with which goes what is kept of this formula."""
        return [] if self._curve is None else formulas_of(self._curve())

    @property
    def _epilogue(self) -> Epilogue:
        made = self.operation() if self._curve is None else self.operation(self._curve())
        made = made.without(*self.absent)
        return made.guarded() if self.guard else made

    def has(self, result: str) -> bool:
        """Whether a result is not zero everywhere."""
        return result in dict(self._epilogue.results)

    def alias(self, result: str) -> str | None:
        """Return the input that a result is, unchanged; None if there is none."""
        expr = dict(self._epilogue.results).get(result)
        return str(expr.payload) if expr is not None and expr.op == "input" else None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that the chosen results depend on, accumulators first."""
        return self._epilogue.select(*self.results, *self.summed, *self.across).inputs

    def text(self, dtype: str, one_rounding: bool) -> str:
        """Return ``fn epilogue`` of the inputs, and of the sums so far where there are such.

        Its ``Results`` has a member for each chosen result, for the next of each sum over rows and
        for what each sum over columns adds up.
        """
        made = self._epilogue
        results = list(made.select(*self.results).results)
        for total, name in zip(self.totals, self.summed, strict=True):
            results.append((total, leaf(total) + made.select(name)[name]))
        for summand, name in zip(self.summands, self.across, strict=True):
            results.append((summand, made.select(name)[name]))
        functions = wgsl.epilogue(results, (*self.inputs, *self.totals), dtype)
        return f"{wgsl.prelude(functions, dtype, one_rounding)}\n\n{functions}\n"
