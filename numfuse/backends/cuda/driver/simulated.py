"""A device of Numba's simulator: host memory, and kernels that run as Python."""

from __future__ import annotations

import ctypes
import struct
import time
from contextlib import nullcontext
from typing import Any

import numpy as np

from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Slot


class SimulatedDevice(Device):
    """A stand-in for `Device` where there is no device."""

    def __init__(self, ordinal: int) -> None:
        if ordinal:
            raise ValueError(f"device must be below 1, got {ordinal}")
        self.ordinal = 0
        self.cuda = None
        # No capability: only the tier that runs everywhere takes a product.
        self.info = DeviceInfo("CUDA simulator", (0, 0), 1, 48 << 10, 48 << 10, 1 << 20)
        self._begin()
        self._memory: dict[int, Any] = {}

    def current(self) -> Any:
        return nullcontext()

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def synchronize(self, stream: int | None = None) -> None:
        self._launched.clear()

    def _no_streams(self, *_: int) -> int:
        return 0

    capture = follow = forget = pace = release = _no_streams  # type: ignore[assignment]

    def event(self, stream: int, timing: bool = False) -> int:
        return time.perf_counter_ns()

    def seconds(self, first: int, last: int) -> float:
        return (last - first) / 1e9

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def passed(self, event: int) -> bool:
        return True

    def allocate(self, nbytes: int, what: str) -> int:
        raw = np.full(nbytes + 256, 255, np.uint8)  # NaN, whatever the dtype
        address = -(-raw.ctypes.data // 256) * 256
        self._memory[address] = raw
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def upload(self, source: int, address: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(address, source, nbytes)

    def download(self, address: int, target: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, address, nbytes)

    def prepare(self, launch: Launch) -> Any:
        return _SimulatedLaunch(launch)


class _SimulatedLaunch:
    """A launch of the simulator."""

    def __init__(self, launch: Launch) -> None:
        self.name, self.launch = launch.kernel.name, launch
        self.table = tuple(dict.fromkeys(a.name for a in launch.arguments if isinstance(a, Slot)))

    def start(self, bases: tuple[int, ...], refs: tuple[tuple[int, int], ...]) -> None:
        """Run it to its end, with (number of the base, offset) of each address."""
        kernel = self.launch.kernel
        pairs = zip(self.table, refs, strict=True)
        known = {name: bases[number] + offset for name, (number, offset) in pairs}
        values: list[Any] = []
        for kind, a in zip(kernel.signature, self.launch.arguments, strict=True):
            value = known[a.name] + a.offset if isinstance(a, Slot) else a
            if kind == "f64" and isinstance(a, Slot):  # the bits of a number
                (value,) = struct.unpack("d", struct.pack("q", value))
            values.append(value)
        kernel.simulate(self.launch.grid, self.launch.shared_bytes, values)
