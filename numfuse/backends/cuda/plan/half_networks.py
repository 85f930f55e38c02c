"""A whole network in float16 or bfloat16 as one launch, and its gradients as one and a join.

It applies to hidden layers of one activation, whose weights fit a block's shared memory together,
and a last layer that is a product alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse import epilogues
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.intrinsics import HALVES, block_barrier, shared_address
from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.compile.unroll import inlined, kernel_of
from numfuse.backends.cuda.kernels import joins
from numfuse.backends.cuda.kernels import network_fragments as fragments
from numfuse.backends.cuda.kernels.elementwise import formula
from numfuse.backends.cuda.kernels.network_half import HALF_FORWARD, fetch, forward, put
from numfuse.backends.cuda.kernels.network_half_backward import HALF_BACKWARD, backward
from numfuse.backends.cuda.plan.half_sizes import HalfSizes, half_sizes_of, pairs_of
from numfuse.backends.cuda.plan.network_slots import Slots
from numfuse.backends.cuda.plan.product import Launch, Operand, Slot
from numfuse.problem.operands import format_of

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.backends.cuda.plan.lower import Bind
    from numfuse.backends.cuda.plan.program import Recorder, View
    from numfuse.problem.networks import NetworkProblem

#: Values that a thread brings to shared memory together.
_HELD = 8


def _value(activation: Activation) -> Any:
    """Return the function of an activation's value."""
    made = epilogues.layer(activation.curve).select("out").without("bias")
    return formula(made, ("z",), "float32", short=True)


def _value_and_slope(activation: Activation, guard: bool) -> Any:
    """Return the function of an activation's value and derivative."""
    made = epilogues.layer(activation.curve).select("out").without("bias").jet()
    made = made.select("out", "slope_z")
    return formula(made.guarded() if guard else made, ("z",), "float32", short=True)


def _wide(x: View, padded: int, width: int, pairs: int) -> bool:
    """Return whether a lane's neighbours are whole accesses, and there are no columns beyond."""
    whole = x.strides[1] == 1 or x.shape[1] == 1
    return padded == width and whole and x.aligned((x.strides[0],)) >= 4 * pairs


def _bindings(s: HalfSizes, dtype: str, turned: tuple[bool, ...]) -> dict[str, Any]:
    """Return what both kernels are bound to."""
    first, inner, last = s.padded
    weights_at, bias_at, _ = s.places
    chunks = [n // fragments.CHUNK for n in s.padded]

    def product(steps: int, across: int) -> Any:
        return fragments.product(dtype, s.pieces, steps, across + 8, False)

    return {
        "COUNT": s.count,
        "WIDTHS": s.widths,
        "WIDTH": inner,
        "FULL": all(n == inner for n in s.widths[1:-1]),
        "IN_WIDTH": first,
        "OUT_WIDTH": last,
        "IN_PAIRS": pairs_of(first),
        "OUT_PAIRS": pairs_of(last),
        "PIECES": s.pieces,
        "THREADS": 32 * s.warps,
        "HELD": _HELD,
        "SEVERAL": True,
        "SIZE": 2,
        "DOWN": s.down,
        "ACROSS": s.across,
        "TURNED": tuple(map(int, turned)),
        "SPREAD": (pairs_of(first), *[1] * (s.count - 1), pairs_of(last)),
        "WEIGHTS_AT": weights_at,
        "BIAS_AT": bias_at,
        "REAL": types.float32,
        "WORD": types.int32,
        "ZERO": np.float32(0),
        "LOAD": elements.loads(dtype),
        "WINDOW": shared_address,
        "BARRIER": block_barrier,
        "PACK": HALVES[dtype][0],
        "LOW": fragments.half_of(dtype, False),
        "HIGH": fragments.half_of(dtype, True),
        "POKE_HALF": fragments.poke_half(dtype),
        "MULTIPLY_FIRST": product(chunks[0], inner),
        "MULTIPLY": product(chunks[1], inner),
    }


def _side(template: Any, s: HalfSizes, dtype: str, x: View, padded: int) -> Any:
    """Return how a warp reads or writes its rows of x, or of the result."""
    pairs, columns = pairs_of(padded), x.shape[-1]
    whole = padded == columns and x.strides[-1] == 1
    wide = whole and x.aligned(x.strides[:-1]) >= 4 * pairs
    names = {
        "PIECES": s.pieces,
        "SIDE_WIDTH": padded,
        "SIDE_PAIRS": pairs,
        "SIDE_COLUMNS": columns,
        "WIDE": wide,
        "ZERO": np.float32(0),
        "PACK": HALVES[dtype][0],
        "LOAD": elements.loads(dtype),
        "STORE_LOW": fragments.store_half_if(False),
        "STORE_HIGH": fragments.store_half_if(True),
        "LOAD_WORDS": fragments.load_words(pairs),
        "STORE_WORDS": fragments.store_words(pairs),
    }
    return inlined(template, **names)


def _back_bindings(s: HalfSizes, dtype: str) -> dict[str, Any]:
    """Return what the kernel of the gradients alone is bound to."""
    first, inner, last = s.padded
    left, right, _ = s.factors
    to, bias_to = s.ends
    parts = s.parts
    kinds = [0, 1 if s.count > 2 else 0, s.count - 1]  # a layer of each kind
    pieces = [s.pieces_of(layer) for layer in kinds]

    def kind(layer: int) -> int:
        return 0 if layer == 0 else 2 if layer == s.count - 1 else 1

    found: dict[str, Any] = {
        "ROWS": s.rows,
        "WARPS": s.warps,
        "LEFT_AT": left,
        "RIGHT_AT": right,
        "TOTALS": s.totals,
        "COLUMNS": max(across for _, across in pieces),
        "LENGTH": s.flat,
        "PARTS": len(parts),
        "PART_LAYER": tuple(layer for layer, _ in parts),
        "PART_KIND": tuple(kind(layer) for layer, _ in parts),
        "PART_ROW": tuple(row for _, row in parts),
        "PART_LEFT": tuple(left[layer] + row * 2 for layer, row in parts),
        "PART_RIGHT": tuple(right[layer] for layer, _ in parts),
        "PART_TO": tuple(to[layer] for layer, _ in parts),
        "PART_BIAS_TO": tuple(bias_to[layer] for layer, _ in parts),
        "KIND_DOWN": (first, inner, inner),
        "KIND_ACROSS": (inner, inner, last),
        "PIECES_DOWN": tuple(down for down, _ in pieces),
        "PIECES_ACROSS": tuple(across for _, across in pieces),
    }
    names = ("OUTER_FIRST", "STORE_FIRST"), ("OUTER", "STORE_INNER"), ("OUTER_LAST", "STORE_LAST")
    found["KIND_PAIRS"] = 1, 1, pairs_of(last)
    for (name, store), (down, across), pairs in zip(
        names, pieces, found["KIND_PAIRS"], strict=True
    ):
        found[name] = fragments.outer(dtype, down, across, False)
        found[f"{name}_ADDED"] = fragments.outer(dtype, down, across, True)
        found[store] = fragments.store_row(across, pairs)
    for name, n in (("MULTIPLY_BACK", inner), ("MULTIPLY_LAST_BACK", last)):
        found[name] = fragments.product(dtype, s.pieces, n // 16, n + 8, True)
    return found


def half_network(rec: Recorder, p: NetworkProblem, bind: Bind) -> None:
    """Record a network's value in 16 bits, or its gradients."""
    dtype, info = format_of(p.dtype), rec.device.info
    s = half_sizes_of(info, dtype, p.widths, p.backward)
    assert s is not None and p.count
    slots = Slots(bind)
    layers, turned = slots.layers(s.count)
    bindings = _bindings(s, dtype, turned)
    first, inner, last = s.padded
    x = slots.view("points")
    bindings["FETCH_POINTS"] = _side(fetch, s, dtype, x, first)
    given: dict[str, Any] = {"x": slots.rows("points"), "layers": layers, "count": p.count}
    threads = 32 * s.warps
    end = slots.view("grad" if p.backward else "u")
    networks = end.shape[0] if len(end.shape) > 2 else 1
    given["steps"] = slots.steps("grad" if p.backward else "u")
    most = -(-s.resident * info.multiprocessors // networks)  # blocks of a network
    if not p.backward:
        bindings |= {
            "MULTIPLY_LAST": fragments.product(dtype, s.pieces, inner // 16, last + 8, False),
            "PUT_RESULTS": _side(put, s, dtype, end, last),
            "ACTIVATE": _value(p.activation),
        }
        how: Any = {"threads": threads, "blocks": s.resident, "name": f"network {dtype} {inner}"}
        made = kernel_of(forward, HALF_FORWARD, bindings, **how)
        grid = min(most, -(-p.count // (threads // 2 * s.pieces)))
        arguments = HALF_FORWARD(**given, out=slots.rows("u"))
        rec.launches((Launch(made, (grid, networks, 1), arguments, s.places[2]),), slots.at)
        return
    moves = bind("d_points") is not None
    d_x = slots.view("d_points") if moves else x
    bindings |= _back_bindings(s, dtype) | {
        "MOVES": moves,
        "FETCH_COTANGENTS": _side(fetch, s, dtype, end, last),
        "PUT_POINTS": _side(put, s, dtype, d_x, first),
        "ACTIVATE": _value_and_slope(p.activation, p.guard),
    }
    grid = min(most, -(-p.count // s.rows))
    planes = rec.fresh((networks, grid, s.flat), "float32")
    given |= {
        "grad": slots.rows("grad"),
        "planes": slots.slot("planes", planes),
        "d_x": slots.rows("d_points"),
    }
    how = {"threads": threads, "blocks": s.resident, "name": f"network backward {dtype} {inner}"}
    made = kernel_of(backward, HALF_BACKWARD, bindings, **how)
    arguments = HALF_BACKWARD(**given)
    rec.launches((Launch(made, (grid, networks, 1), arguments, s.factors[2]),), slots.at)
    flat = Operand(dtype, (s.flat, s.flat, 1), 2)
    lengths = networks, grid, 1, s.flat
    launches, staged = joins.joins(info, "float32", Slot("planes"), flat, lengths, Slot("work"))
    at = {"planes": planes.at(), "out": slots.view("flat").at()}
    rec.launches(launches, at, staged)
