"""Passes over rows, printed from an epilogue: arrays of any strides, that may repeat along an axis.

A thread has neighbours of a row, 16 bytes of them where all rows allow it. Two results may be the
even and the odd columns of one array, which is then stored as such. Results are stored,
added up by column in chunks of rows, in the order of `passes.slopes`, or added up by row: a
thread's neighbours, then the lanes of a warp by halves, and what warps have made afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import accesses, elements
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import kernel, types
from numfuse.backends.cuda.kernels.ampere import registers
from numfuse.backends.cuda.kernels.elementwise import formula
from numfuse.backends.cuda.kernels.passes import chunk_of, grid_of, quotient_of, threads_of
from numfuse.backends.cuda.kernels.pointwise import Result, Source, names_of, once, template_of
from numfuse.backends.cuda.plan.product import WIDE_SINCE, DeviceInfo, Launch, Operand, Slot
from numfuse.epilogues import Epilogue
from numfuse.language.graph import topological

#: Threads that give each other values.
WARP = 32
#: Operations of a formula, times its calls in the body of a loop: more would be slow to compile.
_MOST_OPERATIONS = 2048


class _Access(NamedTuple):
    """How a thread reads or writes an array: `values` neighbours of a row, or one."""

    slot: str
    operand: Operand
    values: int
    #: 2 of an array whose even and odd columns are two results.
    times: int = 1

    @property
    def has_rows(self) -> bool:
        return self.operand.strides[1] != 0

    @property
    def is_wide(self) -> bool:
        return self.values > 1 and self.operand.strides[2] != 0

    @property
    def start(self) -> str:
        """Return where it begins for a thread."""
        step = str(self.times * self.operand.itemsize) if self.is_wide else f"column_{self.slot}"
        column = f" + column * {step}" if self.operand.strides[2] else ""
        return f"from_{self.slot} + place * place_{self.slot}{column}"

    @property
    def held(self) -> int:
        """Return the values of 16 bytes."""
        return 16 // self.operand.itemsize

    @property
    def parts(self) -> int:
        """Return the accesses of 16 bytes."""
        return self.times * self.values // self.held

    def load(self, to: str, at: str) -> list[str]:
        """Return the lines that read what a thread has of a row."""
        if not self.is_wide:
            return [f"{to} = LOAD_{self.slot}({at}, 0)"]
        lines = []
        for part in range(self.parts):
            lines.append(f"w0, w1, w2, w3 = LOAD_WORDS({at} + {16 * part})")
            lines.append(f"{to}_part{part} = AS_VALUES_{self.slot}(w0, w1, w2, w3)")
        return lines

    def value(self, of: str, v: int) -> str:
        """Return neighbour v of what was read."""
        return f"{of}_part{v // self.held}[{v % self.held}]" if self.is_wide else of

    def put(self, v: int, value: str) -> list[str]:
        """Return the lines that keep neighbour v for `store`."""
        return [f"made_{self.slot}_{v // self.held}[{v % self.held}] = {value}"]

    def store(self, at: str, value: str) -> list[str]:
        """Return the lines that write a thread's part of a row, or the one value."""
        if self.values == 1:
            return [f"STORE_{self.slot}({at}, 0, {value})"]
        lines = []
        for part in range(self.parts):
            lines.append(f"w0, w1, w2, w3 = AS_WORDS_{self.slot}(made_{self.slot}_{part})")
            lines.append(f"STORE_WORDS({at} + {16 * part}, w0, w1, w2, w3)")
        return lines


class Sums(NamedTuple):
    """The results that are added up by column, and those by row, by their names."""

    columns: Sequence[str] = ()
    rows: Sequence[str] = ()

    @property
    def slots(self) -> list[str]:
        """Return the names of the tables that they go to, in an order."""
        return [*(f"sums_{x}" for x in self.columns), *(f"rows_{x}" for x in self.rows)]


def _row(
    u: int, sources: Sequence[Source], results: Sequence[Result], sums: Sums,
    accesses_of: Mapping[str, _Access], odd: Mapping[str, str], values: int, lanes: int,
) -> list[str]:  # fmt: skip
    """Return the lines that compute the row which is read as number u."""
    lines = [f"row_sum_{name} = ZERO" for name in sums.rows]
    added = *sums.columns, *sums.rows
    made = ", ".join(f"new_{name}" for name in dict.fromkeys([*names_of(results), *added]))
    for v in range(values):
        given = []
        for x in sources:
            access = accesses_of.get(x.name)
            if access is None:
                given.append(f"in_{x.name}")
            else:
                given.append(access.value(f"in_{x.name}{f'_row{u}' * access.has_rows}", v))
        lines.append(f"{made} = FORMULA({', '.join(given)})")
        lines += [f"run_{name}_{v} = run_{name}_{v} + new_{name}" for name in sums.columns]
        lines += [f"row_sum_{name} = row_sum_{name} + new_{name}" for name in sums.rows]
        for name, slot, _ in results if values > 1 else ():
            access = accesses_of[odd.get(slot, slot)]
            lines += access.put(access.times * v + (slot in odd), f"new_{name}")
    for name, slot, _ in (x for x in results if x.slot not in odd):
        lines += accesses_of[slot].store(f"at_{slot} + row_{u} * row_{slot}", f"new_{name}")
    for name in sums.rows:
        lines.append(f"row_sum_{name} = row_sum_{name} if inside else ZERO")
        distance = lanes // 2
        while distance:
            other = f"cuda.shfl_xor_sync(0xFFFFFFFF, row_sum_{name}, {distance})"
            lines.append(f"row_sum_{name} = row_sum_{name} + {other}")
            distance //= 2
        at = f"(place * m + row_{u}) * parts + part"
        lines += ["if first:", f"    STORE_SUM(rows_{name}, {at}, row_sum_{name})"]
    return lines


def text(
    sources: Sequence[Source], results: Sequence[Result], sums: Sums,
    accesses_of: Mapping[str, _Access], odd: Mapping[str, str], values: int, ahead: int, lanes: int,
) -> str:  # fmt: skip
    """Return the kernel of which a thread has `values` neighbours of the rows of a chunk.

    `ahead` rows are read before the first of them is computed. Without sums by column a chunk is
    one row. `odd` has the slots of results that go between the values of another one, and its slot.
    With sums by row, `lanes` threads side by side have them of one row: behind the last
    neighbours of a row they do as those do, and count for nothing.
    """
    body = [f"at_{slot} = {access.start}" for slot, access in accesses_of.items()]
    arrays = [(x.name, accesses_of[x.name]) for x in sources if not x.once]
    for name, access in arrays:
        body += [] if access.has_rows else access.load(f"in_{name}", f"at_{name}")
    turn: list[str] = []
    for u in range(ahead):
        turn.append(f"row_{u} = " + (f"min(row + {u}, last - 1)" if ahead > 1 else "row"))
        for name, access in arrays:
            at = f"at_{name} + row_{u} * row_{name}"
            turn += access.load(f"in_{name}_row{u}", at) if access.has_rows else []
    for u in range(ahead):
        each = _row(u, sources, results, sums, accesses_of, odd, values, lanes)
        turn += [f"if row + {u} < end:", *(f"    {x}" for x in each)] if ahead > 1 else each
    columns = [(f"{name}_{v}", name, v) for name in sums.columns for v in range(values)]
    if columns:
        body += [f"value_{x} = ZERO" for x, *_ in columns]
        body += ["while row < last:", "    end = min(row + RUN, last)"]
        body += [f"    run_{x} = ZERO" for x, *_ in columns]
        body += ["    while row < end:", *(f"        {x}" for x in turn), f"        row += {ahead}"]
        body += [f"    value_{x} = value_{x} + run_{x}" for x, *_ in columns]
        for x, name, v in columns:
            body.append(f"STORE_SUM(sums_{name}, number * n + column + {v}, value_{x})")
    else:
        body += turn
    head = once([x for x in sources if x.once])
    for _, slot, _ in (x for x in results if values > 1 and x.slot not in odd):
        for part in range(accesses_of[slot].parts):
            held = accesses_of[slot].held
            head.append(f"    made_{slot}_{part} = cuda.local.array({held}, REAL)")
    arguments = [f"from_{x.name}" for x in sources if x.once]
    for slot in accesses_of:
        arguments += [f"{part}_{slot}" for part in ("from", "place", "row", "column")]
    arguments += [*sums.slots, *"m n per_row chunks length total".split()]
    where = [f"        column = (i - number * per_row) * {values}"]
    if sums.rows:
        where += ["        inside = column < n", f"        part = column // {values * lanes}"]
        where += [f"        parts = per_row // {lanes}", f"        first = i % {lanes} == 0"]
        where += [f"        column = min(column, n - {values})"]
    lines = [
        f"def pointwise({', '.join(arguments)}):",
        *head,
        "    for i in range(cuda.grid(1), total, cuda.gridsize(1)):",
        "        number = QUOTIENT(i, per_row)",
        *where,
        "        place = QUOTIENT(number, chunks)",
        "        row = (number - place * chunks) * length",
        "        last = min(row + length, m)",
        *(f"        {x}" for x in body),
    ]
    return "\n".join([*lines, ""])


def _bindings(accesses_of: Mapping[str, _Access], accumulator: str) -> dict[str, Any]:
    """Return how arrays are read and written."""
    found: dict[str, Any] = {}
    for slot, access in accesses_of.items():
        dtype = access.operand.dtype
        found[f"LOAD_{slot}"] = elements.loads(dtype)
        found[f"STORE_{slot}"] = elements.stores(dtype)
        if access.is_wide:
            found[f"AS_VALUES_{slot}"] = registers.words_as(dtype, accumulator)
            found[f"AS_WORDS_{slot}"] = registers.as_words(dtype, accumulator)
            found |= {"LOAD_WORDS": accesses.load_words, "STORE_WORDS": accesses.store_words}
    return found


def launch(
    info: DeviceInfo,
    epilogue: Epilogue,
    accumulator: str,
    sources: Sequence[Source],
    results: Sequence[Result],
    operands: Mapping[str, Operand],
    sums: Sums,
    sizes: tuple[int, int, int],
    short: bool,
    woven: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Launch, int, int]:
    """Return the launch of an epilogue over rows, and the chunks and parts of its sums.

    `operands` has the arrays by their slots; along an axis where a stride is 0 an array repeats.
    `sizes` are M, N and the places. `woven` has the slots of results that are the odd columns of an
    array of which another one, by its slot, is the even ones. Sums go to the slots "sums_" and
    their names, of columns: (places, chunks, N), and "rows_" and theirs, (places, M, parts), in the
    accumulator's dtype; they are joined afterwards.
    """
    m, n, places = sizes
    added = *sums.columns, *sums.rows
    chosen = epilogue.select(*dict.fromkeys([*names_of(results), *added]))
    sources = [x for x in sources if x.name in chosen.inputs]
    slots = [x.slot for x in sources if not x.once] + [x.slot for x in results]
    arrays = {slot: operands[slot] for slot in slots if slot not in woven}
    for even in woven.values():
        place, row, _ = arrays[even].strides
        arrays[even] = replace(arrays[even], strides=(place, row, 1))
    values = 16 // min((x.itemsize for x in arrays.values()), default=16)
    if (
        n % values
        or info.capability < max([WIDE_SINCE[x.dtype] for x in arrays.values()], default=(1, 0))
        or not all(x.in_wholes(n, 16 // x.itemsize) for x in arrays.values() if x.strides[2])
    ):
        values, woven, arrays = 1, {}, {slot: operands[slot] for slot in slots}
    length, ahead = (chunk_of(m, n), tiling.PASS_AHEAD) if sums.columns else (1, 1)
    lanes = WARP if sums.rows and info.capability[0] else 1
    while ahead > 1 and len(topological(chosen.graphs)) * values * ahead > _MOST_OPERATIONS:
        ahead //= 2
    evens = set(woven.values())
    accesses_of = {
        slot: _Access(slot, x, values, 1 + (slot in evens)) for slot, x in arrays.items()
    }
    chunks, per_row = -(-m // length), tiling.round_up(n // values, lanes)
    total = places * chunks * per_row
    printed = text(sources, results, sums, accesses_of, woven, values, ahead, lanes)
    template = template_of(printed)
    bindings = _bindings(accesses_of, accumulator) | {
        "FORMULA": formula(chosen, tuple(x.name for x in sources), accumulator, short=short),
        "REAL": getattr(types, accumulator),
        "ZERO": np.dtype(accumulator).type(0),
        "RUN": tiling.RUN,
        "STORE_SUM": elements.stores(accumulator),
        "QUOTIENT": quotient_of(total, info),
    }
    numbers = [x for x in sources if x.once]
    words = " ".join(f"from_{x.name}" for x in numbers)
    schema = Schema(template, f64=words, u64=" ".join(sums.slots))
    made = kernel(
        template, schema.signature, threads=threads_of(info), name=epilogue.name, **bindings
    )
    given: dict[str, Any] = {f"from_{x.name}": Slot(x.slot) for x in numbers}
    for slot, x in arrays.items():
        given |= {f"from_{slot}": Slot(slot)}
        given |= zip((f"place_{slot}", f"row_{slot}", f"column_{slot}"), x.steps, strict=True)
    given |= {slot: Slot(slot) for slot in sums.slots}
    given |= {"m": m, "n": n, "per_row": per_row, "chunks": chunks, "length": length}
    launch = Launch(made, grid_of(total, info), schema(**given, total=total))
    return launch, chunks, per_row // lanes
