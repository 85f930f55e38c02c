"""The tasks that take results apart and add them up, whatever made them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["block_index", "chosen", "item", "single", "total", "unchanged"]


def single(block: Any) -> Any:
    """The one block in the nested lists that Dask makes along axes which the result lacks."""
    while isinstance(block, list):
        (block,) = block
    return block


def block_index(block_id: tuple[int, ...] = ()) -> tuple[int, ...]:
    """A task's own place in its graph, handed to the block function as an operand."""
    return block_id


def item(block: Any, *, number: int, to: Any = None) -> Any:
    """One of the results of a block."""
    block = single(block)[number]
    return block if to is None else block.astype(to, copy=False)


def chosen(block: Any, *, numbers: tuple[int, ...]) -> Any:
    """Some of the results of a block."""
    return tuple(block[i] for i in numbers)


def unchanged(block: Any, axis: Any = None, keepdims: Any = None) -> Any:
    return block


def total(blocks: Any, axis: Any = None, keepdims: Any = None) -> Any:
    """The sum of some blocks, or tuples of them, in their order, whichever was there first."""
    flat = list(_flat(blocks))
    if isinstance(flat[0], tuple):
        return tuple(_added(parts) for parts in zip(*flat, strict=True))
    return _added(flat)


def _added(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    result = parts[0] + parts[1]
    for part in parts[2:]:
        result += part
    return result


def _flat(blocks: Any) -> Iterator[Any]:
    if isinstance(blocks, list):
        for block in blocks:
            yield from _flat(block)
    else:
        yield blocks
