"""Launches whose arguments are packed, but for the addresses that `plan.program` writes."""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_uint, c_uint64, c_void_p
from struct import pack_into
from typing import TYPE_CHECKING

from numfuse.backends.cuda.driver.libcuda import Attribute, Config
from numfuse.backends.cuda.plan.product import Derived, Launch, Slot

if TYPE_CHECKING:
    from numfuse.backends.cuda.driver.device import Device

_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
_CLUSTER_DIMENSION, _OVERLAPS = 4, 6  # CUlaunchAttributeID
#: Launches of a kernel may have different shared memory: the most of it is what holds.
_ASKING = threading.Lock()
#: What tensor maps are made for at first.
_SOME_ADDRESS = 1 << 20
#: How `struct` packs what is no map.
_CODES = {"u64": "Q", "i64": "q", "u32": "I", "i32": "i", "f32": "f", "f64": "d"}


class Prepared:
    """A launch whose arguments are packed, but for addresses."""

    def __init__(self, device: Device, launch: Launch) -> None:
        kernel = launch.kernel
        self.name, self.launch = kernel.name, launch
        #: Held as long as this may be started.
        self.module = device.module(kernel)
        with _ASKING:
            if launch.shared_bytes > self.module.shared_bytes:
                with device.current():
                    status = device.cuda.cuFuncSetAttribute(
                        self.module.function, _MAX_DYNAMIC_SHARED, launch.shared_bytes
                    )
                    device.check(status, kernel.name)
                self.module.shared_bytes = launch.shared_bytes
        if len(kernel.signature) != len(launch.arguments):
            raise ValueError(
                f"{kernel.name} must have {len(kernel.signature)} arguments, "
                f"got {len(launch.arguments)}"
            )
        # Each argument has 8 bytes of its own; a map has 128, and begins at a multiple of 64.
        at, starts = 0, []
        for kind in kernel.signature:
            at = -(-at // 8) * 8 if kind == "map" else at
            starts.append(at)
            at += 16 if kind == "map" else 1
        raw = (c_uint64 * (at + 8))()
        first = -(ctypes.addressof(raw) // 8) % 8
        self._words = words = (c_uint64 * at).from_buffer(raw, 8 * first)
        base = ctypes.addressof(words)
        #: The names of the addresses that a start needs, in its order.
        self.table = launch.table
        #: (where, number in the table, bytes to add) of each address among the arguments
        self.slots: list[tuple[int, int, int]] = []
        #: The same of each tensor map; the driver writes an address into one that is there.
        self.maps: list[tuple[int, int, int]] = []
        for kind, start, value in zip(kernel.signature, starts, launch.arguments, strict=True):
            where = base + 8 * start
            if isinstance(value, Slot):
                self.slots.append((where, self.table.index(value.name), value.offset))
            elif isinstance(value, Derived):
                made = value.make(_SOME_ADDRESS)
                ctypes.memmove(where, made, len(made))
                self.maps.append((where, self.table.index(value.slot.name), value.slot.offset))
            else:
                pack_into(_CODES[kind], words, 8 * start, value)
        self._pointers = (c_void_p * max(1, len(starts)))(*[base + 8 * at for at in starts])
        attributes = []
        if launch.cluster > 1:
            attributes.append(Attribute(_CLUSTER_DIMENSION, 0, (launch.cluster, 1, 1)))
        if launch.overlaps:
            attributes.append(Attribute(_OVERLAPS, 0, (1,)))
        self._attributes = (Attribute * max(1, len(attributes)))(*attributes)
        self._config = Config(
            (c_uint * 3)(*launch.grid),
            (c_uint * 3)(*kernel.block),
            launch.shared_bytes,
            None,
            self._attributes if attributes else None,
            len(attributes),
        )
        #: What cuLaunchKernelEx takes: the configuration, the kernel, the arguments.
        config, pointers = map(ctypes.addressof, (self._config, self._pointers))
        self.handles = config, self.module.function, pointers
