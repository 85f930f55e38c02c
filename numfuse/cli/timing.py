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

# The worker threads of OpenBLAS, OpenMP and Numba spin for a while after their last job, on the
# cores that the next contestant wants. OpenBLAS gives up after about 1 ms, GNU OpenMP after 5 ms.
REST = 0.006
# The clock's own step (tens of ns) and the call of perf_counter are below 0.1% of this.
SAMPLE = 2e-3


def interleave(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    sample: float = SAMPLE,
    rest: float = REST,
    seed: int = 0,
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
    """
    order = list(contestants)
    shuffle = random.Random(seed).shuffle
    repeats = {name: _repeats(contestants[name], sample) for name in order}
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            call = contestants[name]
            time.sleep(rest)
            call()  # untimed: wakes the threads and takes the caches back from the others
            loop = range(repeats[name])
            start = time.perf_counter()
            for _ in loop:
                call()
            seconds[name].append((time.perf_counter() - start) / len(loop))
    return seconds


def _repeats(call: Contestant, sample: float) -> int:
    call()
    start = time.perf_counter()
    call()
    return max(1, math.ceil(sample / max(time.perf_counter() - start, 1e-7)))


def median(seconds: list[float]) -> float:
    """The figure that is reported."""
    return statistics.median(seconds)


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
