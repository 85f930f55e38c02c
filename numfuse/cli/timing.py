"""Check and time several callables beside each other, so that what disturbs one disturbs all.

Every round runs each contestant once, in a fresh random order; the figure is the median over the
rounds. A machine that slows down half-way slows every contestant, and a ratio of two medians
stays what it was.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import numfuse as nf
from numfuse.cli.ufuncs import Array

Contestant = Callable[[], Any]
Runs = dict[str, Contestant]

# The worker threads of OpenBLAS, OpenMP and Numba spin for a while after their last job, on the
# cores that the next contestant wants. OpenBLAS gives up after 1 ms (`session.OPENBLAS_TIMEOUT`),
# GNU OpenMP after 5 ms.
REST = 0.006
# A stretch counts as disturbed where the processor, measured right before or after it, was slower
# than this share of its best: another tenant of the machine had its core or its power. Its clock
# alone moves by 5%.
CALM = 0.9
# A disturbed stretch is timed again, so often at the most; then it counts as it is.
TRIES = 8
# The clock's own step (tens of ns) and the call of perf_counter are below 0.1% of this.
SAMPLE = 2e-3


def arrays(found: Any) -> tuple[Array, ...]:
    """Return copies of the results of any library, in any nesting, as float64 arrays."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        return tuple(y for x in found for y in arrays(x))
    if hasattr(found, "detach"):
        found = found.detach().double().cpu().numpy()
    elif not isinstance(found, (np.ndarray, np.generic, float)):
        found = nf.to_numpy(found)
    return (np.array(found, np.float64),)


def relative_error(results: tuple[Array, ...], right: tuple[Array, ...]) -> float:
    """Largest difference of any output, relative to that output's largest element."""
    return max(
        float(np.abs(x - y).max() / max(float(np.abs(y).max()), 1e-30))
        for x, y in zip(results, right, strict=True)
    )


def checked(
    names: Iterable[str],
    contestant: Callable[[str], Contestant],
    exact: Contestant,
    required: str | None = None,
) -> tuple[Runs, dict[str, Any]]:
    """Run each contestant once and compare it with the exact results.

    Return those that ran, and {"error": {name: relative error}, "failed": {name: reason}}; an
    exception of the one that is `required` is raised.
    """
    right = arrays(exact())
    runs: Runs = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            run = contestant(name)
            errors[name] = relative_error(arrays(run()), right)
        except Exception as error:  # a contestant that cannot is a fact to report
            if name == required:
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        runs[name] = run
    return runs, {"error": errors, "failed": failed}


class Probe:
    """Tells whether the machine is its own: its speed now, in any unit, against the best seen."""

    def __init__(self, speed: Callable[[], float]) -> None:
        self._speed = speed
        self._best = 0.0
        self.stretches = 0
        self.disturbed = 0

    def calm(self) -> bool:
        speed = self._speed()
        self._best = max(self._best, speed)
        return speed >= CALM * self._best


def interleave(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    sample: float = SAMPLE,
    rest: float = REST,
    seed: int = 0,
    probe: Probe | None = None,
    settle: Contestant = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one figure a round, in an order that `seed` draws.

    Each contestant must have run before (compilation is not timed). A short one is repeated until a
    stretch takes `sample` seconds. Before each stretch there is a pause of `rest` seconds, for the
    previous one's threads to fall asleep; `settle` waits for a device at its end, as part of its
    time. A `probe` is asked before and after, and a disturbed stretch is timed again.
    """
    order = list(contestants)
    shuffle = random.Random(seed).shuffle

    def stretch(call: Contestant, repeats: int) -> float:
        call()  # untimed: wakes the threads and takes the caches back from the others
        settle()
        loop = range(repeats)
        start = time.perf_counter()
        for _ in loop:
            call()
        settle()
        return (time.perf_counter() - start) / repeats

    once = {name: max(stretch(contestants[name], 1), 1e-7) for name in order}
    repeats = {name: max(1, math.ceil(sample / figure)) for name, figure in once.items()}
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            for _ in range(TRIES):
                before = probe is None or probe.calm()
                time.sleep(rest)
                figure = stretch(contestants[name], repeats[name])
                if probe is None:
                    break
                probe.stretches += 1
                if before and probe.calm():
                    break
                probe.disturbed += 1
            seconds[name].append(figure)
    return seconds


#: The figure that is reported.
median = statistics.median


def spread(seconds: list[float]) -> float:
    """Half the distance between the quartiles, relative to the median; 0 for fewer than 4."""
    if len(seconds) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / (2 * middle)


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the median and the spread of each contestant."""
    return {
        "seconds": {name: median(figures) for name, figures in seconds.items()},
        "spread": {name: spread(figures) for name, figures in seconds.items()},
    }


def readable(seconds: float) -> str:
    """Three digits and a unit: ``1.23 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
