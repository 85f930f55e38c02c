"""The text of row functions: the one place where an epilogue becomes a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Source(NamedTuple):
    """Where an epilogue's input is read."""

    name: str
    #: A slot of the context ("bias", ...); None: the row of accumulators.
    slot: str | None
    #: Its storage format.
    fmt: str
    #: Whether one element serves a row.
    once: bool = False


class Total(NamedTuple):
    """Where a result is added up."""

    name: str
    slot: str
    #: Whether its rows are, by groups of columns, not its columns by chunks of rows.
    across: bool = False


class Result(NamedTuple):
    """Where an epilogue's result is written."""

    name: str
    slot: str
    fmt: str
    #: The input in whose place it is written.
    source: str | None = None


def text(
    name: str,
    sources: Sequence[Source],
    results: Sequence[Result],
    formulas: Sequence[str],
    sums: Sequence[Total],
    streams: bool,
) -> str:
    """Return a row function as Python text.

    `sources` are in the order of the formula's arguments, `formulas` names what it returns, in its
    order, and `sums` those that are added up: to column sums, or when the row is finished.
    `streams`: store past the caches; the results begin on a line, and n is a multiple of STEP. A
    step goes to a few registers first: LLVM makes vectors of the loop over them, and non-temporal
    stores need whole ones. Spread between the arithmetic, the stores wait for memory while it goes
    on; copied from a finished row they would not. A result in the place of an input has its
    pointer: of two that could be the same, LLVM makes no vectors.
    """
    at = "at + q" if streams else "q"
    lines = [f"def {name}(context, acc, i, j, n):", "    WIDE_VECTORS()"]
    for name, slot, _, once in sources:
        place = "acc"
        if once and slot is not None:
            here = f"FROM_{name}(PLACE_OF(context, S_{slot.upper()}, i, j))[0]"
            lines.append(f"    one_{name} = WIDEN_{name}({here})")
            continue
        if slot is not None:
            place = f"SOURCE_ROW(context, S_{slot.upper()}, i, j, n, ITEM_{name})"
        lines.append(f"    from_{name} = FROM_{name}({place})")
    for name, slot, _, source in results:
        if source is not None:
            lines.append(f"    to_{name} = from_{source}")
            continue
        place = f"TARGET_ROW(context, S_{slot.upper()}, i, j, SIZE_{name})"
        lines.append(f"    to_{name} = {place if streams else f'TO_{name}({place})'}")
        if streams:
            lines.append(f"    room_{name} = ROOM_{name}()")
    for name, slot, across in sums:
        place = "SCRATCH_ROW(context, S_{})" if across else "OPEN_SUMS(context, S_{}, i, j, n)"
        lines.append(f"    sums_{name} = SUMS({place.format(slot.upper())})")
    arguments = ", ".join(
        f"one_{name}" if once else f"WIDEN_{name}(from_{name}[{at}])"
        for name, _, _, once in sources
    )
    body = [f"{', '.join(f'new_{name}' for name in formulas)} = FORMULA({arguments})"]
    for name, *_ in results:
        target = f"room_{name}[q]" if streams else f"to_{name}[q]"
        body.append(f"{target} = NARROW_{name}(new_{name})")
    for name, _, across in sums:
        body.append(f"sums_{name}[q] = {'' if across else f'sums_{name}[q] + '}new_{name}")
    if streams:
        lines += ["    for at in range(0, n, STEP):", "        for q in range(STEP):"]
        lines += [f"            {line}" for line in body]
        lines += [
            f"        STREAM_{name}(room_{name}, to_{name} + at * SIZE_{name})"
            for name, *_ in results
        ]
    else:
        lines += ["    for q in range(n):", *(f"        {line}" for line in body)]
        lines += [
            f"    FINISH_ROW(context, S_{slot.upper()}, i, j, n, SIZE_{name})"
            for name, slot, *_ in results
        ]
    lines += [f"    CLOSE_GROUPS(context, S_{x.slot.upper()}, i, j, n)" for x in sums if x.across]
    return "\n".join([*lines, ""])


def template(name: str, text: str) -> Callable[..., Any]:
    """Return a printed row function, as a template."""
    scope: dict[str, Any] = {"__name__": __name__}
    # This file's name: Numba's disk cache keeps what is compiled for a file that exists.
    exec(compile(text, __file__, "exec"), scope)
    made: Callable[..., Any] = scope[name]
    return made
