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
import jax.numpy as jnp
import numpy as np
from numpy import ndarray

from numfuse.adapters.jax.ffi import describe
from numfuse.adapters.jax.primitives import call, through
from numfuse.adapters.primitives import PRIMITIVES, How
from numfuse.adapters.signatures import of_module
from numfuse.adapters.surface import NAMES, Functions

__all__ = [*NAMES, "activation", "describe", "synchronize", "to_numpy"]


def to_numpy(x: Any) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    return np.asarray(x)


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`."""
    x.block_until_ready()


# --- the public functions -----------------------------------------------------------------------
class _Jax(Functions):
    """The public functions over JAX's primitives."""

    what = "JAX, the arrays of which are never written to"
    arrays = jnp

    def primitive(self, name: str, how: How, *operands: Any, pre: Any = None) -> Any:
        if pre is not None:
            return self.composite(name, how, *operands, pre=pre, guard=how.guard)
        primitive = PRIMITIVES[name]
        if primitive.names is not None and not how.needs:
            return ()
        found = call(name, how, primitive.linear_last(operands))
        if primitive.names is None:
            return found[0]
        return tuple(x for x in found if x is not None)

    def moves(self, x: Any) -> bool:
        """Whether a derivative may go through an array: through any that is traced."""
        return isinstance(x, jax.core.Tracer)


FUNCTIONS = _Jax()
activation = FUNCTIONS.activation


# --- what is differentiated through its pieces --------------------------------------------------
for _name in ("product_tangent", "product_double", "gate_tangent", "gate_double"):
    through(_name, FUNCTIONS.composite)


# --- where they are served ----------------------------------------------------------------------


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
