"""The backward of gelu(a @ b + bias), with the pre-activation recomputed and saved."""

from .cases import DTYPES, LIBRARIES, SHAPES, contestant, share_of_peak

FORMS = ["backward", "backward_saved"]


class Backward:
    params = (LIBRARIES, FORMS, DTYPES, list(SHAPES))
    param_names = ("library", "form", "dtype", "shape")
    timeout = 300

    def setup(self, library, form, dtype, shape):
        self.run = contestant(library, form, dtype, shape).run

    def time_backward(self, library, form, dtype, shape):
        self.run()


class BackwardShareOfPeak:
    params = (FORMS, DTYPES, list(SHAPES))
    param_names = ("form", "dtype", "shape")
    timeout = 300
    unit = "share of the FMA peak"

    def track_backward(self, form, dtype, shape):
        return share_of_peak(form, dtype, shape)
