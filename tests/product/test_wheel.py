"""The wheel: built, installed in a fresh environment elsewhere, and used there."""

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import numfuse

ROOT = Path(__file__).parents[2]

# What a user's first program does, far from this repository.
PROGRAM = """
import importlib.metadata, importlib.resources, json
import numpy as np
import numfuse as nf

rng = np.random.default_rng(0)
a, b, bias = rng.random((5, 7)), rng.random((7, 3)), rng.random(3)
pre = a @ b + bias
out = nf.matmul_bias_activation(a, b, bias, "sigmoid")
s = 1 / (1 + np.exp(-pre))
grad = rng.random((5, 3))
d_a, d_b, d_bias = nf.matmul_bias_activation_bwd(grad, a, b, bias, "sigmoid")
g = grad * s * (1 - s)
print(json.dumps({
    "file": nf.__file__,
    "version": importlib.metadata.version("numfuse"),
    "backend": nf.last_call().backend,
    "typed": importlib.resources.files("numfuse").joinpath("py.typed").is_file(),
    "errors": [float(np.abs(x - y).max()) for x, y in
               ((out, s), (d_a, g @ b.T), (d_b, a.T @ g), (d_bias, g.sum(0)))],
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built without isolation: [test] holds the build backend, so that nothing is downloaded."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    done = subprocess.run([*command, str(directory), str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = directory.glob("numfuse-*.whl")
    return path


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if name.startswith("numfuse/")}
    outside = set(names) - inside
    assert all(name.startswith(f"numfuse-{numfuse.__version__}.dist-info/") for name in outside)
    assert any(name.endswith("licenses/LICENSE") for name in outside)
    sources = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.py", "*.wgsl", "py.typed")
        for path in (ROOT / "numfuse").rglob(pattern)
    }
    assert inside == sources


@pytest.mark.long
def test_wheel_computes_in_a_fresh_environment(wheel, tmp_path):
    place = tmp_path / "fresh"
    venv.create(place, with_pip=False)
    python = place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    done = subprocess.run(
        [*install, "--no-deps", "--no-compile", str(wheel)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

    # The dependencies are those of this environment, found after the fresh one's own packages.
    (site,) = place.rglob("site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [str(python), "-W", "error", "-c", PROGRAM],
        cwd=elsewhere,
        env={"PATH": str(python.parent), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["file"]).is_relative_to(site)
    assert found["version"] == numfuse.__version__
    assert found["backend"] == "cpu"
    assert found["typed"] is True
    # 7 terms of size 1: some units in the last place of float64
    assert max(found["errors"]) < 1e-14
