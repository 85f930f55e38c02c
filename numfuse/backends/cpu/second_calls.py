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

_Group = Sequence[ndarray | None]


class _Arrays(NetworkArrays):
    """The arrays of a call, with the tangents that there are."""

    kind, members = "second", 2
    record = staticmethod(record)

    def __init__(self, net: Any, x_dot: ndarray | None, weights_dot: _Group, biases_dot: _Group):
        super().__init__(net)
        self.add("x_dot", x_dot)
        for i, (w, bias) in enumerate(zip(weights_dot, biases_dot, strict=True)):
            self.add(f"w_dot{i}", w, True)
            self.add(f"b_dot{i}", bias, True)


def _result(call: _Arrays, name: str) -> ndarray:
    """Enter an array of the results' shape, and return it."""
    found: ndarray = np.empty(call.net.shapes[0], call.net.acc)
    call.add(name, found)
    return found


def tangent(
    backend: CpuBackend, net: Any, x_dot: ndarray | None, weights_dot: _Group, biases_dot: _Group
) -> tuple[ndarray, ndarray] | None:
    """Return a network's value and its tangent; None where it does not go this way."""
    call = _Arrays(net, x_dot, weights_dot, biases_dot)
    found = _result(call, "out"), _result(call, "out_dot")
    return found if call.run(backend, False) else None


def double_backward(
    backend: CpuBackend, net: Any, u: ndarray | None, v: _Group, w: _Group, grad: ndarray,
    needs: Collection[str],
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return d_grad, d_x, and of each layer d_w and d_bias; None where it does not go this way."""
    call, d_grad = _Arrays(net, u, v, w), None
    backward = any(name != "grad" for name in needs)
    if backward:
        call.add("grad", grad)
    if "grad" in needs:
        d_grad = _result(call, "out_dot")
    d_x, pair = call.gradients(needs, {})
    if not call.run(backend, backward):
        return None
    groups = zip(("weights", "biases"), map(tuple, pair), strict=True)
    return d_grad, d_x, *[y if name in needs else None for name, y in groups]
