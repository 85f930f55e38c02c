"""The arrays of a network's launch: their addresses, strides, and steps from network to network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numfuse.backends.cuda.kernels import joins
from numfuse.backends.cuda.kernels.network_layers import MOST_LAYERS, Layer, Layers, Rows, Steps
from numfuse.backends.cuda.plan.product import Operand, Slot

if TYPE_CHECKING:
    from numfuse.backends.cuda.plan.lower import Bind
    from numfuse.backends.cuda.plan.program import Recorder, View


class Slots:
    """The buffers of a launch's arguments, by the names of their slots."""

    def __init__(self, bind: Bind) -> None:
        self.at: dict[str, tuple[int, int]] = {}
        self.bind = bind

    def view(self, name: str) -> View:
        """Return an array that is there."""
        found = self.bind(name)
        assert found is not None
        return found

    def slot(self, name: str, x: View) -> Slot:
        """Return the argument that is the address of an array."""
        self.at[name] = x.at()
        return Slot(name)

    def rows(self, name: str) -> Rows:
        """Return an array of rows as a record: of zeros where it is not there."""
        x = self.bind(name)
        return Rows(0, 0, 0) if x is None else Rows(self.slot(name, x), *x.strides[-2:])

    def step(self, name: str, axes: int = 2) -> int:
        """Return how far an array is from the next network's: 0 where that is the same."""
        x = self.bind(name)
        return x.strides[0] if x is not None and len(x.shape) > axes else 0

    def steps(self, out: str) -> Steps:
        """Return how far the arrays of a network are from those of the next."""
        layers = range(MOST_LAYERS)
        ends = [self.step(name) for name in ("points", out, "d_points", "points_dot")]
        weights = [self.step(f"weights_{i}") for i in layers]
        return Steps(*ends, *weights, *[self.step(f"biases_{i}") for i in layers])

    def layers(self, count: int) -> tuple[Layers, tuple[bool, ...]]:
        """Return the weights and biases, and which weights have their columns in memory."""
        found, turned = [], []
        for i in range(MOST_LAYERS):
            if i >= count:
                found.append(Layer(0, 0, 0, 0, 0))
                continue
            w, bias = self.view(f"weights_{i}"), self.bind(f"biases_{i}")
            place: Any = 0
            step = 0
            if bias is not None:
                place, step = self.slot(f"biases_{i}", bias), bias.strides[-1]
            row, column = w.strides[-2:]
            found.append(Layer(self.slot(f"weights_{i}", w), row, column, place, step))
            turned.append(abs(row) < abs(column))
        return Layers(*found), tuple(turned)


def join_planes(rec: Recorder, planes: View, flat: View) -> None:
    """Record the sums of planes of each network, in their order, to the flat result.

    They begin while the launch before them ends, where a device can do that.
    """
    networks, count, length = planes.shape
    info, step = rec.device.info, flat.shape[-1]
    out, lengths = Operand(flat.dtype, (step, step, 1), flat.itemsize), (networks, count, 1, length)
    how = info, planes.dtype, Slot("planes"), out, lengths, Slot("work"), info.capability >= (9, 0)
    made, staged = joins.joins(*how)
    rec.launches(made, {"planes": planes.at(), "out": flat.at()}, staged)
