"""Eight threads at once, from the first call on: with and without the interpreter's lock.

Guards: numfuse may be called from any thread of a process, on every build of Python that it
declares. On a build with the interpreter's lock, threads change places every ten microseconds here,
so that they meet between any two steps; on one without it they meet by themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig

import pytest

THREADS = 8
#: A process whose first calls are those of eight threads: nothing is compiled or kept yet.
PROGRAM = """
import json, sys, sysconfig, threading
import numpy as np
import numfuse as nf

THREADS = 8
if not sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.setswitchinterval(1e-5)
shifted = nf.epilogue(lambda z, shift: z * 2.0 + shift)

def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)

def layer(i, **options):
    m, n, k = 5 + 3 * i, 4 + 2 * i, 3 + i
    a, b, bias = drawn(i, m, k), drawn(i + 50, k, n), drawn(i + 99, n)
    out = nf.matmul_bias_activation(a, b, bias, "gelu", **options)
    return out, *nf.matmul_bias_activation_bwd(np.ones((m, n)), a, b, bias, "gelu", **options)

def gate(i, **options):
    a, b = drawn(i, 6 + i, 10), drawn(i + 50, 6 + i, 10)
    return nf.silu_mul(a, b, **options), *nf.silu_mul_bwd(a, a, b, **options)

def network(i, **options):
    weights = [drawn(i + j, *shape) for j, shape in enumerate(((3, 8), (8, 8), (8, 1)))]
    biases = [drawn(i + j, w.shape[1]) for j, w in enumerate(weights)]
    return (nf.mlp(drawn(i, 7 + i, 3), weights, biases, "tanh", **options),)

def formula(i, **options):
    a, b, shift = drawn(i, 4 + i, 5), drawn(i + 50, 5, 6), drawn(i + 99, 6)
    return (nf.matmul_epilogue(a, b, shifted, shift, **options),)

WORK = (layer, gate, network, formula)
found = [[] for _ in range(THREADS)]
failed = []
start = threading.Barrier(THREADS)

def work(t):
    try:
        start.wait()
        for turn in range(12):
            # in the first turns all shapes are those of the thread, later they are those of others
            call = WORK[(t + turn) % len(WORK)]
            i = t if turn < 4 else (t + turn) % THREADS
            found[t].append((call, i, [np.array(x) for x in call(i)]))
    except BaseException as error:
        failed.append(f"{type(error).__name__}: {error}")

team = [threading.Thread(target=work, args=(t,)) for t in range(THREADS)]
for thread in team: thread.start()
for thread in team: thread.join()

alone, wrong, far = {}, [], 0.0
for t, results in enumerate(found):
    for call, i, got in results:
        key = call.__name__, i
        if key not in alone:
            alone[key] = call(i), call(i, backend="reference")
        here, right = alone[key]
        if any(x.tobytes() != y.tobytes() for x, y in zip(got, here, strict=True)):
            wrong.append([t, *key])
        far = max([far, *(float(abs(x - y).max()) for x, y in zip(got, right, strict=True))])
print(json.dumps({
    "failed": failed, "wrong": wrong, "far": far, "calls": sum(map(len, found)),
    "backend": nf.last_call().backend,
    "lock": getattr(sys, "_is_gil_enabled", lambda: True)(),
}))
"""


@pytest.fixture(scope="module")
def found():
    """What eight threads found whose calls were a process's first."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"NUMBA_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_first_calls_of_eight_threads_give_what_single_calls_give(found):
    assert found["failed"] == [] and found["wrong"] == []
    assert found["calls"] == THREADS * 12


def test_what_eight_threads_get_is_right(found):
    # sums of at most 21 terms of size 3 in float64
    assert found["far"] < 1e-12


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has the interpreter's lock"
)
def test_numfuse_does_not_bring_the_interpreters_lock_back(found):
    assert found["lock"] is False
