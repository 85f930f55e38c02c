"""gelu(a) * b and its backward, limited by memory where the operands leave the caches."""

from .cases import (
    BACKENDS,
    CONTESTANTS,
    DTYPES,
    GATED_SHAPES,
    WIDE,
    contestant,
    ratio_to_best_peer,
    share_of_triad,
)  # fmt: skip

OPERATIONS = ["gated", "gated_backward", "gated_fresh", "gated_backward_fresh"]


class Gated:
    params = (CONTESTANTS, OPERATIONS, DTYPES, list(GATED_SHAPES))
    param_names = ("contestant", "operation", "dtype", "shape")
    timeout = 300

    def setup(self, name, operation, dtype, shape):
        self.run = contestant(name, operation, dtype, shape)

    def time_gated(self, name, operation, dtype, shape):
        self.run()


class GatedShareOfTriad:
    """Above 1 where the operands stay in a cache, which the triad's do not."""

    params = (OPERATIONS[:2], WIDE, list(GATED_SHAPES))
    param_names = ("operation", "dtype", "shape")
    timeout = 300
    unit = "share of the triad's bandwidth"

    def track_gated_share(self, operation, dtype, shape):
        return share_of_triad(operation, dtype, shape)


class GatedRatio:
    params = (BACKENDS, OPERATIONS, DTYPES, list(GATED_SHAPES))
    param_names = ("backend", "operation", "dtype", "shape")
    timeout = 300
    unit = "our time / that of the fastest peer"

    def track_gated_ratio(self, backend, operation, dtype, shape):
        return ratio_to_best_peer(backend, operation, dtype, shape)
