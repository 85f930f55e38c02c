"""numfuse's functions on Dask arrays: lazy Dask arrays, whose blocks are computed by the same
functions wherever Dask runs them.

A block may be any kind of array that numfuse serves. What follows from the chunks, and how sums
over them are made, is said in docs/distributed.md.

- `operands`: what operands must be, which axes they share; a gate's graph
- `graph`: the graphs of a product and of its gradients
- `epilogues`: those of epilogues and of the gated layer
- `blocks`: the work of one task
"""

from __future__ import annotations

import pickle
import sys
from functools import partial
from typing import Any

import dask
from numpy import ndarray

from numfuse import devices, fusion, gated
from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.adapters.dask import epilogues
from numfuse.adapters.dask.blocks import NONE, Task
from numfuse.adapters.dask.graph import Product
from numfuse.adapters.dask.operands import Gate, base
from numfuse.adapters.signatures import NAMES, PublicFunctions, Signature
from numfuse.backends import Backend, active, load
from numfuse.errors import BackendUnavailable

_FUSED = *fusion.__all__, *gated.__all__
__all__ = [*NAMES, *_FUSED, "activation", "fused", "synchronize", "to_numpy"]


def _task(operation: str, x: dict[str, Any]) -> Task:
    """Return the Task of a call, after the checks that need no operands."""
    if (out := x.get("out")) is not None:
        raise ValueError(
            f"out must be None for Dask arrays, whose results are lazy, got {type(out).__name__}"
        )
    threads = dask.config.get("numfuse.threads", 1)
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(
            f"numfuse.threads in Dask's configuration must be a whole number of threads for a "
            f"task, 1 or more, got {threads!r}"
        )
    act, backend = x["activation"], x["backend"]
    text = NONE if act is get_activation("none") else pickle.dumps(act)
    options = {name: x[name] for name in ("guard", "sum_batch") if name in x}
    # What `use_backend` says is for NumPy blocks: those of a device stay there.
    return Task(operation, text, _backend(backend), threads, implied=backend is None, **options)


def _backend(backend: str | Backend | None) -> str | Backend | None:
    """Return what names the backend in another process: a name where there is one.

    The default is the backend of the `use_backend` around the call that makes the graph, because
    the graph runs outside of it. A backend that this machine lacks may be there on the workers.
    """
    chosen = active() if backend is None else backend
    if chosen is None:
        return None
    name = chosen if isinstance(chosen, str) else getattr(chosen, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"backend must be a name or a backend object, got {type(chosen).__qualname__}"
        )
    try:
        found = load(name)
    except BackendUnavailable:
        return name if isinstance(chosen, str) else chosen
    except ValueError:
        if isinstance(chosen, str):
            raise
        return chosen  # a backend of the user's own
    return name if isinstance(chosen, str) or found is chosen else chosen


class _Dask(PublicFunctions):
    """The public functions as graphs."""

    def call(self, signature: Signature, x: dict[str, Any]) -> Any:
        task = _task(signature.name, x)
        # Cotangents and tangents come behind what they move along with.
        names = sorted(signature.arrays, key=lambda name: base(name) != name)
        operands = {name: x[name] for name in names}
        if signature.kind.startswith("gated"):
            return _gate(signature, Gate(task, operands), x)
        product = Product(task, operands)
        if signature.kind == "forward":
            return product.forward(x.get("return_pre_activation", False))
        if signature.kind == "tangent":
            return signature.result(*product.tangent())
        wanted = [name for name in names if name in x["needs"] and operands[name] is not None]
        if signature.kind == "double_backward":
            found = product.double_backward(wanted)
        else:
            found = product.backward(wanted, x["activation"].is_identity)
        return signature.result(*(found.get(name) for name in signature.needs))


def _gate(signature: Signature, gate: Gate, x: dict[str, Any]) -> Any:
    """Return the results of a gate's function, block by block."""
    if signature.kind == "gated":
        return gate.results()
    needs = x.get("needs", ("out", "out_dot"))
    made = gate.results(**({"needs": needs} if signature.needs else {}))
    found = {name: gate.item(made, i, gate.dtype) for i, name in enumerate(needs)}
    return signature.result(*(found.get(name) for name in signature.needs or needs))


globals().update(_Dask().functions())
globals().update({x: getattr(fusion, x, None) or getattr(gated, x) for x in _FUSED})
fused = partial(epilogues.fused, _task)


def activation(x: Any, activation: Activation) -> Any:
    """Return the values of an activation at a Dask array, block by block."""
    return x.map_blocks(activation, dtype=x.dtype, meta=x._meta)


def to_numpy(x: Any) -> ndarray:
    """The result, computed by the current scheduler."""
    return devices.to_numpy(x.compute())


def synchronize(x: Any) -> None:
    """Wait for the blocks that `persist` has begun to compute; a lazy array has nothing to wait
    for."""
    distributed = sys.modules.get("distributed")
    if distributed is not None and (futures := distributed.futures_of(x)):
        distributed.wait(futures)
