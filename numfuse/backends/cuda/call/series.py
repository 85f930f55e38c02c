"""Calls that came one after another, as one program: a network's layers without Python between.

While a function runs the long way, its calls are noted (`entry.run`): the program of each and the
addresses that it got. What an address lies in is an argument of the function, an array that was
made on the way, or a constant. Where that is known of every address, the programs are joined to
one: arrays that are no part of the result become parts of its workspace, which share room where one
is read for the last time before the other one is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numfuse.backends import active, latest
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.call.foreign import Kind, kind_of
from numfuse.backends.cuda.call.record import NOTES, REPLAY, Argument
from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.driver.devices import device
from numfuse.backends.cuda.face import CudaBackend
from numfuse.backends.cuda.plan.program import Part, Program, joined
from numfuse.runtime.views import bounds, dtype_of

#: What is kept for a form that has no series.
_NEVER = object()


class Notes:
    """The programs that ran, and the arrays that were made, while a function ran."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        #: (program, addresses, how many of these are numbers)
        self.programs: list[tuple[Program, list[int], int]] = []
        #: Arrays that were made, which live until the notes are read, so that no two share memory.
        self.made: list[Any] = []
        #: Arrays that every call reads.
        self.constants: list[Any] = []
        #: Whether something ran that is no program of arrays of the kind.
        self.broken = False

    def add(
        self, kind: Kind, program: Program, addresses: list[int], numbers: int, made: Iterable[Any]
    ) -> None:
        """Note a call."""
        self.broken |= kind is not self.kind
        self.programs.append((program, list(addresses), numbers))
        self.made += [x for x in made if x is not None]


@dataclass(slots=True, eq=False, repr=False)
class _Range:
    """Memory that programs read and write."""

    low: int
    high: int
    #: Its place among the arguments of a call; -1: it was made.
    place: int
    read: Argument
    #: The first and the last program that has it; the place among the results' arrays, if it is one
    first: int = -1
    last: int = -1
    result: int = -1


class Series(NamedTuple):
    """A function's calls as one program."""

    program: Program
    makers: list[Callable[[], Any]]
    #: From the arguments and the arrays that were made to the function's result.
    pack: Callable[[Sequence[Any], list[Any]], Any]
    #: Addresses of constants, which `held` has, and numbers.
    fixed: list[int]
    held: list[Any]
    told: Any

    def run(
        self, program: Program, kind: Kind, ordinal: int, given: Sequence[Any],
        addresses: list[int],
    ) -> Any:  # fmt: skip
        """Run it on arguments, by its program; return the function's result."""
        made = [make() for make in self.makers]
        addresses += map(kind.address, made)
        addresses += self.fixed
        stream, capture = 0, 0
        if kind.stream is not None:
            stream = kind.stream(ordinal)
            if not program.simple and (kind.capturing is None or kind.capturing()):
                capture = None  # type: ignore[assignment]  # (the driver is asked for its number)
        program.launch(stream, addresses, capture)
        latest.call = self.told
        notes = NOTES.get()
        if notes is not None:
            notes.add(kind, program, addresses, len(self.fixed), made)
            notes.constants += self.held
        return self.pack(given, made)


def repeated(
    mark: tuple[Any, ...],
    arrays: Sequence[Any],
    backend: Any,
    formulas: Callable[[], Iterable[Any]],
    long: Callable[[], Any],
) -> Any:
    """Return what `long` returns: by its series, if it ran with such arrays before.

    `mark` is all that the function depends on but `arrays` and `backend`, and `formulas` returns
    those with which it goes. An array may be given several times, and None where there is none.
    """
    kind = next((kind_of(x) for x in arrays if x is not None), None)
    if kind is None or kind.holds or not (backend is None or backend == "cuda" or
                                          isinstance(backend, CudaBackend)):  # fmt: skip
        return long()
    chosen: Any = active() if backend is None else backend
    precision = chosen.precision if isinstance(chosen, CudaBackend) else "ieee"
    given, own = arrays, [x for x in arrays if x is not None]
    same: tuple[int, ...] = ()
    if len(set(map(id, own))) < len(own):  # (of arrays that are given twice none is recalled)
        places = {id(x): i for i, x in reversed([*enumerate(arrays)])}
        same = tuple([-1 if x is None else places[id(x)] for x in arrays])
        given = own = [x for i, x in enumerate(arrays) if same[i] == i]
    asked = "series", mark, kind, precision, backend, same
    addresses: list[int] = []
    if kind.recall is not None:
        found, program, ordinal = kind.recall(asked, given, addresses)
        if found is not None:
            return found.run(program, kind, ordinal, own, addresses)
    seen: list[Any] = [*asked, tuple([x is None for x in arrays])]
    ordinal = kind.glance([*own], seen, addresses)
    if ordinal < 0:
        return long()
    fingerprint = (*seen, ordinal)
    found = REPLAY.find(fingerprint)
    if found is _NEVER:
        return long()
    if found is not None:
        if kind.recall is not None:
            kind.keep(asked, given, found, ordinal)
        return found.run(found.program, kind, ordinal, own, addresses)
    notes = Notes(kind)
    before = NOTES.set(notes)
    try:
        result = long()
    finally:
        NOTES.reset(before)
    made = None if notes.broken else _series(notes, ordinal, own, result)
    REPLAY.keep(fingerprint, _NEVER if made is None else made, formulas())
    return result


def _series(notes: Notes, ordinal: int, given: Sequence[Any], result: Any) -> Series | None:
    """Return the series of a function; None: what one of its programs reads is not known."""
    kind = notes.kind
    ranges = _ranges(notes, ordinal, given)
    if ranges is None or not notes.programs:
        return None
    constants = [_bounds(kind.read("x", x)[0]) for x in notes.constants]

    def at(address: int) -> _Range | None:
        return next((r for r in ranges if r.low <= address < r.high), None)

    pack = _Pack(kind, ordinal, given, at)
    template = pack.template(result)
    if pack.failed:
        return None
    fixed: dict[int, int] = {}
    parts: list[Part] = []
    for step, (program, addresses, numbers) in enumerate(notes.programs):
        where: list[Any] = []
        for i, address in enumerate(addresses):
            array = i < len(addresses) - numbers
            found = at(address) if array else None
            if found is not None:
                found.first, found.last = step if found.first < 0 else found.first, step
                where.append((found, address - found.low))
                continue
            if array and address and not any(low <= address < high for low, high in constants):
                return None
            where.append((fixed.setdefault(address, len(fixed)), 0))
        parts.append(Part(program, where))
    results = sorted((r for r in ranges if r.result >= 0), key=lambda r: r.result)
    program = _joined(device(ordinal), parts, ranges, len(given), len(results), len(fixed))
    makers = [kind.maker(ordinal, tuple(r.read.shape), r.read.dtype) for r in results]
    return Series(program, makers, template, [*fixed], notes.constants, latest.call)


def _ranges(notes: Notes, ordinal: int, given: Sequence[Any]) -> list[_Range] | None:
    """Return the memory of all arguments and of what was made; None where two share some.

    The same function may be called with arguments that do not.
    """
    found: list[_Range] = []
    for place, x in [*enumerate(given), *((-1, x) for x in notes.made)]:
        read, where, _ = notes.kind.read("x", x)
        if where != ordinal:
            return None
        low, high = _bounds(read)
        if low < high:
            found.append(_Range(low, high, place, read))
    found.sort(key=lambda r: r.low)
    if any(x.high > y.low for x, y in itertools.pairwise(found)):
        return None
    return found


def _joined(
    owner: Device, parts: Sequence[Part], ranges: Iterable[_Range], given: int, results: int,
    fixed: int,
) -> Program:  # fmt: skip
    """Return programs as one over so many arguments, arrays of the results, and constants."""
    places, nbytes = _places(ranges)

    def buffer(where: _Range | int, offset: int) -> tuple[int, int]:
        if isinstance(where, int):
            return 2 + given + results + where, offset
        if where.place >= 0:
            return 2 + where.place, offset + where.low - where.read.address
        if where.result >= 0:
            return 2 + given + where.result, offset
        return 0, places[id(where)] + offset

    moved = [Part(p.program, [buffer(*x) for x in p.where]) for p in parts]
    return joined(owner, moved, nbytes, given + results + fixed)


def _bounds(read: Argument) -> tuple[int, int]:
    size = dtype_of(read.dtype).itemsize
    steps = [s * size for s in read.strides]
    return bounds(read.address, tuple(read.shape), steps, size)


def _places(ranges: Iterable[_Range]) -> tuple[dict[int, int], int]:
    """Return where arrays lie in a workspace, by `id`, and its bytes.

    Each takes the first gap between those that are in use while it is.
    """
    found: dict[int, int] = {}
    placed: list[tuple[int, int, _Range]] = []
    inner = [r for r in ranges if r.place < 0 and r.result < 0 and r.first >= 0]
    end = 0
    for r in sorted(inner, key=lambda r: r.first):
        length = tiling.round_up(r.high - r.low, 256)
        at = 0
        for low, high, other in sorted(placed, key=lambda x: x[0]):
            if other.last < r.first or low >= at + length:
                continue
            at = max(at, high)
        found[id(r)] = at
        placed.append((at, at + length, r))
        end = max(end, at + length)
    return found, end


class _Pack:
    """A function's result as a template, to be filled with arguments and arrays that were made."""

    def __init__(
        self, kind: Kind, ordinal: int, given: Sequence[Any], at: Callable[[int], _Range | None]
    ) -> None:
        self._kind, self._ordinal, self._given, self._at = kind, ordinal, given, at
        self._count = 0
        #: Whether an array of the result is none that was made, and no argument.
        self.failed = False

    def template(self, x: Any) -> Callable[[Sequence[Any], list[Any]], Any]:
        """Return a function from the arguments and the arrays that were made to such a result."""
        if x is None:
            return _nothing
        for i, y in enumerate(self._given):
            if x is y:
                return lambda given, made: given[i]
        if isinstance(x, (tuple, list)):
            each = [self.template(y) for y in x]
            how = getattr(type(x), "_make", type(x))
            return lambda given, made: how([f(given, made) for f in each])
        if hasattr(x, "inputs"):  # what a forward keeps
            parts = x.inputs, x.sums, getattr(x, "whole", None)
            each = [self.template(y) for y in parts[: 2 + hasattr(x, "whole")]]
            kept = type(x)
            return lambda given, made: kept(*[f(given, made) for f in each])
        return self._array(x)

    def _array(self, x: Any) -> Callable[[Sequence[Any], list[Any]], Any]:
        read = self._kind.read("x", x)[0]
        shape, strides = tuple(read.shape), tuple(read.strides)
        if 0 in shape:
            make = self._kind.maker(self._ordinal, shape, read.dtype)
            return lambda given, made: make()
        found = self._at(read.address)
        if found is None or found.place >= 0 or found.high < _bounds(read)[1]:
            self.failed = True
            return _nothing
        if found.result < 0:
            found.result = self._count
            self._count += 1
        number, offset = found.result, read.address - found.low
        if found.read[1:] == read[1:] and not offset:
            return lambda given, made: made[number]
        size, part = dtype_of(read.dtype).itemsize, self._kind.part
        return lambda given, made: part(made[number], offset // size, shape, strides)


def _nothing(given: Sequence[Any], made: list[Any]) -> None:
    return None
