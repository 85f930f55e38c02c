"""The rules for a single operand: its kind of array, its dtype, and which arrays may overlap."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.runtime.fingerprint import lie_apart

_F32 = np.dtype(np.float32)
_F64 = np.dtype(np.float64)

#: {storage dtype: dtype of the accumulator}. bfloat16 is entered when the first such array arrives,
#: so that the float32 path never imports ml_dtypes.
ACCUMULATORS: dict[np.dtype[Any], np.dtype[Any]] = {
    _F64: _F64,
    _F32: _F32,
    np.dtype(np.float16): _F32,
}


@functools.cache
def format_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, which NumPy takes 4 us to make."""
    return str(dtype.name)


def accumulator(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the accumulator's dtype for a storage dtype; TypeError calls the operand `name`."""
    known = ACCUMULATORS.get(dtype)
    if known is not None:
        return known
    if dtype.name == "bfloat16" and dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        ACCUMULATORS[dtype] = _F32
        return _F32
    native = dtype.newbyteorder("=") if dtype.kind == "f" else dtype
    if native in ACCUMULATORS:
        raise TypeError(
            f"{name} must be in the native byte order, got {dtype.str!r}; "
            f"convert it with {name}.astype({name}.dtype.newbyteorder('='))"
        )
    raise TypeError(
        f"{name} must have dtype float64, float32, float16 or ml_dtypes.bfloat16, got {dtype}"
    )


#: Operands that no function does without; any other may be None.
_REQUIRED = frozenset(("grad", "a", "b", "residual"))


def required(operands: Mapping[str, Any]) -> None:
    """Raise TypeError where one of these operands, by name, has to be there and is None.

    Every way in asks before anything is computed: NumPy's by :func:`as_plain`, an adapter here.
    """
    for name, x in operands.items():
        if x is None and name in _REQUIRED:
            raise TypeError(f"{name} must be an array, got None")


def as_plain(name: str, x: Any) -> ndarray:
    """`x` as a plain, aligned ndarray over the same memory, or TypeError.

    numpy.memmap is a plain array that lives in a file. Every other subclass of ndarray carries a
    meaning (a mask, a unit, matrix multiplication under ``*``) that a kernel over raw memory would
    silently drop, so it is refused.
    """
    if type(x) is not ndarray:
        if x is None:
            raise TypeError(f"{name} must be an array, got None")
        kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        if not isinstance(x, ndarray):
            raise TypeError(
                f"{name} must be a NumPy array, got {kind}; "
                f"convert it with numpy.asarray({name}, dtype=...)"
            )
        if type(x) is not np.memmap:
            raise TypeError(
                f"{name} must be a plain numpy.ndarray, got its subclass {kind}; "
                f"numpy.asarray({name}) drops what the subclass adds"
            )
        x = np.asarray(x)
    if not x.flags.aligned:
        # A field of a packed record, or a buffer at an odd offset: its strides may be no multiple
        # of the item size. Kernels count in items, so this rare operand (alone) is copied.
        x = x.copy()
    return x


def checked(
    operands: Mapping[str, Any],
) -> tuple[dict[str, ndarray], np.dtype[Any], np.dtype[Any]]:
    """Return the operands that are there as plain arrays by name, their dtype, its accumulator's.

    A first call of a shape asks it once for all of them. grad, a and b have to be there.
    """
    found: dict[str, ndarray] = {}
    for name, x in operands.items():
        if type(x) is ndarray and x.flags.aligned:
            found[name] = x
        elif x is not None or name in ("grad", "a", "b"):
            found[name] = as_plain(name, x)
    dtype = found["a"].dtype
    for x in found.values():
        if x.dtype != dtype or dtype not in ACCUMULATORS:
            return found, *same_dtype(found)
    return found, dtype, ACCUMULATORS[dtype]


def array_of(x: Any) -> Any:
    """Return an array for a NumPy scalar, which arithmetic on 0-d arrays gives; else `x` itself."""
    return np.asarray(x) if isinstance(x, np.generic) and x.dtype in ACCUMULATORS else x


def shaped(x: ndarray, name: str, shape: tuple[int, ...], what: str = "the result's shape") -> Any:
    """Return `x`; raise ValueError if it does not have this shape."""
    if x.shape != shape:
        raise ValueError(f"{name} must have {what} {shape}, got {x.shape}")
    return x


def saved_pre_activation(
    pre: Any, shape: tuple[int, ...], dtype: np.dtype[Any], acc_dtype: np.dtype[Any]
) -> ndarray:
    """Return what a forward saved as a plain array, checked: of the operands' dtype or wider."""
    pre = as_plain("pre_activation", array_of(pre))
    if pre.dtype != acc_dtype and pre.dtype != dtype:
        wanted = f"{acc_dtype}" if acc_dtype == dtype else f"{acc_dtype} or {dtype}"
        raise TypeError(f"pre_activation must have dtype {wanted}, got {pre.dtype}")
    return shaped(pre, "pre_activation", shape)


def same_dtype(operands: Mapping[str, ndarray]) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The one dtype of all operands, and its accumulator's; TypeError names a mixture."""
    dtypes = {name: x.dtype for name, x in operands.items()}
    for name, dtype in dtypes.items():
        acc = accumulator(name, dtype)
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{_listed(list(dtypes))} must have the same dtype, got {found}")
    return dtype, acc


def output(
    name: str,
    given: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    others: Mapping[str, ndarray],
    may_be: tuple[str, ...] = (),
) -> ndarray:
    """The caller's own array for a result, after every check on it.

    It overlaps none of `others`, judged by the bounds of the memory (``x[::2]`` and ``x[1::2]``
    count as overlapping), but may be exactly one of those in `may_be`: same memory, same strides.
    """
    if not isinstance(given, ndarray):
        raise TypeError(
            f"{name} must be a NumPy array of shape {shape} and dtype {dtype}, "
            f"got {type(given).__module__}.{type(given).__qualname__}".replace("builtins.", "")
        )
    if not given.flags.aligned:
        raise ValueError(f"{name} must be aligned to its item size, got an unaligned array")
    out = as_plain(name, given)
    if out.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError(f"{name} must be writable, got a read-only array")
    if _overlaps_itself(out):
        raise ValueError(
            f"{name} must not overlap itself, got shape {shape} with strides {out.strides}"
        )
    for other_name, other in others.items():
        if np.may_share_memory(out, other):
            if other_name in may_be:
                if _same_elements(out, other):
                    continue
                raise ValueError(
                    f"{name} must be exactly {other_name} or apart from it, "
                    f"got memory that overlaps {other_name}"
                )
            raise ValueError(
                f"{name} must not share memory with {other_name}, got overlapping memory bounds"
            )
    return out


def _overlaps_itself(x: ndarray) -> bool:
    """Whether two elements may share an address: each axis must step over all that lies within."""
    if x.size < 2:
        return False
    reach = x.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += (length - 1) * stride
    return False


def check_sequence(weights: Any) -> None:
    """Raise a TypeError for weights that are no sequence of one array or more."""
    if isinstance(weights, ndarray) or not isinstance(weights, Sequence) or not weights:
        kind = type(weights).__name__
        got = f"an empty {kind}" if isinstance(weights, Sequence) else kind
        raise TypeError(f"weights must be a sequence of arrays, got {got}")


def check_group(name: str, given: Any, count: int) -> None:
    """Raise a ValueError for what is no sequence of so many entries, one for each layer."""
    if not isinstance(given, Sequence):
        got = type(given).__name__
    elif len(given) == count:
        return
    else:
        got = f"{len(given)} entries"
    raise ValueError(f"{name} must be None or a sequence of {count} arrays or None, got {got}")


def address(x: ndarray) -> int:
    """Return where the first element of an array lies."""
    return int(x.__array_interface__["data"][0])


def _same_elements(x: ndarray, y: ndarray) -> bool:
    return address(x) == address(y) and x.shape == y.shape and x.strides == y.strides


def apart(
    outs: tuple[ndarray | None, ...], others: tuple[ndarray | None, ...], in_place: bool = False
) -> bool:
    """Return whether no output shares memory with another array; as `output`, without a message.

    With `in_place` an output may have exactly the elements of one of the others.
    """
    rest = others
    if in_place:
        own, left = set(map(id, outs)), []
        for x in others:
            if id(x) not in own:  # (a comprehension would open a frame)
                left.append(x)
        rest = tuple(left)
    if lie_apart(rest, outs):
        return True
    seen = [*others]
    for out in outs:
        if out is None:
            continue
        owns = out.flags.owndata
        for x in seen:
            if x is out and in_place:
                continue
            # Two arrays that own their memory share none: asking NumPy takes longer.
            if x is None or (owns and x is not out and x.flags.owndata):
                continue
            if np.may_share_memory(x, out):
                if not in_place or x.__array_interface__ != out.__array_interface__:
                    return False
        seen.append(out)
    return True


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
