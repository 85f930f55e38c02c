"""Jets on the CPU: bits that no number of threads changes, and what a call holds."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import numfuse as nf
from numfuse.backends import resolve
from numfuse.jets import FORWARD
from numfuse.runtime import slabs

CODE = """
import hashlib, numba, numpy as np, numfuse as nf
rng = np.random.default_rng(0)
found = []
for sizes, points, second in (((2, 32, 32, 1), 3000, [[1.0, 0.0]]), ((6, 65, 33, 2), 901, None)):
    w = [rng.standard_normal(s).astype("{dtype}") / 4 for s in zip(sizes, sizes[1:])]
    b = [rng.standard_normal(n).astype("{dtype}") for n in sizes[1:]]
    x = rng.standard_normal((points, sizes[0])).astype("{dtype}")
    results, kept = nf.mlp_jet(x, w, b, second=second, keep=True)
    found += results
    for saved in (kept, None):
        back = nf.mlp_jet_bwd(*results, x, w, b, second=second, kept=saved)
        found += [*back.d_weights, *back.d_biases]
print(hashlib.sha256(b"".join(y.tobytes() for y in found)).hexdigest())
"""


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_any_number_of_threads_gives_a_network_the_same_bits(dtype):
    found = set()
    for threads in (1, 2, 5):
        env = os.environ | {"NUMBA_NUM_THREADS": str(threads)}
        how = {"env": env, "capture_output": True, "text": True, "check": True}
        code = [sys.executable, "-c", CODE.replace("{dtype}", dtype)]
        found.add(subprocess.run(code, **how).stdout)
    assert len(found) == 1


def test_a_jet_holds_no_sums_of_all_points():
    """Guards: what a call takes beside its operands and results does not grow with M."""
    sizes = []
    for points in (4000, 64000):
        a, b = np.ones((points, 16)), np.ones((16, 32))
        dot, ddot = np.ones((3, points, 16)), np.ones((3, points, 16))
        p = FORWARD.problem(
            activation=nf.activations()["tanh"], needs=(), out=None, guard=True, keep=False,
            pattern=np.eye(3, dtype=bool).tobytes(), stack=None, a=a, b=b, bias=None, a_dot=dot,
            a_ddot=ddot, weights=None,
        )  # fmt: skip
        made = resolve("cpu").record("jet", p, FORWARD.fields)
        sizes.append(made.program.size)
    assert sizes[1] < 2 * sizes[0] < 64000 * 7 * 32 * 8 / 4


def test_memory_of_a_network_is_found_in_place_by_the_next_call():
    """Guards: fresh pages at every call cost as much as the arithmetic."""
    w, x = [np.ones((2, 300)), np.ones((300, 1))], np.ones((50, 2))  # (wide: layer by layer)
    _, kept = nf.mlp_jet(x, w, None, keep=True)
    memory = kept.inputs[0].base
    del kept
    assert any(y is memory for y in slabs._pool.values())
    nf.mlp_jet(x, w, None)
    held = sum(y.nbytes for y in slabs._pool.values())
    assert len(slabs._pool) <= slabs.KEPT
    assert held <= slabs.KEPT_BYTES
