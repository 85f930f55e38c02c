"""The guard of `asv_benches/guard`: what it decides on times that are made up.

No process is timed here: on a machine that runs tests, the times say nothing.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "asv_benches" / "guard"
ROUNDS, CASES = 8, 14


@pytest.fixture
def verdict(monkeypatch):
    """The module that decides."""
    if not FOLDER.is_dir():
        pytest.skip("a checkout has the scripts")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("verdict")


def drawn(generator, noise, slower=0.0, rounds=ROUNDS, heavy=False):
    """Times of one case: of a machine that drifts, and whose processes differ by `noise`."""
    drift = np.cumsum(generator.normal(0, 0.05, rounds))[:, None]
    own = generator.standard_t(2, (rounds, 3)) if heavy else generator.normal(0, 1, (rounds, 3))
    logs = math.log(1e-4) + drift + noise * own
    logs[:, 2] += math.log1p(slower)
    return [tuple(row) for row in np.exp(logs)]


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy tails"])
@pytest.mark.parametrize("noise", [0.005, 0.05, 0.3])
def test_an_unchanged_version_fails_no_more_often_than_stated(verdict, noise, heavy):
    """At a rate of one in five, so that a few hundred runs show it; nothing is allowed for free."""
    generator = np.random.default_rng(3)
    runs, rate = 200, 0.2
    level = rate / 4
    failed = sum(
        any(verdict.chance(np.log(drawn(generator, noise, heavy=heavy))) <= level for _ in range(4))
        for _ in range(runs)
    )
    # binomial: the mean and three standard deviations of it
    assert failed <= runs * rate + 3 * math.sqrt(runs * rate * (1 - rate))
    assert failed > 0  # the rate is used, not far undercut


def test_a_tenth_more_fails_and_names_its_case(verdict):
    generator = np.random.default_rng(4)
    for _ in range(20):
        times = {f"case {i}": drawn(generator, 0.015) for i in range(CASES)}
        times["case 5"] = drawn(generator, 0.015, slower=0.10)
        found = verdict.verdicts(times)
        assert [x.case for x in found if x.slower] == ["case 5"]
        assert verdict.status(found) == 1
        slow = next(x for x in found if x.slower)
        assert slow.change == pytest.approx(0.10, abs=0.04) and slow.chance <= 0.01 / CASES
        line = next(line for line in verdict.table(found) if "case 5" in line)
        assert line.endswith("| SLOWER |") and line == verdict.table(found)[2]


def test_an_unchanged_version_and_a_faster_one_pass(verdict):
    generator = np.random.default_rng(5)
    for faster in (0.0, -0.3):
        times = {f"case {i}": drawn(generator, 0.015, slower=faster) for i in range(CASES)}
        found = verdict.verdicts(times)
        assert verdict.status(found) == 0 and not any(x.noisy for x in found)


def test_a_drop_that_is_sure_but_small_is_allowed(verdict):
    generator = np.random.default_rng(6)
    times = {"case": drawn(generator, 0.0005, slower=0.02)}
    (found,) = verdict.verdicts(times)
    assert found.chance < 0.001 and not found.slower
    (strict,) = verdict.verdicts(times, allowed=0.01)
    assert strict.slower and strict.threshold == 0.01


def test_the_threshold_follows_the_spread_and_holds(verdict):
    """Of the same noise, a change at the threshold fails and one below it does not."""
    generator = np.random.default_rng(7)
    level = 0.01 / CASES
    thresholds = []
    for noise in (0.005, 0.02, 0.04):
        found = verdict.verdict("case", drawn(generator, noise, slower=0.07), level)
        thresholds.append(found.threshold)
        logs = np.log(drawn(np.random.default_rng(8), noise))
        logs[:, 2] -= np.median(logs[:, 2] - logs[:, :2].mean(axis=1))  # without a change
        edge = verdict.verdict("case", [tuple(x) for x in np.exp(logs)], level).threshold
        at, below = logs.copy(), logs.copy()
        at[:, 2] += math.log1p(edge)
        below[:, 2] += math.log1p(edge - 0.01)
        assert verdict.chance(at) <= level
        assert edge == verdict.ALLOWED or verdict.chance(below) > level
    assert thresholds == sorted(thresholds) and thresholds[0] < thresholds[-1]


def test_a_machine_that_cannot_tell_says_so(verdict):
    generator = np.random.default_rng(9)
    noisy = {f"case {i}": drawn(generator, 0.3) for i in range(3)}
    calm = {f"calm {i}": drawn(generator, 0.01) for i in range(2)}
    found = verdict.verdicts(noisy | calm)
    assert [x.noisy for x in found] == [True] * 3 + [False] * 2
    assert verdict.status(found) == 2
    assert sum("too noisy to tell" in line for line in verdict.table(found)) == 3
    assert verdict.status(found[1:]) == 0


def test_a_few_rounds_that_something_held_up_decide_nothing(verdict):
    """On either side: neither does a held-up process hide a drop, nor does it make one."""
    generator = np.random.default_rng(11)
    for place, slower in ((0, 0.15), (2, 0.0)):
        times = np.array(drawn(generator, 0.01, slower=slower, rounds=9))
        times[:2, place] *= 20
        (found,) = verdict.verdicts({"case": [tuple(row) for row in times]})
        assert found.slower == (slower > 0), found
        assert found.change == pytest.approx(slower, abs=0.03)


def test_too_few_rounds_are_refused(verdict):
    generator = np.random.default_rng(10)
    times = {f"case {i}": drawn(generator, 0.01, rounds=4) for i in range(CASES)}
    with pytest.raises(ValueError, match=r"4 rounds cannot tell .* expected at least 7"):
        verdict.verdicts(times)


def test_the_chance_of_a_round_is_a_third(verdict):
    assert verdict.chance(np.array([[0.0, 1.0, 2.0]])) == pytest.approx(1 / 3)
    assert verdict.chance(np.array([[2.0, 1.0, 0.0]])) == 1.0
    assert verdict.chance(np.array([[0.0, 1.0, 2.0]] * 5)) == pytest.approx(3.0**-5)
    assert verdict.chance(np.zeros((4, 3))) == 1.0  # equal times are no change
