"""Jets on the CPU: bits that no number of threads changes, and what a call holds."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import weekly
from arrays import bits

import numfuse as nf
from numfuse.backends import resolve
from numfuse.backends.cpu.face import BACKEND
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
    for threads in (1, 2, 5) if weekly.ALL else (1, 5):
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


STRIDED = {
    "turned": lambda x: x.T.copy().T,
    "cut": lambda x: np.full((2 * len(x), 7), np.nan, x.dtype)[::2, :5],
    "reversed": lambda x: np.full(x.shape, np.nan, x.dtype)[::-1, ::-1],
}


@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize(
    ("points", "dtype"), [(1400, "float64"), (1400, "float16"), (60000, "float32")]
)
def test_a_call_whose_d_b_is_strided_is_replayed_and_has_its_bits(points, dtype, layout):
    """The sum over rows is joined from pieces, of one block of points or of several."""
    rng = np.random.default_rng(3)
    shapes = {"grad": (points, 5), "a": (points, 8), "b": (8, 5), "bias": (5,)}
    x = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    grads, x["a_dot"] = (x["grad"], x["grad"][None], -x.pop("grad")[None]), x["a"][None, :, ::-1]
    wanted = nf.matmul_bias_activation_jet_bwd(*grads, **x, activation="tanh", backend="cpu")
    d_b = STRIDED[layout](wanted.d_b)
    out, seen = [None, d_b, None, None, None], []
    for _ in range(3):
        d_b[...] = np.nan
        got = nf.matmul_bias_activation_jet_bwd(
            *grads, **x, activation="tanh", out=tuple(out), backend="cpu"
        )
        assert got.d_b is d_b
        assert (bits(d_b) == bits(wanted.d_b)).all() and (bits(got.d_a) == bits(wanted.d_a)).all()
        seen.append(BACKEND.replay.statistics())
    first, *others = seen
    assert all(x.misses == first.misses and x.hits > first.hits for x in others)


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
