"""The adversary's suite: its truths agree with the reference, and wrong backends are found.

The suite itself is run by hand and once a week (docs/contributing.md).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from adversary import bounded, checks, curves, worker
from adversary.kinds import place

import numfuse as nf
from numfuse.backends.reference import Reference

ROOT = Path(__file__).parents[2]
SEED = 5


class Wrong(Reference):
    """The reference, and a fault behind it."""

    def __init__(self, fault):
        self.fault = fault

    def run(self, kind, p):
        before = {name: x.copy() for name, x in arrays_of(p) if x.flags.writeable}
        super().run(kind, p)
        self.fault(p, dict(arrays_of(p)), before)


def arrays_of(p):
    """Return the arrays of a problem by name."""
    held = getattr(p, "arrays", None)
    fields = {x for c in type(p).__mro__ for x in getattr(c, "__slots__", ())}
    named = held if held is not None else {x: getattr(p, x, None) for x in fields}
    return [(name, x) for name, x in named.items() if isinstance(x, np.ndarray)]


def results(arrays):
    return [x for name, x in arrays.items() if name.startswith(("out", "d_")) and x.size]


def slightly_off(p, arrays, before):
    for x in results(arrays):
        x[...] = x * (1 + 64 * float(np.finfo(np.float32).eps) * (x.dtype != np.float64))
        x[...] = x * (1 + 1e-11)


def one_element_missing(p, arrays, before):
    for x in results(arrays):
        if x.flags.writeable and x.flags.c_contiguous:
            x.reshape(-1)[-1] = np.nan


def bias_left_out(p, arrays, before):
    if "bias" in arrays and "out" in arrays and arrays["out"].ndim == 2:
        arrays["out"][...] -= arrays["bias"].astype(arrays["out"].dtype)


def an_operand_is_written(p, arrays, before):
    for name in before:
        if name in ("a", "grad") and arrays[name].size:
            arrays[name].reshape(-1)[:1] += 1


def no_guard(p, arrays, before):
    if getattr(p, "guard", False) and "d_bias" in arrays:
        arrays["d_bias"][...] = np.nan


def other_bits_in_a_second_call(p, arrays, before):
    for x in results(arrays):
        other_bits_in_a_second_call.calls += 1
        if other_bits_in_a_second_call.calls % 2 and x.dtype == np.float64:
            x[...] = np.nextafter(x, np.inf)


other_bits_in_a_second_call.calls = 0

FAULTS = [
    slightly_off, one_element_missing, bias_left_out, an_operand_is_written, no_guard,
    other_bits_in_a_second_call,
]  # fmt: skip


def judged(ways, count, backend=None):
    """Return what is found in so many calls of each way."""
    there, tally, found = place("reference", backend), checks.Tally(), []
    for way in ways:
        for index in range(count):
            word = worker.Word("reference", way, SEED, index)
            told, faults = worker.judge(word, there, tally)
            found += [f"{word} {told}: {x}" for x in faults]
    return found, tally


def test_the_truths_of_all_functions_agree_with_the_reference():
    found, tally = judged(worker.BY_NAME, 6)
    assert not found, "\n".join(found)
    assert tally.calls == 6 * len(worker.BY_NAME)
    compared = sum(row[1] for row in tally.by_function.values())
    left_open = sum(row[2] for row in tally.by_function.values())
    assert compared > 100_000 and left_open < compared / 2


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_backend_that_is_wrong_is_found(fault):
    ways = ["forward", "backward", "gate", "tangent", "double_backward"]
    found, _ = judged(ways, 24, Wrong(fault))
    assert found


def test_every_public_function_is_called():
    called = {name for way in worker.BY_NAME.values() for name in worker.functions(way)}
    named = {x for x in nf.__all__ if "mul" in x or x.startswith(("elementwise", "mlp"))}
    assert named - called == set()


def test_a_word_makes_the_same_call_again():
    words = [sys.executable, "-m", "tests.adversary", "--replay", "reference:gate:5:3"]
    done = [
        subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
        for _ in range(2)
    ]
    assert done[0].returncode == 0, done[0].stderr
    assert done[0].stdout == done[1].stdout and "_mul(" in done[0].stdout


@pytest.mark.parametrize("name", curves.ACTIVATIONS)
def test_a_derivative_of_the_truth_is_the_slope_of_what_is_before_it(name):
    """The textbook's formulas, against differences of one another: none is numfuse's."""
    x, step = np.linspace(-4, 4, 41).astype(np.longdouble) + 0.013, np.longdouble(2) ** -20
    f = curves.ACTIVATIONS[name]
    for low, high in itertools.pairwise(f):
        if low is not None:
            slope = (low(x + step) - low(x - step)) / (2 * step)
            exact = high(x) if high is not None else (name == "none") * np.ones_like(x)
            np.testing.assert_allclose(slope, exact, rtol=1e-6, atol=1e-8)
        if high is None:
            break


def test_the_tape_gives_derivatives_of_derivatives():
    rules = bounded.Rules(np.dtype(np.float64))
    x, one = rules.number(np.array([0.5, 2.0])), rules.number(np.ones(2))
    y = x * x * x
    (first,) = bounded.gradients([y], [one], [x])
    (second,) = bounded.gradients([first], [one], [x])
    np.testing.assert_allclose(first.v.astype(float), 3 * np.array([0.25, 4.0]))
    np.testing.assert_allclose(second.v.astype(float), 6 * np.array([0.5, 2.0]))
    assert (second.e > 0).all() and (second.e < 1e-13).all()
