"""numfuse's functions for JAX arrays and tracers on the CPU: jit, grad, jvp, vmap, in any order.

Here are the public functions.

- `primitives`: the operations as JAX primitives, and their rules
- `operations`: what these rules say, without JAX; an operation on NumPy arrays
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

from numfuse.adapters.jax.ffi import describe
from numfuse.adapters.jax.primitives import FUNCTIONS
from numfuse.adapters.signatures import NAMES, of_module

__all__ = [*NAMES, "activation", "describe", "synchronize", "to_numpy"]


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


def _public(name: str) -> Any:
    derived = getattr(FUNCTIONS, name)

    @functools.wraps(derived)
    def serve(*args: Any, **options: Any) -> Any:
        # Outside of transformations, arrays of a GPU are served where they are.
        every = (*args, *options.values())
        if jax.default_backend() != "cpu" and any(map(_on_cuda, every)):
            if not any(isinstance(x, jax.core.Tracer) for x in every):
                return getattr(import_module("numfuse.adapters.cuda"), name)(*args, **options)
        return derived(*args, **options)

    return of_module(serve, __name__)


globals().update({name: _public(name) for name in NAMES})
