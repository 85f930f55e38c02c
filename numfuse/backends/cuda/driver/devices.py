"""The devices of this process, each made at its first use."""

from __future__ import annotations

import os
import threading

from numfuse.backends import end
from numfuse.backends.cuda.compile.toolchain import SIMULATED
from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.driver.libcuda import FORKED, forked
from numfuse.backends.cuda.driver.simulated import SimulatedDevice

_lock = threading.RLock()
_devices: dict[int, Device] = {}


def device(ordinal: int = 0) -> Device:
    """The one object of a device."""
    found = _devices.get(ordinal)
    if found is None:
        with _lock:
            found = _devices.get(ordinal)
            if found is None:
                kind = SimulatedDevice if SIMULATED else Device
                found = _devices[ordinal] = kind(ordinal)
    return found


def made() -> list[Device]:
    """Return the devices that were used so far."""
    return list(_devices.values())


def _after_fork_in_child() -> None:
    # Later than libcuda's own, which is registered before it.
    if forked():
        end("cuda", FORKED)
        for found in _devices.values():
            found.lost = f"{found} is lost to this process, and the arrays on it: {FORKED}"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
