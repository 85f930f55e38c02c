"""The quantities of tiles that backends share."""

from __future__ import annotations

#: Rows of a chunk that are summed one by one.  A chunk of 56 is 7 runs of 8: chains of at most
#: 7 + 6 additions, where NumPy's pairwise sum has up to 18 in a block of 128 and one more for every
#: doubling.
RUN = 8


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step
