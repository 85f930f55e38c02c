"""Epilogues: what a kernel does with a product's sums, as names that the tiers' templates share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numfuse.backends.cuda.compile import intrinsics
from numfuse.backends.cuda.kernels import elementwise
from numfuse.backends.cuda.kernels.elementwise import Scalar
from numfuse.backends.cuda.plan.product import Operand, Product, Slot
from numfuse.expr import Expr
from numfuse.runtime.lifetimes import formulas_of

__all__ = ["Epilogue"]


@dataclass(frozen=True)
class Epilogue:
    """The parts of a `Product` that are bound where a kernel stores the result."""

    accumulator: str
    #: Storage dtypes, of what there is.
    out: str
    bias: str | None
    extra: str | None
    pre: bool
    #: "activation", "residual" or "slope"
    kind: str
    sums: bool
    function: Scalar | None

    def formulas(self) -> list[Expr]:
        """The formula, where there is one."""
        return formulas_of(self.function)

    @classmethod
    def of(cls, product: Product, out: str) -> Epilogue:
        """Return the epilogue of a product whose result the kernel stores in the dtype `out`."""
        p = product
        function = None
        if p.function is not None:
            function = elementwise.scalar(p.function, p.accumulator, p.out.dtype, guard=p.guard)
        return cls(
            p.accumulator,
            out,
            p.bias.dtype if p.bias else None,
            p.extra.dtype if p.extra else None,
            p.pre is not None,
            p.epilogue,
            p.sums,
            function,
        )

    @staticmethod
    def slots(product: Product, out: Slot) -> tuple[int | Slot, ...]:
        """Its arrays as arguments: bias, extra, pre, the result's (at `out`) and the sums."""
        p = product
        return (
            Slot("bias") if p.bias else 0,
            Slot("extra") if p.extra else 0,
            Slot("pre") if p.pre else 0,
            out,
            Slot("sums") if p.sums else 0,
        )

    @staticmethod
    def steps(product: Product, out: Operand) -> tuple[int, ...]:
        """Their strides in bytes: two of bias (place, column), three of extra, pre and `out`."""
        bias, extra, pre = (
            (0, 0, 0) if x is None else x.steps for x in (product.bias, product.extra, product.pre)
        )
        return (bias[0], bias[2], *extra, *pre, *out.steps)

    def bindings(self, count: int = 1) -> dict[str, Any]:
        """The UPPER-case names; `count`: values of extra, pre and out in one access."""
        one, acc = intrinsics, self.accumulator
        store = one.store if count == 1 else one.store_array
        found: dict[str, Any] = {
            "ACCUMULATOR": one.ACCUMULATORS[acc][1],
            "BIAS": self.bias is not None,
            "EXTRA": self.extra is not None,
            "PRE": self.pre,
            "RESIDUAL": self.kind == "residual",
            "SLOPE": self.kind == "slope",
            "SUMS": self.sums,
            "HAS_FUNCTION": self.function is not None,
            "STORE_SUM": one.store(acc, 1, acc),
            "STORE_PRE": store(acc, count, acc),
            "STORE_OUT": store(self.out, count, acc),
            # sums on their way through shared memory
            "TAKE_ONE": one.load(acc, 1, acc, one.SHARED),
            "PUT_ONE": one.store(acc, 1, acc, one.SHARED),
        }
        if self.function is not None:
            found["FUNCTION"] = self.function
        if self.bias is not None:
            found["LOAD_BIAS"] = one.load(self.bias, 1, acc)
        if self.extra is not None:
            found["LOAD_EXTRA"] = one.load(self.extra, count, acc)
        return found
