"""Time several callables beside each other, so that what disturbs one disturbs all.

Every round runs each contestant once, in a fresh random order; the figure is the median over the
rounds. A machine that slows down half-way slows every contestant, and a ratio of two medians
stays what it was.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

Contestant = Callable[[], object]


class Probe:
    """Tells whether the machine is its own: its speed now against the best seen.

    Parameters
    ----------
    speed
        Measures the processor's speed, in any unit, in a millisecond or two.
    """

    def __init__(self, speed: Callable[[], float]) -> None:
        self._speed = speed
        self._best = 0.0
        self.stretches = 0
        self.disturbed = 0

    def calm(self) -> bool:
        speed = self._speed()
        self._best = max(self._best, speed)
        return speed >= CALM * self._best


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


def interleave(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    sample: float = SAMPLE,
    rest: float = REST,
    seed: int = 0,
    probe: Probe | None = None,
    settle: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one figure a round.

    Parameters
    ----------
    contestants
        Callables without arguments; each must have run before (compilation is not timed).
    rounds
        How many figures each contestant gets.
    sample
        Least length in seconds of one timed stretch: a short callable is repeated to fill it.
    rest
        Pause in seconds before each contestant, for the previous one's threads to fall asleep.
    seed
        Of the order in which the contestants run.
    probe
        Where given, it is asked before and after a stretch, and a disturbed stretch is timed again.
    settle
        Where given, it waits for a device: once at the end of a stretch, as part of its time.
    """
    order = list(contestants)
    shuffle = random.Random(seed).shuffle
    settle = settle or _ready
    repeats = {name: _repeats(contestants[name], sample, settle) for name in order}
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            for _ in range(TRIES):
                before = probe is None or probe.calm()
                figure = _stretch(contestants[name], repeats[name], rest, settle)
                if probe is None:
                    break
                probe.stretches += 1
                if before and probe.calm():
                    break
                probe.disturbed += 1
            seconds[name].append(figure)
    return seconds


def _ready() -> None:
    """Return at once: what a CPU computes is there when the call returns."""


def _stretch(call: Contestant, repeats: int, rest: float, settle: Contestant) -> float:
    """Seconds per call, in one stretch of `repeats` calls."""
    time.sleep(rest)
    call()  # untimed: wakes the threads and takes the caches back from the others
    settle()
    loop = range(repeats)
    start = time.perf_counter()
    for _ in loop:
        call()
    settle()
    return (time.perf_counter() - start) / len(loop)


def _repeats(call: Contestant, sample: float, settle: Contestant) -> int:
    call()
    settle()
    start = time.perf_counter()
    call()
    settle()
    return max(1, math.ceil(sample / max(time.perf_counter() - start, 1e-7)))


#: The figure that is reported.
median = statistics.median


def spread(seconds: list[float]) -> float:
    """Half the distance between the quartiles, relative to the median; 0 for fewer than 4."""
    if len(seconds) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / (2 * middle)


def readable(seconds: float) -> str:
    """Three digits and a unit: ``1.23 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
