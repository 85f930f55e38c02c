"""A real cluster: a distributed scheduler and worker processes, over TCP on the loopback.

What a task calls is in `test_dask.py`; here it is about what a cluster does to it: other processes,
workers that die, blocks that fail, computations that are given up. Functions that travel to the
workers are made inside of tests, so that they travel by value.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import numfuse as nf

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

# What a scheduler and its workers leave to the garbage collector when they are closed.
pytestmark = [
    pytest.mark.filterwarnings("default::ResourceWarning"),
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("default::pytest.PytestUnhandledThreadExceptionWarning"),
    # what older versions say where results of both are compared
    pytest.mark.filterwarnings("default:Running on a single-machine scheduler:UserWarning"),
]

K, N = 96, 64


@contextmanager
def started(folder, **options):
    """A cluster of two worker processes and its client; all are gone afterwards."""
    with (
        dask.config.set({"distributed.worker.daemon": True}),
        distributed.LocalCluster(
            n_workers=2, processes=True, host="127.0.0.1", dashboard_address="127.0.0.1:0",
            local_directory=str(folder), silence_logs=50, **options,
        ) as cluster,
        distributed.Client(cluster, timeout="60s") as client,
    ):  # fmt: skip
        assert client.scheduler.address.startswith("tcp://127.0.0.1")
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with started(tmp_path_factory.mktemp("cluster"), threads_per_worker=2) as client:
        yield client


def blocks_of(seed, rows, columns, count, load=None):
    """Random blocks that are made by the worker that needs them."""

    def make(block_id):
        if load is not None:
            load(block_id[0])
        rng = np.random.default_rng((seed, *block_id))
        return rng.random((rows, columns), np.float32) - np.float32(0.5)

    chunks = (rows,) * count, (columns,)
    name = None if load is None else f"made-{seed}-{rows}-{count}-{time.monotonic_ns()}"
    return da.map_blocks(make, chunks=chunks, meta=np.empty((0, 0), np.float32), name=name)


def weights(k=K, n=N):
    rng = np.random.default_rng(0)
    return rng.standard_normal((k, n)).astype("f4"), rng.standard_normal(n).astype("f4")


def layer(x, grad, w, bias):
    """Results of every kind: blocks, and sums over blocks."""
    out = nf.matmul_bias_activation(x, w, bias, "gelu")
    found = nf.matmul_bias_activation_bwd(grad, x, w, bias, "gelu")
    gate = nf.silu_mul_bwd(grad, out, out)
    return out, *found, *gate


def as_bytes(results):
    return [x.tobytes() for x in results]


def eventually(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def known(client):
    """Keys of every task that the scheduler or a worker knows, and of data that workers hold."""

    def of_worker(dask_worker):
        return {str(key) for key in (*dask_worker.data, *dask_worker.state.tasks)}

    def of_scheduler(dask_scheduler):
        return {str(key) for key in dask_scheduler.tasks}

    return client.run_on_scheduler(of_scheduler).union(*client.run(of_worker).values())


def test_a_cluster_gives_the_bits_of_threads(client):
    x, grad = blocks_of(1, 101, K, 19), blocks_of(2, 101, N, 19)
    results = dask.compute(*layer(x, grad, *weights()), scheduler="threads", num_workers=3)
    futures = client.compute(layer(x, grad, *weights()))
    assert as_bytes(client.gather(futures)) == as_bytes(results)
    for workers in (0, 1):  # one worker only
        (address, _) = list(client.scheduler_info()["workers"].items())[workers]
        futures = client.compute(layer(x, grad, *weights()), workers=address)
        assert as_bytes(client.gather(futures)) == as_bytes(results)


@pytest.mark.long
def test_a_killed_worker_and_data_larger_than_its_memory(tmp_path):
    """576 MiB of blocks on two workers of 400 MiB, of which one is killed at the 20th block."""
    rows, k, n, count = 8192, 512, 16, 36
    flag = str(tmp_path / "killed")

    def deadly(index):
        import os
        import signal

        if index == 20:
            try:
                os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return  # the second attempt
            os.kill(os.getpid(), signal.SIGKILL)

    w, bias = weights(k, n)

    def results(load):
        x, grad = blocks_of(3, rows, k, count, load), blocks_of(4, rows, n, count)
        assert x.nbytes == 576 << 20
        d_a, d_b, d_bias = nf.matmul_bias_activation_bwd(grad, x, w, bias, "gelu")
        return abs(d_a).sum(axis=0), d_b, d_bias

    wanted = dask.compute(*results(None), scheduler="threads", num_workers=2)
    options = {"threads_per_worker": 1, "memory_limit": "400MiB"}
    with started(tmp_path, **options) as client:
        before = set(client.run(lambda: __import__("os").getpid()).values())
        found = client.gather(client.compute(results(deadly)))
        assert (tmp_path / "killed").exists()
        client.wait_for_workers(2, timeout=60)
        after = set(client.run(lambda: __import__("os").getpid()).values())
    assert len(before & after) == 1, "the nanny starts another worker for the one that was killed"
    assert as_bytes(found) == as_bytes(wanted)


def test_a_poisoned_block_raises_its_own_error_with_its_index(client):
    def poison(block, block_id):
        return block[:, :-1] if block_id[0] == 7 else block

    x, grad = blocks_of(5, 31, K, 12), blocks_of(6, 31, N, 12)
    poisoned = x.map_blocks(poison, dtype=x.dtype, meta=x._meta)
    message = r"(?s)b must have shape .* with K = 95.*in block \(7, 0\) of numfuse.matmul_bias"
    with pytest.raises(ValueError, match=message):
        client.gather(client.compute(nf.matmul_bias_activation(poisoned, *weights(), "gelu")))
    with pytest.raises(ValueError, match=message):
        client.gather(client.compute(layer(poisoned, grad, *weights())))
    # and the workers go on
    found = client.gather(client.compute(layer(x, grad, *weights())))
    wanted = dask.compute(*layer(x, grad, *weights()), scheduler="threads")
    assert as_bytes(found) == as_bytes(wanted)


def test_a_cancelled_computation_leaves_nothing_behind(client):
    def slow(index):
        time.sleep(0.02)

    before = known(client)  # errors of other tests may still hold their tasks
    x, grad = blocks_of(7, 31, K, 400, slow), blocks_of(8, 31, N, 400)
    futures = client.compute(layer(x, grad, *weights()))

    def begun(dask_scheduler):
        return sum(task.state == "memory" for task in dask_scheduler.tasks.values())

    assert eventually(lambda: client.run_on_scheduler(begun) > 8)
    assert not any(future.done() for future in futures)
    client.cancel(futures)
    del futures
    assert eventually(lambda: known(client) <= before), known(client) - before
    x = blocks_of(7, 31, K, 4)
    found = client.gather(client.compute(nf.matmul_bias_activation(x, *weights(), "gelu")))
    wanted = nf.matmul_bias_activation(x, *weights(), "gelu").compute(scheduler="threads")
    assert found.tobytes() == wanted.tobytes()


def test_persisted_operands_are_not_made_again(client, tmp_path):
    folder = str(tmp_path)

    def counted(index):
        import os
        import uuid

        with open(os.path.join(folder, f"{index}-{uuid.uuid4()}"), "w"):
            pass

    x, grad = blocks_of(9, 31, K, 8, counted), blocks_of(10, 31, N, 8, counted)
    x, grad = client.persist([x, grad])
    nf.synchronize(x)
    nf.synchronize(grad)
    assert len(list(tmp_path.iterdir())) == 16
    for _ in range(2):
        client.gather(client.compute(layer(x, grad, *weights())))
    assert len(list(tmp_path.iterdir())) == 16


@pytest.mark.parametrize("asked", [1, 64])
def test_tasks_of_a_worker_share_its_cores(client, asked):
    def spy():
        import numba

        from numfuse.backends.cpu import tiling
        from numfuse.backends.cpu.face import BACKEND

        tiling.PARALLEL_FMAS = 0
        BACKEND.spied_counts = []
        plain = getattr(BACKEND.launch, "__wrapped__", BACKEND.launch)

        def spied(program, arrays):
            BACKEND.spied_counts.append(program.threads)
            plain(program, arrays)

        spied.__wrapped__ = plain
        BACKEND.launch = spied
        return int(numba.config.NUMBA_NUM_THREADS)

    def seen():
        from numfuse.backends.cpu.face import BACKEND

        return BACKEND.spied_counts

    cores = max(client.run(spy).values())
    x = blocks_of(11, 301, K, 8)
    with dask.config.set({"numfuse.threads": asked}):
        out = nf.matmul_bias_activation(x, *weights(), "gelu")
    client.gather(client.compute(out))
    counts = [count for found in client.run(seen).values() for count in found]
    assert len(counts) == 8 and set(counts) == {min(asked, max(1, cores // 2))}


@pytest.mark.long
def test_the_training_example_learns(tmp_path):
    example = Path(__file__).parents[2] / "docs" / "gallery" / "train_on_dask.py"
    options = "--blocks 6 --rows 512 --batch 2 --epochs 4 --memory 1GiB --quiet".split()
    done = subprocess.run(
        [sys.executable, str(example), *options], capture_output=True, text=True, timeout=300,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, re.findall(r"(?:first|last) step ([\d.]+)", done.stdout))
    assert last < 0.8 * first
