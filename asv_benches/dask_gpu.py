"""Dask with one worker process a GPU and CuPy blocks: is it right, and how does it scale?

    python asv_benches/dask_gpu.py                    as many workers as there are GPUs, at most two
    python asv_benches/dask_gpu.py --blocks 32 --rows 65536 262144
    python asv_benches/dask_gpu.py --check float32   the times, and the results of this dtype alone

It says why and ends with 0 where there is no GPU or no CuPy. What is printed:

- the result of a forward, a backward and a gate on blocks of CuPy arrays beside the CPU backend's;
- whether one worker and several give the same bits;
- seconds of a backward over persisted blocks with one worker and with all, beside the block kernels
  alone, launched one after another in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

import numfuse as nf


def why_not() -> str:
    """Empty where this can run here."""
    try:
        import cupy
        import dask.array  # noqa: F401
        import distributed  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            return "there is no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return str(nf.backends()["cuda"]) if not nf.backends()["cuda"] else ""


def cluster_of(gpus: int):
    """A scheduler and one process for each GPU, which sees no other.

    Work stays where its blocks are: a block that is stolen goes through the memory of the host.
    """
    import dask
    import distributed

    dask.config.set({"distributed.scheduler.work-stealing": False})

    workers = {
        gpu: {
            "cls": distributed.Nanny,
            "options": {
                "nthreads": 1,
                "env": {"CUDA_VISIBLE_DEVICES": str(gpu)},
                "memory_limit": 0,
                "name": gpu,
            },
        }
        for gpu in range(gpus)
    }
    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard_address": "127.0.0.1:0"}}
    return distributed.SpecCluster(scheduler=scheduler, workers=workers)


def made(seed: int, rows: int, columns: int, blocks: int, dtype: str):
    """Random CuPy blocks, made on the worker's GPU; the same ones on every GPU."""
    import cupy
    import dask.array as da

    def make(block_id):
        generator = cupy.random.RandomState(1000 * seed + block_id[0])
        return generator.standard_normal((rows, columns), cupy.float32).astype(dtype)

    chunks = (rows,) * blocks, (columns,)
    return da.map_blocks(make, chunks=chunks, meta=cupy.empty((0, 0), dtype))


def placed(client, x, gpus: int):
    """The blocks of rows in the memory of the workers, a run of them on each.

    So what a task needs of several operands is on one worker, and so is what is added first.
    """
    import cupy
    import dask.array as da
    import distributed

    parts = x.to_delayed().ravel()
    futures = [
        client.compute(part, workers=[i * gpus // len(parts)]) for i, part in enumerate(parts)
    ]
    distributed.wait(futures)
    meta = cupy.empty((0, 0), x.dtype)
    return da.concatenate(
        [
            da.from_delayed(future, (rows, x.shape[1]), meta=meta)
            for future, rows in zip(futures, x.chunks[0], strict=True)
        ]
    )


def on_host(x):
    """The blocks as NumPy arrays."""
    import cupy

    return x.map_blocks(cupy.asnumpy, meta=np.empty((0,) * x.ndim, x.dtype))


def weights(k: int, n: int, dtype: str):
    """The same on the host and as Dask arrays of one CuPy block."""
    import cupy
    import dask.array as da

    rng = np.random.default_rng(0)
    host = [rng.standard_normal(shape).astype(dtype) / 8 for shape in ((k, n), (n,))]
    return host, [
        da.from_array(x, chunks=-1).map_blocks(cupy.asarray, meta=cupy.empty((0,) * x.ndim, dtype))
        for x in host
    ]


def check(client, dtype: str) -> list[bytes]:
    """Every kind of result beside the CPU backend's; their bytes."""
    rows, k, n, blocks = 700, 130, 96, 5
    x, grad = made(1, rows, k, blocks, dtype), made(2, rows, n, blocks, dtype)
    (host_w, host_bias), (w, bias) = weights(k, n, dtype)
    host_x, host_grad = (
        y.astype(dtype) for y in client.gather(client.compute([on_host(x), on_host(grad)]))
    )
    out, pre = nf.matmul_bias_activation(x, w, bias, "gelu", return_pre_activation=True)
    lazy = {"out": out, "pre": pre}
    lazy |= nf.matmul_bias_activation_bwd(grad, x, w, bias, "gelu")._asdict()
    lazy |= {f"gate {name}": y for name, y in nf.silu_mul_bwd(grad, out, out)._asdict().items()}
    parts = x.rechunk({1: 50}), w.rechunk({0: 50})
    lazy["out of parts"] = nf.matmul_bias_activation(*parts, bias, "gelu")
    split = nf.matmul_bias_activation_bwd(grad, *parts, bias, "gelu")
    lazy |= {f"{name} of parts": y for name, y in split._asdict().items()}
    results = client.gather(client.compute([on_host(y) for y in lazy.values()]))
    found = dict(zip(lazy, results, strict=True))
    one = {}
    one["out"], one["pre"] = nf.matmul_bias_activation(
        host_x, host_w, host_bias, "gelu", return_pre_activation=True
    )
    one |= nf.matmul_bias_activation_bwd(host_grad, host_x, host_w, host_bias, "gelu")._asdict()
    gate = nf.silu_mul_bwd(host_grad, found["out"], found["out"])
    one |= {f"gate {name}": y for name, y in gate._asdict().items()}
    unit = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}[dtype]
    for name, result in found.items():
        wanted = one[name.removesuffix(" of parts")].astype(float)
        error = np.abs(result.astype(float) - wanted).max() / np.abs(wanted).max()
        # relative to the largest element; sums of at most rows * blocks terms around zero
        limit = 4 * unit * (rows * blocks) ** 0.5
        print(f"  {dtype:8} {name:16} {error:.1e} (at most {limit:.1e})")
        if not error <= limit:
            sys.exit(f"{name} is wrong")
    return [y.tobytes() for y in found.values()]


class Here:
    """A client without a cluster."""

    def compute(self, lazy):
        import dask

        return dask.compute(*lazy, scheduler="synchronous")

    def gather(self, found):
        return found


def prepared(dtype: str) -> int:
    """Compile what `check` needs into the disk cache."""
    return len(check(Here(), dtype))


def timed(client, rows: int, k: int, n: int, blocks: int, dtype: str, rounds: int) -> float:
    """Median seconds of d_b and d_bias over persisted blocks."""
    import distributed

    gpus = len(client.scheduler_info()["workers"])
    operands = made(3, rows, k, blocks, dtype), made(4, rows, n, blocks, dtype)
    operands = [placed(client, operand, gpus) for operand in operands]
    x, grad, w, bias = client.persist([*operands, *weights(k, n, dtype)[1]])
    distributed.wait([x, grad, w, bias])
    client.replicate(distributed.futures_of([w, bias]))
    seconds = []
    for _ in range(rounds + 1):
        found = nf.matmul_bias_activation_bwd(grad, x, w, bias, "gelu", needs=("b", "bias"))
        start = time.perf_counter()
        client.gather(client.compute([on_host(found.d_b), on_host(found.d_bias)]))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def alone(rows: int, k: int, n: int, blocks: int, dtype: str) -> float:
    """Seconds of as many block kernels, one after another on one GPU."""
    import cupy

    x, grad, w = (
        cupy.random.standard_normal(shape).astype(dtype) for shape in ((rows, k), (rows, n), (k, n))
    )
    bias = cupy.zeros(n, dtype)
    seconds = []
    for _ in range(4):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(blocks):
            nf.matmul_bias_activation_bwd(grad, x, w, bias, "gelu", needs=("b", "bias"))
        cupy.cuda.Device().synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[65536], help="of a block")
    parser.add_argument("-k", type=int, default=1024)
    parser.add_argument("-n", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "float16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", nargs="+", default=["float64", "float32", "float16"],
                        metavar="DTYPE", help="whose results are checked")  # fmt: skip
    arguments = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        return
    import cupy
    import distributed

    most = min(2, cupy.cuda.runtime.getDeviceCount())
    k, n, blocks, dtype = arguments.k, arguments.n, arguments.blocks, arguments.dtype
    bits = {}
    dtypes = arguments.check
    # a kernel takes seconds to compile: all dtypes at once, and not by each worker again
    with ProcessPoolExecutor(len(dtypes), mp_context=get_context("spawn")) as pool:
        print("compiled for", sum(pool.map(prepared, dtypes)), "results", flush=True)
    kernels, one = {}, {}
    for rows in arguments.rows:
        kernels[rows] = alone(rows, k, n, blocks, dtype)
        rate = 4.0 * rows * k * n * blocks / kernels[rows] / 1e12
        print(f"{blocks} blocks of {rows} x {k} x {n}, {dtype}, d_b and d_bias:")
        print(f"  kernels alone {kernels[rows]:7.3f} s  {rate:6.1f} TFLOP/s", flush=True)
    for gpus in sorted({1, most}):
        print(f"{gpus} of {most} GPUs")
        with cluster_of(gpus) as cluster, distributed.Client(cluster) as client:
            client.wait_for_workers(gpus)
            for rows in arguments.rows:
                spent = timed(client, rows, k, n, blocks, dtype, arguments.rounds)
                one.setdefault(rows, spent)
                print(
                    f"  {rows:7} rows  {spent:7.3f} s: {kernels[rows] / gpus / spent:.0%} of the "
                    f"kernels alone on as many GPUs, {one[rows] / spent:.2f} times one worker",
                    flush=True,
                )
            bits[gpus] = [check(client, dtype) for dtype in dtypes]
    print(f"one GPU and {most} GPUs give the same bits: {bits[1] == bits[most]}")
    if bits[1] != bits[most]:
        sys.exit("the bits depend on the number of workers")


if __name__ == "__main__":
    main()
