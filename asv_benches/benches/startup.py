"""What a process pays before its first result: the import, the first call, a warm-up."""

import os
import subprocess
import sys
import tempfile

TIMED = """
import time
import numpy as np
import numfuse as nf
a = np.ones((64, 64), np.float32)
start = time.perf_counter()
{call}
print(time.perf_counter() - start)
"""
CALLS = {
    "forward": "nf.matmul_bias_activation(a, a, a[0], 'gelu')",
    "backward": "nf.matmul_bias_activation_bwd(a, a, a, a[0], 'gelu')",
    "gated": "nf.gelu_mul(a, a)",
    "warmup": "nf.warmup(['gelu'], ['float32'])",
}


def timeraw_import():
    return "import numfuse"


def timeraw_import_numpy_alone():
    return "import numpy"


class FirstCall:
    """In a fresh process: with an empty kernel cache, and with the cache that such a process left.

    `warmup` is no call but `numfuse.warmup` for one activation and dtype.
    """

    params = (list(CALLS), ["cold", "warm"])
    param_names = ("call", "cache")
    timeout = 300
    unit = "s"

    def setup(self, call, cache):
        self.cache = tempfile.TemporaryDirectory()

    def teardown(self, call, cache):
        self.cache.cleanup()

    def first_call(self, call):
        done = subprocess.run(
            [sys.executable, "-c", TIMED.format(call=CALLS[call])],
            env={**os.environ, "NUMBA_CACHE_DIR": self.cache.name},
            capture_output=True,
            check=True,
            text=True,
        )
        return float(done.stdout)

    def track_first_call(self, call, cache):
        if cache == "warm":
            self.first_call(call)
        return self.first_call(call)
