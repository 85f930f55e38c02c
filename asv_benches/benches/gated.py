"""gelu(a) * b and its backward, limited by memory; beside in-place NumPy."""

from .cases import DTYPES, LIBRARIES, contestant


class Gated:
    params = (LIBRARIES, ["gated", "gated_backward"], DTYPES, ["cube_512", "shallow"])
    param_names = ("library", "operation", "dtype", "shape")
    timeout = 300

    def setup(self, library, operation, dtype, shape):
        self.run = contestant(library, operation, dtype, shape).run

    def time_gated(self, library, operation, dtype, shape):
        self.run()
