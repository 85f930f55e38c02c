"""gelu(a) * b and its backward, limited by memory; beside in-place NumPy."""

from .cases import DTYPES, LIBRARIES, contestant

OPERATIONS = ["gated", "gated_backward", "gated_fresh", "gated_backward_fresh"]


class Gated:
    params = (LIBRARIES, OPERATIONS, DTYPES, ["cube_512", "shallow", "gated_large"])
    param_names = ("library", "operation", "dtype", "shape")
    timeout = 300

    def setup(self, library, operation, dtype, shape):
        self.run = contestant(library, operation, dtype, shape).run

    def time_gated(self, library, operation, dtype, shape):
        self.run()
