"""Marks: keys of all that a call of a network depends on but its arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from numfuse.activations import Activation, table


def function(f: Any) -> tuple[str, int] | None:
    """Return what stands for an activation in a mark; None: nothing does."""
    if type(f) is str:
        f = table.TABLE.get(f)
    return (f.name, f.serial) if isinstance(f, Activation) else None


def content(x: Any) -> Any:
    """Return what stands for a constant in a mark; None: nothing does."""
    if x is None:
        return "none"
    if not isinstance(x, (np.ndarray, list, tuple)):
        return None
    x = np.asarray(x)
    return (x.shape, x.dtype, x.tobytes()) if x.dtype.kind in "fiub" else None


def several(activation: Any) -> Any:
    """Return the activations of hidden layers as a sequence, where one may stand for all."""
    return (activation,) if isinstance(activation, (str, Activation)) else activation


def mark(kind: str, weights: Any, biases: Any, how: Any, form: Any, *rest: Any) -> Any:
    """Return all that a call depends on but its arrays; None where not all of it can be told.

    `how` is (activation, final activation, guard, backend), `form` the constants that are arrays.
    """
    activation, final, guard, _ = how
    every = several(activation)
    if type(every) not in (tuple, list) or type(biases) not in (tuple, list, type(None)):
        return None
    parts = [*map(function, (*every, final)), *map(content, form)]
    if None in parts:
        return None
    single = every is not activation
    lengths = len(weights), -1 if biases is None else len(biases), len(every)
    return kind, single, lengths, bool(guard), *parts, *rest
