"""How the CUDA backend runs whole networks in one launch: tiles by the width of a network."""

from __future__ import annotations

from typing import NamedTuple


class NetworkTile(NamedTuple):
    """How a block runs a whole network (`plan.networks`)."""

    #: Columns of the tile; columns of a thread, which has 8 rows.
    width: int
    nr: int
    #: Threads of a block, and blocks of a multiprocessor.
    threads: int
    resident: int
    #: Values of K of a slice of the weights, and the stages of their ring; 0: a layer's weights lie
    #: in shared memory whole.
    slice: int = 0
    stages: int = 0


#: Tiles of whole networks, the best ones first; a network has the first that holds it and that
#: leaves room for so many blocks. Two blocks do their passes while the other one multiplies; where
#: two do not fit, one has twice the threads.
TILES: dict[str, tuple[NetworkTile, ...]] = {
    "float32": (
        NetworkTile(32, 4, 128, 2),
        NetworkTile(64, 4, 256, 2),
        NetworkTile(96, 4, 384, 1),
        # (an H100, 100,000 points of 5 x 128: 5.25 ms, the next one 5.45, slices of 16 5.49)
        NetworkTile(128, 8, 256, 1),
        NetworkTile(128, 8, 128, 2, 32, 2),
        NetworkTile(128, 8, 128, 2, 16, 2),
        NetworkTile(192, 4, 384, 1, 16, 3),
        NetworkTile(192, 4, 384, 1, 16, 2),
        # (50,000 points of 4 x 256: 7.20 ms, with three stages 7.71)
        NetworkTile(256, 8, 256, 1, 16, 2),
    ),
    "float64": (
        NetworkTile(32, 4, 128, 2),
        # (an H200, 20,000 points of 4 x 64: 0.361 ms, the next one 0.370)
        NetworkTile(64, 2, 512, 1),
        NetworkTile(64, 4, 256, 1),
        # (50,000 points of 4 x 128: 2.58 ms, the next one 2.67)
        NetworkTile(128, 2, 512, 1, 16, 2),
        NetworkTile(128, 4, 256, 1, 16, 2),
        NetworkTile(128, 4, 256, 1, 8, 3),
    ),
}
#: Those of a forward where they are others: its blocks keep one tile of rows.
FORWARDS: dict[str, tuple[NetworkTile, ...]] = {
    "float32": (),
    "float64": (
        NetworkTile(64, 4, 256, 2),  # (the same: 0.356 ms)
        NetworkTile(128, 4, 256, 1, 16, 2),
    ),
}
#: Those of products of three bfloat16 parts (from 9.0 on), by columns of a tile whose weights lie
#: whole: a thread has two sums for each result, for which the 128 registers of two blocks of 256
#: threads are too few.
SPLIT = {64: NetworkTile(64, 8, 128, 2)}
#: The same by warp groups, on Hopper (`kernels.network_parts`), of a forward and of a backward:
#: weights come as images of their parts, in slices of 16 or 32. The best ones first, as in `TILES`.
GROUPED: dict[bool, tuple[NetworkTile, ...]] = {
    False: (
        NetworkTile(64, 4, 128, 4, 32, 2),
        NetworkTile(64, 4, 128, 3, 32, 2),
        NetworkTile(128, 8, 128, 2, 32, 2),
        NetworkTile(128, 8, 128, 2, 16, 2),
    ),
    True: (
        # (an H200, 20,000 points of 4 x 64: 0.245 ms, three blocks 0.250)
        NetworkTile(64, 4, 128, 2, 32, 2),
        NetworkTile(128, 8, 256, 1, 32, 2),
        NetworkTile(128, 8, 256, 1, 16, 3),
        NetworkTile(128, 8, 256, 1, 16, 2),
    ),
}
#: The same before 9.0: with eight columns a thread of the second backward spills (100 bytes).
OLDER: dict[str, tuple[NetworkTile, ...]] = {
    "float32": (
        NetworkTile(32, 4, 128, 2),
        NetworkTile(64, 4, 256, 1),
        NetworkTile(128, 8, 256, 1),
    ),
    "float64": (NetworkTile(32, 4, 128, 2), NetworkTile(64, 4, 256, 1)),
}
#: Whether the simulator's tile streams its weights, for tests: values of K of a slice, 0: no.
SIMULATED_SLICE = 0
#: Rows of a point, columns of x and of the last layer, at most: what a thread keeps of them.
MEMBERS, INPUTS, OUTPUTS = 8, 8, 8
