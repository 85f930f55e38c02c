"""numfuse: fused matrix products, activations and gates for scientific Python.

The names below are the whole interface; ``help(numfuse.<name>)`` explains each. Importing this
package imports neither a compiler nor a device library: a backend is loaded at its first use.
"""

from typing import TYPE_CHECKING, Any

# `activations` and `backends` share their names with the modules they live in. Importing a module
# sets it as an attribute here, once, so the functions are bound now, after that; the names below
# that live elsewhere are bound when they are first asked for.
from numfuse.activations import Activation, activation, activations
from numfuse.backends import backends, last_call, use_backend
from numfuse.errors import BackendUnavailable, DeviceError, DeviceLost
from numfuse.registry import compose
from numfuse.runtime.interrupts import import_module

if TYPE_CHECKING:
    from numfuse import webgpu
    from numfuse.definitions import epilogue
    from numfuse.devices import synchronize, to_device, to_numpy, warmup
    from numfuse.differentials import (
        activation_mul_double_bwd,
        activation_mul_jvp,
        matmul_bias_activation_double_bwd,
        matmul_bias_activation_jvp,
        matmul_bias_residual_double_bwd,
        matmul_bias_residual_jvp,
    )
    from numfuse.epilogue_jets import matmul_epilogue_jet, matmul_epilogue_jet_bwd
    from numfuse.functional import (
        activation_mul,
        activation_mul_bwd,
        gelu_mul,
        gelu_mul_bwd,
        matmul_bias_activation,
        matmul_bias_activation_bwd,
        matmul_bias_residual,
        matmul_bias_residual_bwd,
        relu_mul,
        relu_mul_bwd,
        sigmoid_mul,
        sigmoid_mul_bwd,
        silu_mul,
        silu_mul_bwd,
    )
    from numfuse.fusion import (
        elementwise,
        elementwise_bwd,
        matmul_epilogue,
        matmul_epilogue_bwd,
        matmul_epilogue_jvp,
    )
    from numfuse.gated import (
        matmul_activation_mul,
        matmul_activation_mul_bwd,
        matmul_activation_mul_double_bwd,
        matmul_activation_mul_jvp,
    )
    from numfuse.jets import matmul_bias_activation_jet, matmul_bias_activation_jet_bwd
    from numfuse.multilayer import mlp, mlp_bwd, mlp_double_bwd, mlp_jvp
    from numfuse.networks import mlp_jet, mlp_jet_bwd
    from numfuse.packs import pack
    from numfuse.tuning import tune

compose()

__version__ = "0.2.0"

__all__ = [
    "Activation",
    "BackendUnavailable",
    "DeviceError",
    "DeviceLost",
    "activation",
    "activation_mul",
    "activation_mul_bwd",
    "activation_mul_double_bwd",
    "activation_mul_jvp",
    "activations",
    "backends",
    "elementwise",
    "elementwise_bwd",
    "epilogue",
    "gelu_mul",
    "gelu_mul_bwd",
    "last_call",
    "matmul_activation_mul",
    "matmul_activation_mul_bwd",
    "matmul_activation_mul_double_bwd",
    "matmul_activation_mul_jvp",
    "matmul_bias_activation",
    "matmul_bias_activation_bwd",
    "matmul_bias_activation_double_bwd",
    "matmul_bias_activation_jet",
    "matmul_bias_activation_jet_bwd",
    "matmul_bias_activation_jvp",
    "matmul_bias_residual",
    "matmul_bias_residual_bwd",
    "matmul_bias_residual_double_bwd",
    "matmul_bias_residual_jvp",
    "matmul_epilogue",
    "matmul_epilogue_bwd",
    "matmul_epilogue_jet",
    "matmul_epilogue_jet_bwd",
    "matmul_epilogue_jvp",
    "mlp",
    "mlp_bwd",
    "mlp_double_bwd",
    "mlp_jet",
    "mlp_jet_bwd",
    "mlp_jvp",
    "pack",
    "relu_mul",
    "relu_mul_bwd",
    "sigmoid_mul",
    "sigmoid_mul_bwd",
    "silu_mul",
    "silu_mul_bwd",
    "synchronize",
    "to_device",
    "to_numpy",
    "tune",
    "use_backend",
    "warmup",
    "webgpu",
]

_DEVICES = ("synchronize", "to_device", "to_numpy", "warmup")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "webgpu":  # a module of public names
        return import_module("numfuse.webgpu")
    home = "numfuse.devices" if name in _DEVICES else "numfuse.functional"
    if name == "epilogue":
        home = "numfuse.definitions"
    elif name.startswith("matmul_epilogue_jet"):
        home = "numfuse.epilogue_jets"
    elif name.startswith(("matmul_epilogue", "elementwise")):
        home = "numfuse.fusion"
    elif name.startswith("matmul_activation_mul"):
        home = "numfuse.gated"
    elif name.endswith(("_jet", "_jet_bwd")):
        home = "numfuse.networks" if name.startswith("mlp") else "numfuse.jets"
    elif name.startswith("mlp"):
        home = "numfuse.multilayer"
    elif name == "pack":
        home = "numfuse.packs"
    elif name == "tune":
        home = "numfuse.tuning"
    elif name.endswith(("_double_bwd", "_jvp")):
        home = "numfuse.differentials"
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next look-up finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
