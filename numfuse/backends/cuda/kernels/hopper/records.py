"""The records among the arguments of the kernel on Hopper (`schema`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numfuse.backends.cuda.compile.schema import Array


@dataclass
class Fetched:
    """X or Y: the map by which the copy engine fetches it."""

    map: Any
    #: 0 where it is the same at every place.
    places: Any
    #: Places of one plane of a split operand.
    plane: Any


@dataclass
class Maps:
    """The maps by which the copy engine stores results, and fetches the residual or grad."""

    out: Any
    extra: Any
    pre: Any


@dataclass
class Second:
    """The factors of a second term of the sum, or those of a second sum and its other arrays."""

    x: Fetched
    y: Fetched
    bias: Array
    pre: Array
    pre_map: Any


@dataclass
class Work:
    """The units of a launch: blocks of the result, each in parts of K."""

    m: Any
    n: Any
    units: Any
    row_blocks: Any
    column_blocks: Any
    places: Any
    #: Of K, 128 bytes each; a unit has no more than `part_slices` of them.
    slices: Any
    part_slices: Any
    #: Slices of the first term of the sum.
    term_slices: Any
    #: Elements from the plane of a part of K to the next.
    part_step: Any


@dataclass
class Unit:
    """Where a unit of work is: its part of K, its place and its first row and column."""

    part: Any
    place: Any
    row0: Any
    column0: Any
