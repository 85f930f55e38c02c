"""How blocks run a whole network in 16 bits (`half_networks`): their sizes, and what lies where."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import network_fragments as fragments
from numfuse.backends.cuda.kernels.network_layers import MOST_LAYERS
from numfuse.backends.cuda.plan.product import DeviceInfo

HALF_DTYPES = "float16", "bfloat16"
#: Columns of a layer at most: two pieces of 16 rows of a warp, and one, are then 128 registers
#: before and behind a layer.
_WIDTHS = 128, 256
#: Warps of a block of a forward, where those of a multiprocessor are a multiple; else 4.
_WARPS = 8
#: Warps of a block of a backward at most, which 168 registers each are for, and rows of a tile at
#: least: below, barriers and the weights' way from shared memory outweigh the products.
_BACK_WARPS, _BACK_ROWS = 12, 32
#: Bytes of shared memory that the system takes of each block; registers of a multiprocessor, a
#: quarter of which the warps of one scheduler share.
_RESERVED, _REGISTERS = 1024, 65536
#: Registers of a thread beside those of its rows: addresses, and what an activation needs.
_OTHERS = 64
#: Pieces of 16 x 8 sums that a warp of a backward has at most: 64 registers.
_PIECES = 16


@dataclass(frozen=True)
class HalfSizes:
    """How blocks run a network; places in shared memory are in bytes."""

    widths: tuple[int, ...]
    #: Columns of x, of all hidden layers and of the result, whole pieces of 16.
    padded: tuple[int, int, int]
    #: Pieces of 16 rows that a warp has.
    pieces: int
    warps: int
    #: Blocks that share a multiprocessor.
    resident: int
    #: Rows of a backward's tile; 0 of a forward.
    rows: int = 0

    @property
    def count(self) -> int:
        return len(self.widths) - 1

    @property
    def down(self) -> tuple[int, ...]:
        """Return the rows of each layer's weights in shared memory."""
        first, inner, _ = self.padded
        return first, *[inner] * (self.count - 1)

    @property
    def across(self) -> tuple[int, ...]:
        """Return their columns."""
        _, inner, last = self.padded
        return *[inner] * (self.count - 1), last

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return where each layer's weights begin, and each one's bias, and the end of them."""
        pairs = zip(self.down, self.across, strict=True)
        sizes = [*(k * (n + 8) * 2 for k, n in pairs), *(n * 4 for n in self.across)]
        *found, end = accumulate(sizes, initial=0)
        return tuple(found[: self.count]), tuple(found[self.count :]), end

    @property
    def factors(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return where a tile's left factors of weights' gradients begin, the right ones, the end.

        These are what went into each layer, and the gradients by its sums.
        """
        sizes = [self.rows * (n + 8) * 2 for n in (*self.down, *self.across)]
        *found, end = accumulate(sizes, initial=self.places[2])
        return tuple(found[: self.count]), tuple(found[self.count :]), end

    def pieces_of(self, layer: int) -> tuple[int, int]:
        """Return a warp's part of a layer's weights' gradient: times 16 rows, and 8 columns."""
        down, across = self.down[layer] // 16, self.across[layer] // 8
        most = max(1, _PIECES // across)
        return max(n for n in range(1, most + 1) if down % n == 0), across

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Return the layer and the first row of each part of the weights' gradients."""
        return [
            (layer, row)
            for layer in range(self.count)
            for row in range(0, self.down[layer], 16 * self.pieces_of(layer)[0])
        ]

    @property
    def totals(self) -> int:
        """Return the sums of a thread of a backward."""
        return max(4 * down * across for down, across in map(self.pieces_of, range(self.count)))

    @property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where each layer's gradients begin in the flat array: of weights, of biases."""
        sizes = [*(k * n for k, n in pairwise(self.widths)), *self.widths[1:]]
        found = tuple(accumulate(sizes, initial=0))
        return found[: self.count], found[self.count : -1]

    @property
    def taken(self) -> int:
        """Return the bytes of shared memory of a block."""
        return self.factors[2] if self.rows else self.places[2]

    @property
    def flat(self) -> int:
        """Return the values of all gradients: of weights, layer by layer, then of biases."""
        return sum(k * n for k, n in pairwise(self.widths)) + sum(self.widths[1:])


def pairs_of(padded: int) -> int:
    """Return the pairs of neighbouring columns of x, or of the result, that a lane has together."""
    return 4 if padded % 32 == 0 else 2


def _fits(info: DeviceInfo, taken: int, resident: int) -> bool:
    """Return whether so many blocks that take these bytes share a multiprocessor."""
    together = (taken + _RESERVED) * resident <= info.shared_per_multiprocessor
    return taken <= info.shared_per_block and together


@functools.lru_cache(maxsize=256)
def warp_sizes_of(
    info: DeviceInfo, dtype: str, widths: tuple[int, ...], backward: bool
) -> HalfSizes | None:
    """Return how warps run a network of these widths, from x to its result; None: they do not."""
    count = len(widths) - 1
    if dtype not in HALF_DTYPES or info.capability < (8, 0) or not 2 <= count <= MOST_LAYERS:
        return None
    if min(widths) < 1:
        return None
    ends = widths[0], max(widths[1:-1]), widths[-1]
    first, inner, last = (tiling.round_up(n, fragments.CHUNK) for n in ends)
    padded = first, inner, last
    if backward:
        return _back_sizes(info, widths, padded)
    for pieces, most in zip((2, 1), _WIDTHS, strict=True):
        if max(padded) > most:
            continue
        used = pieces * (inner // 2 + 8) + _OTHERS
        for together in range(max(4, _REGISTERS // (128 * used) * 4), 0, -4):
            warps = _WARPS if together % _WARPS == 0 else 4
            made = HalfSizes(widths, padded, pieces, warps, together // warps)
            if _fits(info, made.places[2], made.resident):
                return made
    return None


def _back_sizes(
    info: DeviceInfo, widths: tuple[int, ...], padded: tuple[int, int, int]
) -> HalfSizes | None:
    """Return how blocks make the gradients: the sums must fit the registers of one block.

    A warp has one part of them.
    """
    if max(padded[1:]) > 8 * _PIECES:
        return None
    made = HalfSizes(widths, padded, 1, 4, 1)
    warps = tiling.round_up(len(made.parts), 4)
    if warps > _BACK_WARPS:
        return None
    used = made.totals * 9 // 8 + padded[1] // 2 + _OTHERS
    one = replace(made, rows=1)
    row, fixed = one.factors[2] - one.places[2], made.places[2]
    for resident in range(max(1, _REGISTERS // (32 * warps * used)), 0, -1):
        room = min(info.shared_per_block, info.shared_per_multiprocessor // resident - _RESERVED)
        pieces = min((room - fixed) // row // 16, 2 * warps)
        if pieces > warps and pieces < 1.75 * warps:  # a second turn of few warps
            pieces = warps
        if 16 * pieces >= _BACK_ROWS:
            return replace(made, warps=warps, resident=resident, rows=16 * pieces)
    return None
