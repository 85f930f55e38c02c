"""How warp groups run a whole network in 16 bits on Hopper (`group_networks`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from numfuse.activations import Activation, get
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels.network_layers import MOST_LAYERS
from numfuse.backends.cuda.kernels.network_panels import ALIGNED, CHUNK, GROUP_ROWS, box_of
from numfuse.backends.cuda.plan.half_sizes import HALF_DTYPES, HalfSizes, warp_sizes_of
from numfuse.backends.cuda.plan.product import DeviceInfo

#: Columns of hidden layers: what is narrower, or between, pads more than mma.sync's pieces of 16.
#: (Forwards of 32 columns are mma.sync's: an H100 took 60 us for 2^20 rows, by warp groups 66.)
_FORWARD_WIDTHS, _BACK_WIDTHS = (64, 128), (32, 64)
#: ... of a backward whose rows go through shared memory, in panels of so many columns.
_WIDE, _PANEL = 128, 64
#: Columns of x and of the result at most.
_ENDS, _BACK_ENDS = 128, 64
#: Warp groups of a block at most.
_GROUPS, _BACK_GROUPS = 6, 4
#: ... that share a tile: the kernel has a product of gradients for each.
_SHARING_GROUPS = 3
#: Registers of a thread beside sums and rows: addresses, descriptors, what an activation needs.
_OTHERS = 44
#: Registers of a thread with rows and of one with sums, where these are one group's, by the groups
#: beside it: together those that the block has at its launch, or the group with sums would wait for
#: ever. And of the latter, those beside sums; and what is too few of the former to keep more there.
_APART_REGISTERS = {2: ((152, 200), (136, 232)), 3: ((104, 200), (96, 224))}
_ADDING, _FEW = 32, 96
#: Columns that the tensor cores add to a product at least: one of them is of ones.
_ONES = 8


@dataclass(frozen=True)
class GroupSizes(HalfSizes):
    """How warp groups run a network; places in shared memory are in bytes.

    A group has `GROUP_ROWS` rows of its own at a time.
    """

    #: Whether a backward has room for the cotangents of two tiles.
    tail_two: bool = False
    #: Whether each group of a backward has the weights' gradients of some layers, of all rows.
    shared: bool = False

    @property
    def groups(self) -> int:
        return self.warps // 4

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return where each layer's weights begin, and each one's bias, and the end of them."""
        pairs = zip(self.down, self.across, strict=True)
        sizes = [*(k * n * 2 for k, n in pairs), *(n * 4 for n in self.across)]
        *found, end = accumulate(sizes, initial=0)
        return tuple(found[: self.count]), tuple(found[self.count :]), end

    # --- of a backward: rows of x, of the cotangents, and of each hidden layer --------------------
    @property
    def x_width(self) -> int:
        """Return the columns of x's rows in shared memory: one panel, or with room for the ones."""
        own = self.widths[0]
        if own % 16 == 0 and own != box_of(own):
            return tiling.round_up(own + 1, 16)
        return self.padded[0]

    @property
    def one_inside(self) -> bool:
        """Return whether a column of ones is among those that pad x."""
        return self.x_width > self.widths[0]

    @property
    def tail_width(self) -> int:
        """Return the columns of the cotangents' rows: one panel, which is read several times."""
        last = self.padded[2]
        return last if last == box_of(last) else GROUP_ROWS

    @property
    def tile_bytes(self) -> int:
        """Return the bytes of a hidden layer's rows."""
        return GROUP_ROWS * self.padded[1] * 2

    @property
    def x_bytes(self) -> int:
        return GROUP_ROWS * self.x_width * 2

    @property
    def tail_bytes(self) -> int:
        return GROUP_ROWS * self.tail_width * 2

    @property
    def tail_at(self) -> int:
        """Return where a group's cotangents begin: behind two tiles of x."""
        return 2 * self.x_bytes

    @property
    def left_at(self) -> int:
        """Return where what goes into the layers behind the first begins."""
        return self.tail_at + (1 + self.tail_two) * self.tail_bytes

    @property
    def right_at(self) -> int:
        """Return where the gradients by the hidden layers' sums begin."""
        return self.left_at + (self.count - 1) * self.tile_bytes

    @property
    def group_bytes(self) -> int:
        return self.right_at + (self.count - 1) * self.tile_bytes

    @property
    def groups_at(self) -> int:
        return tiling.round_up(self.places[2], ALIGNED)

    @property
    def ones_at(self) -> int:
        return self.groups_at + self.groups * self.group_bytes

    @property
    def ones_bytes(self) -> int:
        return GROUP_ROWS * 2 * max(box_of(self.padded[1]), box_of(self.x_width))

    @property
    def taken(self) -> int:
        return self.ones_at + self.ones_bytes if self.rows else self.places[2]

    @property
    def one_columns(self) -> tuple[int, ...]:
        """Return which column of what goes into a layer is of ones."""
        inner = self.padded[1]
        first = self.widths[0] if self.one_inside else self.x_width
        return first, *[inner] * (self.count - 1)

    @property
    def total_columns(self) -> tuple[int, ...]:
        """Return the columns of each layer's sums of gradients, that of ones included."""
        return tuple(tiling.round_up(n + 1, _ONES) for n in self.one_columns)

    @property
    def tasks(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers whose gradients each group makes; all make all where none is shared."""
        layers = range(self.count)
        if not self.shared:
            return (tuple(layers),)
        each = -(-self.count // self.groups)
        return tuple(tuple(layers[i : i + each]) for i in range(0, each * self.groups, each))

    @property
    def sources(self) -> int:
        """Return of how many groups' rows a group makes gradients."""
        return self.groups if self.shared else 1

    @property
    def planes(self) -> int:
        """Return how many sums of all gradients a block has."""
        return 1 if self.shared else self.groups

    @property
    def totals_at(self) -> tuple[int, ...]:
        """Return the first of each layer's sums among those of a thread that has them."""
        found = []
        for layers in self.tasks:
            sizes = [self.total_columns[i] // 2 for i in layers]
            found += [*accumulate(sizes, initial=0)][:-1]
        return tuple(found)

    @property
    def totals(self) -> int:
        """Return the sums of a thread, those of its rows left out."""
        return max(sum(self.total_columns[i] // 2 for i in layers) for layers in self.tasks)

    @property
    def sums(self) -> int:
        """Return the sums of a thread's rows in one product."""
        return max(self.padded[:2]) // 2


@dataclass(frozen=True)
class ApartSizes(GroupSizes):
    """How warp groups run a backward of which one more has all sums of gradients.

    `warps` are those of all groups, `groups` those that take rows.
    """

    #: Whether relu's slopes are bits in registers.
    masks: bool = False
    #: Whether slopes are kept in shared memory.
    keeps_slopes: bool = False
    #: Whether the last hidden layer's gradients lie where the next rows of x will.
    next_is_spare: bool = False

    @property
    def groups(self) -> int:
        return self.warps // 4 - 1

    @property
    def values_at(self) -> tuple[int, ...]:
        """Return where what each hidden layer gives lies in a group's part."""
        return tuple(self.left_at + i * self.tile_bytes for i in range(self.count - 1))

    @property
    def right_at(self) -> int:
        """Return where the gradients by the last hidden layer's sums begin, if in no other place.

        Slopes of the other hidden layers are behind them.
        """
        return self.left_at + (self.count - 1) * self.tile_bytes

    @property
    def slopes_at(self) -> tuple[int, ...]:
        """Return where each hidden layer's slopes lie: the last one's are replaced."""
        last = self.count - 2
        more = (*range(1, last + 1), 0)
        return tuple(self.right_at + i * self.tile_bytes for i in more)

    @property
    def gradients_at(self) -> tuple[int, ...]:
        """Return where the gradients by each hidden layer's sums lie.

        The last ones where the next rows of x will, if so, which are those of one of two places.
        """
        return *self.values_at[1:], 0 if self.next_is_spare else self.right_at

    @property
    def group_bytes(self) -> int:
        tiles = self.count - 1 if self.keeps_slopes else 1 - self.next_is_spare
        return self.right_at + tiles * self.tile_bytes

    @property
    def full_at(self) -> int:
        """Return where mbarriers begin, two for each group and layer."""
        return self.ones_at + self.ones_bytes

    @property
    def taken(self) -> int:
        return self.full_at + 2 * 8 * self.groups * self.count

    @property
    def registers(self) -> tuple[int, int]:
        """Return the registers of a thread that has rows, and of one that has sums."""
        kinds = _APART_REGISTERS[self.groups]
        return next((k for k in kinds if self.totals + _ADDING <= k[1]), kinds[-1])

    @property
    def few(self) -> bool:
        """Return whether a thread with rows has no register to spare."""
        return self.registers[0] <= _FEW

    @property
    def tasks(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(self.count)),)

    @property
    def planes(self) -> int:
        return 1


@dataclass(frozen=True)
class WideSizes(GroupSizes):
    """How two warp groups run the backward of a network of 128 columns.

    Each makes half of every layer's gradients: of 64 columns of its sums, or of the last layer 64
    rows.
    """

    @property
    def x_width(self) -> int:
        return self.padded[0]

    @property
    def one_inside(self) -> bool:
        return False

    @property
    def tail_at(self) -> int:
        return self.x_bytes

    @property
    def ones_bytes(self) -> int:
        """Return the bytes of 16 rows of 16 columns, which are read again and again."""
        return 512

    @property
    def total_columns(self) -> tuple[int, ...]:
        return *self.down[:-1], _PANEL

    @property
    def totals_at(self) -> tuple[int, ...]:
        return tuple(accumulate([n // 2 for n in self.total_columns], initial=0))[:-1]

    @property
    def totals(self) -> int:
        return sum(self.total_columns) // 2

    @property
    def sums(self) -> int:
        return max(_PANEL, self.padded[0]) // 2


def wide_sizes_of(info: DeviceInfo, widths: tuple[int, ...]) -> GroupSizes | None:
    """Return how warp groups make the gradients of a network of 128 columns; None: they do not."""
    ends = widths[0], max(widths[1:-1], default=0), widths[-1]
    padded: Any = tuple(tiling.round_up(n, CHUNK) for n in ends)
    first, inner, last = padded
    if info.capability[0] != 9 or inner != _WIDE or max(first, last) > _BACK_ENDS:
        return None
    made = WideSizes(widths, padded, 1, 8, 1, 2 * GROUP_ROWS, False, True)
    ones = _ONES // 2 * made.count
    return _first(info, [(made, made.totals + ones + made.sums + _PANEL // 4 + _OTHERS)])


class Apart(NamedTuple):
    """A backward whose sums of gradients one group has for `groups` others, where that fits."""

    groups: int
    #: Whether relu's slopes are bits in registers, where they are kept at all.
    masks: bool = False


#: Activations whose backward takes no more registers than a thread with rows has.
_LIGHT = "gelu", "sigmoid", "silu", "softplus", "tanh"


def apart_rule(padded: tuple[int, int, int], count: int, activation: Activation) -> Apart | None:
    """Return how a backward has its sums of gradients apart; None where that was not faster.

    Of 64 columns and bfloat16, 2^20 rows, value and gradients on an H200, microseconds:

    - relu, 3 layers: 214 (three groups, bits), 220 (three), 228 (two) for 236; with 4 layers 272,
      291, 300 for 290; with 5 380, 381, 378 for 389;
    - relu with the gradient by the points, 3 layers: 274, 291, 307 for 308; with 4 337, 351, 368
      for 363;
    - 3 layers of tanh 416 (three), 449 (two) for 501, of silu 319, 365 for 350.

    Nothing else was timed. With the gradient by the points the others go the same way, so that the
    gradients by weights have the same bits.
    """
    if padded != (_PANEL, _PANEL, _PANEL) or not 3 <= count <= 5:
        return None
    if activation is get("relu"):
        return Apart(2) if count == 5 else Apart(3, True)
    light = any(activation is get(name) for name in _LIGHT)
    return Apart(3) if light and count == 3 else None


@functools.lru_cache(maxsize=256)
def apart_sizes_of(
    info: DeviceInfo,
    widths: tuple[int, ...],
    padded: tuple[int, int, int],
    rectified: bool,
    how: Apart,
) -> ApartSizes | None:
    """Return how groups run a backward whose sums are one group's; None: they do not."""
    first, inner, last = padded
    if info.capability[0] != 9 or inner != _PANEL or max(first, last) > _BACK_ENDS:
        return None
    if not 3 <= len(widths) - 1:
        return None
    made = ApartSizes(
        widths, padded, 1, 4 * (how.groups + 1), 1, GROUP_ROWS * how.groups, False, False,
        rectified and how.masks, not rectified,
    )  # fmt: skip
    found = [made]
    if rectified and made.x_bytes == made.tile_bytes and first == widths[0] and made.count >= 4:
        found.append(replace(made, next_is_spare=True))
    for s in found:
        s = replace(s, masks=s.masks and not s.few)
        if s.totals + _ADDING <= s.registers[1] and s.taken <= info.shared_per_block:
            return s
    return None


@functools.lru_cache(maxsize=256)
def half_sizes_of(
    info: DeviceInfo, dtype: str, widths: tuple[int, ...], backward: bool
) -> HalfSizes | None:
    """Return how blocks run a network of these widths, from x to its result; None: none does."""
    if dtype not in HALF_DTYPES or not 2 <= len(widths) - 1 <= MOST_LAYERS or min(widths) < 1:
        return None
    found = warp_sizes_of(info, dtype, widths, backward)
    return wide_sizes_of(info, widths) if found is None and backward else found


def _registers(groups: int) -> int:
    """Return the registers of a thread where so many groups are on a multiprocessor."""
    return min(255, 65536 // (128 * groups) // 8 * 8)


def _first(info: DeviceInfo, made: Sequence[tuple[GroupSizes, int]]) -> GroupSizes | None:
    """Return the first of these that fits, each with the registers of a thread."""
    for s, used in made:
        if used <= _registers(s.groups) and s.taken <= info.shared_per_block:
            return s
    return None


def group_sizes_of(
    info: DeviceInfo, widths: tuple[int, ...], padded: tuple[int, int, int], backward: bool
) -> GroupSizes | None:
    """Return how warp groups run a network of these widths; None: they do not."""
    first, inner, last = padded
    if info.capability[0] != 9:
        return None
    if inner not in (_BACK_WIDTHS if backward else _FORWARD_WIDTHS):
        return None
    if max(first, last) > (_BACK_ENDS if backward else _ENDS):
        return None
    if not backward:
        used = max(inner // 2 + inner // 4, inner // 4 + last // 2) + first // 4 + _OTHERS
        found = [GroupSizes(widths, padded, 1, 4 * n, 1) for n in range(_GROUPS, 0, -1)]
        return _first(info, [(s, used) for s in found])
    kinds = [(n, False) for n in range(_BACK_GROUPS, 1, -1)]
    kinds += [(n, True) for n in range(min(_SHARING_GROUPS, len(widths) - 1), 1, -1)]
    found = [
        GroupSizes(widths, padded, 1, 4 * n, 1, GROUP_ROWS * n, two, shared)
        for n, shared in kinds
        for two in (True, False)
    ]
    return _first(info, [(s, s.totals + s.sums + inner // 4 + _OTHERS) for s in found])
