"""numfuse's functions for JAX arrays and tracers on the CPU: jit, grad, jvp, vmap, in any order.

Here are the public functions.

- `primitives`: the operations as JAX primitives, and their rules
- `operations`: what these rules say, without JAX; an operation on NumPy arrays
- `epilogue_rules`, `epilogues`: likewise for epilogues and the gated layer
- `jets`: jets of layers and networks
- `formulas`: formulas over JAX's arrays
- `calls`: how JAX runs a call
- `ffi`: operations as custom calls of XLA, recorded when they are lowered
- `stream`: the same on CUDA
- `table`: what a call's key leads to
- `frame`, `launches`: the machine code that answers such a call
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import jax
import numpy as np
from numpy import ndarray

from numfuse import epilogue_jets, fusion, gated, multilayer, networks
from numfuse import jets as layers
from numfuse.adapters.jax.epilogue_rules import fused as _fused
from numfuse.adapters.jax.ffi import describe
from numfuse.adapters.jax.jets import layer as epilogue_jet
from numfuse.adapters.jax.jets import layer as jet
from numfuse.adapters.jax.jets import network
from numfuse.adapters.jax.primitives import FUNCTIONS
from numfuse.adapters.signatures import NAMES, of_module

_HOMES = fusion, gated, layers, epilogue_jets, networks, multilayer
_FUSED = {name: getattr(home, name) for home in _HOMES for name in home.__all__}
#: Keywords of theirs that are constants on the host.
_CONSTANTS: dict[str, tuple[str, ...]] = dict.fromkeys(layers.__all__, ("weights",))
_CONSTANTS |= dict.fromkeys(epilogue_jets.__all__, ("weights",))
_CONSTANTS |= dict.fromkeys(networks.__all__, ("directions", "second"))
__all__ = [
    *NAMES,
    *_FUSED,
    "activation",
    "describe",
    "epilogue_jet",
    "fused",
    "jet",
    "network",
    "synchronize",
    "to_numpy",
]


def to_numpy(x: Any) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    return np.asarray(x)


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`."""
    x.block_until_ready()


activation = FUNCTIONS.activation


def _on_cuda(x: Any) -> bool:
    return (
        isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)
        and any(device.platform in ("gpu", "cuda") for device in x.devices())
    )


def _where(name: str, derived: Any) -> Any:
    """Return the function that serves arrays of a GPU where they are, outside transformations."""

    @functools.wraps(derived)
    def serve(*args: Any, **options: Any) -> Any:
        if jax.default_backend() != "cpu":
            every = jax.tree.leaves((args, options))
            if any(map(_on_cuda, every)) and not any(isinstance(x, jax.core.Tracer) for x in every):
                return getattr(import_module("numfuse.adapters.cuda"), name)(*args, **options)
        return derived(*args, **options)

    return of_module(serve, __name__)


def _over_arrays(function: Any) -> Any:
    """Return a public function that takes NumPy's arrays as JAX's."""
    constants = _CONSTANTS.get(function.__name__, ())

    @functools.wraps(function)
    def serve(*args: Any, **options: Any) -> Any:
        known = {name: options.pop(name) for name in constants if name in options}
        args, options = jax.tree.map(
            lambda x: jax.numpy.asarray(x) if isinstance(x, ndarray) else x, (args, options)
        )
        return function(*args, **options, **known)

    return of_module(serve, __name__)


fused = _where("fused", _fused)
globals().update({name: _where(name, getattr(FUNCTIONS, name)) for name in NAMES})
globals().update({name: _over_arrays(function) for name, function in _FUSED.items()})
