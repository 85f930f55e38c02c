"""The examples of derivatives run, and hold what they assert."""

from __future__ import annotations

import sys
from pathlib import Path

import once
import pytest
import weekly

EXAMPLES = Path(__file__).parents[2] / "docs" / "gallery"
QUICK = ("hessian_vector_product", "newton_from_scipy", "own_epilogue")
#: Half a minute of a core each. (The pages, which CI builds of every change, run them all too.)
LONGER = (
    "helmholtz",
    "perceptron_and_gate",
    "gated_network",
    "burgers",
    "unknown_coefficient",
    "wave_function",
    "float64_for_a_pinn",
)
NAMES = QUICK + LONGER if weekly.ALL else QUICK
#: What makes an example shorter than a reader's run.
SHORTER = {"float64_for_a_pinn": ["1500"]}

RUNS = {
    name: once.Process(
        lambda _, name=name: [sys.executable, str(EXAMPLES / f"{name}.py"), *SHORTER.get(name, ())],
        {"MPLBACKEND": "agg"},
    )
    for name in NAMES
}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name):
    for package in ("autograd", "matplotlib", "sklearn"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = RUNS[name].result()
    assert done.returncode == 0, done.stderr[-3000:]
