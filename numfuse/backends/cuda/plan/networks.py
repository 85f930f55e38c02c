"""A whole network's jet, or its value, as one launch, and its gradients as one and a join.

It applies to hidden layers of one activation and up to 256 columns (float64: 128; less before
Hopper), a last layer that is a product alone with few columns, and up to 8 members of a point;
float32 or float64. A block keeps two tiles of rows in shared memory and the weights of one layer,
or some slices of these (`network_stream`), so the device must have that. Values in 16 bits have
kernels of their own (`half_networks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.intrinsics import fresh
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.compile.unroll import inlined, kernel_of
from numfuse.backends.cuda.kernels import (
    network_copies,
    network_part_sums,
    network_split,
    network_tiles,
    network_warps,
)
from numfuse.backends.cuda.kernels.network import FORWARD, Member, Members, Points, forward
from numfuse.backends.cuda.kernels.network_backward import BACKWARD, backward
from numfuse.backends.cuda.kernels.network_rows import row
from numfuse.backends.cuda.kernels.network_stream import multiply_ring, open_ring
from numfuse.backends.cuda.plan.half_networks import half_network
from numfuse.backends.cuda.plan.half_sizes import HALF_DTYPES
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.network_images import image_bindings, split_weights
from numfuse.backends.cuda.plan.network_sizes import Sizes, on_tensor_cores, sizes_of
from numfuse.backends.cuda.plan.network_slots import Slots, join_planes
from numfuse.backends.cuda.plan.product import ITEMSIZES, Launch
from numfuse.problem.operands import format_of

if TYPE_CHECKING:
    from numfuse.backends.cuda.plan.program import Recorder, View
    from numfuse.problem.networks import NetworkProblem

_ENDS = ("value", "dot", "ddot")
_RESULTS = ("u", "u_dot", "u_ddot")
_GRADS = ("grad", "grad_dot", "grad_ddot")
#: Values of K whose products are written out behind one another: the loads of some go beside the
#: multiply-adds of those before.
_RUN = 16


def _engine(s: Sizes) -> dict[str, Any]:
    """Return the products of a tile, and where a lane's part begins."""
    tile = s.tile
    found, twice = network_tiles.bindings(tile), network_split.is_split(tile)
    found |= {"TENSOR": bool(tile.tensor), "TWICE": twice, "TOTALS": (1 + twice) * tile.sums}
    found |= {"GROUPED": tile.grouped}
    if not tile.tensor:
        return found | {"CHUNK": tile.few}
    warps = network_warps if tile.tensor == "float64" else network_split
    found |= {"CHUNK": warps.CHUNK, "SPAN": 8 * tile.nr, "DEALT": warps.DEALT}
    found |= {"WARP_ROWS": 32, "NEAR": 2 * warps.DEALT}
    found |= warps.bindings(tile)
    return found | network_part_sums.bindings(tile, s.rows, s.stride) if tile.grouped else found


def _bindings(rec: Recorder, p: NetworkProblem, s: Sizes, real: str) -> dict[str, Any]:
    places, _ = s.places(p.backward)
    tile, itemsize = s.tile, ITEMSIZES[real]
    hidden, inputs = s.count - 1, s.widths[0]
    weighted = p.weights is not None
    counts = p.directions, p.seconds
    how = p.activation, real, counts, p.pattern, weighted, p.guard
    kind = np.dtype(real).type
    found: dict[str, Any] = {name: at for name, at in places.items() if name != "TILE_AT"}
    found |= {
        "COUNT": s.count,
        "WIDTHS": s.widths,
        "WIDTH": tile.width,
        "PITCH": tile.pitch,
        "BACK_PITCH": tile.back_pitch,
        "STREAMED": tile.slice > 0,
        "THREADS": s.threads,
        "PARTS": s.threads // tile.width,
        "POINTS": s.points,
        "AT_ONCE": s.at_once,
        "MEMBERS": s.members,
        "GIVEN": s.members * (2 if p.backward else 1),
        "DIRECTIONS": p.directions,
        "INPUTS": inputs,
        "OUTPUTS": s.widths[-1],
        "WEIGHTS": max(1, p.seconds * p.directions),
        "UNITS_AT": max(1, p.seconds * p.directions),
        "FEW": tile.few,
        "AHEAD": tile.ahead,
        "MR": tile.mr,
        "ACROSS": tile.across,
        "LANES": s.lanes,
        "HELD": min(8, tile.sums),
        "REAL": getattr(types, real),
        "ZERO": kind(0),
        "NOTHING": kind(-0.0),
        "SIZE": itemsize,
        "LOAD": elements.loads(real),
        "STORE": elements.stores(real),
        "FIRST_ROW": row(*how, False, False),
        "ROW": row(*how, False, p.seconds > 0),
        "FIRST_ROW_BACK": row(*how, True, False),
        "ROW_BACK": row(*how, True, p.seconds > 0),
        "TEAM": s.team,
        "TEAMS": s.teams,
        "ROUNDS": s.rounds,
        "SPARE": s.rounds * s.threads > s.teams * s.team,
        "SQUARE": tile.width**2 * itemsize,
        "SQUARE_ACROSS": tile.width // tile.nr,
        "SQUARE_LANES": s.lanes and s.team % 32 == 0 and tile.width // tile.mr % 8 == 0,
        "FETCHED": s.is_roomy,
        "FETCHES": max(tile.fetches, s.at_once * s.members),
        "EARLY": tile.tensor == ("float64" if real == "float64" else ""),
        "LATE": tile.grouped and s.rounds == 1,
        "PLANE": s.flat * itemsize,
        "FULL": all(width == tile.width for width in s.widths[1:-1]),
        "STRIDE": s.stride,
        "KEEPS": p.keeps or (p.backward and not p.saved),
        "SAVED": p.saved,
        "MOVES": "d_points" in p.arrays,
        "POINT_DIRECTIONS": s.own,
        "RELEASES": rec.device.info.capability >= (9, 0),
        # (what a phase computes of a thread's number would be kept for the whole launch)
        "TIGHT": s.lanes,
        "FRESH": fresh,
        "POINT_KEPT": s.members * tile.width * itemsize,
        "BLOCK_KEPT": (hidden - 1) * s.rows * tile.width * itemsize,
        "SLOTS": s.slots,
        "FIRST_SLOT": hidden,
        "LAST_SLOT": hidden + inputs + p.directions,
    }
    return found | _engine(s)


def _member(slots: Slots, name: str, several: bool) -> Member:
    """Return a result or a cotangent, of which nothing may be there."""
    y = slots.bind(name)
    if y is None or 0 in y.shape:
        return Member(0, 0, 0, 0, 0)
    step = y.strides[-3] if several else 0
    member = y.strides[0] if len(y.shape) > 2 + several else 0
    return Member(slots.slot(name, y), step, member, *y.strides[-2:])


def _stream(s: Sizes, inner: list[View], found: dict[str, Any]) -> dict[str, Any]:
    """Return what the products of weights that come in slices are bound to."""
    tile, few = s.tile, s.tile.few

    def wide(axis: int) -> bool:
        apart = [(*w.strides[:-2], w.strides[-2:][1 - axis]) for w in inner]
        aligned = [w.aligned(x) >= few * w.itemsize for w, x in zip(inner, apart, strict=True)]
        return all(w.strides[-2:][axis] == 1 for w in inner) and all(aligned)

    turned = bool(inner) and all(w.strides[-2] == 1 != w.strides[-1] for w in inner)
    unit = few if wide(0 if turned else 1) else 1
    ring = found | network_copies.bindings(tile)
    ring |= {"TURNED": turned, "UNIT": unit, "WIDE": unit > 1}
    ring |= {"SLICE": tile.slice, "STAGE": tile.stage, "STAGES": tile.stages}
    # (threads with fewer sums are many: they have no registers for it, and wait for one another)
    ring["RUN"] = min(tile.slice, _RUN) if tile.nr > few else max(few, found["CHUNK"])
    made: dict[str, Any] = {"TURNED": turned}
    for back, name in ((False, ""), (True, "_BACK")):
        if back == turned:
            own = {"DOWN": True, "SLICE_PITCH": tile.pitch, "K_STEP": tile.pitch}
            own["PRODUCT"] = found["MULTIPLY"]
        else:
            own = {"DOWN": False, "SLICE_PITCH": tile.back_pitch, "K_STEP": 1}
            own["PRODUCT"] = found["MULTIPLY_BACK"]
        made[f"OPEN{name}"] = inlined(open_ring, **ring | own)
        made[f"STREAM{name}"] = inlined(multiply_ring, **ring | own)
    return made


def _wide(s: Sizes, inner: list[View]) -> bool:
    """Return whether all weights between hidden layers fill a tile, their rows whole 16 bytes."""
    few, width = s.tile.few, s.tile.width

    def runs(w: View) -> bool:
        *apart, row, column = w.strides
        whole = w.shape[-2:] == (width, width) and column == 1
        return whole and w.aligned((*apart, row)) >= few * w.itemsize

    return width * width % (few * s.threads) == 0 and all(map(runs, inner))


def network(rec: Recorder, p: NetworkProblem, bind: Bind) -> None:
    """Record a network's jet, or the gradients of one."""
    real, info = format_of(p.dtype), rec.device.info
    if real in HALF_DTYPES:
        half_network(rec, p, bind)
        return
    own = "points_dot" in p.arrays
    s = sizes_of(info, real, p.widths, p.directions, p.seconds, p.backward, own)
    assert s is not None and p.count
    s = on_tensor_cores(s, info, rec.precision, p.backward)
    itemsize, slots = ITEMSIZES[real], Slots(bind)
    layers, _ = slots.layers(s.count)
    x = slots.view("points")
    row_step, column_step = x.strides[-2:]
    networks = _networks(p)
    names = _GRADS if p.backward else _RESULTS
    ends = [_member(slots, name, networks > 0) for name in names]
    places = max(1, networks)
    most = -(-s.resident * info.multiprocessors // places)  # blocks of a network
    least = s.threads // s.tile.width * s.at_once
    share = max(-(-p.count // most), least)
    grid = -(-p.count // share)
    table = np.zeros(max(1, p.seconds * p.directions), p.dtype)
    if p.weights is not None and p.weights.size:
        table[: p.weights.size] = p.weights.ravel()
    table = np.concatenate([table, p.units.astype(p.dtype).ravel()])
    inner = s.rows * s.tile.width * itemsize
    whole = places * p.count * s.members * s.tile.width * itemsize
    given: dict[str, Any] = {
        "kept": 0,
        "layer_step": whole if p.saved or p.keeps else inner,
        "x": Points(slots.slot("points", x), row_step, column_step, p.count, share),
        "x_dot": slots.rows("points_dot"),
        "layers": layers,
        "steps": slots.steps(names[0]),
        "table": rec.constant(table),
        "ends": Members(*ends),
    }
    if p.saved or p.keeps:
        given["kept"] = slots.slot("kept", slots.view("kept"))
    bindings = _bindings(rec, p, s, real) | {"SEVERAL": networks > 0}
    copied = not s.tile.slice and s.lanes and info.capability >= (8, 0)
    bindings |= network_copies.whole(s.tile, copied)
    hidden = [slots.view(f"weights_{i}") for i in range(1, s.count - 1)]
    if s.tile.grouped:
        bindings |= image_bindings(bindings, s.tile, p.backward)
        given |= split_weights(rec, s, bindings, slots, given, places)
    elif s.tile.slice:
        bindings |= _stream(s, hidden, bindings)
    else:
        bindings |= {"TURNED": False, "WIDE_WEIGHTS": _wide(s, hidden)}
    if not p.backward:
        _launch(rec, p, s, forward, FORWARD, bindings, (grid, places, 1), given, slots.at)
        return
    teams = grid * bindings["TEAMS"]
    if not p.saved:
        kept = rec.fresh((places * grid * bindings["BLOCK_KEPT"] // itemsize,), real)
        given |= {"kept": slots.slot("kept", kept)}
    planes = rec.fresh((places, teams, s.flat), real)
    given["planes"] = slots.slot("planes", planes)
    given["d_x"] = slots.rows("d_points")
    _launch(rec, p, s, backward, BACKWARD, bindings, (grid, places, 1), given, slots.at)
    join_planes(rec, planes, slots.view("flat"))


def _networks(p: NetworkProblem) -> int:
    """Return the number of networks; 0: a single one, whose arrays have no axis for it."""
    names = ("weights_", "biases_", "points")
    each = [y for name, y in p.arrays.items() if name.startswith(names)]
    return next((len(y) for y in each if y.ndim > 2), 0)


def _launch(
    rec: Recorder, p: NetworkProblem, s: Sizes, template: Any, schema: Schema,
    bindings: dict[str, Any], grid: tuple[int, int, int], given: dict[str, Any],
    at: dict[str, tuple[int, int]],
) -> None:  # fmt: skip
    """Record the launch of a kernel of all layers."""
    what = "network jet" if s.members > 1 else "network"
    precise = f" {s.tile.tensor}" if s.tile.tensor not in ("", "float64") else ""
    name = f"{what}{' backward' if p.backward else ''} {s.tile.width}{precise}"
    resident = s.resident if s.lanes else 0
    how: Any = {"threads": s.threads, "blocks": resident, "name": name}
    how["feature"] = "a" if s.tile.grouped else ""
    made = kernel_of(template, schema, bindings, **how)
    shared = s.places(p.backward)[1] * ITEMSIZES[s.tile.real]
    launch = Launch(made, grid, schema(**given), shared, overlaps=s.tile.grouped)
    rec.launches((launch,), at)
