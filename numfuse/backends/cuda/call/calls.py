"""A call on arrays of a device: checked and recorded once, repeated when it comes again.

The problem is made, and every check applied, with ghosts (`arrays`). Which steps follow depends on
shapes, strides, dtypes and alignments; a call that has all of these as an earlier one skips to its
steps. Only whether an output of the caller's overlaps an operand is looked at every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy import ndarray

from numfuse.backends import Call, latest
from numfuse.backends.cuda.call.arrays import address, bounds, contiguous, dtype_of, ghost, pool_of
from numfuse.backends.cuda.call.memory import Block
from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.plan import lower, second_order
from numfuse.backends.cuda.plan.program import Recorder, Steps, View, strides_of
from numfuse.problem import product

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.expr import Expr

__all__ = [
    "Argument",
    "Host",
    "Kept",
    "Maker",
    "alignment_of",
    "call",
    "foresee",
    "operations",
    "recorded",
]

#: What runs a kind of problem.
operations: dict[str, Callable[[Recorder, Any, lower.Bind], None]] = {
    "forward": lower.forward,
    "backward": lower.backward,
    "gated": lower.gate,
    "gated_backward": lower.gate_backward,
    "double_backward": second_order.double_backward,
    "tangent": second_order.tangent,
    "gated_double_backward": second_order.gated_double_backward,
    "gated_tangent": second_order.gated_tangent,
}


class Argument(NamedTuple):
    """An array of a call."""

    address: int
    shape: tuple[int, ...]
    #: In elements.
    strides: tuple[int, ...]
    dtype: str
    writable: bool = True


class Maker(Protocol):
    """Makes results of the caller's kind."""

    def __call__(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
        """A new C-contiguous array and its address."""
        ...


@dataclass(frozen=True)
class Kept:
    """The steps of a call, and what its results are."""

    steps: Steps
    #: Of each result: the number of the caller's output, or (name, shape, dtype), or None.
    results: tuple[int | tuple[str, tuple[int, ...], str] | None, ...]
    #: What makes one result of them.
    pack: Callable[[Sequence[Any]], Any] | None
    call: Call


def alignment_of(at: int) -> int:
    """The power of two, at most 16, that divides an address."""
    return at & -at & 15 or 16


def recorded(
    device: Device,
    precision: str,
    kind: str,
    p: Any,
    bind: Callable[[Recorder, str, ndarray], View],
    names: tuple[str, ...],
    activation: str,
) -> tuple[Steps, Call]:
    """The steps of a problem, and what `last_call` tells of it."""
    rec = Recorder(device, precision)
    views: dict[tuple[str, int], View] = {}

    def once(name: str, x: ndarray) -> View:
        found = views.get((name, id(x)))
        if found is None:
            found = views[name, id(x)] = bind(rec, name, x)
        return found

    operations[kind](rec, p, once)
    steps = rec.steps(names)
    _, kernel, tile = steps.chief or (0, "nothing", None)
    told = Call("cuda", str(device), steps.tiers, f"{kind}/{activation} {kernel}", tile)
    return steps, told


def call(
    device: Device,
    stream: int,
    precision: str,
    kind: str,
    operands: dict[str, Argument],
    outs: dict[str, tuple[Any, Argument]],
    options: tuple[Any, ...],
    make_problem: Callable[[dict[str, ndarray]], Any],
    maker: Maker,
    capture: int | None = None,
) -> tuple[Any, Kept]:
    """Run a call, and give its result back as the caller's kind; and what was kept of it.

    Parameters
    ----------
    operands : dict
        {name in the problem: argument}
    outs : dict
        {name in the problem: (the caller's array, argument)}
    options : tuple
        All else that the problem depends on; hashable.
    make_problem : callable
        From ghosts, by name: (problem, names of the parts of its result).
    capture : int, optional
        The number of the graph that is being captured, where the caller knows it.
    """
    key = (
        kind,
        precision,
        options,
        tuple(
            (name, a.shape, a.strides, a.dtype, alignment_of(a.address), a.writable)
            for name, a in operands.items()
        ),
        tuple(
            (name, a.shape, a.strides, a.dtype, alignment_of(a.address), a.writable)
            for name, (_, a) in outs.items()
        ),
    )
    kept = device.kept_calls.get(key)
    if kept is None or (outs and _overlap(operands, outs)):
        device.release(stream)
        kept, formulas = _record(device, precision, kind, operands, outs, make_problem)
        device.kept_calls.keep(key, kept, formulas)
    addresses = [a.address for a in operands.values()]
    addresses += [a.address for _, a in outs.values()]
    given = [x for x, _ in outs.values()]
    made: list[Any] = []
    for result in kept.results:
        if result is None:
            made.append(None)
        elif isinstance(result, int):
            made.append(given[result])
        else:
            x, at = maker(result[1], result[2])
            addresses.append(at)
            made.append(x)
    kept.steps.run(device, pool_of(device), stream, addresses, capture)
    latest.call = kept.call
    return (made[0] if kept.pack is None else kept.pack(made)), kept


def _overlap(operands: dict[str, Argument], outs: dict[str, tuple[Any, Argument]]) -> bool:
    """Whether an output may share memory with anything else."""
    ranges = []
    for a in (*operands.values(), *(a for _, a in outs.values())):
        size = dtype_of(a.dtype).itemsize
        ranges.append(bounds(a.address, a.shape, [s * size for s in a.strides], size))
    for i in range(len(operands), len(ranges)):
        low, high = ranges[i]
        for j in range(i):
            if ranges[j][0] < high and low < ranges[j][1]:
                return True
    return False


def _record(
    device: Device,
    precision: str,
    kind: str,
    operands: dict[str, Argument],
    outs: dict[str, tuple[Any, Argument]],
    make_problem: Callable[[dict[str, ndarray]], Any],
) -> tuple[Kept, list[Expr]]:
    """The steps of a call, and the formulas with which they go."""
    ghosts: dict[str, ndarray] = {}
    for name, a in (*operands.items(), *((name, a) for name, (_, a) in outs.items())):
        dtype = dtype_of(a.dtype)
        strides = [s * dtype.itemsize for s in a.strides]
        ghosts[name] = ghost(a.address, a.shape, strides, dtype, a.writable)
    p, result_names = make_problem(ghosts)
    formulas = p.activation.formulas()
    parts = p.result if isinstance(p.result, tuple) else (p.result,)
    news: list[str] = []
    results: list[int | tuple[str, tuple[int, ...], str] | None] = []
    out_names = list(outs)
    alignments = {name: alignment_of(address(x)) for name, x in ghosts.items()}
    for name, x in zip(result_names, parts, strict=True):
        if x is None:
            results.append(None)
        elif name in outs:
            results.append(out_names.index(name))
        else:
            news.append(name)
            ghosts[name] = x
            alignments[name] = 16
            results.append((name, x.shape, x.dtype.name))

    def bind(rec: Recorder, name: str, x: ndarray) -> View:
        base = ghosts[name]
        offset = address(x) - address(base) if x.size else 0
        return View(
            rec.number(name),
            offset,
            x.shape,
            strides_of(x),
            x.dtype.name,
            x.itemsize,
            alignments[name],
        )

    steps, told = recorded(
        device, precision, kind, p, bind, (*operands, *outs, *news), p.activation.name
    )
    pack: Callable[[Sequence[Any]], Any] | None = None
    if isinstance(p.result, tuple):
        pack = getattr(type(p.result), "_make", tuple)
    return Kept(steps, tuple(results), pack, told), formulas


def foresee(
    device: Device, precision: str, dtype: str, act: Activation, m: int, k: int, n: int
) -> None:
    """Record the calls on contiguous arrays of these sizes, which compiles and loads kernels."""
    shapes = {"a": (m, k), "b": (k, n), "bias": (n,), "grad": (m, n)}
    # apart from one another, and aligned as a library's arrays are
    made = {
        name: Argument((i + 1) << 44, shape, contiguous(shape), dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }
    forward = {name: made[name] for name in ("a", "b", "bias")}
    gates = {name: made["a"]._replace(address=(i + 8) << 44) for i, name in enumerate("ab")}
    gates_backward = {"grad": made["a"], **gates}

    def gemm(save: bool) -> Callable[[dict[str, ndarray]], Any]:
        names = ("out", "pre") if save else ("out",)
        return lambda g: (product.gemm(g["a"], g["b"], g["bias"], act, save), names)

    kinds: tuple[tuple[str, dict[str, Argument], Any], ...] = (
        ("forward", forward, gemm(False)),
        ("forward", forward, gemm(True)),
        (
            "backward",
            made,
            lambda g: (
                product.gemm_backward(g["grad"], g["a"], g["b"], g["bias"], act),
                ("d_a", "d_b", "d_bias"),
            ),
        ),
        ("gated", gates, lambda g: (product.gated(g["a"], g["b"], act), ("out",))),
        (
            "gated_backward",
            gates_backward,
            lambda g: (product.gated_backward(g["grad"], g["a"], g["b"], act), ("d_a", "d_b")),
        ),
    )
    for kind, operands, make_problem in kinds:
        _record(device, precision, kind, operands, {}, make_problem)


class Host:
    """NumPy arrays: operands are copied to the device, and results back at the very end."""

    def __init__(self, device: Device, stream: int, outputs: Sequence[str]) -> None:
        self._device, self._stream, self._outputs = device, stream, outputs
        self._pool = pool_of(device)
        #: {name: its block}
        self.blocks: dict[str, Block] = {}
        self._targets: list[tuple[ndarray, str]] = []

    def bind(self, rec: Recorder, name: str, x: ndarray) -> View:
        """An operand, copied; or room for a result."""
        return View(rec.number(name), 0, x.shape, self.place(name, x), x.dtype.name, x.itemsize, 16)

    def place(self, name: str, x: ndarray) -> tuple[int, ...]:
        """Make its block, and fill it where it is an operand; its strides there."""
        order, packed = list(range(x.ndim)), x
        if name in self._outputs:
            self._targets.append((x, name))
        else:
            # An axis that repeats one slice is copied once, and the rest in the order of memory: a
            # transposed array takes no copy on the way.
            once = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.strides)]
            order.sort(key=lambda axis: -abs(once.strides[axis]))
            packed = np.array(once.transpose(order), order="C", copy=None)
        block = self.blocks[name] = self._pool.take(
            max(1, packed.nbytes), self._stream, f"{name} {x.shape}"
        )
        if name not in self._outputs and packed.size:
            self._device.upload(address(packed), block.address, packed.nbytes, self._stream)
        strides, run_length = [0] * x.ndim, 1
        for axis in reversed(range(x.ndim)):
            at = order[axis]
            strides[at] = run_length if x.strides[at] or name in self._outputs else 0
            run_length *= max(1, packed.shape[axis])
        return tuple(strides)

    def finish(self) -> None:
        """Bring the results back; before that, none of them is touched."""
        found = []
        for x, name in self._targets:
            value = x if x.flags.c_contiguous and len(self._targets) == 1 else np.empty_like(x)
            if not value.flags.c_contiguous:
                value = np.empty(x.shape, x.dtype)
            if value.size:
                at = self.blocks[name].address
                self._device.download(at, address(value), value.nbytes, self._stream)
            found.append((x, value))
        for x, value in found:
            if value is not x:
                x[...] = value

    def close(self) -> None:
        """Give the memory back."""
        for block in self.blocks.values():
            self._pool.give(block)
        self.blocks = {}


#: The arrays of every kind of problem.
_FIELDS = (
    "grad",
    "a",
    "b",
    "bias",
    "residual",
    "pre",
    "out",
    "d_a",
    "d_b",
    "d_bias",
    "d_residual",
    "u",
    "v",
    "w",
    "z",
    "d_grad",
    "out_dot",
)


def host_call(device: Device, precision: str, kind: str, p: Any, outputs: Sequence[str]) -> Call:
    """Run a problem of NumPy arrays; what `last_call` tells of it."""
    arrays = {name: x for name in _FIELDS if (x := getattr(p, name, None)) is not None}
    act = p.activation
    key = (
        "host",
        kind,
        precision,
        act.name,
        act.digest,
        getattr(p, "guard", None),
        p.dtype,
        getattr(p, "batch", None),
        getattr(p, "k", None),
        tuple((name, x.shape, x.strides, x.dtype) for name, x in arrays.items()),
    )
    host = Host(device, 0, outputs)
    try:
        kept = device.kept_calls.get(key)
        if kept is None:
            device.release(0)
            formulas = act.formulas()
            steps, told = recorded(device, precision, kind, p, host.bind, _FIELDS, act.name)
            kept = device.kept_calls.keep(key, (steps, tuple(host.blocks), told), formulas)
        else:
            for name in kept[1]:
                host.place(name, arrays[name])
        steps, _, told = kept
        blocks = [host.blocks.get(name) for name in _FIELDS]
        addresses = [0 if block is None else block.address for block in blocks]
        steps.run(device, pool_of(device), 0, addresses)
        host.finish()
    finally:
        host.close()
    return told
