"""The gallery's scripts run, and hold what they assert."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
# The Burgers equation is trained for a minute or more: it is run with the docs.
QUICK = ("plot_mlp_and_gated", "plot_hessian_vector_product", "plot_trust_krylov")


@pytest.mark.parametrize("name", QUICK)
def test_a_script_of_the_gallery_runs(name):
    for package in ("autograd", "matplotlib", "sklearn"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, str(GALLERY / f"{name}.py")], capture_output=True, text=True, timeout=600,
        env={**os.environ, "MPLBACKEND": "agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_script_is_known():
    assert sorted(path.stem for path in GALLERY.glob("plot_*.py")) == sorted(
        (*QUICK, "plot_burgers_pinn")
    )
