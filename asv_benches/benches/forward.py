"""gelu(a @ b + bias), beside unfused NumPy."""

from .cases import DTYPES, LIBRARIES, SHAPES, contestant, share_of_peak


class Forward:
    params = (LIBRARIES, DTYPES, list(SHAPES))
    param_names = ("library", "dtype", "shape")
    timeout = 300

    def setup(self, library, dtype, shape):
        self.run = contestant(library, "forward", dtype, shape).run

    def time_forward(self, library, dtype, shape):
        self.run()


class ForwardShareOfPeak:
    params = (DTYPES, list(SHAPES))
    param_names = ("dtype", "shape")
    timeout = 300
    unit = "share of the FMA peak"

    def track_forward(self, dtype, shape):
        return share_of_peak("forward", dtype, shape)
