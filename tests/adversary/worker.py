"""One process that draws and makes calls, one after another.

Its state is a small file: the word of the call that it is in, for who watches it.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from . import checks, fused, layers, networks, wrong
from .cases import Case
from .draws import Draw
from .kinds import LIBRARIES, RUN, Place, drawn, place

STATE = 256
CALLS: dict[Callable[[Draw], Case], int] = layers.CALLS | fused.CALLS | networks.CALLS
BY_NAME = {make.__name__: make for make in CALLS}
#: One call in so many is a wrong one.
WRONG = 8


class Word(NamedTuple):
    """What makes a case: where it runs, the way to draw it, a seed and a number."""

    place: str
    way: str
    seed: int
    index: int

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> Word:
        """Return the word of a text."""
        parts = text.split(":")
        if len(parts) != 4 or parts[1] not in BY_NAME:
            raise ValueError(f"a word must be PLACE:WAY:SEED:INDEX, got {text!r}")
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))


def ways(function: str | None) -> list[str]:
    """Return the ways whose calls are of a function, or of all."""
    if function is None or function in BY_NAME:
        return [function] if function else list(BY_NAME)
    found = [name for name, make in BY_NAME.items() if function in functions(make)]
    if not found:
        raise ValueError(f"no call is of {function!r}; the ways are {', '.join(BY_NAME)}")
    return found


def functions(make: Callable[[Draw], Case]) -> set[str]:
    """Return the public functions that a way calls, of a few draws on the reference."""
    there = place("reference")
    return {make(drawn(there, 0, i * RUN + i, 0)).function for i in range(60)}


def word(name: str, seed: int, index: int, among: list[str]) -> Word:
    """Return the word of a number, the way drawn from it."""
    rng = np.random.default_rng([seed, index, 1])
    weights = np.array([CALLS[BY_NAME[way]] for way in among], float)
    return Word(name, among[int(rng.choice(len(among), p=weights / weights.sum()))], seed, index)


def judge(w: Word, there: Place, tally: checks.Tally) -> tuple[str, list[str]]:
    """Draw and make the call of a word; return it in words, and what is wrong."""
    d = drawn(there, w.seed, w.index, crc32(w.way.encode()))
    case = BY_NAME[w.way](d)
    tally.calls += 1
    if there.name not in LIBRARIES and d.rng.integers(WRONG) == 0:
        return str(case), wrong.refused(case, there)
    if there.name in LIBRARIES:
        from .gradients import differentiated

        if case.free and (not there.plain or d.chance(0.7)) and there.name != "dask":
            return str(case), differentiated(case, there, tally)
        if not there.plain:
            return str(case), []
    return f"{d.kind} {case}", checks.examine(case, there, tally)


def run(
    name: str, seed: int, first: int, seconds: float, function: str | None, state: Path,
    write: Callable[[dict[str, Any]], None], step: int = 1, backend: Any = None,
) -> checks.Tally:  # fmt: skip
    """Make calls until the time is over, and write what is wrong as it is found."""
    there, tally = place(name, backend), checks.Tally()
    among = [way for way in ways(function) if there.serves(BY_NAME[way].__module__)]
    state.write_bytes(bytes(STATE))
    end, index = time.monotonic() + seconds, first
    with state.open("r+b") as opened, mmap.mmap(opened.fileno(), STATE) as view:
        while time.monotonic() < end:
            w = word(name, seed, index, among)
            text = f"{w} {time.time():.1f}".encode()
            view[:] = text + bytes(STATE - len(text))
            try:
                told, faults = judge(w, there, tally)
            except Exception:
                told, faults = "", ["the suite failed: " + traceback.format_exc(limit=-6)]
            for fault in faults:
                write({"word": str(w), "call": told, "fault": fault})
            index += step
    write({"next": index, "tally": vars(tally)})
    return tally


def main() -> None:
    """Run as its watcher says in one line of JSON; print a line of JSON for each finding."""
    how = json.loads(sys.argv[1])
    how["state"] = Path(how["state"])

    def write(found: dict[str, Any]) -> None:
        print(json.dumps(found), flush=True)

    run(**how, write=write)


if __name__ == "__main__":
    main()
