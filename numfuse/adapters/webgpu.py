"""numfuse's functions on arrays that live on a WebGPU device: nothing moves.

The problem is made, and every check applied, with the arrays' ghosts (see
`numfuse.backends.webgpu.arrays`); the results are arrays of the same device.
"""

from __future__ import annotations

from typing import Any

from numpy import ndarray

from numfuse.adapters.signatures import NAMES, PublicFunctions, Signature
from numfuse.backends import Backend, latest, load
from numfuse.backends.webgpu import split
from numfuse.backends.webgpu.arrays import DeviceArray, address
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.face import WebGpuBackend
from numfuse.backends.webgpu.program import Program, key_of
from numfuse.backends.webgpu.stores import DeviceStore
from numfuse.problem.operands import required
from numfuse.runtime.lifetimes import formulas_of

__all__ = [*NAMES, "synchronize", "to_numpy"]


class _Call:
    """The operands and outputs of a call: their device, their ghosts, its results."""

    def __init__(self, backend: str | Backend | None, **operands: Any) -> None:
        self.device = device = self._place(operands)
        self.backend = _backend(backend, device)
        self._operands: list[DeviceArray] = []
        self._outs: list[DeviceArray] = []
        for name, x in operands.items():
            if x is not None:
                if type(x) is not DeviceArray or x.device is not device or device.lost:
                    self._own(name, x)
                self._operands.append(x)
            else:
                required({name: x})

    @staticmethod
    def _place(operands: dict[str, Any]) -> Device:
        for x in operands.values():
            if isinstance(x, DeviceArray):
                return x.device
        raise AssertionError("an array of a device brought the call here")

    def _own(self, name: str, x: Any) -> None:
        if not isinstance(x, DeviceArray):
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(
                f"{name} must be on {self.device.name} as the other operands, got {kind}: "
                f"numfuse.to_device({name}, 'webgpu') copies it there"
            )
        if x.device is not self.device:
            raise TypeError(
                f"{name} must be on {self.device.name}, got an array on {x.device.name}"
            )
        x.alive()

    def out(self, name: str, x: Any) -> ndarray | None:
        """The ghost of an output; None where it is to be allocated."""
        if x is None:
            return None
        self._own(name, x)
        self._outs.append(x)
        ghost: ndarray = x.ghost
        return ghost

    def run(self, kind: str, p: Any) -> Any:
        """Run a problem of ghosts, and return its result as arrays of the device."""
        device = self.device
        arrays = self._operands + self._outs
        key = key_of(kind, p, arrays, len(self._outs))
        program = device.programs.get(key)
        result = p.result
        results = result if isinstance(result, tuple) else (result,)
        known: dict[int, DeviceArray] = {id(x.ghost): x for x in self._outs}
        new = [ghost for ghost in results if ghost is not None and id(ghost) not in known]
        if program is not None:
            buffers = program.run(device, arrays)
            for ghost, number in zip(new, program.results, strict=True):
                known[id(ghost)] = DeviceArray(device, buffers[number], ghost, address(ghost))
            latest.call = program.call
        else:
            self.backend.check(device, p.dtype, kind)
            store = DeviceStore(device, self._operands, self._outs)
            getattr(split, kind)(store, p)
            store.finish()
            self.backend.record(device, kind, p)
            for ghost in new:
                known[id(ghost)] = store.result(ghost)
            steps = store.steps
            if steps is not None and all(ghost.size for ghost in new):
                made = [known[id(ghost)].buffer for ghost in new]
                program = Program.of(steps, arrays, made, latest.call)
                device.keep_program(key, program, formulas_of(p.activation.curve))
        if result is results:
            found = [None if ghost is None else known[id(ghost)] for ghost in results]
            return getattr(result, "_make", tuple)(found)
        return known[id(result)]


def _ghost(x: Any) -> Any:
    return x.ghost if isinstance(x, DeviceArray) else x


def _backend(backend: str | Backend | None, device: Device) -> WebGpuBackend:
    """The backend of these arrays; another one asked for is an error, as nothing moves unasked."""
    own = load("webgpu")
    assert isinstance(own, WebGpuBackend)
    if backend is None or backend == "webgpu":
        return own
    if isinstance(backend, WebGpuBackend) and backend.device is device:
        return backend
    raise ValueError(
        f"backend must be 'webgpu' (or None) for arrays on {device.name}, got {backend!r}: "
        f"numfuse.to_numpy moves an array"
    )


class _WebGpu(PublicFunctions):
    """The public functions as problems of ghosts, run on the arrays' device."""

    def call(self, signature: Signature, x: dict[str, Any]) -> Any:
        call = _Call(x["backend"], **{name: x[name] for name in signature.arrays})
        ghosts = {name: _ghost(x[name]) for name in signature.arrays}
        ghosts |= {name: call.out(name, out) for name, out in signature.outs(x).items()}
        return call.run(signature.kind, signature.problem(x, **ghosts))


globals().update(_WebGpu().functions())


def to_numpy(x: DeviceArray) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    return x.to_numpy()


def synchronize(x: DeviceArray) -> None:
    """As :func:`numfuse.synchronize`."""
    x.alive()
    x.device.wait()
