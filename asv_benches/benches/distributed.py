"""Dask arrays in chunks of rows, computed by threads: numfuse beside unfused NumPy."""

import importlib.util

import numba
import numpy as np
from threadpoolctl import threadpool_limits

import numfuse as nf
from numfuse.cli import peers

from .cases import WIDE, normal

version = "1"  # of the figures: a new one, and asv forgets the old ones

SHAPES = {"rows": (16384, 256, 256), "wide": (2048, 2048, 512)}
CHUNKS = 4


class Dask:
    params = (["numfuse", "NumPy"], WIDE, list(SHAPES))
    param_names = ("contestant", "dtype", "shape")
    timeout = 300

    def setup(self, name, dtype, shape):
        if importlib.util.find_spec("dask") is None:
            raise NotImplementedError("Dask is not installed")
        import dask.array

        numba.set_num_threads(1)  # in each task; Dask's threads are the parallel ones
        threadpool_limits(1)
        m, n, k = SHAPES[shape]
        generator = np.random.default_rng(0)
        a, b, bias = (normal(generator, dtype, *s) for s in ((m, k), (k, n), (n,)))
        lazy = dask.array.from_array(a, chunks=(m // CHUNKS, k))
        if name == "numfuse":
            try:
                result = nf.matmul_bias_activation(lazy, b, bias, "gelu")
            except TypeError as error:
                raise NotImplementedError(f"this version takes no Dask arrays: {error}") from error
        else:

            def gelu(x):
                return peers.numpy_activation(x, "gelu", np.empty_like(x))

            result = (lazy @ b + bias).map_blocks(gelu, dtype=a.dtype)
        self.run = lambda: result.compute(scheduler="threads", num_workers=2)
        self.run()

    def time_dask(self, name, dtype, shape):
        self.run()
