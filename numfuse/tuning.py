"""Measuring, for a user's own shapes, what a model of times chooses for all others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from numfuse.backends import Choice, load
from numfuse.devices import to_numpy

__all__ = ["tune"]


def tune(
    function: str | Callable[..., Any], *operands: Any, reorder: bool = False, **options: Any
) -> tuple[Choice, ...]:
    """Time the ways in which a CUDA device can run a call, and keep the fastest on disk.

    The products of a call have a choice of tiles, of copies before them and, with `reorder`, of
    kernels and of parts of the sum. The choices are kept in the cache directory, by device, compute
    capability, version of numfuse, sizes, layouts, alignments, dtype and what is made of the sum.
    They change nothing by themselves: a process in whose environment ``NUMFUSE_TUNED=1`` is looks
    them up when it records a call of these shapes for the first time. A call that comes again is
    what it was.

    Parameters
    ----------
    function : str or callable
        A function of numfuse or its name, or one of your own that calls such functions. It is run
        some dozen times for each product, and must do the same every time: with `out=` the
        operands may not be among the outputs.
    *operands
        Its operands, on a CUDA device.
    reorder : bool
        Also try what adds up a sum over K, or over rows, in another order. Results may then differ
        in the last places from those of a process that is not tuned. Without it no bit changes.
    **options
        Its other arguments.

    Returns
    -------
    tuple of named tuples
        One for each product, the one with the most work first: ``product``, its sizes and dtype;
        ``way``, the fastest one, "" for that of a call that is not tuned; ``before`` and
        ``seconds``, those of the device for the whole call by the untuned way and by the fastest;
        ``tried``, the number of ways that were timed; ``file``, where the choice is kept. It is
        empty where nothing is to choose: elementwise calls, and networks that one kernel runs.

    Raises
    ------
    ValueError
        `function` is no name of numfuse's, or made no call on arrays of a CUDA device. The other
        backends have nothing to tune.
    TypeError
        `function` is no function.
    BackendUnavailable
        The CUDA backend cannot run here.
    OSError
        The choice cannot be written.

    Examples
    --------
    >>> import numfuse as nf
    >>> choices = nf.tune("matmul_bias_activation", a, w, bias, "gelu")  # doctest: +SKIP
    >>> choices[0].before / choices[0].seconds  # doctest: +SKIP
    1.07
    """
    chosen: Any = function
    if isinstance(function, str):
        package = sys.modules["numfuse"]  # (which imports this module)
        if function not in package.__all__:
            raise ValueError(f"function must be a name of numfuse, got {function!r}")
        chosen = getattr(package, function)
    if not callable(chosen):
        raise TypeError(f"function must be callable, or a name, got {type(function).__qualname__}")
    backend: Any = load("cuda")  # the one that has a choice
    found = backend.tune(lambda: chosen(*operands, **options), reorder, to_numpy)
    return tuple(found)
