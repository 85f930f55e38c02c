"""DLPack capsules: arrays from and to other libraries without a copy.

The structures are those of dlpack.h, version 0.8 (https://dmlc.github.io/dlpack/latest/).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from numfuse.runtime.strided import contiguous

__all__ = ["CUDA", "Imported", "export", "take"]

#: kDLCUDA; kDLCUDAManaged memory is the device's too.
CUDA, _CUDA_MANAGED = 2, 13
#: {(type code, bits): dtype}
_DTYPES = {(2, 64): "float64", (2, 32): "float32", (2, 16): "float16", (4, 16): "bfloat16"}
_CODES = {name: code for code, name in _DTYPES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_NAME, _USED = b"dltensor", b"used_dltensor"
_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)

# The same two functions for a capsule that is being destroyed, of which no reference may be taken.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)

#: What is exported, until its taker is done: address of the structure -> everything behind it.
_exported: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _done(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


_waiting: dict[int, int] = {}


@_Destructor
def _unused(capsule: int) -> None:
    """A capsule that nobody took."""
    at = _waiting.pop(capsule, None)
    if at is not None and _is_valid(capsule, _NAME):
        _exported.pop(at, None)


def export(
    owner: Any,
    address: int,
    dtype: str,
    ordinal: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Any:
    """A capsule over memory that `owner` keeps alive; strides in elements."""
    axes = len(shape)
    code, bits = _CODES[dtype]
    lengths, steps = (ctypes.c_int64 * axes)(*shape), (ctypes.c_int64 * axes)(*strides)
    tensor = _Tensor(address, CUDA, ordinal, axes, code, bits, 1, lengths, steps, 0)
    managed = _Managed(tensor, None, _done)
    at = ctypes.addressof(managed)
    _exported[at] = owner, managed, lengths, steps
    capsule = _api.PyCapsule_New(at, _NAME, _unused)
    _waiting[id(capsule)] = at
    return capsule


class Imported:
    """An array of another library, held until this object is gone."""

    def __init__(self, capsule: Any) -> None:
        at = _api.PyCapsule_GetPointer(capsule, _NAME)
        self._managed: Any = ctypes.cast(at, ctypes.POINTER(_Managed))
        _api.PyCapsule_SetName(capsule, _USED)
        t = self._managed.contents.tensor
        self.address = (t.data or 0) + t.byte_offset
        self.ordinal = t.device_id
        self.on_cuda = t.device_type in (CUDA, _CUDA_MANAGED)
        self.dtype = _DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None
        self.shape = tuple(t.shape[i] for i in range(t.ndim))
        steps = [t.strides[i] for i in range(t.ndim)] if t.strides else contiguous(self.shape)
        self.strides = tuple(steps)

    def __del__(self) -> None:
        managed = getattr(self, "_managed", None)
        if managed is not None:
            self._managed = None
            deleter = managed.contents.deleter
            if deleter:
                deleter(managed)


def take(x: Any, stream: int) -> Imported:
    """An object with ``__dlpack__``, its work made visible to `stream`."""
    # the protocol's numbers: 1 is the legacy default stream
    return Imported(x.__dlpack__(stream=stream or 1))
