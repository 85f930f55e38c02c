"""numfuse's functions on arrays that live on a WebGPU device: nothing moves.

A call that was made before is found by what is seen of its arguments, and repeated. For any other
the problem is made, and every check applied, with the arrays' ghosts (see
`numfuse.backends.webgpu.arrays`); the results are arrays of the same device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numfuse.activations import Activation
from numfuse.adapters.signatures import NAMES, PublicFunctions, Signature, of_module
from numfuse.backends import Backend, load
from numfuse.backends.webgpu import split
from numfuse.backends.webgpu.arrays import DeviceArray
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.face import WebGpuBackend
from numfuse.backends.webgpu.program import Program
from numfuse.backends.webgpu.stores import Store
from numfuse.runtime.lifetimes import formulas_of

__all__ = [*NAMES, "synchronize", "to_numpy"]

#: The arguments that are parts of a fingerprint as they are; equal ones mean the same.
_PLAIN = frozenset((str, bool, type(None), WebGpuBackend))


class _WebGpu(PublicFunctions):
    """The public functions as problems of ghosts, run on the arrays' device."""

    def call(self, signature: Signature, x: dict[str, Any]) -> Any:
        """Return a call's result; what it dispatched, if in one submit; and its formulas."""
        operands = {name: x[name] for name in signature.arrays if x[name] is not None}
        device = next(x.device for x in operands.values() if isinstance(x, DeviceArray))
        backend = _backend(x["backend"], device)
        outs = {name: out for name, out in signature.outs(x).items() if out is not None}
        for name, array in (*operands.items(), *outs.items()):
            _check_place(name, array, device)
        ghosts = {name: array.ghost for name, array in (operands | outs).items()}
        known: dict[int, Any] = {id(ghosts[name]): out for name, out in outs.items()}
        p = signature.problem(x, **ghosts)
        backend.check(device, p.dtype, signature.kind)
        store = Store(device, list(operands.values()), list(outs.values()))
        split.run(store, signature.kind, p)
        store.finish()
        backend.record(device, signature.kind, p)

        def found(ghost: Any) -> Any:
            if ghost is None or id(ghost) in known:
                return None if ghost is None else known[id(ghost)]
            return store.result(ghost)

        result = p.result
        if isinstance(result, tuple):
            result = tuple.__new__(type(result), map(found, result))
        else:
            result = found(result)
        return result, store.steps, formulas_of(p.activation.curve)


def _check_place(name: str, x: Any, device: Device) -> None:
    """Raise TypeError for an array that is not on this device, DeviceLost where the device is."""
    if not isinstance(x, DeviceArray):
        kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"{name} must be on {device.name} as the other operands, got {kind}: "
            f"numfuse.to_device({name}, 'webgpu') copies it there"
        )
    if x.device is not device:
        raise TypeError(f"{name} must be on {device.name}, got an array on {x.device.name}")
    x.alive()


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


def _replayed(function: Any) -> Callable[..., Any]:
    """Return a public function that repeats a call that it made before."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        # All that the call depends on but the buffers, looked at once and without another call.
        seen: list[Any] = [name, *options, Activation.definitions]
        flat: list[Any] = []
        for x in (*args, *options.values()):
            if type(x) is tuple or type(x) is list:
                seen.append(len(x))
                flat += x
            else:
                seen.append(None)
                flat.append(x)
        given: list[DeviceArray] = []
        owners: list[Any] = []
        numbers: dict[int, int] = {}  # which arrays share a buffer
        plain = True
        for x in flat:
            kind = type(x)
            if kind is DeviceArray:
                buffer = x.buffer
                number = numbers.get(id(buffer))
                if number is None:
                    number = numbers[id(buffer)] = len(owners)
                    owners.append(buffer)
                seen.append((x.shape, x.strides, x.dtype, x.offset, number))
                plain = plain and (not given or x.device is given[0].device)
                given.append(x)
            elif kind in _PLAIN:
                seen.append(x)
            elif isinstance(x, Activation):
                seen.append((x.name, x.curve.serial))
            else:
                plain = False
        if not given or not plain or given[0].device.lost:
            return function(*args, **options)[0]
        device = given[0].device
        fingerprint = tuple(seen)
        program = device.programs.find(fingerprint)
        if program is not None:
            return program.run(device, owners, given)
        result, steps, formulas = function(*args, **options)
        if steps is not None:
            program = Program.of(steps, owners, given, result)
            if program is not None:
                device.programs.keep(fingerprint, program, formulas, program.nbytes)
        return result

    return call


globals().update(
    {name: of_module(_replayed(x), __name__) for name, x in _WebGpu().functions().items()}
)


def to_numpy(x: DeviceArray) -> Any:
    """As :func:`numfuse.to_numpy`."""
    return x.to_numpy()


def synchronize(x: DeviceArray) -> None:
    """As :func:`numfuse.synchronize`."""
    x.alive()
    x.device.wait()
