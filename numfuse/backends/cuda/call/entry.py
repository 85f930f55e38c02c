"""A call on arrays of a device, as it comes in: repeated where it was recorded, else recorded.

All that a call depends on, but its addresses, is its fingerprint. Of most kinds of arrays that is
taken at a glance. Where arrays have to be read with care (those of the protocols, and arguments in
another form than usual), the fingerprint is made of what was read.

Lifetimes. PyTorch and CuPy give memory again in the order of the current stream, as their own
operations do. Of every other kind the operands are held until the work that reads them is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any

from numfuse.activations import table
from numfuse.backends import Backend, active, latest
from numfuse.backends.cuda.call.foreign import KINDS, NUMBERS, PLAIN, Kind, kind_of
from numfuse.backends.cuda.call.record import (
    NOTES,
    REPLAY,
    Argument,
    Recorded,
    alignment_of,
    beside,
    record,
    word,
)
from numfuse.backends.cuda.call.record import forget as forget
from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.driver.devices import device
from numfuse.backends.cuda.face import CudaBackend


def run(
    operation: Any,
    operands: tuple[Any, ...],
    activation: Any,
    flags: tuple[bool | str, ...],
    needs: Any,
    out: Any,
    backend: Any,
    checked: Any = None,
    flipped: int = 0,
) -> Any:
    """Return the result of a call; see :class:`numfuse.operations.Operation`.

    `checked` is the call's signature, and its arguments as that has checked them, or what makes
    both. Without it, a call that was not recorded goes the operation's other way. With `flipped`,
    the place of b, that is given transposed and so is its gradient; `checked` then makes the
    arguments with b as it is meant.
    """
    numbers: list[float] = []
    given = operands
    if operation.kind == "jet":
        operation, operands = operation.bound(operands)
        given = operands
    if operation.kind in ("fused", "jet"):
        numbers = [x for x in operands if type(x) in NUMBERS]
        given = tuple(["number" if type(x) in NUMBERS else x for x in operands])
    kept: Recorded | None = None
    program: Any = None
    fingerprint: Any = None
    addresses: list[int] = []
    held: list[Any] = []
    ordinal = -1
    kind: Any = None
    for x in given:
        kind = KINDS.get(type(x)) or (None if type(x) in PLAIN else kind_of(x))
        if kind is not None:
            break
    if kind is not None and not kind.holds:
        which = table.TABLE.get(activation) if type(activation) is str else activation
        chosen = active()
        precision = chosen.precision if isinstance(chosen, CudaBackend) else "ieee"
        seen = [operation.mark, kind, getattr(which, "serial", None), precision, flipped]
        asked = *seen, flags, backend, needs
        if out is None and kind.recall is not None:
            kept, program, ordinal = kind.recall(asked, given, addresses)
        if kept is None:
            ordinal = kind.glance([*given, *flags, backend, needs, out], seen, addresses)
        if kept is None and ordinal >= 0:
            seen.append(ordinal)
            if operation.kind == "fused":
                # (asked here as well: arrays at multiples of 16 bytes cost no further call)
                seen.append(reduce(or_, addresses, 0) & 15 and beside(addresses))
            fingerprint = tuple(seen)
            kept = REPLAY.find(fingerprint)
            if kept is not None and kept.outs and kept.overlaps(addresses):
                kept = None
            elif kept is not None and out is None and kind.recall is not None:
                kind.keep(asked, given, kept, ordinal)
    if kept is None:
        if checked is None:
            return operation.other(operands, activation, flags, needs, out, backend)
        if callable(checked):
            checked = checked(operation, operands, activation, flags, needs, out, backend, flipped)
        signature, x = checked
        kept, kind, ordinal, addresses, held = _closely(
            operation, signature, x, fingerprint, flipped
        )
    results: list[Any] = []
    for make in kept.results:
        if make is None:
            results.append(None)
        elif isinstance(make, int):
            results.append(out[make] if isinstance(out, (tuple, list)) else out)
        else:
            new = make()
            addresses.append(kind.address(new))
            results.append(new)
    if numbers:
        addresses += [word(x, kept.dtype) for x in numbers]
    program = program or kept.program
    stream = 0
    capture: int | None = 0
    if kind.stream is not None:
        stream = kind.stream(ordinal)
        if not program.simple and (kind.capturing is None or kind.capturing()):
            capture = None  # it asks the driver for the graph's number
    program.launch(stream, addresses, capture)
    latest.call = kept.told
    notes = NOTES.get()
    if notes is not None:
        pairs = zip(results, kept.results, strict=True)
        notes.add(kind, program, addresses, len(numbers), [x for x, f in pairs if callable(f)])
    if held:
        pairs = zip(results, kept.results, strict=True)
        results = [kind.wrap(x) if callable(make) else x for x, make in pairs]
        _hold(program.device, stream, held)
    return results[0] if kept.pack is None else kept.pack(results)


def _closely(
    operation: Any, signature: Any, x: dict[str, Any], fingerprint: Any, flipped: int
) -> tuple[Recorded, Kind, int, list[int], list[Any]]:
    """Return a call, recorded if need be: that, its arrays' kind, device, addresses, what to hold.

    Without a `fingerprint` it gets one of the arguments as they were checked and read.
    """
    fields = signature.fields
    numbers = {fields[name]: x[name] for name in fields if type(x[name]) in NUMBERS}
    operands = {field: x[name] for name, field in fields.items() if field not in numbers}
    read = _Arrays(operands, signature.label)
    precision = _precision(x["backend"], read.ordinal)
    outs = signature.outs(x)
    for name, out in outs.items():
        read.add(name, out)
    # in the order in which `run` and `Kind.glance` find them
    order = (*(fields[name] for name in operation.operands), *outs)
    arrays = {name: read.arrays[name] for name in order if name in read.arrays}
    addresses = [a.address for a in arrays.values()]
    kind, ordinal, kept = read.kind, read.ordinal, None
    if fingerprint is None:
        chosen = tuple(x[name] for name in signature.options if name != "activation")
        seen = tuple((n, *a[1:], alignment_of(a.address)) for n, a in arrays.items())
        serial = x["activation"].serial
        names = *numbers, *outs
        how = serial, precision, ordinal, chosen, flipped
        fingerprint = operation.mark, kind, *how, seen, beside(addresses), names
        kept = REPLAY.find(fingerprint)
        if kept is not None and kept.outs and kept.overlaps(addresses):
            kept = None
    if kept is None:
        owner = device(ordinal)
        owner.release(0 if kind.stream is None else kind.stream(ordinal))
        kept, formulas = record(
            owner,
            precision,
            signature.kind,
            arrays,
            tuple(outs),
            lambda ghosts: signature.problem(
                x, **ghosts | {name: ghosts.get(field) for name, field in fields.items()}
            ),
            signature.result_names(x),
            partial(kind.maker, ordinal),
            ("d_b",) if flipped and "b" in x.get("needs", ()) else (),
            numbers,
        )
        REPLAY.keep(fingerprint, kept, formulas)
    return kept, kind, ordinal, addresses, read.held


class _Arrays:
    """The arrays of a call, read and checked: of one kind, and on one device."""

    kind: Kind
    ordinal: int

    def __init__(self, operands: dict[str, Any], label: Callable[[str], str]) -> None:
        self.arrays: dict[str, Argument] = {}
        self._label = label
        self.held: list[Any] = []
        self._first = ""
        late = []
        for name, x in operands.items():
            if x is not None and not self._first and kind_of(x) is None:
                late.append((name, x))  # the message names the device of the others
            elif x is not None:
                self.add(name, x)
        for name, x in late:
            self.add(name, x)

    def add(self, name: str, x: Any) -> None:
        """Read another one; raise TypeError if it is no array, of another kind or elsewhere."""
        kind, key, name = kind_of(x), name, self._label(name)
        text = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        if kind is None:
            where = f"cuda:{self.ordinal}" if self._first else "a CUDA device"
            raise TypeError(
                f"{name} must be on {where} as the other operands, got {text}: "
                f"numfuse.to_device({name}, 'cuda') copies it there"
            )
        argument, ordinal, held = kind.read(name, x)
        if not self._first:
            self.kind, self.ordinal, self._first = kind, ordinal, name
        if kind is not self.kind:
            raise TypeError(
                f"the operands must be arrays of one kind, got {text} for {name} beside "
                f"{self._first}"
            )
        if ordinal != self.ordinal:
            raise TypeError(
                f"{name} must be on cuda:{self.ordinal} as {self._first}, got an array on "
                f"cuda:{ordinal}"
            )
        if kind.holds:
            self.held.append(x if held is None else held)
        self.arrays[key] = argument


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
        backend = active()
        return backend.precision if isinstance(backend, CudaBackend) else "ieee"
    if backend == "cuda":
        return "ieee"
    if isinstance(backend, CudaBackend) and backend.ordinal == ordinal:
        return backend.precision
    name = backend if isinstance(backend, str) else getattr(backend, "name", backend)
    raise ValueError(
        f"backend must be 'cuda' (or None) for arrays on cuda:{ordinal}, got {name!r}: "
        f"numfuse.to_numpy moves an array"
    )
