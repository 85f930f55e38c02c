"""wgmma of `cuda_machine`: a warp's part of one block of inline PTX, read from its text.

A warp of a group has 16 rows of the result, of X's fragments, or of X in shared memory; Y is all of
the group's. So warps are computed one by one, at once where they stand: a wait does nothing.
Matrices in shared memory are read by their descriptors (PTX ISA 9.7.15.5.1), swizzled by address.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

_KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
_MULTIPLY = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(\w+)\.\w+ "
    r"\{([^}]*)\}, (\{[^}]*\}|dx), dy, p, 1, 1((?:, \d)+)"
)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\$(\d+)", text)]


def _addresses(low: int, high: int, turned: bool, values: int, depth: int) -> Any:
    """Return where the elements of a factor lie: `values` rows of X or columns of Y, by K.

    `low` and `high` are a descriptor's words: bits 0-13 the beginning, 16-29 from a panel to the
    next, 32-45 from 8 rows to the next, 62-63 the swizzle; but for that of all, in 16 bytes.
    """
    start, panel = (low & 0x3FFF) << 4, (low >> 16 & 0x3FFF) << 4
    group, row = (high & 0x3FFF) << 4, {1: 128, 2: 64, 3: 32}[high >> 30 & 3]
    n, k = np.mgrid[:values, :depth]
    if turned:
        box = row // 2
        at = start + k // 8 * group + k % 8 * row + n % box * 2 + n // box * panel
    else:
        assert depth * 2 <= row, "an instruction reads within a panel"
        at = start + n // 8 * group + n % 8 * row + k * 2
    return at ^ (at >> 3 & row - 16)


@functools.cache
def steps_of(text: str) -> tuple[int, list[Callable[..., None]]]:
    """Return the number of sums of a block of PTX, and what its instructions do.

    These take the shared memory, the warp's number in its group, the operands of its lanes, sums
    among them, and words that the block sets.
    """
    found: list[Callable[..., None]] = []
    count = 0
    for line in text.split(";"):
        line = line.strip()
        if match := re.match(r"setp\.(ne|eq)\.b32 p, (\S+), 0", line):
            found.append(_predicate(match[1], match[2]))
        elif match := re.match(r"add\.s32 w, \$(\d+), (-?\d+)", line):
            found.append(_word(int(match[1]), int(match[2])))
        elif match := re.match(r"mov\.b64 (d[xy]), \{w, (\d+)\}", line):
            found.append(_descriptor(match[1], int(match[2])))
        elif match := _MULTIPLY.match(line):
            own = _numbers(match[3])
            count = max(count, own[-1] + 1)
            assert len(own) == int(match[1]) // 2
            bits = [int(b) for b in re.findall(r"\d", match[5])]
            found.append(_product(own, int(match[1]), _KINDS[match[2]], match[4], bits))
    return count, found


def _predicate(how: str, text: str) -> Callable[..., None]:
    def step(shared: Any, warp: int, lanes: Any, words: dict[str, Any]) -> None:
        number = _numbers(text)
        value = int(lanes[0][number[0]]) if number else int(text)
        words["p"] = (value != 0) == (how == "ne")

    return step


def _word(operand: int, more: int) -> Callable[..., None]:
    def step(shared: Any, warp: int, lanes: Any, words: dict[str, Any]) -> None:
        own = {int(lane[operand]) & 0xFFFFFFFF for lane in lanes}
        assert len(own) == 1, "a descriptor is one for all lanes"
        words["w"] = own.pop() + more

    return step


def _descriptor(name: str, high: int) -> Callable[..., None]:
    def step(shared: Any, warp: int, lanes: Any, words: dict[str, Any]) -> None:
        words[name] = words["w"], high

    return step


def _product(
    own: list[int], columns: int, dtype: Any, left: str, bits: list[int]
) -> Callable[..., None]:
    rows = np.arange(16)

    def read(shared: Any, at: Any) -> Any:
        assert at.max() + 2 <= len(shared), f"shared memory at {at.max()}"
        return np.frombuffer(shared, np.uint16)[at >> 1].view(dtype).astype(float)

    def step(shared: Any, warp: int, lanes: Any, words: dict[str, Any]) -> None:
        if left == "dx":
            at = _addresses(*words["dx"], bool(bits[0]), 64, 16)
            x = read(shared, at[16 * warp + rows])
        else:
            x = np.zeros((16, 16))
            for lane, values in enumerate(lanes):
                given = np.array([values[n] for n in _numbers(left)], np.int32)
                pairs = given.view(dtype).astype(float).reshape(4, 2)
                for r in range(4):
                    x[(lane >> 2) + 8 * (r % 2), 2 * (lane & 3) + 8 * (r // 2) :][:2] = pairs[r]
        y = read(shared, _addresses(*words["dy"], bool(bits[-1]), columns, 16))
        places = [
            (lane, number, (lane >> 2) + 8 * (i // 2 % 2), i // 4 * 8 + 2 * (lane & 3) + i % 2)
            for lane in range(32)
            for i, number in enumerate(own)
        ]
        sums = np.zeros((16, columns))
        for lane, number, row, column in places:
            sums[row, column] = lanes[lane][number]
        with np.errstate(all="ignore"):
            made = (x @ y.T + (sums if words["p"] else 0)).astype(np.float32)
        for lane, number, row, column in places:
            lanes[lane][number] = made[row, column]

    return step


def together(text: str, shared: Any, warp: int, values: list[list[Any]]) -> list[list[Any]]:
    """Return the sums of a warp's lanes after a block of PTX, of its lanes' operands.

    An operand's number is that of the text: sums come twice, as results and as operands.
    """
    count, steps = steps_of(text)
    lanes = [[*own[:count], *own] for own in values]
    words: dict[str, Any] = {}
    for step in steps:
        step(shared, warp, lanes, words)
    return [own[:count] for own in lanes]
