"""What a process pays before its first result: the import, and the first call."""

import subprocess
import sys
import tempfile

FIRST_CALL = """
import time
import numpy as np
import numfuse as nf
a = np.ones((64, 64), np.float32)
start = time.perf_counter()
nf.matmul_bias_activation(a, a, a[0], "gelu")
print(time.perf_counter() - start)
"""


def timeraw_import():
    return "import numfuse"


def timeraw_import_numpy_alone():
    return "import numpy"


class FirstCall:
    """In a fresh process: with an empty kernel cache, and with the cache that this one left."""

    timeout = 300
    unit = "s"

    def setup(self):
        self.cache = tempfile.TemporaryDirectory()

    def teardown(self):
        self.cache.cleanup()

    def first_call(self):
        import os

        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALL],
            env={**os.environ, "NUMBA_CACHE_DIR": self.cache.name},
            capture_output=True,
            check=True,
            text=True,
        )
        return float(done.stdout)

    def track_cold(self):
        return self.first_call()

    def track_warm(self):
        self.first_call()
        return self.first_call()
