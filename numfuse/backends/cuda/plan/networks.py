"""A whole network's jet, or its value, as one launch, and its gradients as one and two joins.

It applies to hidden layers of one activation and up to 256 columns (float64: 128; less before
Hopper), a last layer that is a product alone with few columns, and up to 8 members of a point;
float32 or float64. A block keeps two tiles of rows in shared memory and the weights of one layer,
or some slices of these (`network_stream`), so the device must have that. Values in 16 bits have
kernels of their own (`half_networks`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends.cuda import network_tiling, tiling
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.intrinsics import fresh
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.compile.unroll import inlined, kernel_of
from numfuse.backends.cuda.kernels import (
    joins,
    network_copies,
    network_parts,
    network_split,
    network_tiles,
    network_warps,
)
from numfuse.backends.cuda.kernels.network import FORWARD, Member, Members, Points, forward
from numfuse.backends.cuda.kernels.network_backward import BACKWARD, backward
from numfuse.backends.cuda.kernels.network_layers import MOST_LAYERS
from numfuse.backends.cuda.kernels.network_rows import row
from numfuse.backends.cuda.kernels.network_stream import multiply_ring, open_ring
from numfuse.backends.cuda.kernels.network_tiles import Tile
from numfuse.backends.cuda.plan.half_networks import half_network
from numfuse.backends.cuda.plan.half_sizes import HALF_DTYPES
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.network_slots import Slots
from numfuse.backends.cuda.plan.product import ITEMSIZES, DeviceInfo, Launch, Operand, Slot
from numfuse.problem.operands import format_of

if TYPE_CHECKING:
    from numfuse.backends.cuda.plan.program import Recorder, View
    from numfuse.problem.networks import NetworkProblem

_ENDS = ("value", "dot", "ddot")
_RESULTS = ("u", "u_dot", "u_ddot")
_GRADS = ("grad", "grad_dot", "grad_ddot")
#: Bytes of shared memory that the system takes of each block.
_RESERVED = 1024
#: Values of K whose products are written out behind one another: the loads of some go beside the
#: multiply-adds of those before.
_RUN = 16


@dataclass(frozen=True)
class Sizes:
    """How a block runs a network; places in shared memory are in values.

    The gradients are one flat array: WIDTH x WIDTH for the weights between hidden layers, then rows
    of WIDTH: the hidden layers' biases, the first layer's weights, (used up:) sums of directions,
    the last layer's weights in rows of its own columns, its bias.
    """

    tile: Tile
    threads: int
    #: Blocks that share a multiprocessor.
    resident: int
    #: Points of a tile, and those that a thread of a pass takes together.
    points: int
    at_once: int
    #: Whether threads are warps: the simulator has a few alone.
    lanes: bool
    widths: tuple[int, ...]
    directions: int
    members: int
    #: Whether a point has a direction of its own, and there is no other.
    own: bool = False

    @property
    def count(self) -> int:
        return len(self.widths) - 1

    @property
    def rows(self) -> int:
        """Return the rows of a tile, those that no point has included."""
        return self.threads // self.tile.across * self.tile.mr

    @property
    def stride(self) -> int:
        """Return the rows from a thread's point in a pass to its next one."""
        return self.threads // self.tile.width * self.members

    @property
    def team(self) -> int:
        """Return the threads that make a whole gradient of weights."""
        return (self.tile.width // self.tile.mr) * (self.tile.width // self.tile.nr)

    @property
    def is_roomy(self) -> bool:
        """Return whether threads have registers for what they multiply next."""
        exact = self.tile.real == "float32" and not (self.tile.tensor or self.tile.slice)
        may = self.tile.grouped or (exact and self.resident == 1)
        return may and self.resident * self.threads <= 256

    @property
    def teams(self) -> int:
        """Return the planes of a block: of its teams, or of the one that all threads are."""
        return max(1, self.threads // self.team)

    @property
    def rounds(self) -> int:
        """Return the rounds in which the threads make a whole gradient of weights."""
        return -(-self.team // self.threads)

    @property
    def slots(self) -> int:
        """Return the rows of sums over points."""
        return self.count - 1 + self.widths[0] + self.directions + self.widths[-1] + 1

    def places(self, back: bool) -> tuple[dict[str, int], int]:
        """Return where what a block keeps begins, and the end of it."""
        tile, outputs, inputs = self.tile, self.widths[-1], self.widths[0]
        width, inner = tile.width, self.count > 2
        beside = back and inner
        lengths = {
            "TILE_AT": self.rows * tile.pitch,
            "OTHER_AT": self.rows * tile.pitch if beside and not tile.grouped else 0,
            "WEIGHTS_AT": (tile.stages * tile.stage or width * tile.pitch) if inner else 0,
            # (Q as three 16-bit parts, behind whole KiB as wgmma asks for)
            "PARTS_AT": self.rows * width * 3 // 2 if beside and tile.grouped else 0,
            "BIAS_AT": (self.count - 1) * width,
            "FIRST_AT": inputs * width,
            "MOVED_AT": self.directions * width,
            "LAST_AT": outputs * width,
            "INPUTS_AT": self.points * inputs * (1 + self.own),
            "GRADS_AT": self.points * self.members * outputs if back else 0,
            "SLOTS_AT": self.slots * self.threads if back else 0,
        }
        found, end = {}, 0
        for name, length in lengths.items():
            found[name], end = end, end + tiling.round_up(length, tile.few)
        if tile.grouped:  # what went into a layer lies where the gradients by its results lay
            found["OTHER_AT"] = 0
        return found, end

    @property
    def squares(self) -> int:
        """Return the values of the gradients of weights between hidden layers."""
        return (self.count - 2) * self.tile.width**2

    @property
    def flat(self) -> int:
        """Return the values of all gradients."""
        return self.squares + self.slots * self.tile.width


def _tiles(
    info: DeviceInfo, real: str, widest: int, back: bool
) -> list[tuple[Tile, int, int, int, bool]]:
    """Return tiles with their threads, resident blocks, and points at once; the best one first."""
    if not info.capability[0]:
        width = tiling.round_up(max(widest, 8), 4)
        half, part = width // 2, network_tiling.SIMULATED_SLICE
        if not part:
            return [(Tile(real, width, width + 2, half, half, half, 2, 2), width, 2, 2, False)]
        width = tiling.round_up(width, 16)  # (a gradient of weights takes two rounds of threads)
        step = width // 8
        tile = Tile(real, width, width + 2, 2 * step, step, step, 8, 2, "", part, 2)
        return [(tile, width, 2, 1, False)]
    few = 4 if real == "float32" else 2
    table = network_tiling.TILES if info.capability >= (9, 0) else network_tiling.OLDER
    rows = table[real]
    if table is network_tiling.TILES and not back:
        rows = (*network_tiling.FORWARDS.get(real, ()), *rows)
    found = []
    # (of one width both ways: a forward keeps rows of it)
    least = min((row.width for row in rows if widest <= row.width), default=0)
    for width, nr, threads, resident, part, stages in rows:
        if width == least:
            tensor = real if real == "float64" and info.capability >= (9, 0) else ""
            pitch = width + (4 if tensor else few)
            tile = Tile(real, width, pitch, 8, nr, 8, width // nr, few, tensor, part, stages)
            found.append((tile, threads, resident, few, True))
    return found


@functools.lru_cache(maxsize=256)
def sizes_of(
    info: DeviceInfo, real: str, widths: tuple[int, ...], directions: int, seconds: int, back: bool,
    own: bool = False,
) -> Sizes | None:  # fmt: skip
    """Return how a block runs a network of these widths, from x to u; None: it does not.

    `own` says that the one direction is an array of all points.
    """
    count, members = len(widths) - 1, 1 + directions + seconds
    few = members <= network_tiling.MEMBERS and 0 < widths[-1] <= network_tiling.OUTPUTS
    if real not in ("float32", "float64") or not (2 <= count <= MOST_LAYERS and few):
        return None
    if not 0 < widths[0] <= network_tiling.INPUTS or min(widths) < 1:
        return None
    if widths[-1] > min(max(widths[1:-1]), 8):
        return None
    for tile, threads, resident, at_once, lanes in _tiles(info, real, max(widths[1:-1]), back):
        how = threads, resident, at_once, lanes
        made = _placed(info, tile, *how, widths, directions, members, own, back)
        if made is not None:
            return made
    return None


def _placed(
    info: DeviceInfo, tile: Tile, threads: int, resident: int, at_once: int, lanes: bool,
    widths: tuple[int, ...], directions: int, members: int, own: bool, back: bool,
) -> Sizes | None:  # fmt: skip
    """Return how blocks of so many threads run a network by a tile; None: it does not fit."""
    rows = threads // tile.across * tile.mr
    step = threads // tile.width * at_once
    points = rows // members // step * step
    made = Sizes(tile, threads, resident, points, at_once, lanes, widths, directions, members, own)
    taken = made.places(back)[1] * ITEMSIZES[tile.real]
    if not points or taken > info.shared_per_block:
        return None
    if (taken + _RESERVED) * resident > info.shared_per_multiprocessor and lanes:
        # (a tile with slices is made for so many blocks)
        return None if tile.slice else replace(made, resident=1)
    return made


def on_tensor_cores(s: Sizes, info: DeviceInfo, precision: str, back: bool) -> Sizes:
    """Return how a block runs a network by products of this precision; its results lie as before.

    Where tensor cores cannot, and of the precisions that have no kernel here, products are IEEE's.
    """
    real, width = s.tile.real, s.tile.width
    warps = s.lanes and width % 32 == 0 and info.capability >= (8, 0)
    if precision not in ("bf16x6", "tf32") or real != "float32" or not warps:
        return s
    nr, threads, resident = s.tile.nr, s.threads, s.resident
    if precision == "bf16x6" and info.capability[0] == 9 and s.count > 2:
        made = _by_groups(s, info, back)
        if made is not None:
            return made
    if precision == "bf16x6" and info.capability >= (9, 0) and width in network_tiling.SPLIT:
        _, nr, threads, resident, *_ = network_tiling.SPLIT[width]
    if s.tile.slice:
        return s
    tile = replace(s.tile, nr=nr, across=width // nr, tensor=precision)
    what = s.widths, s.directions, s.members, s.own
    return _placed(info, tile, threads, resident, s.at_once, s.lanes, *what, back) or s


def _by_groups(s: Sizes, info: DeviceInfo, back: bool) -> Sizes | None:
    """Return how a block runs a network by products of warp groups; None: it does not fit."""
    what = s.widths, s.directions, s.members, s.own
    for each in network_tiling.GROUPED[back]:
        if each.width != s.tile.width:
            continue
        width = each.width
        kind = Tile("float32", width, width + 4, 8, each.nr, 8, width // each.nr, 4)
        tile = replace(kind, tensor="bf16x6", slice=each.slice, stages=each.stages, grouped=True)
        made = _placed(info, tile, each.threads, each.resident, 4, s.lanes, *what, back)
        if made is not None:
            return made
    return None


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
    return found | network_parts.bindings(tile, s.rows, s.stride) if tile.grouped else found


def _is_tight(s: Sizes) -> bool:
    """Return whether registers are so few that nothing is kept of a thread's number."""
    tile = s.tile
    if tile.tensor:
        return network_split.is_split(tile)
    return tile.real == "float32" and (s.own or (tile.width == 128 and not tile.slice))


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
        "EARLY": real == "float32" and not tile.tensor,
        "LATE": tile.grouped and s.rounds == 1,
        "PLANE": s.squares * itemsize,
        "FULL": all(width == tile.width for width in s.widths[1:-1]),
        "STRIDE": s.stride,
        "KEEPS": p.keeps or (p.backward and not p.saved),
        "SAVED": p.saved,
        "MOVES": "d_points" in p.arrays,
        "POINT_DIRECTIONS": s.own,
        # (without it ptxas spills 32 bytes)
        "TIGHT": s.lanes and _is_tight(s),
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
    ring["RUN"] = min(tile.slice, _RUN) if tile.nr > few else few
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


def _image_bindings(found: dict[str, Any], tile: Tile, backward: bool) -> dict[str, Any]:
    """Return what the products of weights that come as images are bound to."""
    made: dict[str, Any] = {"TURNED": False, "IMAGES": 1 + backward}
    steps = -(-found["POINTS"] // (found["AT_ONCE"] * found["PARTS"]))
    made["SHARE"] = -(-steps // (tile.width // tile.slice))
    ring = found | made | {"COPY_FEW": network_copies.copy(tile, tile.few)}
    parts = network_parts
    for back, name in ((0, ""), (1, "_BACK")):
        made[f"OPEN{name}"] = inlined(parts.open_images, **ring, BACK=back)
    made["STREAM"] = inlined(parts.multiply_images, **ring)
    made["MULTIPLY_BESIDE"] = inlined(parts.multiply_beside, **ring)
    made["ADD_ROWS"] = inlined(parts.add_rows, **ring)
    made["WRITE_PARTS"] = inlined(parts.write_parts, **ring)
    made["CLEAR_PARTS"] = inlined(parts.clear_parts, **ring)
    made["PART_PLACE"] = inlined(parts.part_place, **ring)
    return made | {"PLACE": types.int32}


def _split(
    rec: Recorder, s: Sizes, bindings: dict[str, Any], slots: Slots, given: dict[str, Any],
    places: int,
) -> dict[str, Any]:  # fmt: skip
    """Record the launch that splits weights; return layers whose weights are their images."""
    inner, images, threads = s.count - 2, bindings["IMAGES"], 256
    each = network_parts.image_bytes(s.tile) * images
    made = rec.fresh((places, inner * each // 4), "float32")
    image = slots.slot("images", made)
    own = bindings | {"THREADS": threads}
    name = f"network weights {s.tile.width} {s.tile.tensor}"
    kernel = kernel_of(
        network_parts.split_weights, network_parts.SPLIT, own, threads=threads, name=name
    )
    layers, steps = given["layers"], given["steps"]
    arguments = network_parts.SPLIT(
        layers=layers, steps=steps, images=image, network_step=inner * each
    )
    grid = inner * images * s.tile.width**2 // (2 * threads), places, 1
    rec.launches((Launch(kernel, grid, arguments),), slots.at, ahead=True)
    whole = {}
    for i in range(1, s.count - 1):
        weights = Slot("images", (i - 1) * each)
        whole[f"l{i}"] = replace(getattr(layers, f"l{i}"), weights=weights)
    apart = {f"weights_{i}": inner * each // 4 for i in range(1, s.count - 1)}
    return {"layers": replace(layers, **whole), "steps": replace(steps, **apart)}


def _wide(s: Sizes, inner: list[View]) -> str:
    """Return along which axis all weights between hidden layers come by 16 bytes; "": none.

    They must fill a tile, and a thread's part of one its registers.
    """
    few, width = s.tile.few, s.tile.width
    if width * width % (few * s.threads) or width * width // s.threads > s.tile.sums:
        return ""

    def runs(w: View, axis: int) -> bool:
        *apart, row, column = w.strides
        near, far = (row, column) if axis == 0 else (column, row)
        return near == 1 and w.aligned((*apart, far)) >= few * w.itemsize

    if any(w.shape[-2:] != (width, width) for w in inner):
        return ""
    for axis, name in ((1, "rows"), (0, "columns")):
        if all(runs(w, axis) for w in inner):
            return name
    return ""


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
    hidden = [slots.view(f"weights_{i}") for i in range(1, s.count - 1)]
    if s.tile.grouped:
        bindings |= _image_bindings(bindings, s.tile, p.backward)
        given |= _split(rec, s, bindings, slots, given, places)
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
    planes = rec.fresh((places, teams, s.squares), real)
    rows = rec.fresh((places, grid, s.slots * s.tile.width), real)
    given |= {"planes": slots.slot("planes", planes), "slots": slots.slot("slots", rows)}
    given["d_x"] = slots.rows("d_points")
    _launch(rec, p, s, backward, BACKWARD, bindings, (grid, places, 1), given, slots.at)
    for made, first in (planes, 0), (rows, s.squares):
        if made.shape[-1]:
            _join(rec, real, made, slots.view("flat"), first)


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


def _join(rec: Recorder, real: str, planes: View, flat: View, first: int) -> None:
    """Record the sums of planes of each network, in their order, to a part of the flat result."""
    networks, count, length = planes.shape
    step = flat.shape[-1]
    out, work = Operand(real, (step, step, 1), ITEMSIZES[real]), Slot("work")
    lengths = networks, count, 1, length
    made, staged = joins.joins(rec.device.info, real, Slot("planes"), out, lengths, work)
    rec.launches(made, {"planes": planes.at(), "out": flat.at(first)}, staged)
