"""Every size of the Dask adapter's graphs, each with its reason."""

__all__ = ["MOVED_BYTES", "SPLIT"]

#: Blocks that one task of a sum over Dask blocks adds.  It is a constant because the order of a sum
#: follows from it.  A task holds that many partial results and its result (36 MiB for a d_b of
#: 512 x 2048 in float32), and the tasks of a sum are a seventh of those of its blocks; the depth,
#: and with it the latency, falls with the logarithm only: 4096 blocks take 4 levels, with 4 they
#: take 6 and a third more tasks, with 16 they take 3 (docs/distributed.md counts them).
SPLIT = 8
#: Bytes that chunks along K may make move before a warning: a second at 10 Gbit/s.
MOVED_BYTES = 1 << 30
