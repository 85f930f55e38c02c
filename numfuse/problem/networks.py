"""Hop 2 of networks that run whole: a perceptron's jet, or its gradients, as one problem.

A backend takes it where it has a kernel for all layers (`plan.networks` of CUDA, `lower.networks`
of WebGPU); elsewhere, and for all other networks, the layers are problems of their own
(:mod:`numfuse.problem.jets`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation


@dataclass(slots=True, eq=False, repr=False)
class NetworkProblem:
    """Arrays by name: points (x), weights_0 and so on, biases_0, the results or their cotangents.

    A backward's `flat` has the gradients of weights and biases: on CUDA see
    `numfuse.backends.cuda.plan.network_sizes.Sizes`, on WebGPU
    `numfuse.backends.webgpu.lower.networks`, which has those by x too (d_points), and may have
    d_weights_0 and so on as arrays of their own.
    """

    #: Of each layer.
    activations: tuple[Activation, ...]
    widths: tuple[int, ...]
    count: int
    dtype: np.dtype[Any]
    #: (D, d_0), and (S, D) or None for the identity.
    units: ndarray
    weights: ndarray | None
    #: Which weights are there, one byte each.
    pattern: bytes
    seconds: int
    guard: bool
    backward: bool
    #: Whether a forward keeps the sums of hidden layers but the first; whether a backward has them:
    #: (layers, points, members, columns of a tile).
    keeps: bool
    saved: bool
    arrays: Mapping[str, ndarray]
    result: tuple[ndarray, ...]

    def __getattr__(self, name: str) -> ndarray | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.arrays.get(name)

    @property
    def activation(self) -> Activation:
        """Return the first layer's activation."""
        return self.activations[0]

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of the arrays that are written."""
        if self.backward:
            return tuple(x for x in self.arrays if x == "flat" or x.startswith("d_"))
        return tuple(x for x in ("u", "u_dot", "u_ddot", "kept") if x in self.arrays)

    @property
    def directions(self) -> int:
        """Return the number of directions."""
        return len(self.units)
