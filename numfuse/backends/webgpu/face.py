"""The WebGPU backend: WGSL compute shaders through wgpu, for any GPU with a driver of Vulkan, Metal
or Direct3D 12, and for CPUs behind Vulkan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends import Call, OneRun, Traits, latest
from numfuse.backends.webgpu import host, network_calls
from numfuse.backends.webgpu.arrays import DeviceArray, to_device
from numfuse.backends.webgpu.contract.backend import ContractBackend
from numfuse.backends.webgpu.contract.entry_points import reference_source
from numfuse.backends.webgpu.device import forks
from numfuse.backends.webgpu.device.adapters import adapters, choose
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.host import HostProgram
from numfuse.backends.webgpu.lower import networks
from numfuse.backends.webgpu.lower.places import Places, chains_of, tile_of
from numfuse.problem.fused import FusedProblem
from numfuse.problem.networks import NetworkProblem
from numfuse.problem.results import settled, without_terms
from numfuse.runtime.lifetimes import formulas_of
from numfuse.runtime.replay import Recording, Replay

if TYPE_CHECKING:
    from numfuse.activations import Activation


class WebGpuBackend(OneRun):
    """A device of WebGPU; see :class:`numfuse.backends.Backend` for what each method is.

    `which` is a part of an adapter's name, or its index; None: `NUMFUSE_WEBGPU_ADAPTER`, else the
    best. `limits` are limits of WebGPU to ask for in place of the adapter's own.
    """

    name = "webgpu"
    jet = partialmethod(OneRun._run, "jet")

    def __init__(
        self, which: str | int | None = None, limits: dict[str, int] | None = None
    ) -> None:
        self._adapter = choose(which)
        self._limits = limits
        self._lock = threading.Lock()
        self._device: Device | None = None
        self._reference: ContractBackend | None = None

    @property
    def traits(self) -> Traits:
        """Return what the device leaves open, and WGSL for any device."""
        device = self.device
        return Traits(
            memory="device",
            dtypes=tuple(sorted(device.dtypes)),
            subnormals=tuple(sorted(device.flushes_subnormals)),
            division=2.5,
            reassociates=True,
        )

    @property
    def device(self) -> Device:
        """The device, made at its first use, and anew after it was lost."""
        device = self._device
        if device is None or device.lost:
            forks.refuse()  # before the lock, which a thread that is gone may hold
            with self._lock:
                device = self._device
                if device is None or device.lost:
                    device = self._device = Device(self._adapter, self._limits)
        return device

    # --- problems -------------------------------------------------------------------------------
    network_jet = network_calls.forward
    network_jet_bwd = network_calls.backward

    @property
    def replay(self) -> Replay[Any]:
        """The recorded calls on NumPy arrays."""
        return self.device.hosted

    def record(self, kind: str, p: Any, names: Sequence[str]) -> Recording:
        """Return the program of a problem of NumPy arrays (`numfuse.backends.Replaying`)."""
        device = self.device
        self.check(device, p.dtype, kind)
        self.tell(device, kind, p)
        program = None if without_terms(p) is not None else HostProgram.of(device, kind, p, names)
        if program is None:
            return Recording(partial(self.run, kind, p), None, 0)
        formulas = formulas_of(getattr(p.activation, "curve", p.activation))
        return Recording(program.run, formulas, program.program.nbytes)

    def launch(self, program: Any, arrays: tuple[Any, ...]) -> None:
        """Run a program on arrays."""
        program(arrays)

    def run(self, kind: str, p: Any, arrays: tuple[Any, ...] = ()) -> None:
        """Run a problem of NumPy arrays."""
        device = self.device
        self.check(device, p.dtype, kind)
        if not settled(p):
            host.run(device, kind, p)
        self.tell(device, kind, p)

    def check(self, device: Device, dtype: np.dtype[Any], kind: str) -> None:
        """Raise TypeError for a dtype that the device does not compute."""
        if dtype.name not in device.dtypes:
            known = ", ".join(sorted(device.dtypes))
            raise TypeError(f"{kind} on {device.name} must have dtype {known}, got {dtype.name}")

    def tell(self, device: Device, kind: str, p: Any) -> None:
        """Set what `last_call` tells."""
        tiling: Any = None
        if isinstance(p, NetworkProblem):
            tiling = networks.sizes(device, p).tile
        elif not isinstance(p, FusedProblem) or p.sums or p.products:
            factors = min(3, max(1, len(getattr(p, "sums", None) or ())))
            tiling = tile_of(device, p.m, p.n, p.acc_dtype, factors=factors)
            if kind == "forward":
                places = Places.of(p.batch, p.batch)
                few = chains_of(device, p.m, p.n, p.k, places, p.acc_dtype)
                tiling = tiling if few is None else few[0]
        latest.call = Call(
            "webgpu", device.name, p.dtype.name, f"{kind}/{p.activation.name}", tiling
        )

    def configure(
        self, device: Any = None, precision: str | None = None, shaders: str | None = None
    ) -> WebGpuBackend | ContractBackend:
        """This backend on another adapter, or with the shaders of the contract."""
        if precision is not None:
            raise ValueError(f"precision must be None for the backend 'webgpu', got {precision!r}")
        if shaders not in (None, "reference"):
            raise ValueError(
                f"shaders must be None or 'reference', got {shaders!r}; load_shaders makes a "
                f"backend of a module of your own"
            )
        chosen = self if device is None else _on(choose(device).number)
        return chosen if shaders is None else chosen.reference_shaders()

    def load_shaders(self, source: str, label: str = "shaders") -> ContractBackend:
        """A module that keeps the shader contract, on this device; see `numfuse.webgpu`."""
        return ContractBackend(source, self, label)

    def reference_shaders(self) -> ContractBackend:
        """numfuse's own module for the shader contract, on this device."""
        if self._reference is None:
            self._reference = self.load_shaders(reference_source(), "reference shaders")
        return self._reference

    @staticmethod
    def adapters() -> list[str]:
        """Every adapter, as `device` may name it."""
        return [str(adapter) for adapter in adapters()]

    def describe(self) -> dict[str, Any]:
        """Return what `info` shows, by name."""
        return {**self.device.describe(), "adapters": [str(a) for a in adapters()]}

    def to_device(self, x: ndarray) -> DeviceArray:
        """A NumPy array, copied to the device."""
        device = self.device
        self.check(device, x.dtype, "an array")
        return to_device(x, device)

    def warmup(
        self,
        activations: Sequence[Activation],
        dtypes: Sequence[np.dtype[Any]],
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Compile the kernels of contiguous operands, for this process."""
        from numfuse.problem import gates, product

        device = self.device
        for dtype in dtypes:
            if dtype.name not in device.dtypes:
                continue
            for act in activations:
                if progress is not None:
                    progress(f"{act.name} {dtype.name}")
                for m in (64, 63):  # read by fours, and one by one
                    x, bias = np.zeros((m, m), dtype), np.zeros(m, dtype)
                    self.forward(product.gemm(x, x, bias, act))
                    self.backward(product.gemm_backward(x, x, x, bias, act))
                    self.gated(gates.gated(x, x, act))
                    self.gated_backward(gates.gated_backward(x, x, x, act))


_BACKENDS: dict[int, WebGpuBackend] = {}


def _on(index: int) -> WebGpuBackend:
    """The one backend object of an adapter."""
    return _BACKENDS.get(index) or _BACKENDS.setdefault(index, WebGpuBackend(index))


# Where there is no adapter, or none of the name asked for, importing this module says so.
BACKEND = _on(choose().number)
