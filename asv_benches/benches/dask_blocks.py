"""What Dask's scheduler adds to the block kernels: 64 blocks of (4096, 512) x (512, 2048)."""

import time

import numpy as np

BLOCKS, M, K, N = 64, 4096, 512, 2048
WORKERS = 2


class Overhead:
    """Total time over the kernels' own, divided by the threads that ran them; 1.1 is the goal.

    Operands and results stay in memory as blocks: nothing is gathered into one array.
    """

    params = (["forward", "backward", "gated"],)
    param_names = ("operation",)
    timeout = 600
    unit = "total over the kernels' own"

    def setup(self, operation):
        try:
            import dask
            import dask.array as da

            from numfuse.adapters.dask import blocks as dask_blocks
        except ImportError as error:
            raise NotImplementedError("this needs dask, and a numfuse that serves it") from error
        self.dask, self.blocks = dask, dask_blocks
        rng = np.random.default_rng(0)
        block, grad = (rng.standard_normal(shape).astype("f4") for shape in ((M, K), (M, N)))
        self.b, self.bias = rng.standard_normal((K, N)).astype("f4"), np.zeros(N, "f4")

        def repeated(x):
            # one array under every key: all blocks are read from the same memory
            blocks = [da.from_array(x, chunks=x.shape)] * BLOCKS
            return da.concatenate(blocks)

        self.a, self.grad = dask.persist(repeated(block), repeated(grad), scheduler="sync")
        self.seconds = []
        self.run(operation)  # compiles

    def graph(self, operation):
        import numfuse as nf

        if operation == "forward":
            return nf.matmul_bias_activation(self.a, self.b, self.bias, "gelu")
        if operation == "backward":
            found = nf.matmul_bias_activation_bwd(self.grad, self.a, self.b, self.bias, "gelu")
            return found.d_b, found.d_bias
        return nf.silu_mul(self.grad, self.grad)

    def run(self, operation):
        """(total, the sum of the kernels' times) of one computation."""
        made = self.graph(operation)
        functional, seconds = self.blocks.functional, []
        names = ("matmul_bias_activation", "matmul_bias_activation_bwd", "activation_mul")
        plain = {name: getattr(functional, name) for name in names}

        def timed(function):
            def call(*args, **kwargs):
                start = time.perf_counter()
                result = function(*args, **kwargs)
                seconds.append(time.perf_counter() - start)
                return result

            return call

        for name in names:
            setattr(functional, name, timed(plain[name]))
        try:
            start = time.perf_counter()
            results = self.dask.persist(made, scheduler="threads", num_workers=WORKERS)
            total = time.perf_counter() - start
        finally:
            for name in names:
                setattr(functional, name, plain[name])
        del results
        assert len(seconds) == BLOCKS
        return total, sum(seconds)

    def track_overhead(self, operation):
        ratios = []
        for _ in range(3):
            total, kernels = self.run(operation)
            ratios.append(total * WORKERS / kernels)
        return sorted(ratios)[1]
