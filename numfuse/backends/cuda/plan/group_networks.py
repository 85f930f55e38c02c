"""Bindings of the kernels that run a whole network in 16 bits by wgmma: see `half_networks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numfuse.backends.cuda.compile import accesses
from numfuse.backends.cuda.compile.engines import Factor, GroupProduct, registers_of
from numfuse.backends.cuda.compile.intrinsics import dynamic_shared
from numfuse.backends.cuda.compile.unroll import inlined
from numfuse.backends.cuda.kernels import network_fragments as fragments
from numfuse.backends.cuda.kernels import network_panels as panels
from numfuse.backends.cuda.kernels.network_groups_backward import fetch_rows, settle_rows
from numfuse.backends.cuda.kernels.network_panels import (
    GROUP_ROWS,
    across,
    along,
    product_of,
    products_of,
)

if TYPE_CHECKING:
    from numfuse.backends.cuda.plan.group_sizes import ApartSizes, GroupSizes, WideSizes
    from numfuse.backends.cuda.plan.program import View

#: A word of two ones.
_ONES = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}
#: Values of a tile's rows that a thread loads one by one, at most: each is a register.
_PER_THREAD = 16


def group_bindings(s: GroupSizes, dtype: str, rectified: bool) -> dict[str, Any]:
    """Return what both kernels are bound to, beside what those with mma.sync are."""
    first, inner, last = s.padded
    head, head_rest = across(first, inner, first)
    middle, middle_rest = across(inner, inner, inner)
    tail, tail_rest = across(inner, last, inner)
    return {
        "MEMORY": dynamic_shared,
        "PLACE_OF": inlined(panels.panel_place),
        "GROUPS": s.groups,
        "RECTIFIED": rectified,
        "RECTIFY": panels.rectified(dtype),
        "HEAD": head_rest,
        "INNER": middle_rest,
        "TAIL": tail_rest,
        "MULTIPLY_FIRST": product_of(dtype, GroupProduct(inner, None, head, True)),
        "MULTIPLY": product_of(dtype, GroupProduct(inner, None, middle, True)),
        "MULTIPLY_LAST": product_of(dtype, GroupProduct(last, None, tail, True)),
    }


def _shortened(factor: Factor, columns: int) -> Factor:
    """Return a factor with the first columns of K alone."""
    return Factor(factor.turned, factor.steps[: columns // panels.CHUNK], factor.high)


def back_bindings(s: GroupSizes, dtype: str) -> dict[str, Any]:
    """Return what both kernels of gradients are bound to: places, and what words are made of."""
    to, bias_to = s.ends
    return {
        # (rows lie in shared memory as in memory)
        "SPREAD": (1,) * (s.count + 1),
        "TOTALS": s.totals,
        "TOTAL_COLUMNS": s.total_columns,
        "ONES_WORD": _ONES[dtype],
        "ONES_AT": s.ones_at,
        "ONES_BYTES": s.ones_bytes,
        "PADDED": s.x_width > s.widths[0] or s.tail_width > s.widths[-1],
        "SUMS": s.sums,
        "GROUPS_AT": s.groups_at,
        "GROUP_BYTES": s.group_bytes,
        "X_WIDTH": s.x_width,
        "X_BYTES": s.x_bytes,
        "TAIL_AT": s.tail_at,
        "TAIL_BYTES": s.tail_bytes,
        "TAIL_TWO": s.tail_two,
        "LEFT_AT": s.left_at,
        "RIGHT_AT": s.right_at,
        "TILE_BYTES": s.tile_bytes,
        "LENGTH": s.flat,
        "WEIGHTS_TO": to,
        "BIASES_TO": bias_to,
        "FETCH_WAIT": accesses.fetch_wait(0),
        "FETCH_WAIT_TAIL": accesses.fetch_wait(1),
        "BY_WORDS": dtype == "bfloat16",
        "TIMES": panels.times,
        "ONES_ABOVE": panels.ones_above(dtype),
        "STORE_WORD": fragments.store_word_if,
        "STORE_LOW": fragments.store_half_if(False),
        "STORE_HIGH": fragments.store_half_if(True),
    }


def group_back_bindings(s: GroupSizes, dtype: str) -> dict[str, Any]:
    """Return what the kernel of the gradients alone is bound to."""
    first, inner, last = s.padded
    head, _ = across(first, inner, first)
    rows_of_x = _shortened(along(GROUP_ROWS, s.x_width)[0], first)
    rows_of_tail = _shortened(along(GROUP_ROWS, s.tail_width)[0], last)
    back, rest = along(inner, inner)
    hidden, _ = across(GROUP_ROWS, inner, GROUP_ROWS)
    cotangents, _ = across(GROUP_ROWS, s.tail_width, GROUP_ROWS)
    points, points_rest = across(GROUP_ROWS, s.x_width, GROUP_ROWS)

    begin = GroupProduct(inner, rows_of_x, head, True)
    lefts = [*[hidden] * (s.count - 1), cotangents]
    rights = [points, *[hidden] * (s.count - 1)]
    sides = zip(s.total_columns, lefts, rights, strict=True)
    gradients = [GroupProduct(n, x, y, True) for n, x, y in sides]
    adds = {}
    for g, layers in enumerate(s.tasks):
        own = [(gradients[i], s.totals_at[i]) for i in layers for _ in range(s.sources)]
        adds[f"ADD_{g}"] = products_of(dtype, tuple(own), ((begin, 0),))
    moved, tail = along(first, inner)[0], along(inner, last)[0]
    return back_bindings(s, dtype) | {
        "ALONG": rest,
        "MULTIPLY_FIRST": product_of(dtype, begin),
        **adds,
        "ADDERS": len(s.tasks),
        "SHARED": s.shared,
        "SOURCES": s.sources,
        "TASKS": s.tasks,
        "TASK_COUNT": tuple(map(len, s.tasks)),
        "WORDS": 2 * (1 + s.sources * max(map(len, s.tasks))),
        "MULTIPLY_BACK": product_of(dtype, GroupProduct(inner, None, back, False)),
        "MULTIPLY_LAST_BACK": product_of(dtype, GroupProduct(inner, rows_of_tail, tail, False)),
        "MULTIPLY_MOVED": product_of(dtype, GroupProduct(first, None, moved, False)),
        "POINTS_ACROSS": points_rest,
        "TOTAL_AT": s.totals_at,
        "ONE_COLUMN": s.one_columns,
        "ONE_INSIDE": s.one_inside,
    }


def apart_back_bindings(s: ApartSizes, dtype: str) -> dict[str, Any]:
    """Return what the kernel is bound to whose sums of gradients are one group's."""
    first, inner, last = s.padded
    hidden, _ = across(GROUP_ROWS, inner, GROUP_ROWS)
    cotangents, _ = across(GROUP_ROWS, s.tail_width, GROUP_ROWS)
    points, _ = across(GROUP_ROWS, s.x_width, GROUP_ROWS)
    tail = along(inner, last)[0]

    def added(layer: int, left: Factor, right: Factor) -> Any:
        return products_of(
            dtype, ((GroupProduct(s.total_columns[layer], left, right, True), 0),), ()
        )

    def kib(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(at // panels.ALIGNED for at in places)

    return group_back_bindings(s, dtype) | {
        "MULTIPLY_FIRST": group_bindings(s, dtype, False)["MULTIPLY_FIRST"],
        "MULTIPLY_LAST_BACK": product_of(dtype, GroupProduct(inner, None, tail, False)),
        "ADD_FIRST": added(0, hidden, points),
        "ADD": added(1, hidden, hidden),
        "ADD_LAST": added(s.count - 1, cotangents, hidden),
        "GIVEN": max(first, last) // 4,
        "X_BOX": panels.box_of(s.x_width),
        "TAIL_BOX": panels.box_of(s.tail_width),
        "MASKS": s.masks,
        "FEW": s.few,
        # (relu's values of the last hidden layer are 16 registers more in its product)
        "LEFT_IS_KEPT": not s.keeps_slopes and not s.few,
        "NEXT_IS_SPARE": s.next_is_spare,
        "VALUES_KIB": kib(s.values_at),
        "SLOPES_KIB": kib(s.slopes_at),
        "KEPT_KIB": kib(s.slopes_at if s.keeps_slopes else s.values_at),
        "GRADIENTS_KIB": kib(s.gradients_at),
        "FULL_AT": s.full_at,
        "REGISTERS_MORE": registers_of(s.registers[1], True),
        "REGISTERS_FEWER": registers_of(s.registers[0], False),
        "FETCH_WAIT_FIRST": accesses.fetch_wait(1),
        "KEEP_BITS": panels.keep_bits(dtype),
        "WHERE_BITS": panels.where_bits,
    }


def wide_back_bindings(s: WideSizes, dtype: str) -> dict[str, Any]:
    """Return what the kernel of the gradients of 128 columns is bound to.

    It takes halves of 64 columns.
    """
    first, inner, last = s.padded
    half = GROUP_ROWS
    rows_of_x = along(GROUP_ROWS, first)[0]
    rows_of_tail = _shortened(along(GROUP_ROWS, s.tail_width)[0], last)
    hidden_rows, rest = along(GROUP_ROWS, inner)
    panel = across(GROUP_ROWS, half, GROUP_ROWS)[0]
    cotangents = across(GROUP_ROWS, s.tail_width, GROUP_ROWS)[0]
    points, points_rest = across(GROUP_ROWS, first, GROUP_ROWS)
    hidden, hidden_rest = across(GROUP_ROWS, inner, GROUP_ROWS)

    def product(left: Factor, right: Factor, columns: int = half, added: bool = False) -> Any:
        return product_of(dtype, GroupProduct(columns, left, right, added))

    def added(left: Factor, right: Factor, columns: int) -> Any:
        of_x = GroupProduct(columns, left, right, True)
        ones = GroupProduct(8, left, panels.repeated(panels.CHUNK, GROUP_ROWS), True)
        return products_of(dtype, ((of_x, 0),) * s.groups, ((ones, 0),) * s.groups)

    return back_bindings(s, dtype) | {
        "ADD_FIRST": added(panel, points, first),
        "ADD": added(panel, hidden, inner),
        "ADD_LAST": added(cotangents, panel, half),
        "WIDTH": half,
        "HIDDEN": inner,
        "MULTIPLY_FIRST": product(rows_of_x, across(first, inner, first)[0], added=True),
        "MULTIPLY": product(hidden_rows, across(inner, inner, inner)[0], added=True),
        "MULTIPLY_BACK": product(hidden_rows, along(inner, inner)[0]),
        "MULTIPLY_LAST_BACK": product(rows_of_tail, along(inner, last)[0]),
        "MULTIPLY_MOVED": product(hidden_rows, along(first, inner)[0], first),
        # a half of the columns, or of the rows, of weights further, in 16 bytes
        "HEAD_STEP": first * 2 * half // 16,
        "INNER_STEP": inner * 2 * half // 16,
        "BACK_STEP": half * 2 * half // 16,
        "TAIL_STEP": half * 2 * panels.box_of(last) // 16,
        "ALONG": rest,
        "POINTS_ACROSS": points_rest,
        "HIDDEN_ACROSS": hidden_rest,
        "PANEL_BYTES": GROUP_ROWS * half * 2,
        "WORDS": 4 * s.groups,
        "ONES_TOTALS": 4 * s.count,
        "TOTAL_AT": s.totals_at,
    }


def _unit(x: View) -> int:
    """Return how many values of a row are brought to shared memory together."""
    whole = x.strides[-1] == 1 and x.shape[-1] % 8 == 0
    return 8 if whole and x.aligned(x.strides[:-1]) >= 16 else 1


def _each(x: View) -> tuple[int, int, int]:
    """Return values of a unit, units of a row as a power of two's bits, and a thread's units."""
    unit = _unit(x)
    bits = (x.shape[-1] // unit - 1).bit_length()
    return unit, bits, max(1, (GROUP_ROWS << bits) // 128)


def group_rows(end: str, x: View, width: int, warps: int = 4) -> dict[str, Any]:
    """Return how rows of x ("POINTS"), or cotangents, come to shared memory, by so many warps."""
    unit, bits, each = _each(x)
    names = {
        "UNIT": unit,
        "UNITS": x.shape[-1] // unit,
        "SPREAD_BITS": bits,
        "PER_THREAD": each,
        "SIDE_WIDTH": width,
        "TEAM": 32 * warps,
        "TEAM_ROWS": GROUP_ROWS // 4 * warps,
        "COPY": accesses.fetch16,
    }
    return {
        f"{end}_PER_THREAD": each,
        f"FETCH_{end}": inlined(fetch_rows, **names),
        f"SETTLE_{end}": inlined(settle_rows, **names),
    }


def fits(x: View, grad: View, most: int = _PER_THREAD) -> bool:
    """Return whether the gradients' kernel takes arrays of these strides and alignments.

    `most`: of values that a thread loads one by one.
    """
    ends = [(_unit(y), _each(y)[2]) for y in (x, grad)]
    return not any(unit == 1 and each > most for unit, each in ends)


def moves_pairs(x: View) -> bool:
    """Return whether two neighbours of a row of d_x are one access."""
    whole = x.strides[-1] == 1 and x.shape[-1] % 2 == 0
    return whole and x.aligned(x.strides[:-1]) >= 4
