"""Moving arrays where they are asked to be, waiting for them, and compiling ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.backends import Backend, resolve
from numfuse.problem.operands import accumulator, as_plain
from numfuse.runtime.dispatch import adapter_of

__all__ = ["synchronize", "to_device", "to_numpy", "warmup"]

# Every activation is a compilation of its own, so a warm-up of all of them is asked for by name.
_COMMON_ACTIVATIONS = ("none", "relu", "gelu", "silu", "sigmoid", "tanh")
_COMMON_DTYPES = (np.float32, np.float64)


def warmup(
    activations: Iterable[str | Activation] | None = None,
    dtypes: Iterable[Any] | None = None,
    backend: str | Backend | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Compile now what the first calls would compile, and leave it in the disk cache.

    Parameters
    ----------
    activations : iterable of str or Activation, optional
        Default: none, relu, gelu, silu, sigmoid and tanh.
    dtypes : iterable of dtype, optional
        Anything :class:`numpy.dtype` accepts. Default: float32 and float64.
    backend : str or backend object, optional
        Default: as for a call.
    progress : callable, optional
        Called with one line of text per piece of work.

    Raises
    ------
    ValueError
        An unknown activation or backend.
    TypeError
        A dtype that is not supported, or a single str where an iterable is meant.
    BackendUnavailable
        The backend cannot run here.

    Examples
    --------
    >>> import numfuse as nf
    >>> nf.warmup(["gelu"], ["float32"], backend="reference")
    """
    for name, given in (("activations", activations), ("dtypes", dtypes)):
        if isinstance(given, str):
            raise TypeError(f"{name} must be an iterable, such as [{given!r}], got {given!r}")
    chosen = resolve(backend)
    acts = [
        get_activation(a) for a in (_COMMON_ACTIVATIONS if activations is None else activations)
    ]
    types = [np.dtype(d) for d in (_COMMON_DTYPES if dtypes is None else dtypes)]
    for dtype in types:
        accumulator("dtypes", dtype)
    chosen.warmup(acts, types, progress)


def to_device(x: Any, backend: str | Backend) -> Any:
    """A NumPy array as an array of the backend, which stays on its device from call to call.

    Parameters
    ----------
    x : numpy.ndarray
    backend : str or backend object
        For "cpu" and "reference" that is `x` itself.

    Raises
    ------
    BackendUnavailable
        The backend cannot run here.
    """
    move = getattr(resolve(backend), "to_device", None)
    if move is None:
        return to_numpy(x)
    if not isinstance(x, ndarray):
        raise TypeError(f"x must be a NumPy array, got {type(x).__qualname__}")
    return move(as_plain("x", x))


def to_numpy(x: Any) -> ndarray:
    """Any array that numfuse serves as a NumPy array; a NumPy array is returned as it is.

    Raises
    ------
    TypeError
        Not an array, or of a kind without an adapter.
    """
    if isinstance(x, ndarray):
        return x
    adapter = adapter_of(x=x)
    if adapter is None:
        raise TypeError(f"x must be an array, got {type(x).__qualname__}; use numpy.asarray(x)")
    converted: ndarray = adapter.to_numpy(x)
    return converted


def synchronize(x: Any = None) -> None:
    """Wait until the work on an array's device is done; NumPy arrays are always ready.

    Parameters
    ----------
    x : array, optional
        None: there is nothing to wait for but the arrays at hand.

    Raises
    ------
    TypeError
        Not an array, or of a kind without an adapter.
    """
    if x is None or isinstance(x, ndarray):
        return
    adapter = adapter_of(x=x)
    if adapter is None:
        raise TypeError(f"x must be an array, got {type(x).__qualname__}")
    adapter.synchronize(x)
