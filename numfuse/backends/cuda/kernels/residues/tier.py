"""Which float64 products run by residues of 8 bits, and the launches of one."""

from __future__ import annotations

from typing import NamedTuple

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile.schema import Array, Ends
from numfuse.backends.cuda.kernels.hopper.factors import box_of
from numfuse.backends.cuda.kernels.hopper.kernel import Gemm
from numfuse.backends.cuda.kernels.hopper.maps import TensorMap
from numfuse.backends.cuda.kernels.hopper.records import Fetched, Maps, Second, Work
from numfuse.backends.cuda.kernels.hopper.tier import available
from numfuse.backends.cuda.kernels.hopper.tiling import HOPPER_TILES, HopperTile, hopper_tile
from numfuse.backends.cuda.kernels.residues import finish, gemm, split, warps
from numfuse.backends.cuda.plan.product import (
    Derived,
    DeviceInfo,
    Launch,
    Plan,
    Product,
    Slot,
    Tier,
)
from numfuse.moduli import Residues, count_of, residues

#: Values of K in a slice, and slices of which a sum of products of residues stays below 2^31: their
#: products are 2^14 at most.
SLICE = 128
SLICES = (1 << 31) // (1 << 14) // SLICE - 1
#: Bytes of a factor's residues that are kept for its next product in a call; larger ones give their
#: room to the next product's: a backward of 8192 cubed wants 3 GiB, and not 7.
KEPT = 512 << 20
#: Parts of K, at most: the low words of `finish` then stay below 2^-20.
PARTS = 1 << 10
#: Of a multiprocessor, as they are reached, by compute capability: operations a second of float64
#: (on tensor cores, where it has those for it) and of integers, and bytes; in 10^9. (Of an H200,
#: measured at 4096 and 8192 cubed; of an A100, RTX 3090, 4090 and 5090 by formulas of machines.)
RATES = {
    (9, 0): (440, 11700, 25),
    (8, 0): (157, 3700, 13),
    (8, 6): (6.7, 2200, 10),
    (8, 9): (8.6, 3100, 7),
    (12, 0): (8.8, 2600, 9.4),
}
#: Seconds of a launch; the share of float64's time that is left, at most.
LAUNCH, GAIN = 2.5e-6, 0.97
#: Operations in float64 on an element of a factor, and for each modulus on one of the result.
SPLIT_FLOPS, FINISH_FLOPS = 8, 6
#: The time of all instructions likewise, as instructions at one for each lane and cycle, of which a
#: multiprocessor has so many a second. (On an H100 at 8192 cubed residues take 1.5 ms for both
#: factors; on an H200 too, where what comes behind the products takes 1.0 ms, and 0.23 at 4096.)
SPLIT_WORK, FINISH_WORK, ISSUED = 300, 28, 200e9
#: The largest tile, and the rounds of blocks from which on it is taken in place of two consumers by
#: turns: on an H200 these did 1.26 POP/s at 4096 cubed, and the largest tile 1.64 there and 1.55 at
#: 8192 cubed. The end of a block, reductions of its sums, is not hidden as the model of bfloat16
#: has it.
LARGEST, ROUNDS = HOPPER_TILES[0][0], 16
#: The share of the integers' rate that smaller tiles have.
SMALLER = 0.81


class Seconds(NamedTuple):
    """The time of a product in float64 and by residues, as the constants above have it."""

    native: float
    residues: float


def seconds(m: int, n: int, k: int, places: int, count: int, device: DeviceInfo) -> Seconds:
    """Return the time of a product of so many moduli, and that in float64."""
    native, integers, memory = (
        rate * 1e9 * device.multiprocessors for rate in RATES[device.capability]
    )
    work = 2 * m * n * k * places
    # blocks are whole, and so are rows of residues
    rows, columns, depth = (tiling.round_up(x, 128) for x in (m, n, k))
    if device.capability == (9, 0) and not _fills(m, n, places * count, device.multiprocessors):
        integers *= SMALLER
    products = 2 * rows * columns * depth * places * count / integers
    read, made = (m + n) * k * places, m * n * places
    nbytes = read * (16 + count) + made * (2 * count + 8)
    flops = read * SPLIT_FLOPS + made * FINISH_FLOPS * count
    issued = (read * SPLIT_WORK + made * FINISH_WORK * count) / (ISSUED * device.multiprocessors)
    passes = max(nbytes / memory, flops / native, issued)
    return Seconds(work / native, products + passes + 6 * LAUNCH)


def take(product: Product, device: DeviceInfo) -> Plan | None:
    """Launches for a product of float64 that may be made of residues, where that is faster.

    The simulator makes every product so: there is nothing to be faster than.
    """
    p, count = product, count_of(product.precision)
    operands = p.x, p.y, p.out, p.bias, p.extra, p.pre
    if not count or p.is_rich or p.x1 is not None or p.members is not None:
        return None
    if any(o is not None and o.dtype != "float64" for o in operands):
        return None
    simulated = not device.capability[0]
    if not simulated:
        if device.capability not in RATES:
            return None
        took = seconds(p.m, p.n, p.k, p.places, count, device)
        if took.residues >= GAIN * took.native:
            return None
    slices = -(-p.k // SLICE)
    parts = 1 if simulated else -(-slices // SLICES)
    planes, blocks = p.places * count, -(-max(p.m, p.n) // split.ROWS)
    if parts > PARTS or max(planes, blocks) > 65535 or max(p.m, p.n, p.k) >= 1 << 30:
        return None
    return plan_with(p, residues(count), device, parts)


RESIDUES = Tier("int8", take)


def plan_with(product: Product, of: Residues, device: DeviceInfo, parts: int) -> Plan | None:
    """Return the launches of a product, its K in so many parts."""
    p, overlaps = product, device.capability >= (9, 0)
    sizes, planes = (p.m, p.n, p.k), p.places * of.count
    pitch, out_pitch = tiling.pitch(p.k, 1), tiling.round_up(p.n, split.COLUMNS)
    bytes_ = p.m * pitch, split.plane_rows("y", p.n) * pitch, pitch, out_pitch
    workspace = tiling.round_up(parts * planes * p.m * out_pitch, 256)
    launches: list[Launch] = []
    factors: list[Slot] = []
    for name, operand, rows, plane in ("x", p.x, p.m, bytes_[0]), ("y", p.y, p.n, bytes_[1]):
        to = Slot(f"{name} copy")
        if planes * plane > KEPT:
            to = Slot("work", workspace)
            workspace += tiling.round_up(planes * plane, 256)
        factors.append(to)
        launches += split.planes_of(name, operand, rows, p.k, p.places, of, device, to)
    there = factors[0], factors[1]
    if available(device):
        found = _by_wgmma(p, of, device, (pitch, out_pitch), there, parts)
        if found is None:
            return None
        middle, tile, parts = found
    elif device.capability[0]:
        middle, parts = warps.launch(sizes, planes, of.moduli, bytes_, there, parts)
        tile = f"{warps.BLOCK}x{warps.BLOCK}x{warps.DEPTH}"
    else:
        middle, tile = gemm.launch(sizes, planes, of.moduli, bytes_, there), "plain"
    last = finish.finished(p, device, of, parts, out_pitch, overlaps)
    shown = f"{of.count} moduli, {tile}" + (f", K in {parts} parts" if parts > 1 else "")
    return Plan((*launches, middle, last), shown, workspace, tiling.RUN)


def _tile(m: int, n: int, slices: int, planes: int, multiprocessors: int) -> HopperTile:
    """Return the block of a product of residues, of which a thread has wholes of 64 columns."""
    tile, _ = hopper_tile(m, n, slices, planes, multiprocessors, unit=split.COLUMNS)
    if tile.ping_pong and _fills(m, n, planes, multiprocessors):
        return LARGEST
    return tile


def _fills(m: int, n: int, planes: int, multiprocessors: int) -> bool:
    """Return whether the largest tile's blocks have little outside, and are enough rounds."""
    blocks = -(-m // LARGEST.block_m) * -(-n // LARGEST.block_n)
    filled = blocks * LARGEST.block_m * LARGEST.block_n <= 1.1 * m * n
    return filled and blocks * planes >= ROUNDS * multiprocessors


def _by_wgmma(
    product: Product,
    of: Residues,
    device: DeviceInfo,
    pitches: tuple[int, int],
    factors: tuple[Slot, Slot],
    parts: int,
) -> tuple[Launch, str, int] | None:
    """Return the launch that multiplies planes of residues, its tile and the parts of K."""
    p, (pitch, out_pitch) = product, pitches
    slices, places = -(-p.k // SLICE), p.places * of.count
    part_slices = -(-slices // parts)
    parts = -(-slices // part_slices)
    tile = _tile(p.m, p.n, part_slices, places * parts, device.multiprocessors)
    row_blocks, column_blocks = -(-p.m // tile.block_m), -(-p.n // tile.block_n)
    units = row_blocks * column_blocks * places * parts
    found, bytes_ = [], 0
    sides = ("x", p.m, tile.block_m), ("y", p.n, tile.block_n)
    for (name, rows, block), slot in zip(sides, factors, strict=True):
        rows = split.plane_rows(name, rows)
        box = SLICE, box_of(False, block, rows, "int8")[1]
        made = TensorMap("int8", (p.k, rows, places), (pitch, rows * pitch), box)
        found.append(Fetched(Derived(slot, made), 1, 0))
        bytes_ += SLICE * box[1]
        if not made.possible():
            return None
    if units >= 1 << 31:
        return None
    kernel = Gemm("int8", False, False, tile, "residues", moduli=of.moduli)
    nothing, none = Fetched(0, 0, 0), Array(0, 0, 0, 0)
    plane = p.m * out_pitch
    out = Array(Slot("work"), plane, out_pitch, 1)
    arguments = kernel.schema(
        x=found[0],
        y=found[1],
        maps=Maps(0, 0, 0),
        ends=Ends(none, none, none, out),
        sums=0,
        second=Second(nothing, nothing, none, none, 0),
        work=Work(
            *(p.m, out_pitch, units, row_blocks, column_blocks, places),
            *(slices, part_slices, slices, places * plane),
        ),
        slice_bytes=bytes_,
    )
    grid = (min(units, device.multiprocessors), 1, 1)
    launch = Launch(kernel.kernel(), grid, arguments, kernel.shared_bytes, overlaps=True)
    return launch, f"{tile}, {kernel.stages} stages", parts
