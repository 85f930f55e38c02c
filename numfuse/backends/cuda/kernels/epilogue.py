"""How a kernel finishes an element of a product: what it loads, the formula, what it stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.schema import Array, Ends
from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.kernels.elementwise import Formula, formula, is_short
from numfuse.backends.cuda.plan.product import Operand, Product, Slot


def formula_of(product: Product, short: bool) -> Formula:
    """Return the formula of a product: of its sum, its bias and its extra operand.

    It gives the result and, where that is stored too, the pre-activation.
    """
    biases = ("z", "z1", "bias", "bias1") if product.has_two_sums else ("z", "bias")
    arguments = (*biases, product.extra_name)
    return formula(product.epilogue, arguments, product.accumulator, short=short)


def parts_of(product: Product) -> dict[str, Any]:
    """Return which parts the epilogue of a product has, and its formula, as UPPER-case names."""
    p = product
    return {
        "BIAS": p.bias is not None,
        "EXTRA": p.extra is not None,
        "PRE": p.pre is not None,
        "BIAS1": p.bias1 is not None,
        "PRE1": p.pre1 is not None,
        "SUMS": p.sums,
        "EPILOGUE": formula_of(p, is_short(p.accumulator, p.out.dtype)),
    }


def finish_of(product: Product, out: str, count: int = 1) -> dict[str, Any]:
    """Return the UPPER-case names with which a kernel stores a product in the dtype `out`.

    `count`: values of extra, pre and out in one access.
    """
    acc, shared = product.accumulator, intrinsics.SHARED
    store = accesses.store if count == 1 else accesses.store_array
    found = parts_of(product) | {
        "ACCUMULATOR": getattr(types, acc),
        "STORE_SUM": accesses.store(acc, 1, acc),
        "STORE_PRE": store(acc if product.pre is None else product.pre.dtype, count, acc),
        "STORE_OUT": store(out, count, acc),
        # sums on their way through shared memory
        "TAKE_ONE": accesses.load(acc, 1, acc, shared),
        "PUT_ONE": accesses.store(acc, 1, acc, shared),
    }
    if product.bias is not None:
        found["LOAD_BIAS"] = accesses.load(product.bias.dtype, 1, acc)
    if product.bias1 is not None:
        found["LOAD_BIAS1"] = accesses.load(product.bias1.dtype, 1, acc)
    if product.pre1 is not None:
        found["STORE_PRE1"] = store(product.pre1.dtype, count, acc)
    if product.extra is not None:
        repeats = count > 1 and not product.extra.strides[2]
        load = accesses.load_repeated if repeats else accesses.load
        found["LOAD_EXTRA"] = load(product.extra.dtype, count, acc)
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
    product: Product,
    out: Operand,
    slot: Slot,
    given: Callable[[Slot, Operand | None], Array],
    pre: Slot | None = None,
) -> dict[str, Any]:
    """Return the arguments that a product finishes with, its result laid out as `out` at `slot`.

    `given` is `in_bytes` or `in_elements`, `pre` where its second result goes.
    """
    p = product
    slots = ("bias", p.bias), ("extra", p.extra)
    arrays = {name: given(Slot(name), operand) for name, operand in slots}
    arrays["pre"] = given(pre or Slot("pre"), p.pre)
    return {"ends": Ends(**arrays, out=given(slot, out)), "sums": Slot("sums") if p.sums else 0}
