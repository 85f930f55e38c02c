"""The part of a problem that is the same for each kind with arrays by name."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.problem.shapes import Shape


class ArraysByName:
    """A problem whose arrays are attributes: None where one is not there."""

    __slots__ = ()
    m: int
    n: int
    batch: Shape
    acc_dtype: np.dtype[Any]
    arrays: dict[str, ndarray]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.arrays.get(name)

    @property
    def shape(self) -> Shape:
        """Return the shape over which the formulas run: that of a result, or of a member of it."""
        return (*self.batch, self.m, self.n)

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of all arrays that are written."""
        raise NotImplementedError
