"""How products scale with threads on this machine: numfuse beside PyTorch and NumPy's BLAS.

    python asv_benches/scaling.py --threads 1 4 16 --json scaling.json

One process per number of threads, pinned to as many processors; contestants interleaved in a fresh
random order each round, medians, every result checked against float64 on sampled rows.  For each
case a line as soon as it is measured: GFLOP/s, numfuse's share of the FMA peak of as many threads,
and the time of each peer as a multiple of numfuse's (above 1 numfuse is faster).

``product`` is NumPy's matrix product alone, without bias and activation: what its BLAS can do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATIONS = ("forward", "backward", "backward_saved")
PEERS = ("PyTorch", "NumPy")
# Seconds before each contestant.  Idle threads of OpenBLAS look for work for 2**28 cycles, 130 ms:
# after 6 ms, which is enough for two, sixteen still took PyTorch and numfuse 20 times as long.
REST = 0.2


def arguments() -> argparse.Namespace:
    from numfuse.cli.bench import size

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, cpus}))
    sizes = [size(text) for text in ("512", "1024", "2048", "8192x2048x512")]
    parser.add_argument("--sizes", nargs="+", type=size, default=sizes, metavar="MxNxK")
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS[:2])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--activation", default="gelu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="append one object a case")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.worker is not None:
        return work(options)
    from numfuse.cli.ceilings import cores
    from numfuse.cli.session import THREAD_VARIABLES

    cpus = cores() or sorted(os.sched_getaffinity(0))
    for threads in options.threads:
        # Pinned before anything is imported: every library obeys that.
        boot = "import os,runpy,sys; os.sched_setaffinity(0, eval(sys.argv.pop(1)));"
        boot += "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
        chosen = str(cpus[:threads])
        command = [sys.executable, "-c", boot, chosen, __file__, *sys.argv[1:]]
        command += ["--worker", str(threads)]
        environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
        code = subprocess.run(command, env=environment).returncode
        if code:
            return code
    return 0


def work(options: argparse.Namespace) -> int:
    import numba
    import numpy as np

    from numfuse.cli import ceilings, peers, session, timing

    threads = options.worker
    numba.set_num_threads(threads)
    session.limit_threads(options.peers, threads)
    generator = np.random.default_rng(0)
    for dtype in options.dtype:
        peak = max(ceilings.fma_peak(dtype, threads, 0.02) for _ in range(5))
        print(f"\n{threads} thread(s), {dtype}: FMA peak {peak:.0f} GFLOP/s", flush=True)
        for operation in options.operations:
            for m, n, k in options.sizes:
                case = peers.Case(operation, m, n, k, dtype, options.activation)
                o = peers.draw_operands(case, generator)
                runs: dict[str, Callable[[], object]] = {}
                for name in ("numfuse", *options.peers):
                    runs[name] = peers.contestant(name, case, o)
                    check(case, o, timing.arrays(runs[name]()), name)
                product = np.empty((m, n), dtype)

                def blas(a: Any = o.a, b: Any = o.b, out: Any = product) -> None:
                    np.matmul(a, b, out=out)

                if operation == "forward":
                    runs["product"] = blas
                seconds = timing.interleave(
                    runs, rounds=options.rounds, rest=REST if threads > 1 else 0.0
                )
                report(case, threads, peak, seconds, options.json)
    return 0


def check(case: Any, o: Any, results: tuple[Any, ...], name: str) -> None:
    """Compare the first output on 16 rows (d_a's rows in a backward) with float64."""
    import numpy as np

    from numfuse.cli import peers

    rows = np.linspace(0, case.m - 1, 16).astype(int)
    part = case._replace(m=len(rows))
    few = o._replace(a=o.a[rows], grad=o.grad[rows], pre=o.pre[rows], up=o.up[rows])
    right = peers.exact(part, few)[0]
    error = float(np.linalg.norm(results[0][rows] - right) / np.linalg.norm(right))
    if not error <= peers.tolerance(case):
        raise SystemExit(f"WRONG RESULT {name}: {case}: relative error {error:.1e}")


def report(
    case: Any, threads: int, peak: float, seconds: dict[str, list[float]], path: Path | None
) -> None:
    from numfuse.cli import timing

    medians = {name: timing.median(figures) for name, figures in seconds.items()}
    flop = {name: case.flop for name in medians} | {"product": 2 * case.m * case.n * case.k}
    rates = {name: flop[name] / time / 1e9 for name, time in medians.items()}
    ours = medians["numfuse"]
    words = [f"{name} {rates[name]:.0f} ({time / ours:.2f}x)" for name, time in medians.items()]
    share = rates["numfuse"] / peak if peak else float("nan")
    shape = f"{case.m}x{case.n}x{case.k}"
    print(f"{case.operation:15s} {shape:15s} {share:4.0%}  " + "  ".join(words), flush=True)
    if path is not None:
        with path.open("a") as file:
            line = {**case._asdict(), "threads": threads, "peak_gflops": peak, "seconds": medians}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
