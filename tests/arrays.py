"""Operands for the tests: random values in every layout, and outputs with fences around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy import ndarray

LAYOUTS = ("c", "transposed", "sliced", "inner_sliced", "reversed", "offset", "zero_stride")
#: NumPy 2.0 gives and takes the capsules of before DLPack 1, and has no `from_dlpack(device=)`.
NUMPY_KNOWS_DLPACK_1 = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
FENCE = 37  # elements on either side; odd, so that a fenced output is on no vector boundary


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, scale=1.0) -> ndarray:
    return np.asarray(scale * rng.standard_normal(shape)).astype(dtype)


def in_layout(x: ndarray, layout: str) -> ndarray:
    """A read-only view with the values of `x` (for zero_stride: of its first row or element)."""
    if layout == "zero_stride":
        x = np.broadcast_to(x[..., :1, :] if x.ndim > 1 else x[:1], x.shape)
    elif layout == "transposed":
        x = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) if x.ndim > 1 else x.copy()
    elif layout in ("sliced", "inner_sliced", "offset"):
        around = [slice(None)] * x.ndim
        lengths = list(x.shape)
        axis = -2 if layout == "sliced" and x.ndim > 1 else -1
        step = 1 if layout == "offset" else 3
        lengths[axis] = step * lengths[axis] + 5
        around[axis] = slice(2, 2 + step * x.shape[axis], step)
        base = np.full(lengths, np.nan, x.dtype)
        base[tuple(around)] = x
        x = base[tuple(around)]
    elif layout == "reversed":
        flip = (slice(None, None, -1),) * min(2, x.ndim)
        x = x[(..., *flip)].copy()[(..., *flip)]
    else:
        x = np.ascontiguousarray(x)
    x = x.view()
    x.flags.writeable = False
    return x


class Fenced:
    """An output of a given shape inside a larger array, all of it NaN at first."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, strided: bool = False) -> None:
        inner = (*shape[:-1], shape[-1] + 3) if strided and shape else shape
        size = int(np.prod(inner))
        self.base = np.full(size + 2 * FENCE, np.nan, dtype)
        block = self.base[FENCE : FENCE + size].reshape(inner)
        self.array = block[..., : shape[-1]] if strided and shape else block

    def assert_untouched(self) -> None:
        """All is still NaN but the output itself."""
        rest = self.base.copy()
        shape, strides = self.array.shape, self.array.strides
        offset = self.array.__array_interface__["data"][0] - address(self.base)
        np.ndarray(shape, rest.dtype, rest, offset, strides)[...] = np.nan
        assert np.isnan(rest).all(), "a store went past the output"


def address(x: ndarray) -> int:
    return x.__array_interface__["data"][0]


@contextmanager
def unwritten(*arrays: ndarray | None) -> Iterator[None]:
    """The bytes of these arrays are the same afterwards."""
    before = [None if x is None else np.ascontiguousarray(x).tobytes() for x in arrays]
    yield
    after = [None if x is None else np.ascontiguousarray(x).tobytes() for x in arrays]
    assert before == after, "an input was written"


def bits(x: ndarray) -> ndarray:
    """For comparisons of every bit: -0 is not 0, and a NaN is itself."""
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.itemsize}") if x.ndim else x.reshape(1).view(f"u{x.itemsize}")
