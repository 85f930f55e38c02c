"""What the README tells a new user to type does what it says."""

import re
import tomllib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_runs_and_its_gradients_are_right():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(program, names)
    a, b, bias, d_bias = (names[name] for name in ("a", "b", "bias", "d_bias"))
    step = 1e-6

    def total(shift):
        return names["nf"].matmul_bias_activation(a, b, bias + shift, "gelu", backend="reference")

    slope = (total(step).sum(axis=0) - total(-step).sum(axis=0)) / (2 * step)
    np.testing.assert_allclose(d_bias, slope, rtol=1e-6)


def test_continuous_integration_runs_the_readmes_test_command():
    (command,) = re.findall(r"^python -m pip install .*-m pytest.*$", README, re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_extras_and_pages_that_the_readme_names_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r'"\.\[(\w+)\]"', README):
        assert extra in project["optional-dependencies"]
    for target in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / target).exists(), target
