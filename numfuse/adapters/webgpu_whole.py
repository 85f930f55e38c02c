"""Networks on arrays of a WebGPU device: all layers in one dispatch where the device takes them so.

A call goes the long way once, with every check, and is found again by all that it depends on but
its buffers (`webgpu.again`). What does not go at once goes layer by layer (`stacks`, `chains`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.adapters import marks, stacks
from numfuse.backends.webgpu.arrays import DeviceArray
from numfuse.backends.webgpu.lower.networks import Gradient, gradients
from numfuse.backends.webgpu.network_calls import GRADS, RESULTS, kind_of, problem_of
from numfuse.backends.webgpu.stores import Store
from numfuse.backends.webgpu.tiling import NETWORK_WIDTHS, network_width
from numfuse.kept import given_back
from numfuse.problem.results import NetworkGradients, NetworkJet
from numfuse.runtime.strided import contiguous

if TYPE_CHECKING:
    from numfuse.problem.networks import NetworkProblem

#: The dtypes of arrays that a dispatch of all layers takes.
_DTYPES = frozenset(map(np.dtype, (np.float32, np.float16)))


_NEW = object.__new__
_GROUPS = "weights", "biases"
_NONE_GIVEN: frozenset[str] = frozenset()


class Raw(tuple[Any, ...]):
    """A backward's arrays: d_x, that of all gradients, and those which are no part of it."""

    __slots__ = ()


class _Latest(threading.local):
    """The arrays of this thread's latest backward of a whole network."""

    raw: Raw | None = None


_LATEST = _Latest()


class Call:
    """A call of a network as `webgpu.again` sees one: a mark, and the long way."""

    name = "mlp_jet"

    def __init__(self, mark: tuple[Any, ...], long: Callable[[], Any]) -> None:
        self.mark, self._long = mark, long

    def other(self, *_: Any) -> Any:
        """Run the call the long way; return a backward's arrays if it was one dispatch."""
        _LATEST.raw = None
        found = self._long()
        raw, _LATEST.raw = _LATEST.raw, None
        return found if raw is None else raw


# --- one network ----------------------------------------------------------------------------------
@lru_cache(maxsize=256)
def _places(widths: tuple[int, ...]) -> list[Gradient]:
    return gradients(widths)[0]


def _widths(x: Any, weights: Sequence[Any]) -> tuple[int, ...]:
    return (x.shape[-1], *[w.shape[-1] for w in weights])


def _chosen(
    x: Any, weights: Sequence[Any], biases: Sequence[Any], needs: Sequence[str],
    outs: Mapping[str, Any],
) -> list[tuple[Gradient, Any, bool]]:  # fmt: skip
    """Return the gradients of weights and biases that are needed, layer by layer.

    With each come its operand and whether it has an array of its own: one that was given, or one
    without the padding of its rows.
    """
    found = []
    for i, place in enumerate(_places(_widths(x, weights))):
        group = "biases" if i % 2 else "weights"
        operand = (biases if i % 2 else weights)[i // 2]
        if group in needs and operand is not None:
            found.append((place, operand, f"d_{place.name}" in outs or not place.compact))
    return found


@lru_cache(maxsize=256)
def _views(
    width: int, shapes: tuple[Any, ...], biases: tuple[Any, ...], needs: tuple[str, ...],
    given: frozenset[str], itemsize: int,
) -> list[tuple[int, int, Any]]:  # fmt: skip
    """Return where each gradient is, as a group and a layer, and how the array of all has it.

    That is a shape, strides and an offset in bytes; None: it has an array of its own.
    """
    found = []
    for i, place in enumerate(_places((width, *[shape[-1] for shape in shapes]))):
        group, layer = i % 2, i // 2
        shape = (shapes, biases)[group][layer]
        if _GROUPS[group] in needs and shape is not None:
            own = f"d_{place.name}" in given or not place.compact
            view = None if own else (shape, contiguous(shape, itemsize), place.at * itemsize)
            found.append((group, layer, view))
    return found


def _unpacked(
    raw: Raw, x: Any, weights: Sequence[Any], biases: Sequence[Any], needs: Sequence[str],
    outs: Mapping[str, Any],
) -> NetworkGradients:  # fmt: skip
    """Return a backward's arrays as its result: views of that of all gradients, and others."""
    d_x, flat, *own = raw
    groups: tuple[list[Any], list[Any]] = [None] * len(weights), [None] * len(weights)
    if flat is not None:
        shapes = tuple([w.shape for w in weights])
        others = tuple([None if y is None else y.shape for y in biases])
        given = frozenset(outs) if outs else _NONE_GIVEN
        rest, dtype = iter(own), flat.dtype
        how = shapes, others, tuple(needs), given, dtype.itemsize
        # (each view is made without a call, as `Program.run` makes results)
        for group, layer, view in _views(x.shape[-1], *how):
            if view is None:
                groups[group][layer] = next(rest)
                continue
            groups[group][layer] = made = _NEW(DeviceArray)
            made.shape, made.strides, at = view
            made.dtype, made.offset = dtype, flat.offset + at
            made.device, made.buffer = flat.device, flat.buffer
    pairs = [tuple(y) if name in needs else None for name, y in zip(_GROUPS, groups, strict=True)]
    return NetworkGradients(d_x, *pairs)


class Whole:
    """A network that the device takes at once; `run` runs a problem of ghosts."""

    def __init__(self, of: stacks.DeviceNetwork, run: Callable[..., Any]) -> None:
        self._of, self._run = of, run
        self._device: Any = of.device

    def problem(self, backward: bool, more: Mapping[str, Any]) -> NetworkProblem | None:
        """Return the problem of the network's arrays and more; None where it does not go so."""
        of = self._of
        if len(of.x.shape) != 2 or any(len(w.shape) != 2 for w in of.weights):
            return None
        members = 1 + of.net.directions + of.net.seconds
        if not _at_once(of.x, of.weights, members):
            return None
        arrays = {"points": of.x.ghost}
        arrays |= {f"weights_{i}": w.ghost for i, w in enumerate(of.weights)}
        for i, bias in enumerate(of.biases):
            if bias is None:
                continue
            if len(bias.shape) > 2:
                return None
            arrays[f"biases_{i}"] = bias.ghost.reshape(-1)
        return problem_of(self._device, of.net, arrays | dict(more), backward)

    def _call(self, p: NetworkProblem, read: Sequence[Any], written: dict[int, Any]) -> Any:
        """Run a problem; `written` has the caller's arrays for its results, by their ghosts."""
        of = self._of
        given = [y for y in (of.x, *of.weights, *of.biases, *read) if y is not None]
        store = Store(self._device, given, [*written.values()])
        return self._run(of.backend, store, kind_of(p), p, written)

    def forward(self, results: Sequence[DeviceArray], keep: bool) -> None:
        """Write the results; nothing is kept."""
        ghosts = tuple([y.ghost for y in results])
        more = {name: y for name, y in zip(RESULTS, ghosts, strict=True) if y.size}
        p = self.problem(False, more)
        assert p is not None  # (as `whole` found)
        p.result = ghosts
        self._call(p, (), {id(y): own for y, own in zip(ghosts, results, strict=True)})

    def backward(
        self, grads: Sequence[DeviceArray | None], kept: Any, needs: Sequence[str],
        outs: Mapping[str, DeviceArray],
    ) -> NetworkGradients:  # fmt: skip
        """Return the gradients that are needed; `outs` has arrays for some, by their names."""
        of, dtype = self._of, self._of.net.dtype
        named = {_name(name): y for name, y in outs.items()}
        ghosts = {name: y.ghost for name, y in named.items()}
        more = {name: y.ghost for name, y in zip(GRADS, grads, strict=True) if y is not None}
        more = {name: y for name, y in more.items() if y.size}
        d_x = flat = None
        if "x" in needs:
            d_x = more["d_points"] = ghosts.get("d_points", np.empty(of.x.shape, dtype))
        chosen = _chosen(of.x, of.weights, of.biases, needs, named)
        if chosen:
            widths = _widths(of.x, of.weights)
            flat = more["flat"] = np.empty(gradients(widths)[1], dtype)
        own = []
        for place, operand, apart in chosen:
            if apart:
                name = f"d_{place.name}"
                own.append(ghosts.get(name, np.empty(operand.shape, dtype)))
                more[name] = own[-1]
        p = self.problem(True, more)
        assert p is not None
        p.result = Raw((d_x, flat, *own))
        known = {id(ghosts[name]): y for name, y in named.items()}
        raw = _LATEST.raw = self._call(p, grads, known)
        return _unpacked(raw, of.x, of.weights, of.biases, needs, named)


def _name(out: str) -> str:
    """Return what a problem calls a gradient that a message calls d_weights[0]."""
    return "d_points" if out == "d_x" else out.replace("[", "_").removesuffix("]")


class Own(stacks.Arrays):
    """numfuse's own arrays of a WebGPU device."""

    def __init__(self, put: Any, run: Callable[..., Any]) -> None:
        super().__init__(put, DeviceArray)
        self._run = run

    def whole(
        self, network: stacks.DeviceNetwork, backward: bool, more: bool = False
    ) -> Whole | None:
        found = Whole(network, self._run)
        return None if found.problem(backward, {}) is None else found


# --- calls ----------------------------------------------------------------------------------------
def _fits(x: Any, weights: Any) -> bool:
    """Whether a network may go at once, by what is seen without a check."""
    if type(x) is not DeviceArray or len(x.shape) != 2 or x.dtype not in _DTYPES:
        return False
    if type(weights) not in (tuple, list):
        return False
    most = NETWORK_WIDTHS[-1]
    return all(type(w) is DeviceArray and w.shape[-1:] <= (most,) for w in weights)


def _at_once(x: Any, weights: Any, members: int) -> bool:
    """Whether a network of matrices goes at once, by its sizes."""
    widest = max([x.shape[-1], *[w.shape[-1] for w in weights]])
    cpu = x.device.adapter.kind == "CPU"
    return network_width(widest, members * x.shape[0], cpu) > 0


def network(layered: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs networks' jets, by `layered` for the first time."""

    def run(
        grads: Sequence[Any] | None, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
        form: tuple[Any, Any], keep: Any, needs: Sequence[str], out: Any = None,
    ) -> Any:  # fmt: skip
        """Return a forward's results or, with `grads`, the gradients; `keep`: what it kept."""
        mark, outs, given = None, None, ()
        if _fits(x, weights) and (grads is None or given_back(keep) is None):
            kind = "network" if grads is None else "network backward"
            kept = bool(keep) if grads is None else None
            mark = marks.mark(kind, weights, biases, how, form, kept, tuple(needs))
            outs, given = _flat(out, grads is not None, weights)
        if mark is None or outs is None:
            return layered(grads, x, weights, biases, how, form, keep, needs, out)

        def long() -> Any:
            found = layered(grads, x, weights, biases, how, form, keep, needs, out)
            if kept and not found[1].inputs:
                return found[0]
            return found

        outs = None if out is None else outs
        call = Call(mark, long), x, weights, biases, grads or (), outs, how[-1]
        found = _repeated(again, call, needs, given)
        if kept and type(found) is NetworkJet:
            return found, stacks.Kept([], [])
        return found

    return run


def _repeated(
    again: Callable[..., Any], call: tuple[Any, ...], needs: Sequence[str], given: Any
) -> Any:
    """Run a call, again if it was made before; return its results, gradients as `needs` has them.

    `given` pairs the names of gradients with the caller's arrays for them.
    """
    operation, x, weights, biases, grads, outs, backend = call
    every = x, *weights, *(biases or ()), *grads
    found = again(operation, every, "none", (), (), outs, backend)
    if type(found) is not Raw:
        return found
    own = (None,) * len(weights) if biases is None else biases
    return _unpacked(found, x, weights, own, needs, dict(given))


def _flat(out: Any, backward: bool, weights: Any) -> tuple[Any, Any]:
    """Return the arrays of `out` in their order, and pairs of names and those of a backward.

    None: it has another form.
    """
    if out is None:
        return (), ()
    if type(out) not in (tuple, list) or len(out) != 3:
        return None, ()
    if not backward:
        return tuple(out), ()
    count = len(weights)
    groups = [(None,) * count if y is None else y for y in out[1:]]
    if any(type(y) not in (tuple, list) or len(y) != count for y in groups):
        return None, ()
    names = [f"d_{name}_{i}" for name in ("weights", "biases") for i in range(count)]
    every = (out[0], *groups[0], *groups[1])
    named = zip(("d_points", *names), every, strict=True)
    return every, [(name, y) for name, y in named if y is not None]


def perceptron(arrays: Own, again: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs networks' values, or with a cotangent the gradients; it may return None."""

    def run(
        grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...], needs: Sequence[str],
        out: Any,
    ) -> Any:  # fmt: skip
        """Return the value, or the gradients that are needed; None: layers run it."""
        if not _fits(x, weights) or (grad is not None and not needs):
            return None
        if not weights or not _at_once(x, weights, 1):
            return None
        width = x.shape[-1]
        form = np.zeros((0, width)), np.zeros((0, 0))
        kind = "mlp" if grad is None else "mlp backward"
        mark = marks.mark(kind, weights, biases, how, (None, None), tuple(needs))
        outs, given = (out, ()) if grad is None else _flat(out, True, weights)
        if mark is None:
            return None

        def long() -> Any:
            activation, *rest = how
            name = kind.replace(" backward", "_bwd")
            try:
                made = stacks.DeviceNetwork(
                    arrays, name, x, weights, biases, activation, *form, *rest
                )
                if arrays.whole(made, grad is not None) is None:
                    return None
                if grad is not None:
                    return stacks.backward(made, (grad, None, None), None, needs, out)
                found = stacks.forward(made, False, None if out is None else (out, None, None))
            except (TypeError, ValueError):
                if grad is not None and out is not None:
                    raise
                return None  # and the layers say what is wrong
            return found.u

        if outs is None and out is not None:
            return long()
        outs, grads = None if out is None else outs, () if grad is None else (grad,)
        call = Call(mark, long), x, weights, biases, grads, outs, how[-1]
        return _repeated(again, call, needs, given)

    return run
