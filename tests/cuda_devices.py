"""NVIDIA's GPUs as plans see them, for tests on machines that have none."""

from __future__ import annotations

from typing import Any

from numfuse.backends.cuda.plan.product import DeviceInfo

TURING = DeviceInfo("T4", (7, 5), 40, 64 << 10, 64 << 10, 4 << 20)
AMPERE = DeviceInfo("A100", (8, 0), 108, 163 << 10, 164 << 10, 40 << 20)
ADA = DeviceInfo("RTX 4090", (8, 9), 128, 99 << 10, 100 << 10, 72 << 20)
HOPPER = DeviceInfo("H200", (9, 0), 132, 227 << 10, 228 << 10, 50 << 20)


def slices(monkeypatch: Any, values: int) -> None:
    """Let the simulator's networks stream slices of so many values of K; 0: layers come whole."""
    from numfuse.adapters import cuda_values
    from numfuse.backends.cuda import network_tiling
    from numfuse.backends.cuda.call.entry import forget
    from numfuse.backends.cuda.driver.devices import device
    from numfuse.backends.cuda.plan import network_sizes

    monkeypatch.setattr(network_tiling, "SIMULATED_SLICE", values)
    network_sizes.sizes_of.cache_clear()
    cuda_values._sizes.cache_clear()
    forget(device(0))
