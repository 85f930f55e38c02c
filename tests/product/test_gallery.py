"""The examples of derivatives run, and hold what they assert."""

from __future__ import annotations

import sys
from pathlib import Path

import once
import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "gallery"
QUICK = (
    "perceptron_and_gate",
    "gated_network",
    "hessian_vector_product",
    "newton_from_scipy",
    "own_epilogue",
    "burgers",
    "helmholtz",
    "unknown_coefficient",
    "wave_function",
    "float64_for_a_pinn",
)
#: What makes an example shorter than a reader's run.
SHORTER = {"float64_for_a_pinn": ["1500"]}

RUNS = {
    name: once.Process(
        lambda _, name=name: [sys.executable, str(EXAMPLES / f"{name}.py"), *SHORTER.get(name, ())],
        {"MPLBACKEND": "agg"},
    )
    for name in QUICK
}


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_an_example_runs(name):
    for package in ("autograd", "matplotlib", "sklearn"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = RUNS[name].result()
    assert done.returncode == 0, done.stderr[-3000:]
