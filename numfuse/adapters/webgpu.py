"""numfuse's functions on arrays that live on a WebGPU device: nothing moves.

A call that was made before is found by what is seen of its arguments, and repeated. For any other
the problem is made, and every check applied, with the arrays' ghosts (see
`numfuse.backends.webgpu.arrays`); the results are arrays of the same device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.activations import Activation, table
from numfuse.adapters import stacks, webgpu_whole
from numfuse.adapters.signatures import NAMES, JetSignature, PublicFunctions, Signature
from numfuse.backends import Backend, load
from numfuse.backends.webgpu import split
from numfuse.backends.webgpu.arrays import DeviceArray, to_device
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.face import WebGpuBackend
from numfuse.backends.webgpu.program import Program
from numfuse.backends.webgpu.stores import Store
from numfuse.definitions import UserEpilogue
from numfuse.fused_operations import NUMBERS, FusedOperation
from numfuse.jets import JetOperation
from numfuse.language.graph import Expr
from numfuse.runtime.dispatch import AGAIN
from numfuse.runtime.lifetimes import formulas_of

if TYPE_CHECKING:
    from numfuse.operations import Operation

__all__ = [
    *NAMES,
    "epilogue_jet",
    "jet",
    "network",
    "perceptron_at_once",
    "synchronize",
    "to_numpy",
]

#: The types of a `backend` that is a part of a fingerprint as it is; equal ones mean the same.
_BACKENDS = frozenset((str, type(None), WebGpuBackend))


class _Recording(threading.local):
    """Where a call of this thread says what it dispatched, if in one submit, and its formulas."""

    made: list[tuple[list[Any], list[Expr]]] | None = None


_RECORDING = _Recording()


class _WebGpu(PublicFunctions):
    """The public functions as problems of ghosts, run on the arrays' device."""

    def call(self, signature: Signature, x: dict[str, Any]) -> Any:
        """Return a call's result; where it is asked for, say what was dispatched."""
        operands = {name: x[name] for name in signature.arrays if x[name] is not None}
        device = next(x.device for x in operands.values() if isinstance(x, DeviceArray))
        backend = _backend(x["backend"], device)
        outs = signature.outs(x)
        for name, array in (*operands.items(), *outs.items()):
            _check_place(name, array, device)
        ghosts = {name: array.ghost for name, array in (operands | outs).items()}
        store = Store(device, list(operands.values()), list(outs.values()))
        known = {id(ghosts[name]): out for name, out in outs.items()}
        p = signature.problem(x, **ghosts)
        return _run(backend, store, signature.kind, p, known)


def _run(
    backend: WebGpuBackend, store: Store, kind: str, p: Any, known: dict[int, DeviceArray]
) -> Any:
    """Run a problem of ghosts, and return its results; `known` has the caller's own by ghost."""
    device = store.device
    backend.check(device, p.dtype, kind)
    split.run(store, kind, p)
    store.finish()
    backend.tell(device, kind, p)

    def found(ghost: Any) -> Any:
        own = known.get(id(ghost))
        return store.result(ghost) if own is None and ghost is not None else own

    result = p.result
    if isinstance(result, tuple):
        result = tuple.__new__(type(result), map(found, result))
    else:
        result = found(result)
    if _RECORDING.made is not None and store.steps is not None:
        every = getattr(p, "activations", None) or (p.activation,)
        formulas = formulas_of(tuple([getattr(f, "curve", f) for f in every]))
        _RECORDING.made.append((store.steps, formulas))
    return result


def _with_numbers(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return operands with Python numbers as arrays, the elements of a new one."""
    values = [x for x in operands if type(x) in NUMBERS]
    if not values:
        return operands
    first = next(x for x in operands if isinstance(x, DeviceArray))
    host = np.array(values, first.dtype)
    # (one array of a loop's numbers: to upload another to its memory would end what is recorded)
    known, key = first.device.numbers, (host.dtype, host.tobytes())
    found = known.find(key)
    if found is None:
        found = known.keep(key, to_device(host, first.device), nbytes=host.nbytes)
    made = iter(found)
    return tuple(next(made) if type(x) in NUMBERS else x for x in operands)


def _fused(
    operation: FusedOperation,
    operands: tuple[Any, ...],
    activation: Any,
    flags: tuple[bool | str, ...],
    needs: Any,
    out: Any,
    backend: str | Backend | None,
) -> Any:
    """Run a call of an epilogue the long way."""
    pairs = zip(operation.operands, _with_numbers(operands), strict=True)
    given = {name: x for name, x in pairs if x is not None}
    device = next(x.device for x in given.values() if isinstance(x, DeviceArray))
    own = _backend(backend, device)
    made: dict[str, DeviceArray] = {}
    if out is not None:
        outs = tuple(out) if operation.several else (out,)
        pairs = zip(operation.results, outs, strict=True)
        made = {name: x for name, x in pairs if x is not None}
    for name, x in (*given.items(), *made.items()):
        _check_place(operation.form.label(name), x, device)
    ghosts = {name: x.ghost for name, x in (given | made).items()}
    store = Store(device, list(given.values()), list(made.values()))
    how = {name: ghosts.get(name) for name in operation.operands}
    how |= dict(zip(operation.flags, flags, strict=True), needs=needs)
    how |= {"gathered": store.rows, "scattered": store.result_rows}
    if made:
        found = tuple(map(ghosts.get, operation.results))
        how["out"] = found if operation.several else found[0]
    p = operation.problem(operation.known(activation), **how)
    return _run(own, store, "fused", p, {id(ghosts[name]): x for name, x in made.items()})


def jet(
    operation: JetOperation,
    operands: tuple[Any, ...],
    activation: Any,
    flags: tuple[Any, ...],
    needs: Any,
    out: Any,
    backend: str | Backend | None,
) -> Any:
    """Run a call of a layer's jet the long way."""
    operation, operands = operation.bound(_with_numbers(operands))
    signature = JetSignature(operation)
    x = signature.arguments(operands, activation, flags, needs, out, backend)
    given = {name: y for name, y in x.items() if name in operation.operands and y is not None}
    device = next(y.device for y in given.values() if isinstance(y, DeviceArray))
    own, outs = _backend(backend, device), signature.outs(x)
    for name, y in (*given.items(), *outs.items()):
        _check_place(signature.label(name), y, device)
    ghosts = {name: y.ghost for name, y in (given | outs).items()}
    store = Store(device, list(given.values()), list(outs.values()))
    known = {id(ghosts[name]): y for name, y in outs.items()}
    return _run(own, store, "jet", signature.problem(x, **ghosts), known)


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


def again(operation: Operation, *call: Any) -> Any:
    """Run a call; one that was made before is found by all that it depends on but its buffers."""
    if isinstance(operation, JetOperation):
        operation, operands = operation.bound(_with_numbers(call[0]))
        call = operands, *call[1:]
    operands, activation, flags, needs, out, backend = call
    # Every array is looked at once, and nothing is called: this is the way of nearly every call.
    outs = () if out is None else tuple(out) if type(out) in (tuple, list) else (out,)
    seen: list[Any] = [operation.mark, flags, type(out), backend]
    plain = type(needs) in (tuple, list) and type(backend) in _BACKENDS
    if plain:
        seen.append(tuple(needs))
    if type(activation) is str:
        activation = table.TABLE.get(activation, activation)
    if isinstance(activation, (Activation, UserEpilogue)):
        seen += activation.name, activation.serial
    else:
        plain = False
    anew: Callable[..., Any] = type(operation).other
    if type(operation) is FusedOperation:
        anew = _fused
        if True in operation.form.numbers:
            operands = _with_numbers(operands)
            call = operands, *call[1:]
    given: list[DeviceArray] = []
    owners: list[Any] = []
    numbers: dict[int, int] = {}  # which arrays share a buffer
    for x in (*operands, *outs):
        if x is None:
            seen.append(None)
        elif type(x) is DeviceArray and (not given or x.device is given[0].device):
            buffer = x.buffer
            number = numbers.get(id(buffer))
            if number is None:
                number = numbers[id(buffer)] = len(owners)
                owners.append(buffer)
            seen += x.shape, x.strides, x.dtype, x.offset, number
            given.append(x)
        else:
            plain = False
    if not plain or given[0].device.lost:
        return anew(operation, *call)
    device = given[0].device
    fingerprint = tuple(seen)
    try:
        program = device.programs.find(fingerprint)
    except TypeError:  # a name in `needs` that has no hash
        return anew(operation, *call)
    if program is not None:
        return program.run(device, owners, given)
    made: list[Any] = []
    _RECORDING.made = made
    try:
        result = anew(operation, *call)
    finally:
        _RECORDING.made = None
    for steps, formulas in made:
        program = Program.of(steps, owners, given, result)
        if program is not None:
            device.programs.keep(fingerprint, program, formulas, program.nbytes)
    return result


epilogue_jet = jet


def _network(backend: Any, store: Store, kind: str, p: Any, known: dict[int, DeviceArray]) -> Any:
    """Run the problem of a network; see `_run`."""
    return _run(_backend(backend, store.device), store, kind, p, known)


_OWN = webgpu_whole.Own(to_device, _network)


def _arrays(name: str, x: Any) -> stacks.Arrays:
    if not isinstance(x, DeviceArray):
        raise stacks.refuse_kind(name, x)
    return _OWN


network = webgpu_whole.network(stacks.network(_arrays), again)
perceptron_at_once = webgpu_whole.perceptron(_OWN, again)
#: What runs a call of an epilogue (`numfuse.fused_operations`).
fused = AGAIN[DeviceArray] = again
globals().update(_WebGpu().functions())


def to_numpy(x: DeviceArray) -> Any:
    """As :func:`numfuse.to_numpy`."""
    return x.to_numpy()


def synchronize(x: DeviceArray) -> None:
    """As :func:`numfuse.synchronize`."""
    x.alive()
    x.device.wait()
