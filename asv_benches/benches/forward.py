"""gelu(a @ b + bias), by every backend and every peer."""

from .cases import (
    BACKENDS,
    CONTESTANTS,
    DTYPES,
    SHAPES,
    WIDE,
    contestant,
    ratio_to_best_peer,
    share_of_peak,
)  # fmt: skip


class Forward:
    params = (CONTESTANTS, DTYPES, list(SHAPES))
    param_names = ("contestant", "dtype", "shape")
    timeout = 300

    def setup(self, name, dtype, shape):
        self.run = contestant(name, "forward", dtype, shape)

    def time_forward(self, name, dtype, shape):
        self.run()


class ForwardShareOfPeak:
    params = (WIDE, list(SHAPES))
    param_names = ("dtype", "shape")
    timeout = 300
    unit = "share of the FMA peak"

    def track_forward_share(self, dtype, shape):
        return share_of_peak("forward", dtype, shape)


class ForwardRatio:
    params = (BACKENDS, DTYPES, list(SHAPES))
    param_names = ("backend", "dtype", "shape")
    timeout = 300
    unit = "our time / that of the fastest peer"

    def track_forward_ratio(self, backend, dtype, shape):
        return ratio_to_best_peer(backend, "forward", dtype, shape)


class ForwardOnViews:
    """Operands turned round, cut out of wider arrays, every second column."""

    params = (
        ["cpu", "NumPy", "PyTorch", "JAX"],
        WIDE,
        ["cube_512", "odd"],
        ["transposed", "sliced", "strided"],
    )
    param_names = ("contestant", "dtype", "shape", "layout")
    timeout = 300

    def setup(self, name, dtype, shape, layout):
        self.run = contestant(name, "forward", dtype, shape, layout)

    def time_forward_on_views(self, name, dtype, shape, layout):
        self.run()
