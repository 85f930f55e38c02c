"""Views of arrays that live on a device.

What numfuse checks of an operand (shapes, strides, overlaps, broadcasts) it checks of a NumPy
array, and of an array of a device by its *ghost*: a NumPy array of the same shape and strides that
is never read or written. Views of the ghost are views of the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy import ndarray
from numpy.lib.stride_tricks import as_strided


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a name; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def address(x: ndarray) -> int:
    """Return where the first element of `x` lies."""
    found: int = x.__array_interface__["data"][0]
    return found


def bounds(at: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one past the last; strides in bytes."""
    low = high = at
    for length, stride in zip(shape, strides, strict=True):
        if length == 0:
            return at, at
        reach = (length - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low, high + itemsize


class GhostViews:
    """The attributes and views that an array of a device has from its `ghost`."""

    __slots__ = ()
    __array_ufunc__ = None  # no arithmetic: NumPy would take it for an object

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    #: Its text is the device's name.
    device: Any
    #: In bytes, as NumPy's.
    strides: tuple[int, ...]

    @property
    def ghost(self) -> ndarray:
        """The NumPy array that has its shape and strides."""
        raise NotImplementedError

    def _view(self, x: ndarray) -> Self:
        """An array over the same memory, with this view of the ghost."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return self.ghost.ndim

    @property
    def size(self) -> int:
        return self.ghost.size

    @property
    def nbytes(self) -> int:
        return self.ghost.nbytes

    @property
    def T(self) -> Self:
        return self._view(self.ghost.T)

    def transpose(self, *axes: Any) -> Self:
        """The axes in another order."""
        return self._view(self.ghost.transpose(*axes))

    def swapaxes(self, first: int, second: int) -> Self:
        """Two axes in each other's place."""
        return self._view(self.ghost.swapaxes(first, second))

    def __getitem__(self, index: Any) -> Self:
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if not (part is None or part is Ellipsis or isinstance(part, (slice, int, np.integer))):
                raise TypeError(
                    f"an index must be of integers, slices, None and ..., got {part!r}: "
                    f"an array of a device has only the views that move no data"
                )
        if not any(part is Ellipsis for part in parts):
            parts = (*parts, Ellipsis)  # a 0-d view, never a scalar
        return self._view(self.ghost[parts])

    def reshape(self, *shape: Any) -> Self:
        """Return the same elements in another shape, if that takes no copy.

        Raises
        ------
        ValueError
            The shapes do not fit, or a copy would be needed.
        """
        wanted = shape[0] if len(shape) == 1 else shape
        # What NumPy would copy is not there: the strides are found on an array of one byte an item.
        size = self.dtype.itemsize
        steps = tuple(s // size for s in self.strides)
        low, high = bounds(0, self.shape, steps, 1)
        like = ndarray(self.shape, np.uint8, np.empty(high - low, np.uint8), -low, steps)
        made = like.reshape(wanted)
        if not np.may_share_memory(made, like) and made.size:
            raise ValueError(
                f"an array of shape {self.shape} with strides {self.strides} cannot be reshaped "
                f"without a copy, to {wanted}"
            )
        return self._view(as_strided(self.ghost, made.shape, [s * size for s in made.strides]))

    def __array__(self, *_: Any, **__: Any) -> ndarray:
        raise TypeError(
            f"an array on {self.device} is not moved to NumPy unless asked: use numfuse.to_numpy(x)"
        )

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={str(self.device)!r})"

    def __len__(self) -> int:
        return len(self.ghost)
