"""Arrays that have DLPack alone, whose capsules are written by hand from dlpack.h.

So what numfuse reads is not what it wrote.
"""

from __future__ import annotations

import ctypes
import struct

import ml_dtypes
import numpy as np

DTYPES = {
    "float64": (np.float64, 2, 64), "float32": (np.float32, 2, 32),
    "float16": (np.float16, 2, 16), "bfloat16": (ml_dtypes.bfloat16, 4, 16),
}  # fmt: skip
# (its own prototype: other libraries write to those of `ctypes.pythonapi`)
_KINDS = ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
_new = ctypes.PYFUNCTYPE(*_KINDS)(("PyCapsule_New", ctypes.pythonapi))
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Old:
    """An array that has DLPack alone, as it was before version 1."""

    versioned = False

    def __init__(
        self, x, *, version=(1, 0), flags=0, device=(1, 0), kind=None, lanes=1, strides=True
    ):
        self.x, self.version, self.flags, self.device = x, version, flags, device
        self.kind, self.lanes, self.strides = kind or DTYPES[x.dtype.name][1:], lanes, strides
        self.asked, self.deleted, self._alive = [], [], []

    def capsule(self):
        x, (code, bits) = self.x, self.kind
        shape = (ctypes.c_int64 * max(1, x.ndim))(*x.shape)
        steps = (ctypes.c_int64 * max(1, x.ndim))(*[s // x.itemsize for s in x.strides])
        at = ctypes.addressof(steps) if self.strides else 0
        data = x.__array_interface__["data"][0]
        tensor = struct.pack(
            "=QiiiBBHQQQ", data, *self.device, x.ndim, code, bits, self.lanes,
            ctypes.addressof(shape), at, 0,
        )  # fmt: skip
        deleter = _DELETER(self.deleted.append)
        where = ctypes.cast(deleter, ctypes.c_void_p).value
        if self.versioned:
            raw = struct.pack("=IIQQQ", *self.version, 0, where, self.flags) + tensor
        else:
            raw = tensor + struct.pack("=QQ", 0, where)
        memory = ctypes.create_string_buffer(raw, len(raw))
        self._alive.append((shape, steps, deleter, memory))
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new(ctypes.addressof(memory), name, None)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        self.asked.append({"stream": stream})
        return self.capsule()


class New(Old):
    """An array that has DLPack alone, of version 1."""

    versioned = True

    def __dlpack__(self, **asked):
        self.asked.append(asked)
        return self.capsule()


def rng(*shape, dtype=np.float64):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)
