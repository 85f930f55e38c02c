"""Weights of a network, packed once for many calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.problem.operands import array_of, check_sequence, same_dtype
from numfuse.runtime.dispatch import adapter_for

__all__ = ["Packed", "pack"]

#: Bytes to which a row is padded: as wide as the widest vectors that a processor has.
LINE = 64


class Packed(Sequence[ndarray]):
    """A network's weights, copied; in calls of networks they stand where their sequence does.

    Each is a read-only array. Rows are padded with zeros to whole vectors, so that a processor
    takes them as they are; by `turned` it has the transposes, made when a backward first asks.
    """

    __slots__ = ("_arrays", "_turned")

    def __init__(self, arrays: Sequence[ndarray]) -> None:
        self._arrays = tuple(map(_padded, arrays))
        self._turned: list[ndarray | None] = [None] * len(arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[ndarray]:
        return iter(self._arrays)

    def __getitem__(self, index: Any) -> Any:
        return self._arrays[index]

    def __repr__(self) -> str:
        shapes = " ".join("x".join(map(str, x.shape)) for x in self._arrays)
        return f"<packed weights: {shapes}, {self._arrays[0].dtype}>"

    def __reduce__(self) -> Any:
        return pack, ([np.array(x) for x in self._arrays],)

    def turned(self, layer: int) -> ndarray:
        """Return the transpose of a layer's weights, as they are: padded, contiguous rows."""
        found = self._turned[layer]
        if found is None:
            found = self._turned[layer] = _padded(self._arrays[layer].swapaxes(-2, -1))
        return found


def _padded(x: ndarray) -> ndarray:
    """Return a read-only copy whose rows begin lines and end in zeros."""
    *lead, rows, columns = x.shape
    width = -(-columns * x.itemsize // LINE) * LINE // x.itemsize
    size, more = int(np.prod(lead, dtype=int)) * rows * width, LINE // x.itemsize
    memory = np.zeros(size + more, x.dtype)
    start = -memory.ctypes.data % LINE // x.itemsize
    made = memory[start : start + size].reshape(*lead, rows, width)[..., :columns]
    made[...] = x
    made.flags.writeable = False
    return made


def pack(weights: Sequence[Any]) -> Packed:
    """Pack a network's weights once, for many calls of :func:`mlp` and the like.

    Parameters
    ----------
    weights : sequence of (..., d_i, d_i+1) arrays
        NumPy's, layer by layer, of one dtype.

    Returns
    -------
    Packed
        A sequence of read-only copies. It stands in place of `weights` in :func:`mlp`,
        :func:`mlp_bwd`, :func:`mlp_jvp`, :func:`mlp_double_bwd`, :func:`mlp_jet` and
        :func:`mlp_jet_bwd`, on any backend, with the same results to the last bit. What happens to
        the arrays later does not show in it.

    Raises
    ------
    TypeError
        For anything but a sequence of NumPy arrays of one dtype.
    ValueError
        For shapes that do not follow one another.

    Notes
    -----
    A call on the CPU copies a layer's weights first where their rows are no whole vectors, and a
    backward needs their transposes: as many elements as there are weights, so this is worth its
    while for few rows (64 columns: up to some hundred) and weights that stay.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> packed = nf.pack([np.ones((2, 3)), np.ones((3, 1))])
    >>> nf.mlp(np.ones((1, 2)), packed, None, "relu")
    array([[6.]])
    """
    if type(weights) is Packed:
        return weights
    check_sequence(weights)
    named = {f"weights[{i}]": array_of(w) for i, w in enumerate(weights)}
    for name, w in named.items():
        if adapter_for(w=w) is not None or not isinstance(w, ndarray):
            raise TypeError(f"{name} must be a NumPy array, got {type(w).__name__}")
    same_dtype(named)
    width = None
    for name, w in named.items():
        if w.ndim < 2 or (width is not None and w.shape[-2] != width):
            rows = "K" if width is None else width
            raise ValueError(f"{name} must have shape (..., {rows}, N), got {w.shape}")
        width = w.shape[-1]
    return Packed(list(named.values()))
