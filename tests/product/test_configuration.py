"""The configuration of pytest: strict about numfuse, no matter which plugins there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: As pytest-benchmark does beside pytest-xdist: a warning of its own class, while pytest begins.
PLUGIN = """
import warnings
class PluginWarning(UserWarning):
    pass
def pytest_configure(config):
    warnings.warn(PluginWarning("this plugin rests"))
"""
TESTS = """
import warnings
import pytest
from numfuse.runtime import binaries, compilation
def test_what_a_product_warns_of_is_an_error():
    def work():
        binaries.tell("a test", "no directory for compiled kernels is writable")
    with pytest.raises(RuntimeWarning, match="no directory for compiled kernels"):
        compilation.compiled(work)
def test_what_a_test_does_is_an_error():
    with pytest.raises(UserWarning):
        warnings.warn("anything", UserWarning, stacklevel=1)
"""


@pytest.mark.parametrize("plugin", ["pytest_anything", "own_plugin"])
def test_only_a_plugin_may_warn_of_itself(plugin, tmp_path):
    (tmp_path / f"{plugin}.py").write_text(PLUGIN)
    (tmp_path / "test_strict.py").write_text(TESTS)
    root = Path(__file__).parents[2]
    paths = [str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", plugin, "-p", "no:cacheprovider",
         "-c", str(root / "pyproject.toml"), "--rootdir", str(tmp_path),
         str(tmp_path / "test_strict.py")],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    if plugin == "own_plugin":  # by its name no plugin of pytest: as strict as with anything else
        assert done.returncode != 0 and "this plugin rests" in done.stdout + done.stderr
    else:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "2 passed" in done.stdout
