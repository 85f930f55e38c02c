"""How a block runs a whole network: tiles, threads, and places in shared memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from numfuse.backends.cuda import network_tiling, tiling
from numfuse.backends.cuda.kernels.network_layers import MOST_LAYERS
from numfuse.backends.cuda.kernels.network_tiles import Tile
from numfuse.backends.cuda.plan.product import ITEMSIZES, DeviceInfo

#: Bytes of shared memory that the system takes of each block.
_RESERVED = 1024


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
        """Return whether threads have registers for what they take next: sums kept, factors."""
        tile = self.tile
        whole = not tile.slice and tile.tensor in ("", "float64")
        may = tile.grouped or (whole and self.resident == 1)
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
        # (a direction of each point takes one register more than 16 warps have)
        if own and real == "float64" and threads > 256:
            continue
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

    Where tensor cores cannot, and of the precisions that have no kernel here, products are IEEE's,
    forward and backward: what a backward makes again has the bits of what a forward keeps.
    """
    real, width = s.tile.real, s.tile.width
    warps = s.lanes and width % 32 == 0 and info.capability >= (8, 0)
    if precision not in ("bf16x6", "tf32") or real != "float32" or not warps:
        return s
    split = precision == "bf16x6"
    if split and info.capability[0] == 9 and s.count > 2:
        made = _by_groups(s, info, back)
        if made is not None:
            return made
    seconds = s.members - 1 - s.directions
    other = sizes_of(info, real, s.widths, s.directions, seconds, not back, s.own)
    if s.tile.slice or (other is not None and other.tile.slice):
        return s
    nr, threads, resident = s.tile.nr, s.threads, s.resident
    if split and info.capability >= (9, 0) and width in network_tiling.SPLIT:
        _, nr, threads, resident, *_ = network_tiling.SPLIT[width]
    tile = replace(s.tile, nr=nr, across=width // nr, tensor=precision)
    what = s.widths, s.directions, s.members, s.own
    return _placed(info, tile, threads, resident, s.at_once, s.lanes, *what, back) or s


def _by_groups(s: Sizes, info: DeviceInfo, back: bool) -> Sizes | None:
    """Return how a block runs a network by products of warp groups; None: it does not fit.

    It must fit a forward and a backward.
    """
    found = {}
    for way, tiles in network_tiling.GROUPED.items():
        for width, nr, threads, resident, part, stages in tiles:
            if width != s.tile.width or way in found:
                continue
            kind = Tile("float32", width, width + 4, 8, nr, 8, width // nr, 4)
            tile = replace(kind, tensor="bf16x6", slice=part, stages=stages, grouped=True)
            how = threads, resident, 4, s.lanes, s.widths, s.directions, s.members, s.own
            made = _placed(info, tile, *how, way)
            if made is not None:
                found[way] = made
    return found[back] if len(found) == 2 else None
