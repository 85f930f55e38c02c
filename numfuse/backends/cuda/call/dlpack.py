"""DLPack capsules: arrays from and to other libraries without a copy.

The structures are those of dlpack.h, version 0.8 (https://dmlc.github.io/dlpack/latest/).
"""

from __future__ import annotations

import ctypes
from typing import Any

from numfuse.runtime.strided import contiguous

#: kDLCUDA; kDLCUDAManaged memory is the device's too.
CUDA, _CUDA_MANAGED = 2, 13
#: {(type code, bits): dtype}
_DTYPES = {(2, 64): "float64", (2, 32): "float32", (2, 16): "float16", (4, 16): "bfloat16"}
_CODES = {name: code for code, name in _DTYPES.items()}


#: A deleter of an array, and a destructor of a capsule.
_Ending = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor, the DLTensor at its beginning field by field."""

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
        ("context", ctypes.c_void_p),
        ("deleter", _Ending),
    )


_NAME, _USED = b"dltensor", b"used_dltensor"
_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _Ending)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)

# Of a capsule that is being destroyed no reference may be taken.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)

#: What is exported, until its taker is done: address of the structure -> everything behind it.
_exported: dict[int, tuple[Any, ...]] = {}


#: {capsule that was not destroyed: the address of its structure}
_waiting: dict[int, int] = {}


@_Ending
def _done(at: int) -> None:
    _exported.pop(at, None)


@_Ending
def _unused(capsule: int) -> None:
    """A capsule that nobody took."""
    at = _waiting.pop(capsule, None)
    if at is not None and _is_valid(capsule, _NAME):
        _exported.pop(at, None)


def export(x: Any) -> Any:
    """A capsule over the memory of a `DeviceArray`, which it keeps alive."""
    axes, size = len(x.shape), x.dtype.itemsize
    lengths = (ctypes.c_int64 * axes)(*x.shape)
    steps = (ctypes.c_int64 * axes)(*[step // size for step in x.strides])
    layout = axes, *_CODES[x.dtype.name], 1, lengths, steps, 0
    managed = _Managed(x.address, CUDA, x.ordinal, *layout, None, _done)
    at = ctypes.addressof(managed)
    _exported[at] = x, managed, lengths, steps
    capsule = _api.PyCapsule_New(at, _NAME, _unused)
    _waiting[id(capsule)] = at
    return capsule


class Imported:
    """An array of another library, held until this object is gone."""

    def __init__(self, capsule: Any) -> None:
        self._at = _api.PyCapsule_GetPointer(capsule, _NAME)
        t = _Managed.from_address(self._at)
        self._deleter = t.deleter
        _api.PyCapsule_SetName(capsule, _USED)
        self.address = (t.data or 0) + t.byte_offset
        self.ordinal = t.device_id
        self.on_cuda = t.device_type in (CUDA, _CUDA_MANAGED)
        self.dtype = _DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None
        self.shape = tuple(t.shape[i] for i in range(t.ndim))
        steps = [t.strides[i] for i in range(t.ndim)] if t.strides else contiguous(self.shape)
        self.strides = tuple(steps)

    def __del__(self) -> None:
        deleter = getattr(self, "_deleter", None)
        if deleter:
            deleter(self._at)


def take(x: Any, stream: int) -> Imported:
    """An object with ``__dlpack__``, its work made visible to `stream`."""
    # the protocol's numbers: 1 is the legacy default stream
    return Imported(x.__dlpack__(stream=stream or 1))
