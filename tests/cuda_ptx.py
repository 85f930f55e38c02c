"""Inline PTX of several lines without a branch, as Python: for `cuda_machine`.

Registers of 32 and 64 bits hold integers of their width without a sign, those of float64 NumPy's.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

WORD, LONG = (1 << 32) - 1, (1 << 64) - 1


def signed(value: Any, bits: int) -> int:
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if value >> (bits - 1) else value


def fused(a: Any, b: Any, c: Any) -> np.float64:
    """a b + c, rounded once."""
    with np.errstate(all="ignore"):
        plain = np.float64(a) * np.float64(b) + np.float64(c)
    if not np.isfinite(a) or not np.isfinite(b) or not np.isfinite(c):
        return plain
    whole = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if not whole:
        return plain  # with its sign
    try:
        return np.float64(float(whole))
    except OverflowError:
        return np.float64(np.copysign(np.inf, float(whole > 0) - 0.5))


def _dot(a: int, b: int, c: int) -> int:
    """dp4a.s32.s32 (9.7.1.23): four products of signed bytes and a sum."""
    return sum(signed(a >> 8 * i, 8) * signed(b >> 8 * i, 8) for i in range(4)) + signed(c, 32)


def _permuted(a: int, b: int, selectors: int) -> int:
    """prmt.b32 (9.7.9.7): bytes of both words by their numbers, or their signs alone."""
    both = (a & WORD) | (b & WORD) << 32
    found = 0
    for i in range(4):
        byte = both >> 8 * (selectors >> 4 * i & 7) & 255
        if selectors >> 4 * i & 8:
            byte = 255 * (byte >> 7)
        found |= byte << 8 * i
    return found


def _rounded(x: Any, how: Callable[[Any], Any]) -> int:
    return int(how(x)) & LONG if np.isfinite(x) else 1 << 63


#: What an instruction makes of its operands.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "add.s64": lambda a, b: a + b & LONG,
    "and.b32": lambda a, b: a & b & WORD,
    "shl.b32": lambda a, b: a << b & WORD,
    "xor.b32": lambda a, b: (a ^ b) & WORD,
    "shr.s64": lambda a, b: signed(a, 64) >> b & LONG,
    "shr.s32": lambda a, b: signed(a, 32) >> b & WORD,
    "mul.hi.s32": lambda a, b: signed(a, 32) * signed(b, 32) >> 32 & WORD,
    "mad.lo.s32": lambda a, b, c: signed(a, 32) * signed(b, 32) + signed(c, 32) & WORD,
    "dp4a.s32.s32": lambda a, b, c: _dot(a, b, c) & WORD,
    "prmt.b32": _permuted,
    "setp.ne.b32": lambda a, b: a != b,
    "selp.f32": lambda a, b, p: a if p else b,
    "mul.f64": lambda a, b: np.float64(a) * np.float64(b),
    "fma.rn.f64": fused,
    "cvt.rni.s64.f64": lambda x: _rounded(x, np.rint),
    "cvt.rmi.s64.f64": lambda x: _rounded(x, np.floor),
    "cvt.rzi.s64.f64": lambda x: _rounded(x, np.trunc),
    "cvt.rni.f64.f64": lambda x: np.rint(np.float64(x)),
    "cvt.rn.f64.s64": lambda x: np.float64(signed(x, 64)),
}


def _literal(word: str) -> Any:
    if word.startswith("0d"):
        return np.float64(struct.unpack(">d", bytes.fromhex(word[2:]))[0])
    return int(word, 0)


def _result(x: Any) -> Any:
    """Return what a register holds: a word, or a float64, also where it was put together of two."""
    if isinstance(x, int) and x > WORD:
        return np.int64(signed(x, 64)).view(np.float64)
    return signed(x, 32) if isinstance(x, int) else x


@functools.cache
def block(text: str) -> Callable[[Any, list[Any]], Any]:
    """Return what a block of PTX does with its operands: its result, or a list of several."""
    statements = [s.strip() for s in text.strip().strip("{}").split(";")]
    steps = []
    wanted: set[int] = set()
    for statement in statements:
        if not statement or statement.startswith(".reg"):
            continue
        name, _, rest = statement.partition(" ")
        operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        to, *of = operands
        wanted |= {int(n) for n in re.findall(r"\$(\d+)", to)}
        steps.append((name, to, tuple(of)))
    count = len(wanted)
    assert wanted == set(range(count)), f"results are written out of order: {text}"

    lines = [f"{_name(f'${count + i}')} = given[{i}]" for i in _given(steps, count)]
    scope: dict[str, Any] = {"LONG": LONG, "WORD": WORD, "result": _result}

    def value(word: str) -> str:
        if word[0] not in "-0123456789":
            return _name(word)
        name = f"literal{len(scope)}"
        scope[name] = _literal(word)
        return name

    for name, to, of in steps:
        if to.startswith("{"):
            low, high = (_name(x.strip()) for x in to.strip("{}").split(","))
            lines += [f"whole = int({value(of[0])}) & LONG", f"{low} = whole & WORD"]
            lines += [f"{high} = whole >> 32"]
        elif of[0].startswith("{"):
            low, high = (value(x.strip()) for x in of[0].strip("{}").split(","))
            lines += [f"{_name(to)} = (int({low}) & WORD) | (int({high}) & WORD) << 32"]
        else:
            scope[operation := name.replace(".", "_")] = OPERATIONS[name]
            lines += [f"{_name(to)} = {operation}({', '.join(map(value, of))})"]
    made = [f"result({_name(f'${i}')})" for i in range(count)]
    lines += [f"return {made[0] if count == 1 else '[' + ', '.join(made) + ']'}"]
    exec("def run(machine, given):\n    " + "\n    ".join(lines), scope)
    run: Callable[[Any, list[Any]], Any] = scope["run"]
    return run


def _name(register: str) -> str:
    """Return what a register is called in Python."""
    return re.sub(r"\W", "_", f"r{register}")


def _given(steps: list[tuple[str, str, tuple[str, ...]]], count: int) -> list[int]:
    """Return the numbers of the operands that are read."""
    numbers = {int(n) for *_, of in steps for word in of for n in re.findall(r"\$(\d+)", word)}
    return sorted(n - count for n in numbers if n >= count)
