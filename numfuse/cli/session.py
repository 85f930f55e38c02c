"""The measuring half of ``bench``: one process per number of threads, pinned to as many cores.

Pinning is the one limit that every library obeys: JAX and others size their pools by the
processors they are allowed, and have no switch of their own. The parent sends the plan as the
argument and reads one JSON object a line from the standard output.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

# Read by the libraries when they are imported; the same number for all.
THREAD_VARIABLES = (
    "NUMBA_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# Idle threads of OpenBLAS look for work for 2**28 cycles, 130 ms, on the cores of the next
# contestant: measured, 4-12 ms more for each of its calls. With 2**21, 1 ms, they still find the
# next of OpenBLAS's own calls.
OPENBLAS_TIMEOUT = "21"
# Seconds of multiply-adds that tell whether the machine is undisturbed.
PROBE = 0.002
# Affinity is set before anything is imported: threads inherit it from the one that starts them.
BOOT = """
import os, sys
cpus = [int(cpu) for cpu in sys.argv[2].split(",") if cpu]
if cpus:
    os.sched_setaffinity(0, cpus)
from numfuse.cli.session import measure
measure(sys.argv[1])
"""


def start(plan: dict[str, Any], cpus: list[int]) -> Iterator[dict[str, Any]]:
    """Run a plan in a process of its own and yield its events as they come.

    Raises
    ------
    RuntimeError
        The process failed; the message holds the end of what it said.
    """
    threads = str(plan["threads"])
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, threads)
    if "uses" not in plan:
        environment["OPENBLAS_THREAD_TIMEOUT"] = OPENBLAS_TIMEOUT
    environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_cpu_multi_thread_eigen=false" if threads == "1" else ""
    )
    command = [sys.executable, "-c", BOOT, json.dumps(plan), ",".join(map(str, cpus))]
    # (a file takes what a talkative library says; a pipe that nobody reads would block it)
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):  # libraries print there too
                    yield json.loads(line)
        except BaseException:
            process.kill()
            raise
        if code := process.wait():
            said.seek(0)
            tail = "".join(said.readlines()[-40:])
            raise RuntimeError(f"the measuring process ended with code {code}:\n{tail}")


def measure(plan_text: str) -> None:
    """Entry point of the measuring process."""
    plan = json.loads(plan_text)
    threads = plan["threads"]

    def tell(**event: Any) -> None:
        print(json.dumps(event), flush=True)

    import numba
    import numpy as np

    from numfuse.cli import ceilings, peers, timing

    numba.set_num_threads(threads)
    if libraries := limit_threads(plan["peers"], threads):
        tell(event="libraries", libraries=libraries)
    if "uses" in plan:
        from numfuse.cli import uses

        for row in uses.measured(plan):
            tell(event="use", **row)
        return
    bandwidth, array_bytes = ceilings.triad(threads)
    tell(event="triad", gbs=bandwidth, array_bytes=array_bytes)

    probe = None
    if ceilings.fma_peak("float32", threads) is not None:
        probe = timing.Probe(lambda: ceilings.fma_peak("float32", threads, PROBE) or 0.0)
    generator = np.random.default_rng(plan["seed"])
    for fields in plan["cases"]:
        found = run_case(peers.Case(*fields), plan, generator, probe)
        if probe is not None:  # so far: the parent may end this process after any case
            tell(event="disturbed", disturbed=probe.disturbed, stretches=probe.stretches)
        tell(event="case", **found)


def limit_threads(names: list[str], threads: int) -> list[str]:
    """Set every pool that has a switch; for JAX the affinity of the process is the switch.

    Returns the libraries of BLAS that were found.
    """
    if any(name in ("PyTorch", "torch.compile") for name in names):
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)  # no tape: the formulas are explicit
    # (without it, OPENBLAS_NUM_THREADS and its like did it at the import)
    if importlib.util.find_spec("threadpoolctl") is None:
        return []
    from threadpoolctl import threadpool_info, threadpool_limits

    threadpool_limits(threads)
    return sorted(
        {
            f"{info['internal_api']} {info.get('version') or ''}".strip()
            + f" ({info['num_threads']} threads)"
            for info in threadpool_info()
            if info["user_api"] == "blas"
        }
    )


def run_case(case: Any, plan: dict[str, Any], generator: Any, probe: Any = None) -> dict[str, Any]:
    """Build the contestants, check each against float64, time them in interleaved rounds."""
    from numfuse.cli import ceilings, peers, timing

    operands = peers.draw_operands(case, generator)
    right = peers.exact(case, operands)
    makers = {"numfuse": peers.numfuse_contestant}
    makers |= {name: peers.PEERS[name][1] for name in plan["peers"]}

    runs: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, make in makers.items():
        try:
            contestant = make(case, operands)
            result = contestant.arrays(contestant.run())
        except Exception as error:  # a peer that cannot is a fact to report, whatever it raises
            if name == "numfuse":
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        runs[name] = contestant.run
        errors[name] = peers.relative_error(result, right)
    del right

    peaks: list[Any] = []
    if case.flop and ceilings.fma_peak(case.dtype, plan["threads"]) is not None:
        # In the same rounds as the contestants: a processor's clock moves with heat and load.
        runs["peak"] = lambda: peaks.append(ceilings.fma_peak(case.dtype, plan["threads"]))
    seconds = timing.interleave(
        runs,
        rounds=plan["rounds"],
        sample=plan["sample"],
        rest=timing.REST if plan["rest"] else 0.0,
        seed=plan["seed"],
        probe=probe,
    )
    seconds.pop("peak", None)
    return {
        **case._asdict(),
        "threads": plan["threads"],
        "seconds": {name: timing.median(figures) for name, figures in seconds.items()},
        "spread": {name: timing.spread(figures) for name, figures in seconds.items()},
        "error": errors,
        "tolerance": peers.tolerance(case),
        "failed": failed,
        "flop": case.flop,
        "bytes": case.bytes,
        "peak_gflops": timing.median(peaks) if peaks else None,
    }
