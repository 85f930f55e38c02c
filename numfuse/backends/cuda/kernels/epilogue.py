"""How a kernel finishes an element of a product: what it loads, the formula, what it stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.kernels.elementwise import Formula, formula, is_short
from numfuse.backends.cuda.plan.product import Operand, Product, Slot, strides
from numfuse.expr import Expr

__all__ = ["Finish", "addresses", "formula_of", "steps"]


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


def addresses(product: Product, out: Slot) -> dict[str, int | Slot]:
    """Return the addresses of what a product finishes with, its result at `out`."""
    p = product
    return {
        "bias": Slot("bias") if p.bias else 0,
        "extra": Slot("extra") if p.extra else 0,
        "pre": Slot("pre") if p.pre else 0,
        "out": out,
        "sums": Slot("sums") if p.sums else 0,
    }


def steps(unit: str, product: Product, out: Operand) -> dict[str, int]:
    """Return the strides of what a product finishes with, its result laid out as `out`."""
    p = product
    found = strides(unit, bias=p.bias, extra=p.extra, pre=p.pre, out=out)
    del found["bias_row"]  # (it is 0)
    return found
