"""Tensor maps: how the copy engine is told of an array (CUDA driver API, Tensor Map Object).

A map holds the array's address, so it is a `product.Derived` argument: made once, and given another
address before a launch that wants it (`launcher`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from numfuse.backends.cuda.driver.libcuda import Unusable, library
from numfuse.errors import DeviceError

# CUtensorMapDataType
_TYPES = {"int8": (0, 1), "float16": (6, 2), "float32": (7, 4), "bfloat16": (9, 2)}
# CUtensorMapSwizzle, by the bytes of a row of the box
_SWIZZLES = {64: 2, 128: 3}
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_PROMOTE_TO_128_BYTES = 2  # CUtensorMapL2promotion


@dataclass(frozen=True)
class TensorMap:
    """An array of three axes, and the box of it that one copy moves; made for an address."""

    dtype: str
    #: Elements along (inner, outer, place); the inner axis is contiguous.
    sizes: tuple[int, int, int]
    #: Elements from one (outer, place) to the next: multiples of 16 bytes.
    strides: tuple[int, int]
    #: Elements of a box along (inner, outer): a row of it has 64 or 128 bytes.
    box: tuple[int, int]

    def __call__(self, address: int) -> bytes:
        status, made = self._encoded(address)
        if status:
            raise DeviceError(f"cuTensorMapEncodeTiled refused {self} at {address:#x}: {status}")
        return made

    def possible(self) -> bool:
        """Whether the driver takes such a map.

        Without a driver, or in a thread without a context, its rules are applied as far as known.
        """
        _, itemsize = _TYPES[self.dtype]
        for stride in self.strides:
            if stride <= 0 or stride * itemsize % 16 or stride * itemsize >= 1 << 40:
                return False
        try:
            return self._encoded(1 << 20)[0] != _INVALID_VALUE
        except Unusable:
            return True

    def _encoded(self, address: int) -> tuple[int, bytes]:
        kind, itemsize = _TYPES[self.dtype]
        raw = (ctypes.c_uint8 * 192)()
        at = -(-ctypes.addressof(raw) // 64) * 64  # a map is aligned to 64 bytes
        sizes = (ctypes.c_uint64 * 3)(*self.sizes)
        strides = (ctypes.c_uint64 * 2)(*(s * itemsize for s in self.strides))
        box = (ctypes.c_uint32 * 3)(*self.box, 1)
        steps = (ctypes.c_uint32 * 3)(1, 1, 1)
        status: int = library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            ctypes.c_int(kind),
            ctypes.c_uint32(3),
            ctypes.c_void_p(address),
            sizes,
            strides,
            box,
            steps,
            ctypes.c_int(0),
            ctypes.c_int(_SWIZZLES[self.box[0] * itemsize]),
            ctypes.c_int(_PROMOTE_TO_128_BYTES),
            ctypes.c_int(0),
        )
        return status, ctypes.string_at(at, 128)
