"""WebGPU's own names: adapters, and shaders of your own as a backend.

A WGSL module that keeps the shader contract (`docs/webgpu.md` has the table) takes the place of
numfuse's shaders: ``backend=load_shaders(path)``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numfuse.backends import load

if TYPE_CHECKING:
    from numfuse.backends import Backend

__all__ = ["adapters", "load_shaders", "reference_shaders"]


def adapters() -> list[str]:
    """The adapters that wgpu finds: index, name, kind and interface of each.

    Returns
    -------
    list of str
        A part of a name, or the index, is what `device` takes elsewhere.

    Raises
    ------
    BackendUnavailable
        There is none, or wgpu is not installed.
    """
    found: list[str] = _backend(None).adapters()
    return found


def load_shaders(source_or_path: str | os.PathLike[str], device: str | int | None = None) -> Any:
    """A WGSL module that keeps the shader contract, as a backend.

    Parameters
    ----------
    source_or_path : str or os.PathLike
        A str is the WGSL text itself, a path is a file of it (UTF-8).
    device : str or int, optional
        A part of an adapter's name, or its index; default as for the backend "webgpu".

    Returns
    -------
    backend object
        For ``backend=`` and :class:`numfuse.use_backend`. It computes float32 NumPy arrays with the
        activations none, relu, gelu, silu, sigmoid and tanh. A module may hold any subset of the
        contract's entry points: an operation whose entry points are absent raises ValueError and
        names them. Its ``check()`` runs all that it has beside the reference backend, and returns
        {(output, shape, activation): relative error}.

    Raises
    ------
    ValueError
        The module breaks the contract: it is no WGSL, it has none of the entry points, or one with
        another workgroup size or other bindings. The message names them.
    OSError, UnicodeDecodeError
        The file cannot be read.
    BackendUnavailable
        There is no adapter, or wgpu is not installed.

    Notes
    -----
    Workgroup sizes are read from the text, constants resolved; the rest is the validation of
    pipelines, with the bind group layouts that the contract gives.

    The contract has no place for a saved pre-activation: a backward computes it again, whether or
    not `pre_activation` is given. A derivative that is not finite counts as 0, so guard=False is a
    ValueError, but for none and relu. With a batched `b` and one gradient per member, the module is
    dispatched once per element of the batch; with sum_batch=True or a shared `b`, once.

    Examples
    --------
    >>> import numfuse as nf
    >>> nf.webgpu.load_shaders("fn helper() {}")  # doctest: +SKIP
    Traceback (most recent call last):
    ValueError: shaders: a module must have an entry point of the shader contract ...
    """
    if isinstance(source_or_path, str):
        source, label = source_or_path, "shaders"
    elif isinstance(source_or_path, os.PathLike):
        path = Path(source_or_path)
        source, label = path.read_text(encoding="utf-8"), path.name
    else:
        raise TypeError(
            f"source_or_path must be a str (WGSL text) or a path, "
            f"got {type(source_or_path).__qualname__}"
        )
    return _backend(device).load_shaders(source, label)


def reference_shaders(device: str | int | None = None) -> Any:
    """numfuse's own module for the contract, as a backend: plain and readable, and slow.

    ``use_backend("webgpu", shaders="reference")`` is the same object; ``.source`` is its text, to
    start a module of one's own from.

    Parameters
    ----------
    device : str or int, optional
        As for :func:`load_shaders`.

    Raises
    ------
    BackendUnavailable
        There is no adapter, or wgpu is not installed.
    """
    return _backend(device).reference_shaders()


def _backend(device: str | int | None) -> Any:
    found: Backend = load("webgpu")
    configure: Any = getattr(found, "configure")  # noqa: B009 - only some backends have it
    return configure(device=device)
