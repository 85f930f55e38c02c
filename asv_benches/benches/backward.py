"""The backward of gelu(a @ b + bias), with the pre-activation recomputed and saved."""

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

FORMS = ["backward", "backward_saved"]


class Backward:
    params = (CONTESTANTS, FORMS, DTYPES, list(SHAPES))
    param_names = ("contestant", "form", "dtype", "shape")
    timeout = 300

    def setup(self, name, form, dtype, shape):
        self.run = contestant(name, form, dtype, shape)

    def time_backward(self, name, form, dtype, shape):
        self.run()


class BackwardShareOfPeak:
    params = (FORMS, WIDE, list(SHAPES))
    param_names = ("form", "dtype", "shape")
    timeout = 300
    unit = "share of the FMA peak"

    def track_backward_share(self, form, dtype, shape):
        return share_of_peak(form, dtype, shape)


class BackwardRatio:
    params = (BACKENDS, FORMS, DTYPES, list(SHAPES))
    param_names = ("backend", "form", "dtype", "shape")
    timeout = 300
    unit = "our time / that of the fastest peer"

    def track_backward_ratio(self, backend, form, dtype, shape):
        return ratio_to_best_peer(backend, form, dtype, shape)


class BackwardOnViews:
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
        self.run = contestant(name, "backward", dtype, shape, layout)

    def time_backward_on_views(self, name, dtype, shape, layout):
        self.run()
