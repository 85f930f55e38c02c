"""A call on arrays of a device, as it comes in: whose arrays they are, and where.

One that was made before is known at a glance (`again`), and repeated. Every other is a
`DeviceCall`: each operand is read and checked, and `calls` does the rest.

Lifetimes. PyTorch and CuPy give memory again in the order of the current stream, as their own
operations do. Of every other kind the operands are held until the work that reads them is done.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

from numfuse.activations import Activation
from numfuse.backends import Backend, active, latest
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.call.arrays import DeviceArray, pool_of
from numfuse.backends.cuda.call.calls import Argument, Kept, call
from numfuse.backends.cuda.call.foreign import KINDS, Kind, kind_of
from numfuse.backends.cuda.call.memory import Pool
from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.driver.devices import device
from numfuse.backends.cuda.face import CudaBackend
from numfuse.problem.operands import required

__all__ = ["DeviceCall", "again", "forget", "remembered"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Place(NamedTuple):
    kind: Kind
    ordinal: int
    name: str


class DeviceCall:
    """The operands and outputs of a call, and where they are."""

    def __init__(self, backend: str | Backend | None, **operands: Any) -> None:
        self.operands: dict[str, Argument] = {}
        self.outs: dict[str, tuple[Any, Argument]] = {}
        self._held: list[Any] = []
        self._own: list[DeviceArray] = []
        self._place: _Place | None = None
        required(operands)
        late = []
        for name, x in operands.items():
            if x is None:
                continue
            if self._place is None and kind_of(x) is None:
                late.append((name, x))  # the message names the device of the others
            else:
                self.operands[name] = self._read(name, x)
        for name, x in late:
            self._read(name, x)
        place: Any = self._place  # an array of a device brought the call here
        self.kind: Kind = place.kind
        self.ordinal: int = place.ordinal
        self.device = device(self.ordinal)
        self.precision = _precision(backend, self.ordinal)

    def _read(self, name: str, x: Any) -> Argument:
        kind = kind_of(x)
        if kind is None:
            text = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            where = f"cuda:{self._place.ordinal}" if self._place else "a CUDA device"
            raise TypeError(
                f"{name} must be on {where} as the other operands, got {text}: "
                f"numfuse.to_device({name}, 'cuda') copies it there"
            )
        argument, ordinal, held = kind.read(name, x)
        if self._place is None:
            self._place = _Place(kind, ordinal, name)
        first = self._place
        if kind is not first.kind:
            text = f"{type(x).__module__}.{type(x).__qualname__}"
            raise TypeError(
                f"the operands must be arrays of one kind, got {text} for {name} beside "
                f"{first.name}"
            )
        if ordinal != first.ordinal:
            raise TypeError(
                f"{name} must be on cuda:{first.ordinal} as {first.name}, got an array on "
                f"cuda:{ordinal}"
            )
        if kind.holds:
            self._held.append(x if held is None else held)
        elif isinstance(x, DeviceArray):
            self._own.append(x)
        return argument

    def out(self, name: str, x: Any) -> None:
        """An output of the caller's; None is allocated."""
        if x is not None:
            self.outs[name] = x, self._read(name, x)

    def run(self, kind: str, options: tuple[Any, ...], make_problem: Any) -> Any:
        """Check, launch, and give the result back."""
        stream = self.kind.stream(self.ordinal)
        for x in self._own:
            self._follow(x, stream)
        result, kept = call(
            self.device,
            stream,
            self.precision,
            kind,
            self.operands,
            self.outs,
            options,
            make_problem,
            self.kind.maker(self.ordinal, stream),
            self.kind.capture(self.ordinal),
        )
        _LATEST.kept = kept
        if self._held:
            _hold(self.device, stream, self._held)
        return result

    def _follow(self, x: DeviceArray, stream: int) -> None:
        """Let this stream wait for the work that makes an array of another one."""
        x.memory.streams.add(stream)
        if x.stream != stream:
            event = self.device.event(x.stream)
            self.device.wait(stream, event)
            self.device.forget(event)


class _Known(NamedTuple):
    """A call that was made before, with no outputs of the caller's."""

    kept: Kept
    #: What makes each result, with its address; None of None.
    results: tuple[Callable[[], tuple[Any, int]] | None, ...]
    device: Device
    pool: Pool


#: They, by what is seen of them at a glance.
_KNOWN: dict[tuple[Any, ...], _Known] = {}
# A key may hold an activation, so none is kept longer than it can be found.
Activation.forgetters.append(_KNOWN.clear)
_LATEST = threading.local()  # .kept: of this thread's latest `DeviceCall`


def _glance(
    name: str, args: Sequence[Any], options: dict[str, Any]
) -> tuple[Kind, tuple[Any, ...], list[int], int] | None:
    """Return a call's kind of arrays, all that the call depends on, and the addresses and device.

    Return None if the call has to be looked at closely.
    """
    for x in args:
        kind = KINDS.get(type(x))
        if kind is not None:
            break
    else:
        return None
    if kind.holds or options.get("out") is not None:
        return None
    chosen = active()
    precision = chosen.precision if isinstance(chosen, CudaBackend) else "ieee"
    made: list[Any] = [name, kind, Activation.definitions, precision]
    addresses: list[int] = []
    ordinal = kind.glance(args, made, addresses, -1)
    if ordinal < 0:
        return None
    for key, value in options.items():
        if value is None:
            continue
        made.append(key)
        if type(value) not in KINDS:
            made.append(value)
            continue
        # of others, the place among the addresses is not known
        if key != "pre_activation" or kind.glance((value,), made, addresses, ordinal) < 0:
            return None
    made.append(ordinal)
    return kind, tuple(made), addresses, ordinal


def again(name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The result of a call that was made before; None of any other.

    Parameters
    ----------
    name : str
        Of the public function.
    args : sequence
        Arrays in the order of its signature, and what follows them.
    options : dict
        By keyword: no arrays but a pre-activation, which comes after those of `args`.
    """
    seen = _glance(name, args, options)
    if seen is None:
        return None
    kind, key, addresses, ordinal = seen
    try:
        known = _KNOWN.get(key)
    except TypeError:  # something that cannot be hashed: a list, an array of another kind
        return None
    if known is None:
        return None
    kept, makers, owner, pool = known
    results: list[Any] = []
    for make in makers:
        if make is None:
            results.append(None)
            continue
        x, at = make()
        addresses.append(at)
        results.append(x)
    steps = kept.steps
    if steps.simple:
        steps.once(owner, kind.stream(ordinal), addresses)
    else:
        steps.run(owner, pool, kind.stream(ordinal), addresses, kind.capture(ordinal))
    latest.call = kept.call
    return results[0] if kept.pack is None else kept.pack(results)


def remembered(function: _Function) -> _Function:
    """A public function whose calls are known `again`; it makes one `DeviceCall`, with its
    operands in the order of the signature.
    """
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        result = again(name, args, options)
        if result is not None:
            return result
        _LATEST.kept = None
        result = function(*args, **options)
        seen, kept = _glance(name, args, options), _LATEST.kept
        _LATEST.kept = None  # (nor a call of a formula that goes)
        if seen is None or kept is None:
            return result
        kind, key, _, ordinal = seen
        stream = kind.stream(ordinal)
        makers = tuple(
            kind.maker_of(spec[1], spec[2], ordinal, stream) if type(spec) is tuple else None
            for spec in kept.results
        )
        if len(_KNOWN) >= tiling.KEPT_PLANS:
            _KNOWN.clear()
        owner = device(ordinal)
        with suppress(TypeError):
            _KNOWN[key] = _Known(kept, makers, owner, pool_of(owner))
        return result

    return cast(_Function, call)


def forget(owner: Device) -> None:
    """Let every choice that was made for a call of a device be made again."""
    owner.kept_calls.clear()
    owner.kept_products.clear()
    _KNOWN.clear()


_IN_FLIGHT: dict[int, deque[tuple[int, list[Any]]]] = {}


def _hold(owner: Device, stream: int, arrays: list[Any]) -> None:
    """Keep arrays until the work of a stream so far is done."""
    if owner.capture(stream):
        return  # the graph's arrays are the caller's to keep
    waiting = _IN_FLIGHT.setdefault(owner.ordinal, deque())
    waiting.append((owner.event(stream), arrays))
    while waiting and owner.passed(waiting[0][0]):
        owner.forget(waiting.popleft()[0])


def _precision(backend: str | Backend | None, ordinal: int) -> str:
    """Return the precision of float32 products.

    Raise ValueError if another backend is asked for, as nothing moves unasked.
    """
    if backend is None:
        chosen = active()
        return chosen.precision if isinstance(chosen, CudaBackend) else "ieee"
    if backend == "cuda":
        return "ieee"
    if isinstance(backend, CudaBackend) and backend.ordinal == ordinal:
        return backend.precision
    name = backend if isinstance(backend, str) else getattr(backend, "name", backend)
    raise ValueError(
        f"backend must be 'cuda' (or None) for arrays on cuda:{ordinal}, got {name!r}: "
        f"numfuse.to_numpy moves an array"
    )
