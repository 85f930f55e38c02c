"""Calls that were made before: their dispatches, with other buffers.

What a call dispatches depends on the shapes, strides and offsets of its arrays, never on what is in
them. A call on arrays of the device that looks like an earlier one takes over its pipelines,
uniforms and grids, and only the buffers are its own.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from numpy import ndarray

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.arrays import DeviceArray
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.device.memory import Binding, Buffer

__all__ = ["Program", "key_of"]


class Program:
    """The steps of a call over numbered buffers: the caller's first, then its own.

    Attributes
    ----------
    results : tuple
        The numbers of the buffers of new results.
    call
        What `last_call` tells of it.
    """

    __slots__ = ("_groups", "_sizes", "_steps", "call", "results")

    def __init__(
        self,
        steps: Sequence[tuple[Any, Any, tuple[Any, ...], tuple[int, int, int]]],
        sizes: Sequence[int],
        results: Sequence[int],
        call: Any,
    ) -> None:
        #: (pipeline, uniform, numbers of buffers or other bindings, grid)
        self._steps, self._sizes, self.results, self.call = steps, sizes, results, call
        # Dispatches with the buffers met last: those of a loop are a few sets, by turns.
        self._groups: OrderedDict[tuple[int, ...], tuple[list[Any], list[Any]]] = OrderedDict()

    @classmethod
    def of(
        cls,
        steps: Sequence[Any],
        given: Sequence[DeviceArray],
        results: Sequence[Buffer],
        call: Any,
    ) -> Program | None:
        """Return the program of recorded steps; None where a buffer is not bound as a whole."""
        numbers: dict[int, int] = {}
        for x in given:
            numbers.setdefault(id(x.buffer), len(numbers))
        first = len(numbers)
        sizes: list[int] = []
        made = []

        def number(buffer: Buffer) -> int:
            found = numbers.get(id(buffer))
            if found is None:
                found = numbers[id(buffer)] = first + len(sizes)
                sizes.append(buffer.size)
            return found

        for pipeline, uniform, bindings, grid in steps:
            parts: list[Any] = []
            for b in bindings:
                if not isinstance(b, Binding):
                    parts.append(b)
                elif b.offset or b.size != b.buffer.size:
                    return None
                else:
                    parts.append(number(b.buffer))
            made.append((pipeline, uniform, tuple(parts), grid))
        return cls(made, sizes, [number(buffer) for buffer in results], call)

    def run(self, device: Device, given: Sequence[DeviceArray]) -> list[Buffer]:
        """Do it again with these arrays; return the caller's buffers and the call's own."""
        # Loops, and no comprehensions, which are calls of Python's.
        own: dict[int, Buffer] = {}
        for x in given:
            own[id(x.buffer)] = x.buffer
        buffers = list(own.values())
        for size in self._sizes:
            buffers.append(device.buffer(size))
        key: tuple[int, ...] = ()
        for buffer in buffers:
            key += (id(buffer.handle),)
        known = self._groups.get(key)
        if known is None:
            known = self._bound(device, buffers, key)
        device.submit(known[0])
        return buffers

    def _bound(
        self, device: Device, buffers: Sequence[Buffer], key: tuple[int, ...]
    ) -> tuple[list[Any], list[Any]]:
        """Return the dispatches with these buffers, and what has to live as long as they."""
        whole = [Binding(buffer, 0, buffer.size) for buffer in buffers]
        dispatches = []
        for pipeline, uniform, parts, grid in self._steps:
            bindings = [whole[b] if isinstance(b, int) else b for b in parts]
            dispatches.append((pipeline, device.group(pipeline.layout, uniform, bindings), grid))
        # As long as the handles are held, their identities are theirs.
        known = self._groups[key] = dispatches, [buffer.handle for buffer in buffers]
        if len(self._groups) > tiling.KEPT_SETS:
            with contextlib.suppress(KeyError):  # another thread was here
                self._groups.popitem(last=False)
        return known


#: The arrays of every kind of problem, in one order.
_FIELDS = {
    "forward": ("a", "b", "bias", "residual", "out", "pre"),
    "backward": ("grad", "a", "b", "bias", "pre", "d_a", "d_b", "d_bias", "d_residual"),
    "gated": ("a", "b", "out"),
    "gated_backward": ("grad", "a", "b", "d_a", "d_b"),
    "double_backward": (
        "u", "v", "w", "z", "grad", "a", "b", "bias", "pre", "d_grad", "d_a", "d_b", "d_bias",
        "d_residual",
    ),
    "tangent": ("a", "b", "bias", "residual", "u", "v", "w", "z", "out", "out_dot"),
    "gated_double_backward": ("u", "v", "grad", "a", "b", "d_grad", "d_a", "d_b"),
    "gated_tangent": ("a", "b", "u", "v", "out", "out_dot"),
}  # fmt: skip


def key_of(kind: str, p: Any, given: Sequence[DeviceArray], outs: int) -> Any:
    """Return a key of all that the dispatches of a call depend on.

    `given` are the caller's arrays, of which the last `outs` are outputs.
    """
    act = p.activation
    parts: list[Any] = [
        kind,
        p.dtype,
        act.name,
        act.curve.serial,
        getattr(p, "guard", None),
        outs,
    ]
    for name in _FIELDS[kind]:
        ghost: ndarray | None = getattr(p, name)
        # (of its own dtype: a saved pre-activation may have the accumulator's)
        parts.append(None if ghost is None else (ghost.shape, ghost.strides, ghost.dtype))
    order: dict[int, int] = {}
    for x in given:
        # which arrays share a buffer, and where each begins in it
        parts.append((order.setdefault(id(x.buffer), len(order)), x.offset))
    return tuple(parts)
