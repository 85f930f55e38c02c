"""Kinds of array that are not NumPy's, and who serves them.

The tables hold names, not imports: an adapter is imported when an array of its kind arrives, and
never otherwise. They are filled by `numfuse.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

from numpy import generic, ndarray

#: {root of the module that defines an array's class: the module that serves it}. An adapter has the
#: public functions under their own names, with the same signatures.
ADAPTERS: dict[str, str] = {}
#: How an array of any other library says that it is on a kind of device, and who serves it then: an
#: attribute of its class ("": none), else DLPack with one of its device types; the adapter.
DEVICES: list[tuple[str, tuple[int, ...], str]] = []

#: What needs no adapter: the public functions compare types with these before anything else.
PLAIN = frozenset({ndarray, type(None)})

#: {class: what runs a call on such arrays}, of adapters that repeat calls that they made before: a
#: function of the operation, which has the other way (`other`), and what that is called with.
AGAIN: dict[type, Callable[..., Any]] = {}

#: {class: what returns a network's value where a call of that form came before, or None}.
NETWORKS: dict[type, Callable[..., Any]] = {}

#: Adapters that have been imported: torch.compile can follow a look-up here, not an import.
_LOADED: dict[str, ModuleType] = {}
#: By class, of those that were met: the adapter, None of what needs none.
_SERVED: dict[type, ModuleType | None] = {ndarray: None, type(None): None}


def serve(adapter: ModuleType, kinds: Iterable[type]) -> None:
    """Let an adapter that has been imported serve these classes, without a look-up by name."""
    _LOADED[adapter.__name__] = adapter
    _SERVED.update(dict.fromkeys(kinds, adapter))


def adapter_for(**operands: Any) -> Any:
    """As :func:`adapter_of`, in one step where all are plain, or of classes met before."""
    found = None
    for x in operands.values():
        module = _SERVED.get(type(x), False)
        if module is not found and module is not None:
            if found is not None or module is False:
                return adapter_of(**operands)
            found = module
    return found


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
        kind = type(x)
        module = _KNOWN.get(kind)
        if module is None and kind not in PLAIN:
            module = _adapter_name(kind) or _protocol_name(name, x)
            if _root(kind) in ADAPTERS:
                _KNOWN[kind] = module
        if module is not None:
            found.setdefault(module, name)
    if not found:
        return None
    module, name = next(iter(found.items()))
    if len(found) > 1:
        kinds = ", ".join(f"{name} {_kind(operands[name])}" for name in found.values())
        raise TypeError(f"the operands must be arrays of one kind, got {kinds}")
    loaded = _LOADED.get(module)
    if loaded is not None:
        for x in operands.values():
            if type(x) in _KNOWN:
                _SERVED[type(x)] = loaded
        return loaded
    try:
        return _LOADED.setdefault(module, import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise TypeError(
            f"{name} must be a NumPy array, got {_kind(operands[name])}: this version of numfuse "
            f"has no {module} to serve it; convert it to NumPy yourself if its gradient and device "
            f"do not matter"
        ) from error


#: Of the classes met so far that the libraries themselves define.
_KNOWN: dict[type, str | None] = {}


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _root(kind: type) -> str:
    root, _, rest = kind.__module__.partition(".")
    return ".".join((root, *rest.split(".")[:2])) if root == "numfuse" else root


def _adapter_name(kind: type) -> str | None:
    # The bases count: a user's subclass of torch.Tensor is defined in the user's own module.
    roots = map(_root, kind.__mro__)
    return next((ADAPTERS[root] for root in roots if root in ADAPTERS), None)


def _protocol_name(name: str, x: Any) -> str | None:
    if isinstance(x, (ndarray, generic)):
        return None
    kind = type(x)
    for attribute, _, adapter in DEVICES:
        if attribute and hasattr(kind, attribute):
            return adapter
    if not hasattr(kind, "__dlpack__"):
        return None
    # The protocol has both methods; what has no place of its own is of the host.
    place = x.__dlpack_device__()[0] if hasattr(kind, "__dlpack_device__") else 1
    for _, types, adapter in DEVICES:
        if place in types:
            return adapter
    from numfuse.runtime.dlpack import DEVICES as known

    raise TypeError(
        f"{name} must be in the host's memory or on a CUDA device, got {_kind(x)} on "
        f"{known.get(place, 'an unknown device')} (DLPack's device type {int(place)})"
    )
