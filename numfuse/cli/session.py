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
from collections.abc import Iterator
from typing import Any

import numpy as np

from numfuse.cli import ceilings, peers, timing, uses

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
    if "cases" in plan:
        environment["OPENBLAS_THREAD_TIMEOUT"] = OPENBLAS_TIMEOUT
    if threads == "1":
        flags = os.environ.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"
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
    import numba

    plan = json.loads(plan_text)
    threads = plan["threads"]

    def tell(event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **facts}), flush=True)

    numba.set_num_threads(threads)
    if libraries := limit_threads(plan["peers"], threads):
        tell("libraries", libraries=libraries)
    generator = np.random.default_rng(plan["seed"])
    if "uses" in plan:
        for use in uses.chosen(plan["uses"]):
            tell("uses", **uses.measure(use, generator, plan["seconds"], plan["rounds"]))
        return
    bandwidth, array_bytes = ceilings.triad(threads)
    tell("triad", gbs=bandwidth, array_bytes=array_bytes)

    probe = timing.Probe(lambda: ceilings.fma_peak("float32", threads, PROBE))
    for fields in plan["cases"]:
        found = run_case(peers.Case(*fields), plan, generator, probe)
        # so far: the parent may end this process after any case
        tell("disturbed", disturbed=probe.disturbed, stretches=probe.stretches)
        tell("cases", **found)


def limit_threads(names: list[str], threads: int) -> list[str]:
    """Set every pool that has a switch; for JAX the affinity of the process is the switch.

    Returns the libraries of BLAS that were found.
    """
    if {"PyTorch", "torch.compile"} & set(names):
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


def run_case(
    case: peers.Case,
    plan: dict[str, Any],
    generator: np.random.Generator,
    probe: timing.Probe | None = None,
) -> dict[str, Any]:
    """Build the contestants, check each against float64, time them in interleaved rounds."""
    operands = peers.draw_operands(case, generator)
    runs, found = timing.checked(
        ("numfuse", *plan["peers"]),
        lambda name: peers.contestant(name, case, operands),
        lambda: peers.exact(case, operands),
        required="numfuse",
    )
    peaks: list[float] = []
    if case.flop:
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
        **timing.summary(seconds),
        **found,
        "tolerance": peers.tolerance(case),
        "flop": case.flop,
        "bytes": case.bytes,
        "peak_gflops": timing.median(peaks) if peaks else None,
    }
