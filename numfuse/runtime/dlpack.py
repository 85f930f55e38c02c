"""DLPack: arrays from and to other libraries without a copy, in the host's memory or a device's.

The structures are those of dlpack.h, of version 1 and of what came before it
(https://dmlc.github.io/dlpack/latest/). NumPy reads capsules too, but none of bfloat16 and, in its
version 2.0, none of DLPack 1; and it takes every array of an older capsule for a read-only one. The
capsules that are given away are NumPy's own, with another device or dtype written into them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.runtime.strided import contiguous
from numfuse.runtime.views import dtype_of

#: Device types of dlpack.h.
CPU, CUDA, WEBGPU = 1, 2, 15
#: The host's memory, that which CUDA or ROCm has pinned among it; and memory of CUDA's devices.
HOST, CUDA_TYPES = (1, 3, 11), (2, 13)
DEVICES = {
    1: "CPU", 2: "CUDA", 3: "pinned by CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 9: "VPI",
    10: "ROCm", 11: "pinned by ROCm", 12: "an extension device", 13: "CUDA, managed", 14: "oneAPI",
    15: "WebGPU", 16: "Hexagon", 17: "MAIA", 18: "Trainium",
}  # fmt: skip
#: The newest version whose capsules are read. A later minor one adds devices, dtypes and flags.
VERSION = 1, 3

#: {(type code, bits): dtype}
_DTYPES = {(2, 64): "float64", (2, 32): "float32", (2, 16): "float16", (4, 16): "bfloat16"}
_CODES = {0: "int", 1: "uint", 2: "float", 3: "a handle of ", 4: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY, _COPIED = 1, 2

#: A deleter of an array.
_Ending = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Tensor(ctypes.Structure):
    """DLTensor."""

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
    """DLManagedTensor, before version 1."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Ending))
    major, minor, flags = 0, 0, 0


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Ending),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


#: {name of a capsule: what it holds, and its name when that has been taken}
_FORMS: dict[bytes, tuple[type[_Managed | _Versioned], bytes]] = {
    b"dltensor": (_Managed, b"used_dltensor"),
    b"dltensor_versioned": (_Versioned, b"used_dltensor_versioned"),
}


def _capsules(what: str, result: Any, *arguments: Any) -> Any:
    """Return a function of Python's capsules.

    It is our own: the types of one that is an attribute of `ctypes.pythonapi` are whatever the last
    library that wrote them needs.
    """
    return ctypes.PYFUNCTYPE(result, *arguments)((f"PyCapsule_{what}", ctypes.pythonapi))


_name_of = _capsules("GetName", ctypes.c_char_p, ctypes.py_object)
_pointer_of = _capsules("GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _capsules("SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)


class Imported:
    """An array of another library, held until this object is gone; messages call it `name`.

    Raises
    ------
    TypeError
        No capsule, one that was taken before, of a later DLPack, or of a dtype that no function
        has.
    ValueError
        Elements without memory.
    """

    def __init__(self, name: str, capsule: Any) -> None:
        try:
            found: bytes | None = _name_of(capsule)
        except ValueError:
            raise TypeError(
                f"{name} must give a capsule by __dlpack__, got {type(capsule).__qualname__}"
            ) from None
        if found not in _FORMS:
            told = "without a name" if found is None else repr(found.decode(errors="replace"))
            raise TypeError(
                f"{name} must give a new capsule 'dltensor' or 'dltensor_versioned' by "
                f"__dlpack__, got one {told}"
            )
        form, used = _FORMS[found]
        self._at = _pointer_of(capsule, found)
        managed = form.from_address(self._at)
        # From here on the array is this object's, and is given back by it whatever is raised.
        self._deleter = managed.deleter
        _rename(capsule, used)
        if managed.major > VERSION[0]:  # of which only the deleter's place is known
            got = f"{managed.major}.{managed.minor}"
            raise TypeError(f"{name} must be exported by DLPack {VERSION[0]}.x, got version {got}")
        t = managed.tensor
        self.address = (t.data or 0) + t.byte_offset
        #: DLPack's device type, and the number of the device.
        self.device = t.device_type, t.device_id
        self.copied = bool(managed.flags & _COPIED)
        #: Nobody would see what is written to a copy.
        self.writable = not managed.flags & _READ_ONLY and not self.copied
        dtype = _DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None
        if dtype is None:
            lanes = "" if t.lanes == 1 else f" in vectors of {t.lanes}"
            got = f"{_CODES.get(t.code, f'type code {t.code} of ')}{t.bits}{lanes}"
            raise TypeError(
                f"{name} must have dtype float64, float32, float16 or bfloat16, got {got}"
            )
        self.dtype = dtype
        self.shape = tuple(t.shape[i] for i in range(t.ndim))
        steps = [t.strides[i] for i in range(t.ndim)] if t.strides else contiguous(self.shape)
        #: In elements.
        self.strides = tuple(steps)
        if not t.data and 0 not in self.shape:
            raise ValueError(f"{name} must have memory, got shape {self.shape} at no address")

    def __del__(self) -> None:
        deleter = getattr(self, "_deleter", None)
        if deleter:
            self._deleter = None
            deleter(self._at)


def take(name: str, x: Any, stream: int | None = None, shared: bool = False) -> Imported:
    """Return what an object gives by ``__dlpack__``; with `shared`, not as a copy.

    Its work is made visible to `stream`, if that is a number of DLPack's: 1 is CUDA's default one.
    """
    old = {} if stream is None else {"stream": stream}
    new = {**old, "max_version": VERSION} | ({"copy": False} if shared else {})
    try:
        try:
            capsule = x.__dlpack__(**new)
        except (TypeError, ValueError, NotImplementedError):  # from before DLPack 1
            capsule = x.__dlpack__(**old)
    except BufferError as error:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"{name} must be exported by DLPack, which {kind} refuses: {error}"
        ) from error
    held = Imported(name, capsule)
    if shared and held.copied:
        raise TypeError(f"{name} must be exported by DLPack without a copy, got one")
    return held


def host_array(name: str, x: Any, shared: bool = False) -> ndarray:
    """Return the NumPy array over the memory of an object that has ``__dlpack__``."""
    held = take(name, x, None, shared)
    if held.device[0] not in HOST:
        place = DEVICES.get(held.device[0], f"device type {held.device[0]}")
        raise TypeError(f"{name} must be in the host's memory, got an array on {place}")
    dtype = dtype_of(held.dtype)
    strides = tuple(step * dtype.itemsize for step in held.strides)
    return over(held, held.address, held.shape, strides, dtype, held.writable)


class _Place:
    """Memory as NumPy's protocol says it; the array over it keeps this object, and so the owner."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner, self.__array_interface__ = owner, interface


def over(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    writable: bool,
) -> ndarray:
    """Return an array at an address, which keeps `owner` alive; strides in bytes."""
    if 0 in shape:
        return np.empty(shape, dtype)  # (which may have no address)
    plain = dtype.kind == "f"
    interface = {
        "version": 3,
        "typestr": dtype.str if plain else np.dtype(np.uint16).str,
        "shape": shape,
        "strides": strides,
        "data": (address, not writable),
    }
    x = np.asarray(_Place(owner, interface))
    return x if plain else x.view(dtype)


def export(
    x: ndarray,
    device: tuple[int, int] = (CPU, 0),
    max_version: tuple[int, int] | None = None,
    copied: bool = False,
) -> Any:
    """Return a capsule over an array's memory, which is on a device, and keep the array alive.

    It is of DLPack 1 where the consumer reads that by its `max_version`, if NumPy is 2.1 or newer.

    Raises
    ------
    BufferError
        A read-only array, which older capsules cannot say.
    """
    half = x.dtype.kind != "f"  # bfloat16
    given = x.view(np.uint16) if half else x
    if max_version is not None and max_version[0] >= 1:
        try:
            capsule = given.__dlpack__(max_version=VERSION)
        except TypeError:  # NumPy 2.0
            capsule = given.__dlpack__()
    else:
        capsule = given.__dlpack__()
    name: bytes = _name_of(capsule)
    managed = _FORMS[name][0].from_address(_pointer_of(capsule, name))
    t = managed.tensor
    t.device_type, t.device_id = device
    if half:
        t.code = 4
    if copied and managed.major:
        managed.flags |= _COPIED
    return capsule


def host_copy(x: Any, max_version: tuple[int, int] | None, copy: bool | None) -> Any:
    """Return a capsule over a copy of a device's array in the host's memory."""
    if copy is False:
        raise BufferError(
            f"an array on {x.device} is in the host's memory as a copy, got copy=False"
        )
    return export(x.to_numpy(), (CPU, 0), max_version, True)
