"""What all adapters have in common: names, signatures, laziness, one kind of array in a call."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest

import numfuse as nf
from numfuse.adapters.surface import NAMES, Functions

DIFFERENTIATING = ("autograd", "torch", "jax")


@pytest.mark.parametrize("library", DIFFERENTIATING)
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_has_the_public_functions_with_their_signatures(library, name):
    pytest.importorskip(library, reason=f"{library} is not installed")
    own = inspect.signature(getattr(import_module(f"numfuse.adapters.{library}"), name))
    public = inspect.signature(getattr(nf, name))
    assert [(p.name, p.kind) for p in own.parameters.values()] == [
        (p.name, p.kind) for p in public.parameters.values()
    ]
    for mine, theirs in zip(own.parameters.values(), public.parameters.values(), strict=True):
        assert mine.default == theirs.default


def test_every_operation_has_an_adapters_name():
    operations = [
        name for name in nf.__all__ if name.startswith("matmul_") or "_mul" in name
    ]  # fmt: skip
    assert sorted(operations) == sorted(NAMES)
    assert all(hasattr(Functions, name) for name in NAMES)


@pytest.mark.parametrize("library", ["autograd", "torch", "jax"])
def test_without_the_package_the_core_runs(library):
    blocked = (library, "jaxlib") if library == "jax" else (library,)
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("blocked", name=name)
sys.meta_path.insert(0, Blocked())
import numpy as np, numfuse as nf
x = np.ones((2, 2))
nf.matmul_bias_activation_double_bwd(x, x, None, x, x, x, None, "gelu", backend="reference")
assert not any(name.startswith("numfuse.adapters") for name in sys.modules)
try:
    import numfuse.adapters.{library}
except ModuleNotFoundError:
    print("only the adapter is missing")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "only the adapter is missing\n", done.stderr[-2000:]


def test_two_kinds_of_arrays_do_not_meet():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with pytest.raises(TypeError, match="the operands must be arrays of one kind"):
        nf.matmul_bias_activation(torch.ones(2, 2), jax.numpy.ones((2, 2)))
    with pytest.raises(TypeError, match="the operands must be arrays of one kind"):
        nf.activation_mul_jvp(torch.ones(2), torch.ones(2), jax.numpy.ones(2), None, "gelu")


def test_a_tangent_brings_a_call_to_its_adapter():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = np.ones(3)
    with pytest.raises(TypeError, match=r"a must be a torch.Tensor as the other operands"):
        nf.activation_mul_jvp(x, x, torch.ones(3), None, "gelu")
