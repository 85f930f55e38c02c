"""What the first calls of a process cost: with an empty cache of kernels, and in the next process.

    python asv_benches/first_calls.py                  the table of docs/guide/threads.md
    python asv_benches/first_calls.py --rounds 5

Each round makes the calls below one after another in a fresh process whose NUMBA_CACHE_DIR is
empty, then once more in the next process, which finds the kernels that the first one left. Small
operands, so that the arithmetic counts nothing. Figures are medians of the rounds; the import of
numfuse and NumPy is timed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

#: In this order: what a row compiles is what the rows before it have not.
CALLS = {
    "first product, float64": "nf.matmul_bias_activation(a, a, a[0], 'gelu')",
    "its backward": "nf.matmul_bias_activation_bwd(a, a, a, a[0], 'gelu')",
    "another activation": "nf.matmul_bias_activation(a, a, a[0], 'tanh')",
    "a gate": "nf.silu_mul(a, a)",
    "its backward ": "nf.silu_mul_bwd(a, a, a)",
    "a formula of your own": "nf.elementwise(lambda x, y: ex.tanh(x) * y, a, a)",
    "`mlp`": "nf.mlp(a, [a, a], None, 'tanh')",
    "`mlp_bwd`": "nf.mlp_bwd(a, a, [a, a], None, 'tanh')",
    "`mlp_jet`": "nf.mlp_jet(b, [a, a], None, 'tanh')",
    "`mlp_jet_bwd`": "nf.mlp_jet_bwd(b, None, None, b, [a, a], None, 'tanh')",
    "first product in float32": "nf.matmul_bias_activation(f, f, f[0], 'gelu')",
    "its backward  ": "nf.matmul_bias_activation_bwd(f, f, f, f[0], 'gelu')",
}
PROGRAM = """
import json, sys, time
start = time.perf_counter()
import numpy as np
import numfuse as nf
from numfuse import expr as ex
found = {"import": time.perf_counter() - start}
a, b = np.ones((16, 16)), np.ones((4, 16))
f = a.astype(np.float32)
for name, call in json.loads(sys.argv[1]).items():
    start = time.perf_counter()
    eval(call)
    found[name] = time.perf_counter() - start
print(json.dumps(found))
"""


def process(cache: str) -> dict[str, float]:
    """Return the seconds of each call in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(CALLS)],
        env={**os.environ, "NUMBA_CACHE_DIR": cache},
        capture_output=True,
        check=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = []
    for _ in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory() as cache:
            rounds.append((process(cache), process(cache)))
    print("| first call | empty cache, s | next process, s |\n|---|---:|---:|")
    for name in rounds[0][0]:
        cold, warm = (statistics.median(r[i][name] for r in rounds) for i in (0, 1))
        print(f"| {name.strip()} | {cold:.2f} | {warm:.3f} |")


if __name__ == "__main__":
    main()
