"""gelu(a @ b + bias) and its backward on views: turned round, cut out, every second column."""

from .cases import DTYPES, LIBRARIES, contestant


class Views:
    params = (
        LIBRARIES,
        ["forward", "backward"],
        DTYPES,
        ["cube_512", "odd"],
        ["transposed", "sliced", "strided"],
    )
    param_names = ("library", "operation", "dtype", "shape", "layout")
    timeout = 300

    def setup(self, library, operation, dtype, shape, layout):
        self.run = contestant(library, operation, dtype, shape, layout).run

    def time_views(self, library, operation, dtype, shape, layout):
        self.run()
