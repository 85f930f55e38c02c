"""What all adapters have in common: names, signatures, laziness, one kind of array in a call."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
from conftest import unavailable

import numfuse as nf
from numfuse import epilogue_jets, fusion, gated, jets, multilayer, networks
from numfuse.adapters.surface import NAMES, Functions

DIFFERENTIATING = ("autograd", "torch", "jax")
OWN = sorted(
    {
        name
        for module in (epilogue_jets, fusion, gated, jets, multilayer, networks)
        for name in module.__all__
    }
    & set(nf.__all__)
)


@pytest.mark.parametrize("library", DIFFERENTIATING)
@pytest.mark.parametrize("name", [*NAMES, *OWN])
def test_an_adapter_has_the_public_functions_with_their_signatures(library, name):
    pytest.importorskip(library, reason=f"{library} is not installed")
    own = inspect.signature(getattr(import_module(f"numfuse.adapters.{library}"), name))
    public = inspect.signature(getattr(nf, name))
    assert [(p.name, p.kind) for p in own.parameters.values()] == [
        (p.name, p.kind) for p in public.parameters.values()
    ]
    for mine, theirs in zip(own.parameters.values(), public.parameters.values(), strict=True):
        assert mine.default == theirs.default


ADAPTERS = (*DIFFERENTIATING, "dask", "webgpu")


@pytest.mark.parametrize("library", ADAPTERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_an_adapter_is_pickled_and_tells_its_name_and_its_arguments(library, name):
    package = "wgpu" if library == "webgpu" else library
    pytest.importorskip(package, reason=f"{package} is not installed")
    function = getattr(import_module(f"numfuse.adapters.{library}"), name)
    assert pickle.loads(pickle.dumps(function)).__name__ == name
    assert function.__doc__.startswith(inspect.getdoc(getattr(nf, name)).partition("\n\n")[0])
    assert f"numfuse.{name}" in function.__doc__
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'bais'"):
        function(1, 2, bais=3)


@pytest.mark.parametrize("library", DIFFERENTIATING)
def test_needs_may_be_in_any_order(library):
    pytest.importorskip(library, reason=f"{library} is not installed")
    functions = import_module(f"numfuse.adapters.{library}")
    make = {"torch": "torch.tensor", "jax": "jax.numpy.asarray", "autograd": "numpy.asarray"}
    module, _, maker = make[library].rpartition(".")
    x = getattr(import_module(module), maker)(np.arange(4.0).reshape(2, 2))
    if library == "torch":
        x.requires_grad_()
    found = functions.matmul_bias_activation_bwd(x, x, x, x[0], "tanh", needs=("bias", "a"))
    every = functions.matmul_bias_activation_bwd(x, x, x, x[0], "tanh")
    assert found.d_b is None
    for name in ("d_a", "d_bias"):
        assert (getattr(found, name) == getattr(every, name)).all()
    gate = functions.activation_mul_bwd(x, x, x, "tanh", needs=["b", "a", "b"])
    assert (gate.d_a == functions.activation_mul_bwd(x, x, x, "tanh").d_a).all()


def test_every_operation_has_an_adapters_name():
    operations = {name for name in nf.__all__ if name.startswith("matmul_") or "_mul" in name}
    assert sorted(operations - set(OWN)) == sorted(NAMES)
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


#: {operation: its operands by the names of arrays}, of a product and of a gate.
OPERATIONS = {
    "matmul_bias_activation": "a b bias",
    "matmul_bias_residual": "a b bias residual",
    "matmul_bias_activation_bwd": "grad a b bias",
    "matmul_bias_residual_bwd": "grad a b bias residual",
    "matmul_bias_activation_double_bwd": "a b bias grad a b bias",
    "matmul_bias_residual_double_bwd": "a b bias residual grad a b bias residual",
    "matmul_bias_activation_jvp": "a b bias a b bias",
    "matmul_bias_residual_jvp": "a b bias residual a b bias residual",
    "silu_mul": "a b",
    "silu_mul_bwd": "grad a b",
}


def on_webgpu(x):
    if not nf.backends()["webgpu"]:
        unavailable("webgpu", str(nf.backends()["webgpu"]))
    return nf.to_device(x, "webgpu")


#: What makes an array of another kind, and the module that has the functions for it.
KINDS = {
    "numpy": (lambda x: x, None),
    "webgpu": (on_webgpu, "webgpu"),
    "autograd": (lambda x: x, "autograd"),
    "torch": (lambda x: pytest.importorskip("torch").tensor(x), "torch"),
    "torch with gradients": (
        lambda x: pytest.importorskip("torch").tensor(x, requires_grad=True), "torch",
    ),
    "jax": (lambda x: pytest.importorskip("jax").numpy.asarray(x), "jax"),
    "dask": (lambda x: pytest.importorskip("dask.array").from_array(x, chunks=-1), "dask"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_none_for_an_operand_that_must_be_there_is_one_type_error(kind):
    """Of the public functions and an adapter's own, and at the call: also where arrays are lazy."""
    make, adapter = KINDS[kind]
    if adapter == "autograd":
        pytest.importorskip("autograd", reason="autograd is not installed")
    shapes = {"grad": (2, 2), "a": (2, 2), "b": (2, 2), "bias": (2,), "residual": (2, 2)}
    there = {name: make(np.ones(shape, np.float32)) for name, shape in shapes.items()}
    modules = [nf] if adapter is None else [nf, import_module(f"numfuse.adapters.{adapter}")]
    for operation, names in OPERATIONS.items():
        names = names.split()
        # (cotangents and tangents come first, or last, and may be None)
        places = {name: i for i, name in enumerate(names)}
        if operation.endswith("_jvp"):
            places = {name: i for i, name in reversed(list(enumerate(names)))}
        for name, place in places.items():
            if name == "bias":
                continue
            given = [there[one] for one in names]
            given[place] = None
            for module in modules:
                if not hasattr(module, operation):
                    continue
                with pytest.raises(TypeError) as caught:
                    getattr(module, operation)(*given)
                assert str(caught.value) == f"{name} must be an array, got None", operation
