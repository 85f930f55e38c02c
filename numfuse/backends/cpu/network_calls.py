"""Networks' calls on the CPU: their arrays as a program takes them, and the launch.

Points of one network are rows, whatever axes they have. A batch of networks has one axis; what all
networks share has none, and what only some share is copied for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.kernels import library
from numfuse.backends.cpu.launch import threads
from numfuse.backends.cpu.launch.sequence import Program, formulas_of
from numfuse.backends.cpu.networks import SEVERAL, Form, Layout, form_of, record
from numfuse.kept import Kept, KeptStacks
from numfuse.problem.operands import format_of
from numfuse.problem.shapes import sum_to

if TYPE_CHECKING:
    from numfuse.backends.cpu.face import CpuBackend
    from numfuse.repeats import Repeat

_RESULTS = "value", *SEVERAL
#: Bytes of the stacks of all blocks, at the most, that are kept.
KEPT_BYTES = 64 << 20
#: Arrays of a call before its operands.
CONSTANTS = 2


class NetworkArrays:
    """The arrays of a call, as rows and as one batch of networks."""

    #: What tells the programs of `record` from others, and how many members a point has at least.
    kind, members = "network", 0
    record: Callable[[Form, Sequence[str], int], Program | None] = staticmethod(record)

    def __init__(self, net: Any) -> None:
        self.net, self.batch = net, net.batches[-1]
        own = [y for w, bias, _ in net.layers for y in (w, bias) if y is not None and y.ndim > 2]
        #: Whether there is one network, whose points may have any axes.
        self.alone = all(prod(y.shape[:-2]) == 1 for y in own)
        self.networks = 1 if self.alone else prod(self.batch)
        #: In the order of a call's operands and results, behind two constants.
        self.arrays: dict[str, ndarray | None] = {"units": net.units, "table": net.weights}
        if not net.directions:
            self.arrays = {"units": None, "table": None}
        #: The gradients that are summed to their operands' shapes.
        self.later: dict[str, tuple[ndarray, ndarray]] = {}
        self.add("x", net.x)
        for i, (w, _, _) in enumerate(net.layers):
            self.add(f"w{i}", w, True)
        for i, (_, bias, _) in enumerate(net.layers):
            self.add(f"b{i}", bias, True)

    def rows(self, x: ndarray, members: bool, own: bool) -> ndarray:
        """Return an array as (rows, columns), or so for each network; behind an axis of members."""
        if x.ndim <= 2 + members:
            return x if x.ndim > 1 else x[None]
        first = x.shape[:members]
        *lead, m, n = x.shape[members:]
        if self.alone and not own:
            return x.reshape(*first, prod(lead) * m, n)
        if prod(lead) == 1:
            return x.reshape(*first, m, n)
        if prod(lead) != self.networks:
            x = np.broadcast_to(x, (*first, *self.batch, m, n))
        return x.reshape(*first, self.networks, m, n)

    def add(self, name: str, x: ndarray | None, own: bool = False) -> ndarray | None:
        """Enter an array; `own` is of a network, others have its points."""
        if x is not None:
            x = self.rows(x, name in SEVERAL, own)
        self.arrays[name] = x
        return x

    def gradient(
        self, name: str, x: ndarray, own: bool = False, target: ndarray | None = None
    ) -> ndarray:
        """Enter the gradient of an operand, and return it: the `target` where it can be that."""
        found = target
        if found is None or found.dtype != self.net.acc or not _plain(found):
            found = np.empty(x.shape, self.net.acc)
        count = 1 if x.ndim < 3 else prod(x.shape[:-2])
        if self.alone or count == self.networks or (own and count == 1):
            self.arrays[name] = self.rows(found, False, own)
        else:
            every = np.empty((*self.batch, *x.shape[-2:]), self.net.acc)
            self.later[name] = found, every
            self.add(name, every, own)
        return found

    def turned(self, needs: Collection[str]) -> None:
        """Enter the transposes of weights that are packed."""
        if self.net.packed is not None:
            for i in range(len(self.net.layers)):
                self.arrays[f"t{i}"] = self.net.packed.turned(i) if i or "x" in needs else None

    def gradients(
        self, needs: Collection[str], targets: Mapping[str, ndarray]
    ) -> tuple[ndarray | None, list[list[ndarray | None]]]:
        """Enter the gradients that are needed; return d_x, then those of weights and of biases.

        They are in `targets` where these can be written to.
        """
        d_x = None
        if "x" in needs:
            d_x = self.gradient("d_x", self.net.x, False, targets.get("d_x"))
        self.arrays.setdefault("d_x", None)
        groups: list[list[ndarray | None]] = [[], []]
        for place, (name, label) in enumerate((("weights", "w"), ("biases", "b"))):
            for i, layer in enumerate(self.net.layers):
                x, key, made = layer[place], f"d_{label}{i}", None
                if name in needs and x is not None:
                    made = self.gradient(key, x, True, targets.get(f"d_{name}[{i}]"))
                self.arrays.setdefault(key, None)
                groups[place].append(made)
        return d_x, groups

    def run(
        self,
        backend: CpuBackend,
        backward: bool,
        results: Sequence[ndarray | None] = (),
        repeat: Repeat | None = None,
        stacks: ndarray | None = None,
    ) -> bool:
        """Launch the program of the call, recorded before or now; False where there is none.

        It is kept for calls that come again as `repeat`, which has these results, and behind them
        `stacks`, what is kept for a backward.
        """
        net, form, elements = self.net, list[Any](), 0
        for name, y in self.arrays.items():
            if y is None:
                form.append(None)
                continue
            if type(y) is not ndarray or (not y.flags.aligned and name in _RESULTS):
                return False
            if not y.flags.aligned:
                y = self.arrays[name] = y.copy()
            form.append((y.shape, y.strides))
        for w, _, _ in net.layers:
            elements += w.shape[-2] * w.shape[-1]
        points = net.x.shape[-2] * prod(self.batch)
        fmas = points * max(net.members(1), self.members) * elements
        large = fmas >= tiling.parallel_fmas(library.registers(format_of(net.acc)))
        count = threads.number() if large else 1
        key = (
            self.kind, backward, count, net.packed is not None, net.guard, net.pattern,
            net.directions, net.seconds, self.networks, net.acc,
            *[f.serial for _, _, f in net.layers], *self.arrays, *form,
        )  # fmt: skip
        made = backend.replay.find(key)
        if made is None:
            f = form_of(net, self.arrays, self.networks, backward)
            if f is None:
                return False
            made = self.record(f, tuple(self.arrays), count)
            if made is None:
                return False
            formulas = formulas_of(made)
            if formulas is not None:
                backend.replay.keep(key, made, formulas, made.nbytes)
        arrays = tuple(self.arrays.values())
        backend.launch(made, arrays)
        if self.later:
            with np.errstate(all="ignore"):  # as silent as the kernels, whatever is set
                for found, every in self.later.values():
                    found[...] = sum_to(every, found.shape, net.acc)
        formulas = None if repeat is None or self.later else formulas_of(made)
        if repeat is not None and formulas is not None:
            constants, own = arrays[:CONSTANTS], arrays[CONSTANTS:]
            varies = threads.number if large else None
            own = own if stacks is None else own[:-1]
            repeat.keep(made, constants, own, results, formulas, varies, stacks)
        return True


def _plain(x: ndarray) -> bool:
    """Return whether gradients are joined in an array as it is."""
    return x.flags.aligned and x.flags.c_contiguous


def _stacks(call: NetworkArrays, backward: bool) -> tuple[int, int, int] | None:
    """Return the shape of what is kept of a network's blocks; None where it does not go this way"""
    f = form_of(call.net, call.arrays, call.networks, backward)
    if f is None:
        return None
    at = Layout(f._replace(keeps=True))
    return call.networks, at.blocks, at.stacks // call.net.acc.itemsize


def _kept(call: NetworkArrays) -> Kept:
    """Enter what is kept for a backward, and return it; nothing where it takes less to make it."""
    shape = _stacks(call, False)
    if shape is None or prod(shape) * call.net.acc.itemsize > KEPT_BYTES:
        return Kept()
    kept = KeptStacks(prod(shape), call.net.acc)
    call.arrays["stacks"] = kept.stacks.reshape(shape)
    return kept


def forward(
    backend: CpuBackend,
    net: Any,
    made: Sequence[ndarray],
    repeat: Repeat | None = None,
    keep: bool = False,
) -> Kept | None:
    """Write a network's value, or its jet, to its arrays; return what is kept for a backward.

    None is returned where it does not go this way.
    """
    call = NetworkArrays(net)
    rows = [call.add(name, y) for name, y in zip(_RESULTS, made, strict=False)]
    kept = _kept(call) if keep else Kept()
    if not call.run(backend, False, made, repeat, kept.stacks):
        return None
    for y, found in zip(made, rows, strict=True):
        if found is not None and found is not y and not np.may_share_memory(y, found):
            y[...] = found.reshape(y.shape)
    return kept


def backward(
    backend: CpuBackend,
    net: Any,
    given: Sequence[ndarray | None],
    needs: Collection[str],
    targets: Mapping[str, ndarray],
    repeat: Repeat | None = None,
    stacks: ndarray | None = None,
) -> tuple[ndarray | None, list[list[ndarray | None]]] | None:
    """Return d_x, and of each layer d_w and d_bias; None where it does not go this way.

    They are in `targets` where these can be written to. `stacks` is what a forward kept.
    """
    call = NetworkArrays(net)
    for name, y in zip(_RESULTS, given, strict=False):
        call.add(name, y)
    if stacks is not None:
        shape = _stacks(call, True)
        if shape is None or prod(shape) != stacks.size or stacks.dtype != net.acc:
            raise ValueError(
                "kept must come from a forward on operands of these shapes and this dtype, got "
                f"{stacks.size} elements of {stacks.dtype}"
            )
        call.arrays["stacks"] = stacks.reshape(shape)
    call.turned(needs)
    d_x, groups = call.gradients(needs, targets)
    if not call.run(backend, True, [d_x, *groups[0], *groups[1]], repeat):
        return None
    return d_x, list(map(list, zip(*groups, strict=True)))
