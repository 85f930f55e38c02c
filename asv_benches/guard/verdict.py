"""The decision: which cases of the new version take longer, by more than this machine's noise.

In every round there are three fresh processes: two of the old version and one of the new. If the
new version is as fast as the old one, the three are alike, so which of them is called new makes no
difference. So the labels are changed in all 3^rounds ways: the share of the ways in which "new"
comes out at least as slow as it did is the chance that the machine alone gives such a result. That
needs no assumption about the noise: neither its size nor its shape, nor that rounds are alike.

A process that another program held up is far from the other two of its round. So that a few such
rounds decide nothing, what is far counts as the middle round's width, whoever it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

#: Of runs without a change, so many may fail, all cases together.
RATE = 0.01
#: A drop that a change may cost without a word. Ratios to NumPy of two commits with the same
#: kernels differed by 0.3 to 2% for products (docs/history.md).
ALLOWED = 0.03
#: What the guard promises to find. A case whose noise hides this is called noisy.
PROMISED = 0.10
#: Rounding in the sums over rounds: ways as slow as what was seen count as such.
_SLACK = 1e-12

#: Seconds of the old version, the old one again, and the new one, in one round.
Triple = tuple[float, float, float]


class Verdict(NamedTuple):
    """What a case's times say."""

    case: str
    #: Seconds of the old and of the new version, in the middle round.
    old: float
    new: float
    #: The new version's time over the old one's, less 1, in the middle round.
    change: float
    #: The old version's two processes: how far apart they are in the middle round.
    spread: float
    #: The chance of such a change, or a larger one, without any.
    chance: float
    #: The smallest change that would have failed, with the noise of this run.
    threshold: float
    slower: bool
    noisy: bool


def chance(differences: np.ndarray) -> float:
    """Return the share of all labellings that are as slow as the given one.

    `differences` is (rounds, 3): logarithms of seconds, the new version's last.
    """
    centred = differences - np.median(differences, axis=1, keepdims=True)
    far = float(np.median(np.ptp(centred, axis=1)))  # the same for every labelling
    near = np.clip(centred, -far, far)
    sums = np.zeros(1)
    for row in near:
        sums = np.add.outer(sums, row).ravel()
    return float(np.mean(sums >= near[:, -1].sum() - _SLACK))


def verdict(case: str, times: Sequence[Triple], level: float, allowed: float = ALLOWED) -> Verdict:
    """Return what the rounds of a case say, at this chance of a false alarm."""
    logs = np.log(np.asarray(times, float))
    change = float(np.median(logs[:, 2] - logs[:, :2].mean(axis=1)))
    unchanged = logs - np.array((0.0, 0.0, change))

    def fails(drop: float) -> bool:
        return chance(unchanged + np.array((0.0, 0.0, math.log1p(drop)))) <= level

    steps = np.arange(round(100 * allowed), 101) / 100
    threshold = next((float(step) for step in steps if fails(float(step))), math.inf)
    seen = chance(logs)
    old, again, new = np.exp(np.median(logs, axis=0))
    return Verdict(
        case,
        old=math.sqrt(old * again),
        new=float(new),
        change=math.expm1(change),
        spread=float(np.median(np.abs(logs[:, 1] - logs[:, 0]))),
        chance=seen,
        threshold=threshold,
        slower=seen <= level and math.expm1(change) >= allowed,
        noisy=threshold > PROMISED,
    )


def verdicts(
    times: Mapping[str, Sequence[Triple]], rate: float = RATE, allowed: float = ALLOWED
) -> list[Verdict]:
    """Return the verdict of each case; `rate` is that of a false alarm in any of them."""
    for case, rounds in times.items():
        least = 3.0 ** -len(rounds)
        if least > rate / len(times):
            raise ValueError(
                f"{case}: {len(rounds)} rounds cannot tell at a rate of {rate:g} in {len(times)} "
                f"cases, expected at least {math.ceil(math.log(len(times) / rate, 3))}"
            )
    return [verdict(case, rounds, rate / len(times), allowed) for case, rounds in times.items()]


def status(found: Sequence[Verdict]) -> int:
    """Return the exit status: 1 for a drop, 2 where most cases are too noisy to tell, else 0."""
    if any(x.slower for x in found):
        return 1
    return 2 if 2 * sum(x.noisy for x in found) > len(found) else 0


def table(found: Sequence[Verdict], readable: Sequence[str] = ("s", "ms", "us")) -> list[str]:
    """Return the lines of a table, the largest drop first."""

    def seconds(x: float) -> str:
        factors = (1.0, 1e3, 1e6)
        factor, unit = next(
            ((f, u) for f, u in zip(factors, readable, strict=True) if x * f >= 1),
            (factors[-1], readable[-1]),
        )
        return f"{x * factor:.3g} {unit}"

    lines = [
        "| case | old | new | change | old beside itself | chance | fails from | |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for x in sorted(found, key=lambda x: -x.change):
        word = "SLOWER" if x.slower else "too noisy to tell" if x.noisy else ""
        edge = f"{x.threshold:+.0%}" if math.isfinite(x.threshold) else "never"
        lines.append(
            f"| {x.case} | {seconds(x.old)} | {seconds(x.new)} | {x.change:+.1%} "
            f"| {x.spread:.1%} | {x.chance:.2g} | {edge} | {word} |"
        )
    return lines
