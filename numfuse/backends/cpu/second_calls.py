"""Networks' tangents and double backwards on the CPU: their arrays, and the launch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends.cpu.network_calls import NetworkArrays
from numfuse.backends.cpu.second_networks import record

if TYPE_CHECKING:
    from numfuse.backends.cpu.face import CpuBackend
    from numfuse.repeats import Repeat

_Group = Sequence[ndarray | None]


class _Arrays(NetworkArrays):
    """The arrays of a call, with the tangents that there are."""

    kind, members = "second", 2
    record = staticmethod(record)

    def __init__(self, net: Any, x_dot: ndarray | None, weights_dot: _Group, biases_dot: _Group):
        super().__init__(net)
        self.add("x_dot", x_dot)
        for label, group in (("w", weights_dot), ("b", biases_dot)):
            for i, y in enumerate(group):
                self.add(f"{label}_dot{i}", y, True)

    def result(self, name: str) -> ndarray:
        """Enter an array of the results' shape, and return it."""
        found: ndarray = np.empty(self.net.shapes[0], self.net.acc)
        self.add(name, found)
        return found


def tangent(
    backend: CpuBackend, net: Any, x_dot: ndarray | None, weights_dot: _Group, biases_dot: _Group,
    repeat: Repeat | None,
) -> tuple[ndarray, ndarray] | None:  # fmt: skip
    """Return a network's value and its tangent; None where it does not go this way."""
    call = _Arrays(net, x_dot, weights_dot, biases_dot)
    found = call.result("out"), call.result("out_dot")
    return found if call.run(backend, False, found, repeat) else None


def double_backward(
    backend: CpuBackend, net: Any, u: ndarray | None, v: _Group, w: _Group, grad: ndarray,
    needs: Collection[str], repeat: Repeat | None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return d_grad, d_x, and those of weights and biases; None where it does not go this way."""
    call = _Arrays(net, u, v, w)
    call.add("grad", grad)
    call.turned(needs)
    d_grad = call.result("out_dot") if "grad" in needs else call.add("out_dot", None)
    d_x, groups = call.gradients(needs, {})
    results = d_grad, d_x, *groups[0], *groups[1]
    if not call.run(backend, any(name != "grad" for name in needs), results, repeat):
        return None
    named = zip(("weights", "biases"), groups, strict=True)
    return d_grad, d_x, *[tuple(y) if name in needs else None for name, y in named]
