"""One table of recorded calls: the fingerprint of a call's operands, and the program that runs it.

A fingerprint is everything that a program depends on but the operands' addresses: shapes, strides,
dtypes, options, threads or device, and formulas by their serial numbers. A program is whatever a
backend recorded; who runs it holds it, so nothing goes under a running call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar, cast

from numfuse.language.graph import Expr
from numfuse.runtime.lifetimes import Ties, formulas_of, named

Program = TypeVar("Program")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Statistics(NamedTuple):
    """Calls that found a program, calls that did not, and the size of the table."""

    hits: int
    misses: int
    entries: int
    nbytes: int


class Recording(NamedTuple):
    """A program that a backend recorded, and for how long it may be kept."""

    program: Any
    #: The formulas that the program goes with; None: it is for this one call.
    formulas: Iterable[Expr] | None
    nbytes: int
    #: What else the program depends on, and a call has to ask for: the number of threads.
    varies: Callable[[], Hashable] | None = None


class Replay(Generic[Program]):
    """Programs by fingerprint, for any thread; beyond the limits the oldest goes.

    There is no lock, which an interrupt or a fork could leave locked: every step is one of a dict,
    which no other thread can come between. Threads that record the same call at once keep the
    program of the last. A program that alone has more bytes than the limit is not kept.
    """

    def __init__(self, entries: int, nbytes: int) -> None:
        self.limits = entries, nbytes
        self._programs: dict[Hashable, tuple[Program, int]] = {}
        self._nbytes = self._hits = self._misses = 0
        self._ties = Ties(self._forget)

    def find(self, fingerprint: Hashable) -> Program | None:
        """Return the program that was recorded for a fingerprint, or None."""
        found = self._programs.get(fingerprint)
        if found is None:
            self._misses += 1
            return None
        self._hits += 1
        return found[0]

    def keep(
        self,
        fingerprint: Hashable,
        program: Program,
        formulas: Iterable[Expr] = (),
        nbytes: int = 0,
    ) -> Program:
        """Keep a program until one of its formulas is gone, or the table is full; return it."""
        entries, limit = self.limits
        if nbytes > limit:
            return program
        if fingerprint in self._programs:
            self._forget(fingerprint)
        self._programs[fingerprint] = program, nbytes
        self._nbytes += nbytes
        if formulas:
            self._ties.tie(fingerprint, formulas)
        while len(self._programs) > entries or self._nbytes > limit:
            try:
                oldest = next(iter(self._programs))
            except StopIteration:
                break
            except RuntimeError:  # another thread was here
                continue
            self._forget(oldest)
            self._ties.untie(oldest)
        return program

    def clear(self) -> None:
        """Drop all programs."""
        for fingerprint in list(self._programs):
            self._forget(fingerprint)
        self._ties.clear()

    def programs(self) -> list[Program]:
        """Return the programs, the oldest first."""
        return [program for program, _ in list(self._programs.values())]

    def statistics(self) -> Statistics:
        """Return how the table was used so far, and how full it is."""
        return Statistics(self._hits, self._misses, len(self._programs), self._nbytes)

    def _forget(self, fingerprint: Hashable) -> None:
        _, nbytes = self._programs.pop(fingerprint, (None, 0))
        self._nbytes -= nbytes


def kept(entries: int) -> Callable[[_Function], _Function]:
    """Keep what a function returns (never None), as long as the formulas in its arguments live.

    A redefined activation is another formula, and what was made of the one before goes.
    """

    def decorate(make: _Function) -> _Function:
        table: Replay[Any] = Replay(entries, 0)

        @functools.wraps(make)
        def found(*args: Any, **options: Any) -> Any:
            key = named((*args, *sorted(options.items())))
            value = table.find(key)
            if value is None:
                made = make(*args, **options)
                # (after it: what is made of a curve asks it for derivatives)
                formulas = formulas_of((*args, *options.values()))
                # What another thread made meanwhile stays: one object for one key.
                value = table.find(key) or table.keep(key, made, formulas)
            return value

        return cast(_Function, found)

    return decorate
