"""Kinds of array that are not NumPy's, and who serves them.

The table holds names, not imports: an adapter is imported when an array of its kind arrives, and
never otherwise.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from numpy import ndarray

__all__ = ["ADAPTERS", "PLAIN", "adapter_for", "adapter_of"]

#: {root of the module that defines an array's class: the module that serves it}. An adapter has the
#: public functions under their own names, with the same signatures.
ADAPTERS = {
    "autograd": "numfuse.adapters.autograd",
    "torch": "numfuse.adapters.torch",
    "jax": "numfuse.adapters.jax",
    "jaxlib": "numfuse.adapters.jax",
    "dask": "numfuse.adapters.dask",
    "cupy": "numfuse.adapters.cupy",
    "numba": "numfuse.adapters.numba_cuda",
    "numfuse": "numfuse.adapters.webgpu",
}

#: What needs no adapter: the public functions compare types with these before anything else.
PLAIN = frozenset({ndarray, type(None)})


#: Adapters that have been imported: torch.compile can follow a look-up here, not an import.
_LOADED: dict[str, ModuleType] = {}


def adapter_for(**operands: Any) -> Any:
    """As :func:`adapter_of`, in one step where all are plain."""
    for x in operands.values():
        if type(x) not in PLAIN:
            return adapter_of(**operands)
    return None


def adapter_of(**operands: Any) -> ModuleType | None:
    """The adapter that serves these operands; None where all are NumPy's (or no arrays at all).

    Raises
    ------
    TypeError
        No adapter for an operand's kind is installed, or two kinds meet. A tensor is never turned
        into a NumPy array on the way: that would lose its gradient and move its memory unasked.
    """
    found: dict[str, str] = {}
    for name, x in operands.items():
        module = _adapter_name(type(x))
        if module is not None:
            found.setdefault(module, name)
    if not found:
        return None
    module, name = next(iter(found.items()))
    kind = f"{type(operands[name]).__module__}.{type(operands[name]).__qualname__}"
    if len(found) > 1:
        kinds = ", ".join(
            f"{name} {type(operands[name]).__module__}.{type(operands[name]).__qualname__}"
            for name in found.values()
        )
        raise TypeError(f"the operands must be arrays of one kind, got {kinds}")
    loaded = _LOADED.get(module)
    if loaded is not None:
        return loaded
    try:
        return _LOADED.setdefault(module, import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise TypeError(
            f"{name} must be a NumPy array, got {kind}: this version of numfuse has no {module} to "
            f"serve it; convert it to NumPy yourself if its gradient and device do not matter"
        ) from error


def _adapter_name(kind: type) -> str | None:
    # The bases count: a user's subclass of torch.Tensor is defined in the user's own module.
    for base in kind.__mro__:
        module = ADAPTERS.get(base.__module__.partition(".")[0])
        if module is not None:
            return module
    return None
