"""Calls on PyTorch's tensors run on PyTorch's own threads, which its operations keep awake.

How many threads there are is settled once in a process, and what fails here does not return, so
every case runs in a process of its own. Guards: results do not depend on who computes them.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from numfuse.adapters.torch import tensors  # noqa: E402

pytestmark = [
    pytest.mark.long,  # each imports PyTorch anew
    pytest.mark.skipif(tensors.TEAM is None, reason="no OpenMP with GNU's entry in PyTorch"),
]

PRELUDE = """
import os, threading, time
import numpy as np, torch
import numfuse as nf
from numfuse.adapters.torch import Linear
from numfuse.backends.cpu.launch import threads as launching

entered = []
plain_entry = launching.entry
def spied_entry(name):
    entered.append(name)
    return plain_entry(name)
launching.entry = spied_entry

torch.manual_seed(0)
layer = Linear(251, 263, activation="gelu")
x = torch.randn(263, 251)

def step():
    launching._until = 0.0
    layer.zero_grad()
    y = layer(x)
    y.backward(torch.ones_like(y))
    found = y.detach(), layer.weight.grad, layer.bias.grad
    return b"".join(z.numpy().tobytes() for z in found)

def on_arrays():
    launching._until = 0.0
    w, b = (p.detach().numpy() for p in (layer.weight, layer.bias))
    y, pre = nf.matmul_bias_activation(x.numpy(), w.T, b, "gelu", return_pre_activation=True)
    found = nf.matmul_bias_activation_bwd(
        np.ones_like(y), x.numpy(), w.T, b, "gelu", needs=("b", "bias"), pre_activation=pre
    )
    return y.tobytes() + found.d_b.T.tobytes() + found.d_bias.tobytes()
"""


def run(code: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"NUMBA_NUM_THREADS": "4", "OMP_NUM_THREADS": "4"} | environment,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-3000:]}"


def test_tensors_take_torchs_threads_and_arrays_do_not():
    run("""
found = step()
assert "team" in entered and "helped" not in entered, entered
entered.clear()
assert on_arrays() == found
assert "helped" in entered and "team" not in entered, entered
""")


def test_an_operator_takes_them_as_well():
    run("""
row = x.view(263, 1, 251)
y = torch.func.vmap(lambda row: nf.matmul_bias_activation(row, layer.weight.t()))(row)
assert "team" in entered and "helped" not in entered, entered
torch.testing.assert_close(y[:, 0], x @ layer.weight.t())
""")


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_results_have_the_same_bits_on_any_number_of_torchs_threads(threads):
    run(f"""
wanted = on_arrays()
entered.clear()
torch.set_num_threads({threads})
assert all(step() == wanted for _ in range(20))
assert ("team" in entered) is ({threads} > 1), entered
""")


def test_a_team_may_have_fewer_threads_than_were_asked_for():
    run(
        """
wanted = on_arrays()
torch.set_num_threads(6)
assert all(step() == wanted for _ in range(20)) and "team" in entered
""",
        OMP_THREAD_LIMIT="2",
    )


def test_threads_that_call_at_once_get_what_single_calls_get():
    run("""
wanted = on_arrays()
step()
results = []
def work():
    for _ in range(20):
        results.append(layer(x).detach().numpy().tobytes())
workers = [threading.Thread(target=work) for _ in range(4)]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert len(results) == 80 and set(results) == {layer(x).detach().numpy().tobytes()}
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_may_call_after_its_parent_has():
    run("""
wanted = step()
with torch.no_grad():
    wanted = layer(x).numpy().tobytes()
    child = os.fork()
    if child == 0:
        os._exit(0 if layer(x).numpy().tobytes() == wanted else 1)
assert os.waitpid(child, 0)[1] == 0
assert step()
""")


def test_a_team_that_comes_late_is_left_alone_for_a_while():
    """Guards: other work on the other cores costs a launch its team, no more."""
    run("""
step()
waited = []
launching._note_waiting = lambda *times: waited.append(times)
step()
assert len(waited) == 2 and all(0 <= late <= took for late, took in waited), waited
launching._until = time.monotonic() + 60
entered.clear()
with torch.no_grad():
    layer(x), layer(x)
    assert "team" not in entered
    launching._until = time.monotonic()
    layer(x)
assert "team" in entered
""")
