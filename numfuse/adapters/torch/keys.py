"""Strings for what the schema of an operator cannot name: activations and backend objects."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from numfuse.activations import Activation, formulas, get
from numfuse.language.text import digest

#: Activations that are held for the strings that stand for them.
_HELD = 64


class _Activations(dict[str, Any]):
    """Activations by the strings that stand for them in a graph of PyTorch's.

    A compiled graph knows a string for as long as it lives. The object behind it holds its kernels,
    so only the latest `_HELD` are kept as objects; of the others there is a text of some kilobytes,
    from which one is made again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[str, bytes] = {}

    def hold(self, key: str, activation: Any) -> None:
        """Keep an activation; the oldest beyond `_HELD` becomes its text."""
        self[key] = activation
        while len(self) > _HELD:
            try:
                oldest = next(iter(self))
            except (RuntimeError, StopIteration):  # another thread was here
                continue
            gone = self.get(oldest)
            if gone is not None:
                self._texts.setdefault(oldest, pickle.dumps(gone))
            self.pop(oldest, None)

    def __missing__(self, key: str) -> Any:
        made = pickle.loads(self._texts[key])
        self.hold(key, made)
        return made


_ACTIVATIONS = _Activations()
_BACKENDS: dict[str, Any] = {}


# torch.compile runs it, where it cannot follow the hashing of a formula, and keeps the string.
@torch.compiler.assume_constant_result
def key_of(activation: Any) -> str:
    """A string that stands for an activation: equal for equal formulas, in any process."""
    act = get(activation)
    key = act.key
    if key is None:
        key = act.key = f"{act.name} {act.digest}"
    if key not in _ACTIVATIONS:
        _ACTIVATIONS.hold(key, act)
    return key


# torch.compile follows a call only as far as to read this string, not into the making of it.
# (numfuse's own: what a user has defined before this import goes with its definition)
for _own in [x for x in vars(formulas).values() if isinstance(x, Activation)]:
    key_of(_own)


@torch.compiler.assume_constant_result
def formula_key(f: Any) -> str:
    """Return a string that stands for a formula of several variables, as :func:`key_of` does."""
    if isinstance(f, str):
        return f
    key: str | None = f.made.get("key")
    if key is None:
        form = f.several, len(f.parameters), digest(f.graphs)
        key = f.made["key"] = f"{f.name} {form}"
    if key not in _ACTIVATIONS:
        _ACTIVATIONS.hold(key, (f, f.made.get("plain")))
    return key


def formula_of(key: Any) -> Any:
    """Return the formula that a string stands for; a formula as it is."""
    if not isinstance(key, str):
        return key
    f, plain = _ACTIVATIONS[key]
    if plain is not None:  # (a text has the formula without what was made of it)
        f.made["plain"] = plain
    return f


def activation_of(key: str) -> Any:
    """Return the activation that a string stands for."""
    return _ACTIVATIONS[key]


def backend_key(backend: Any) -> str | None:
    """Return a string that stands for a backend in this process; None for the default."""
    if backend is None or isinstance(backend, str):
        return backend
    key = f"{backend.name} at {id(backend)}"
    _BACKENDS[key] = backend
    return key


def backend_of(key: str | None) -> Any:
    """Return the backend that a string stands for: a name, an object, or None."""
    return None if key is None else _BACKENDS.get(key, key)
