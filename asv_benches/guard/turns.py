"""Three processes by turns: two of the old version and one of the new, fresh in every round."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from verdict import Triple

WORKER = Path(__file__).with_name("worker.py")
#: Seconds of a stretch, about: a hundred times what an interrupt takes.
STRETCH = 4e-3
#: Stretches of a case in one process, of which the fastest counts: what disturbs one can only
#: lengthen it (docs/history.md).
STRETCHES = 15


class Version:
    """A process of a version, in which the cases are ready to be called.

    `words` choose cases whose names hold one of them.
    """

    def __init__(self, tree: Path, python: str, cache: Path, words: Sequence[str] = ()) -> None:
        where = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH", ""))))
        # (a tree's path is in no cache's name, so two trees need two folders)
        env = os.environ | {"PYTHONPATH": where, "NUMBA_CACHE_DIR": str(cache)}
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, str(WORKER), str(tree), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
            cwd=tree,
        )
        found = self._answer()
        self.cases: list[str] = found["cases"]
        self.missing: dict[str, str] = found["missing"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"a process of the guard ended:\n{self._log.read()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def seconds(self, case: str, repeats: int) -> float:
        """Return the seconds of one call, out of a stretch of `repeats`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"case": case, "repeats": repeats}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def started(makes: Sequence[Callable[[], Version]]) -> Iterator[list[Version]]:
    with contextlib.ExitStack() as stack:
        versions = []
        for make in makes:
            version = make()
            stack.callback(version.end)
            versions.append(version)
        yield versions


def fastest(
    versions: Sequence[Version], case: str, repeats: int, shuffle: Callable[[list[int]], None]
) -> Triple:
    """Return the seconds of a case in each process: the fastest of its stretches, by turns."""
    found = [math.inf] * len(versions)
    order = list(range(len(versions)))
    for _ in range(STRETCHES):
        shuffle(order)
        for i in order:
            found[i] = min(found[i], versions[i].seconds(case, repeats))
    old, again, new = found
    return old, again, new


def measure(
    old: Callable[[], Version],
    new: Callable[[], Version],
    rounds: int,
    seed: int = 0,
) -> tuple[dict[str, list[Triple]], dict[str, str]]:
    """Return the seconds of every case that both versions have, and why others were left out."""
    with started([old, new]) as versions:  # compiles, and fills both caches
        cases = [case for case in versions[0].cases if case in versions[1].cases]
        missing = {
            f"{case} ({which})": why
            for which, version in zip(("old", "new"), versions, strict=True)
            for case, why in version.missing.items()
        }
        repeats = {}
        for case in cases:
            once = min(versions[0].seconds(case, 1) for _ in range(3))
            repeats[case] = max(1, math.ceil(STRETCH / once))
    generator = random.Random(seed)
    times: dict[str, list[Triple]] = {case: [] for case in cases}
    for number in range(rounds):
        makes = [(0, old), (1, old), (2, new)]
        generator.shuffle(makes)  # who starts first has the emptier memory
        with started([make for _, make in makes]) as versions:
            places = [place for place, _ in makes]
            ordered = [versions[places.index(place)] for place in range(3)]
            for case in cases:
                times[case].append(fastest(ordered, case, repeats[case], generator.shuffle))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return times, missing
