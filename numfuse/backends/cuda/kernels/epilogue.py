"""How a kernel finishes an element of a product: what it loads, the formula, what it stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.schema import Array
from numfuse.backends.cuda.kernels.elementwise import Formula, formula, is_short
from numfuse.backends.cuda.plan.product import Operand, Product, Slot
from numfuse.expr import Expr

__all__ = ["Finish", "element", "finishing", "formula_of", "in_bytes", "in_elements"]


def formula_of(product: Product, short: bool) -> Formula:
    """Return the formula of a product: of its sum, its bias and its extra operand.

    It gives the result and, where that is stored too, the pre-activation.
    """
    arguments = ("z", "bias", product.extra_name)
    return formula(product.epilogue, arguments, product.accumulator, short=short)


@dataclass(frozen=True)
class Finish:
    """The parts of a `Product` that are bound where a kernel stores the result."""

    accumulator: str
    #: Storage dtypes, of what there is.
    out: str
    bias: str | None
    extra: str | None
    pre: bool
    sums: bool
    formula: Formula

    def formulas(self) -> list[Expr]:
        """Return the formulas with which its kernel goes."""
        return self.formula.formulas()

    @classmethod
    def of(cls, product: Product, out: str) -> Finish:
        """Return what a kernel does that stores the result of a product in the dtype `out`."""
        p = product
        return cls(
            p.accumulator,
            out,
            p.bias.dtype if p.bias else None,
            p.extra.dtype if p.extra else None,
            p.pre is not None,
            p.sums,
            formula_of(p, is_short(p.accumulator, p.out.dtype)),
        )

    def bindings(self, count: int = 1) -> dict[str, Any]:
        """Return the UPPER-case names; `count`: values of extra, pre and out in one access."""
        one, acc = intrinsics, self.accumulator
        store = accesses.store if count == 1 else accesses.store_array
        found: dict[str, Any] = {
            "ACCUMULATOR": one.ACCUMULATORS[acc][1],
            "BIAS": self.bias is not None,
            "EXTRA": self.extra is not None,
            "PRE": self.pre,
            "SUMS": self.sums,
            "EPILOGUE": self.formula,
            "STORE_SUM": accesses.store(acc, 1, acc),
            "STORE_PRE": store(acc, count, acc),
            "STORE_OUT": store(self.out, count, acc),
            # sums on their way through shared memory
            "TAKE_ONE": accesses.load(acc, 1, acc, one.SHARED),
            "PUT_ONE": accesses.store(acc, 1, acc, one.SHARED),
        }
        if self.bias is not None:
            found["LOAD_BIAS"] = accesses.load(self.bias, 1, acc)
        if self.extra is not None:
            found["LOAD_EXTRA"] = accesses.load(self.extra, count, acc)
        return found


def element(array: Array, place, row, column):  # type: ignore[no-untyped-def]
    """Return how far an element of an array is from its address; a template."""
    return place * array.place + row * array.row + column * array.column


def in_bytes(slot: Slot, operand: Operand | None) -> Array:
    """Return an array as a kernel's argument, its strides in bytes; zeros for what is not there."""
    return Array(slot, *operand.steps) if operand else Array(0, 0, 0, 0)


def in_elements(slot: Slot, operand: Operand | None) -> Array:
    """Return an array as a kernel's argument, its strides in elements."""
    return Array(slot, *operand.strides) if operand else Array(0, 0, 0, 0)


def finishing(
    product: Product, out: Operand, slot: Slot, given: Callable[[Slot, Operand | None], Array]
) -> dict[str, Any]:
    """Return the arguments that a product finishes with, its result laid out as `out` at `slot`.

    `given` is `in_bytes` or `in_elements`.
    """
    p = product
    found: dict[str, Any] = {"out": given(slot, out), "sums": Slot("sums") if p.sums else 0}
    for name, operand in (("bias", p.bias), ("extra", p.extra), ("pre", p.pre)):
        found[name] = given(Slot(name), operand)
    return found
