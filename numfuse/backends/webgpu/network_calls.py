"""Networks of NumPy arrays as one dispatch each way: points of one network are rows.

A call that looks like an earlier one is found again, as all calls on NumPy arrays are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.host import HostProgram
from numfuse.backends.webgpu.lower.networks import gradients, sizes_of
from numfuse.kept import Kept
from numfuse.problem.networks import NetworkProblem
from numfuse.runtime.lifetimes import formulas_of

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.device import Device
    from numfuse.backends.webgpu.face import WebGpuBackend

#: What a problem calls the results of a jet, and their cotangents.
RESULTS = "u", "u_dot", "u_ddot"
GRADS = "grad", "grad_dot", "grad_ddot"


def problem_of(
    device: Device, net: Any, arrays: Mapping[str, ndarray], backward: bool
) -> NetworkProblem | None:
    """Return the problem of one network on these arrays; None where the device has no such way.

    `net` is a `numfuse.perceptron.Network`, which has the checks.
    """
    x, widths = arrays["points"], (net.x.shape[-1], *(w.shape[-1] for w, _, _ in net.layers))
    beyond = any(y.nbytes > device.room for y in arrays.values())
    if net.acc != np.float32 or 0 in x.shape or beyond:
        return None
    if sizes_of(device, widths, len(x), 1 + net.directions + net.seconds, backward) is None:
        return None
    activations = tuple(f for _, _, f in net.layers)
    constant = net.units, net.weights, net.pattern, net.seconds, net.guard
    kept = False, False
    return NetworkProblem(
        activations, widths, len(x), x.dtype, *constant, backward, *kept, dict(arrays), ()
    )


def _operands(net: Any) -> dict[str, ndarray] | None:
    """Return the arrays of one network, its points as rows; None where there are several."""
    found = {"points": net.x.reshape(-1, net.x.shape[-1])}
    for i, (w, bias, _) in enumerate(net.layers):
        if prod(w.shape[:-2]) != 1 or (bias is not None and bias.size != bias.shape[-1]):
            return None
        found[f"weights_{i}"] = w.reshape(w.shape[-2:])
        if bias is not None:
            found[f"biases_{i}"] = bias.reshape(-1)
    return found


def _rows(x: ndarray, members: bool) -> ndarray:
    """Return results or their cotangents as rows, behind the axis of their members."""
    return x.reshape(*x.shape[:members], prod(x.shape[members:-1]), x.shape[-1])


def _run(backend: WebGpuBackend, net: Any, arrays: dict[str, ndarray], backward: bool) -> bool:
    """Run a network; return False where the device does not take it whole."""
    device = backend.device
    constants = [None if y is None else y.tobytes() for y in (net.units, net.weights)]
    key = (
        "network", backward, net.guard, net.pattern, net.directions, net.seconds, *constants,
        *[f.serial for _, _, f in net.layers],
        *[(name, y.shape, y.strides, y.dtype) for name, y in arrays.items()],
    )  # fmt: skip
    program = device.hosted.find(key)
    if program is None:
        p = problem_of(device, net, arrays, backward)
        if p is None:
            return False
        backend.tell(device, kind_of(p), p)
        program = HostProgram.of(device, kind_of(p), p, tuple(arrays))
        if program is None:
            return False
        formulas = formulas_of(tuple(f.curve for f in p.activations))
        device.hosted.keep(key, program, formulas, program.program.nbytes)
    program.run(tuple(arrays.values()))
    return True


def kind_of(p: NetworkProblem) -> str:
    """Return what `last_call` calls a problem."""
    return "network backward" if p.backward else "network"


def forward(backend: WebGpuBackend, net: Any, made: Sequence[ndarray], *again: Any) -> Kept | None:
    """Write a network's value, or its jet, to its arrays; None where it does not go this way.

    Nothing is kept for a backward.
    """
    arrays = _operands(net)
    if arrays is None:
        return None
    found = [_rows(y, i > 0) for i, y in enumerate(made)]
    arrays |= {name: y for name, y in zip(RESULTS, found, strict=False) if y.size}
    if not _run(backend, net, arrays, False):
        return None
    for y, rows in zip(made, found, strict=True):
        if not np.may_share_memory(y, rows):
            y[...] = rows.reshape(y.shape)
    return Kept()


def backward(
    backend: WebGpuBackend,
    net: Any,
    given: Sequence[ndarray | None],
    needs: Collection[str],
    *again: Any,
) -> tuple[ndarray | None, list[list[ndarray | None]]] | None:
    """Return d_x, and of each layer d_w and d_bias; None where it does not go this way."""
    arrays = _operands(net)
    if arrays is None or not needs:
        return None
    for i, (name, y) in enumerate(zip(GRADS, given, strict=False)):
        if y is not None and y.size:
            arrays[name] = _rows(y, i > 0)
    d_x = np.empty(net.x.shape, net.acc) if "x" in needs else None
    if d_x is not None:
        arrays["d_points"] = d_x.reshape(-1, d_x.shape[-1])
    places, length = gradients((net.x.shape[-1], *(w.shape[-1] for w, _, _ in net.layers)))
    flat = np.empty(length, net.acc)
    if "weights" in needs or "biases" in needs:
        arrays["flat"] = flat
    if not _run(backend, net, arrays, True):
        return None
    pairs: list[list[ndarray | None]] = []
    for i, (w, bias, _) in enumerate(net.layers):
        pair: list[ndarray | None] = [None, None]
        for j, (name, y) in enumerate((("weights", w), ("biases", bias))):
            if name in needs and y is not None:
                g = places[2 * i + j]
                part = flat[g.at : g.at + g.rows * g.pitch].reshape(g.rows, g.pitch)
                pair[j] = np.ascontiguousarray(part[:, : g.columns]).reshape(y.shape)
        pairs.append(pair)
    return d_x, pairs
