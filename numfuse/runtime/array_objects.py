"""Forms of arrays and the bounds of their memory, read natively: see `fingerprint`.

The places of fields are those of NumPy's C API and of CPython's, checked before anything here runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import NativeValue, box, intrinsic, models, register_model, unbox

from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a template are bound at specialisation)
# mypy: disable-error-code="name-defined"

specialise.register(__name__, __file__)

#: Bytes of an element, at the most.
LARGEST = 32
_I64 = ir.IntType(64)


def read(operands: Any, array_type: int, nothing: int) -> Any:
    """Return the form of a tuple of arrays and Nones as bytes; None where something else is there.

    An array is its dimensions and flags, the address of its dtype, its shape and, where these do
    not follow from it, its strides.
    """
    items = ADDRESS(operands) + ITEMS
    count = WORDS(ADDRESS(operands) + COUNT)[0]
    total = 0
    for i in range(count):
        x = WORDS(items)[i]
        total += 1
        if x == nothing:
            continue
        if WORDS(x + TYPE)[0] != array_type:
            return NONE()
        flags = WORDS(x + FLAGS)[0]
        if flags & ALIGNED == 0:
            return NONE()
        axes = WORDS(x + AXES)[0] & 0xFFFFFFFF
        total += 1 + (axes if flags & C_CONTIGUOUS != 0 else 2 * axes)
    form = BYTES(8 * total)
    to = WORDS(ADDRESS(form) + TEXT)
    at = 0
    for i in range(count):
        x = WORDS(items)[i]
        if x == nothing:
            to[at] = -1
            at += 1
            continue
        flags = WORDS(x + FLAGS)[0] & (C_CONTIGUOUS | WRITEABLE)
        axes = WORDS(x + AXES)[0] & 0xFFFFFFFF
        to[at] = axes | flags << 32
        to[at + 1] = WORDS(x + DTYPE)[0]
        at += 2
        shape, strides = WORDS(WORDS(x + SHAPE)[0]), WORDS(WORDS(x + STRIDES)[0])
        for axis in range(axes):
            to[at] = shape[axis]
            at += 1
        if flags & C_CONTIGUOUS == 0:
            for axis in range(axes):
                to[at] = strides[axis]
                at += 1
    return form


def separate(arrays: Any, count: int, itemsize: int, nothing: int) -> bool:
    """Return whether the last `count` arrays of a tuple overlap no other, by their bounds.

    The tuple has a form (`read`), and these are of one dtype, whose elements have `itemsize`.
    """
    items = ADDRESS(arrays) + ITEMS
    total = WORDS(ADDRESS(arrays) + COUNT)[0]
    dtype = 0
    for i in range(total - count, total):
        x = WORDS(items)[i]
        if x == nothing:
            continue
        if dtype == 0:
            dtype = WORDS(x + DTYPE)[0]
        elif dtype != WORDS(x + DTYPE)[0]:
            return False
        low, high = BOUNDS(x, itemsize)
        for j in range(i):
            y = WORDS(items)[j]
            if y != nothing:
                size = itemsize if WORDS(y + DTYPE)[0] == dtype else LARGEST
                first, end = BOUNDS(y, size)
                if first < high and low < end:
                    return False
    return True


def bounds(x: int, itemsize: int) -> tuple[int, int]:
    """Return where the memory of an array begins and ends."""
    low = high = WORDS(x + DATA)[0]
    shape, strides = WORDS(WORDS(x + SHAPE)[0]), WORDS(WORDS(x + STRIDES)[0])
    for axis in range(WORDS(x + AXES)[0] & 0xFFFFFFFF):
        if shape[axis] == 0:
            return low, low
        way = (shape[axis] - 1) * strides[axis]
        low += min(0, way)
        high += max(0, way)
    return low, high + itemsize


# --- objects of Python in compiled code ---------------------------------------------------------
class _Object(types.Opaque):
    """An object of Python: a reference that the caller has."""

    def __init__(self) -> None:
        super().__init__("object")


_OBJECT = _Object()
register_model(_Object)(models.OpaqueModel)


@box(_Object)
def _box(kind: Any, value: ir.Value, c: Any) -> ir.Value:
    return c.builder.bitcast(value, c.pyapi.pyobj)


@unbox(_Object)
def _unbox(kind: Any, value: ir.Value, c: Any) -> Any:
    return NativeValue(c.builder.bitcast(value, c.context.get_value_type(kind)))


def _made_by_python(builder: ir.IRBuilder, context: Any, found: ir.Value) -> ir.Value:
    return builder.bitcast(found, context.get_value_type(_OBJECT))


@intrinsic
def _address(typing: Any, x: Any) -> Any:
    """Return the address of an object."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> ir.Value:
        return builder.ptrtoint(args[0], _I64)

    return types.int64(_OBJECT), emit


@intrinsic
def _words(typing: Any, address: Any) -> Any:
    """Return what is at an address as a pointer to words."""
    pointer = types.CPointer(types.int64)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64), emit


@intrinsic
def _bytes(typing: Any, size: Any) -> Any:
    """Return new bytes, whose text the caller writes; what Python raises where it has no memory."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> ir.Value:
        api = context.get_python_api(builder)
        nowhere = ir.Constant(_I64, 0).inttoptr(ir.IntType(8).as_pointer())
        made = api.bytes_from_string_and_size(nowhere, args[0])
        return _made_by_python(builder, context, made)

    return _OBJECT(types.int64), emit


@intrinsic
def _none(typing: Any) -> Any:
    """Return None."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> ir.Value:
        return _made_by_python(builder, context, context.get_python_api(builder).make_none())

    return _OBJECT(), emit


_PARTS: dict[str, Any] = {"ADDRESS": _address, "WORDS": _words, "BYTES": _bytes, "NONE": _none}
for _name, _made in _PARTS.items():
    _made.numfuse_key = _name


def reader(names: Mapping[str, int]) -> Callable[[Any, int, int], Any]:
    """Return what writes forms; `names` has places and masks."""
    signature = _OBJECT(_OBJECT, types.int64, types.int64)
    made = specialise.entry(read, signature, nogil=False, **_PARTS, **names)
    return made.overloads[signature.args].entry_point


def separator(names: Mapping[str, int]) -> Callable[[Any, int, int, int], bool]:
    """Return what compares bounds of memory."""
    signature = types.boolean(_OBJECT, types.int64, types.int64, types.int64)
    bound = {"ADDRESS": _address, "WORDS": _words, "LARGEST": LARGEST, **names}
    own = specialise.device(bounds, **bound)
    made = specialise.entry(separate, signature, nogil=False, BOUNDS=own, **bound)
    return made.overloads[signature.args].entry_point
