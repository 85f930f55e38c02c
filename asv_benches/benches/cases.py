"""What the suites share: named shapes, and contestants of `numfuse.cli.peers` made ready."""

import numba
import numpy as np
from threadpoolctl import threadpool_limits

from numfuse.cli import ceilings, peers, timing

SHAPES = {
    "cube_64": (64, 64, 64),
    "cube_512": (512, 512, 512),
    "cube_1024": (1024, 1024, 1024),
    "shallow": (2048, 2048, 64),
    "odd": (1000, 777, 1003),
    "gated_large": (8192, 4096, 1),  # 32 Mi elements
}
MAKERS = {"numfuse": peers.numfuse_contestant, "NumPy": peers.numpy_contestant}
LIBRARIES, DTYPES = list(MAKERS), ["float32", "float64"]


def contestant(
    library: str, operation: str, dtype: str, shape: str, layout: str = "contiguous"
) -> peers.Contestant:
    """A call that has run once: compiled, or found in the disk cache. One thread for everyone."""
    numba.set_num_threads(1)
    threadpool_limits(1)
    # Versions before there were views have no such field, and their history stays measurable.
    view = () if layout == "contiguous" else (layout,)
    case = peers.Case(operation, *SHAPES[shape], dtype, "gelu", *view)
    made = MAKERS[library](case, peers.draw_operands(case, np.random.default_rng(0)))
    made.run()
    return made


def share_of_peak(operation: str, dtype: str, shape: str) -> float:
    """The rate as a share of the FMA peak of one thread, both measured in the same rounds."""
    if ceilings.fma_peak(dtype, 1) is None:
        raise NotImplementedError("this version has no fma_peak")
    peaks: list[float] = []
    run = contestant("numfuse", operation, dtype, shape).run
    seconds = timing.interleave(
        {"run": run, "peak": lambda: peaks.append(ceilings.fma_peak(dtype, 1))}, rounds=5
    )
    flop = peers.Case(operation, *SHAPES[shape], dtype, "gelu").flop
    return flop / timing.median(seconds["run"]) / 1e9 / timing.median(peaks)
