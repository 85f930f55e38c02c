"""A whole network in float16 or bfloat16 as one launch, and its gradients as one and a join.

It applies to hidden layers of one activation, whose weights fit a block's shared memory together,
and a last layer that is a product alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse import epilogues
from numfuse.activations import get
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.intrinsics import HALVES, block_barrier, shared_address
from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.compile.unroll import inlined, kernel_of
from numfuse.backends.cuda.kernels import network_fragments as fragments
from numfuse.backends.cuda.kernels.elementwise import formula
from numfuse.backends.cuda.kernels.network_apart_backward import APART_BACKWARD
from numfuse.backends.cuda.kernels.network_apart_backward import backward as apart_backward
from numfuse.backends.cuda.kernels.network_groups import GROUP_FORWARD
from numfuse.backends.cuda.kernels.network_groups import forward as group_forward
from numfuse.backends.cuda.kernels.network_groups_backward import GROUP_BACKWARD
from numfuse.backends.cuda.kernels.network_groups_backward import backward as group_backward
from numfuse.backends.cuda.kernels.network_half import (
    HALF_FORWARD,
    forward,
    load_rows,
    place_rows,
    put,
)
from numfuse.backends.cuda.kernels.network_half_backward import HALF_BACKWARD, backward
from numfuse.backends.cuda.kernels.network_wide_backward import WIDE_BACKWARD
from numfuse.backends.cuda.kernels.network_wide_backward import backward as wide_backward
from numfuse.backends.cuda.plan.group_networks import (
    apart_back_bindings,
    fits,
    group_back_bindings,
    group_bindings,
    group_rows,
    moves_pairs,
    wide_back_bindings,
)
from numfuse.backends.cuda.plan.group_sizes import (
    Apart,
    ApartSizes,
    GroupSizes,
    WideSizes,
    apart_rule,
    apart_sizes_of,
    group_sizes_of,
    half_sizes_of,
)
from numfuse.backends.cuda.plan.half_sizes import HalfSizes, pairs_of
from numfuse.backends.cuda.plan.network_slots import Slots, join_planes
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch
from numfuse.problem.operands import format_of

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.backends.cuda.plan.lower import Bind
    from numfuse.backends.cuda.plan.program import Recorder, View
    from numfuse.problem.networks import NetworkProblem

#: Whether warp groups with wgmma run what they can on Hopper; else mma.sync does.
GROUPS = os.environ.get("NUMFUSE_CUDA_NETWORKS") != "mma.sync"
#: How a backward by warp groups has its sums of gradients apart from rows, where it can, by its
#: padded widths, its layers and its activation; None: each group, or the groups of a block
#: together, have their own.
APART: Callable[..., Apart | None] = apart_rule
#: Values that a thread brings to shared memory together.
_HELD = 8
#: Registers of a thread for rows that are loaded a tile ahead, at most: two pieces of 16 rows with
#: 64 columns, which are 32, spill with three blocks of 168.
_AHEAD = 16
#: ... one by one of x, or of the cotangents, where the sums of gradients are another group's.
_APART_LOADS = 4


def switches() -> tuple[bool, Callable[..., Apart | None]]:
    """Return what says by which kernels networks run."""
    return GROUPS, APART


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
        "PLACE_OF": inlined(fragments.padded_place),
        "MULTIPLY_FIRST": product(chunks[0], inner),
        "MULTIPLY": product(chunks[1], inner),
    }


def side(end: str, s: HalfSizes, dtype: str, x: View, padded: int) -> dict[str, Any]:
    """Return how a warp reads and writes its rows of x ("POINTS"), or of the result ("RESULTS").

    They are loaded a tile ahead where that takes few registers.
    """
    pairs, columns = pairs_of(padded), x.shape[-1]
    whole = padded == columns and x.strides[-1] == 1
    wide = whole and x.aligned(x.strides[:-1]) >= 4 * pairs
    names = {
        "PIECES": s.pieces,
        "SIDE_WIDTH": padded,
        "SIDE_PAIRS": pairs,
        "SIDE_COLUMNS": columns,
        "WIDE": wide,
        "STORE_LOW": fragments.store_half_if(False),
        "STORE_HIGH": fragments.store_half_if(True),
        "LOAD_WORDS": fragments.load_words(pairs),
        "STORE_WORDS": fragments.store_words(pairs),
    }
    raw = s.pieces * padded // (4 if wide else 2)
    return {
        f"RAW_{end}": raw,
        f"{end}_AHEAD": raw <= _AHEAD,
        f"LOAD_{end}": inlined(load_rows, **names),
        f"PLACE_{end}": inlined(place_rows, **names),
        f"PUT_{end}": inlined(put, **names),
    }


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


def _chosen(info: DeviceInfo, dtype: str, p: NetworkProblem, x: View, end: View) -> HalfSizes:
    """Return how a network is run: by warp groups, where they take it."""
    s = half_sizes_of(info, dtype, p.widths, p.backward)
    assert s is not None and p.count
    if isinstance(s, GroupSizes):  # there is no other way
        return s
    groups = group_sizes_of(info, s.widths, s.padded, p.backward) if GROUPS else None
    if groups is None or (p.backward and not fits(x, end)):
        return s
    if p.backward and fits(x, end, _APART_LOADS):
        how = APART(s.padded, s.count, p.activation)
        if how is not None:
            rectified = p.activation is get("relu")
            return apart_sizes_of(info, s.widths, s.padded, rectified, how) or groups
    return groups


def half_network(rec: Recorder, p: NetworkProblem, bind: Bind) -> None:
    """Record a network's value in 16 bits, or its gradients."""
    dtype, info = format_of(p.dtype), rec.device.info
    slots = Slots(bind)
    x, end = slots.view("points"), slots.view("grad" if p.backward else "u")
    s = _chosen(info, dtype, p, x, end)
    layers, turned = slots.layers(s.count)
    bindings = _bindings(s, dtype, turned)
    bindings |= side("POINTS", s, dtype, x, s.padded[0])
    bindings |= side("RESULTS", s, dtype, end, s.padded[2])
    networks = end.shape[0] if len(end.shape) > 2 else 1
    given: dict[str, Any] = {
        "x": slots.rows("points"),
        "layers": layers,
        "count": p.count,
        "steps": slots.steps("grad" if p.backward else "u"),
    }
    most = -(-s.resident * info.multiprocessors // networks)  # blocks of a network
    how: Any = {"threads": 32 * s.warps, "blocks": s.resident}
    record = _record_gradients if p.backward else _record_value
    record(rec, p, s, slots, bindings, given, (most, networks), how)


def _record_value(
    rec: Recorder, p: NetworkProblem, s: HalfSizes, slots: Slots, bindings: dict[str, Any],
    given: dict[str, Any], blocks: tuple[int, int], how: dict[str, Any],
) -> None:  # fmt: skip
    """Record a network's value; `blocks` are those of a network at most, and networks."""
    dtype = format_of(p.dtype)
    _, inner, last = s.padded
    bindings["ACTIVATE"] = _value(p.activation)
    kind, template, schema = "network", forward, HALF_FORWARD
    rows = 16 * s.warps * s.pieces
    if isinstance(s, GroupSizes):
        bindings |= group_bindings(s, dtype, p.activation is get("relu"))
        kind, template, schema = "network wgmma", group_forward, GROUP_FORWARD
        how["feature"] = "a"
    else:
        last_product = fragments.product(dtype, s.pieces, inner // 16, last + 8, False)
        bindings["MULTIPLY_LAST"] = last_product
    made = kernel_of(template, schema, bindings, **how, name=f"{kind} {dtype} {inner}")
    grid = min(blocks[0], -(-p.count // rows)), blocks[1], 1
    launch = Launch(made, grid, schema(**given, out=slots.rows("u")), s.taken)
    rec.launches((launch,), slots.at)


def _record_gradients(
    rec: Recorder, p: NetworkProblem, s: HalfSizes, slots: Slots, bindings: dict[str, Any],
    given: dict[str, Any], blocks: tuple[int, int], how: dict[str, Any],
) -> None:  # fmt: skip
    """Record a network's gradients and the sum of what blocks, or warp groups, have made."""
    dtype = format_of(p.dtype)
    most, networks = blocks
    moves = slots.bind("d_points") is not None
    x, grad = slots.view("points"), slots.view("grad")
    d_x = slots.view("d_points") if moves else x
    bindings |= {"MOVES": moves, "ACTIVATE": _value_and_slope(p.activation, p.guard)}
    grid = min(most, -(-p.count // s.rows))
    parts = grid
    kind, template, schema = "network backward", backward, HALF_BACKWARD
    if isinstance(s, GroupSizes):
        bindings |= group_bindings(s, dtype, p.activation is get("relu"))
        bindings["MOVES_PAIRS"] = moves_pairs(d_x)
        apart = isinstance(s, ApartSizes)
        warps = 1 if apart else 4
        bindings |= group_rows("POINTS", x, s.x_width, warps)
        bindings |= group_rows("COTANGENTS", grad, s.tail_width, warps)
        if isinstance(s, ApartSizes):
            bindings |= apart_back_bindings(s, dtype)
            template, schema = apart_backward, APART_BACKWARD
        elif isinstance(s, WideSizes):
            bindings |= wide_back_bindings(s, dtype)
            template, schema = wide_backward, WIDE_BACKWARD
        else:
            bindings |= group_back_bindings(s, dtype)
            template, schema = group_backward, GROUP_BACKWARD
        kind = "network backward apart" if apart else "network backward wgmma"
        how["feature"] = "a"
        parts = grid * s.planes
    else:
        bindings |= _back_bindings(s, dtype)
        bindings["PUT_MOVED"] = side("MOVED", s, dtype, d_x, s.padded[0])["PUT_MOVED"]
    planes = rec.fresh((networks, parts, s.flat), "float32")
    given |= {
        "grad": slots.rows("grad"),
        "planes": slots.slot("planes", planes),
        "d_x": slots.rows("d_points"),
    }
    made = kernel_of(template, schema, bindings, **how, name=f"{kind} {dtype} {s.padded[1]}")
    launch = Launch(made, (grid, networks, 1), schema(**given), s.taken)
    rec.launches((launch,), slots.at)
    join_planes(rec, planes, slots.view("flat"))
