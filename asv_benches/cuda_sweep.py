"""Shapes that nobody chose, on an NVIDIA GPU: numfuse beside the best of PyTorch's ways.

    python asv_benches/cuda_sweep.py --minutes 9            draw, compile ahead, time, keep, report
    python asv_benches/cuda_sweep.py --seed 7 --minutes 9   the same cases as another run's
    python asv_benches/cuda_sweep.py --thin --eager --minutes 2.4 --into FILE     `thin_cases`
    python asv_benches/cuda_sweep.py --again run.jsonl --under 0.9 --into FILE      what was slow
    python asv_benches/cuda_sweep.py --report               tables and picture of all kept results
    python asv_benches/cuda_sweep.py --add run.jsonl        keep another machine's results too
    python asv_benches/cuda_sweep.py --dry 40               no GPU: plans of 40 cases, tiny ones run

M, K and N are drawn anew at every run, each octave from 1 to 65,536 as likely as any other, half of
them from sizes of models (`sweep_cases`), within memory and some 30 ms of work. A share of the time
that is left is for compiling in many processes, in which numfuse's kernels and torch.compile's come
into their caches on disk; what is ready then is timed, and so on until the end. A case takes about
8 seconds of a core ahead and 1 of the GPU: 16 cores have some 150 cases in five minutes, and 300 in
nine. Peers are PyTorch's eager way, the product and the sum apart, cuBLAS's fused epilogues and, of
a quarter of the cases, torch.compile. Of some, other ways of one of their products are timed too,
for `cuda_fit.py`. Times and clocks are those of `cuda_gpu.py`; errors are against float64, or twice
its digits for float64 itself. Every result is written at once, as a line of
docs/history/cuda_sweep.jsonl: a run that is killed keeps what it has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cuda_fit
import sweep_report
import thin_cases
import torch
from sweep_cases import MOST, MOST_WAYS, Case, Contestants, Layers, Norms, draw, errors, norms

import numfuse as nf

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "history" / "cuda_sweep.jsonl"
PICTURE = ROOT / "docs" / "images" / "cuda_sweep.png"
#: Bytes of a case's arrays: sixteen processes that compile have a case each.
MEMORY = 3 << 30
#: The share of the time that is left that goes to compiling ahead, and the seconds for which
#: processes that compile are worth their start.
AHEAD, LEAST = 0.4, 45
#: Seconds that the contestants of a case are timed for, device and wall time each.
SECONDS = 0.25
#: Elements that the error of a result comes from, draws of the operands that it takes at the most,
#: and seconds: of one element the peer's error may be zero by luck.
ELEMENTS, DRAWS, DRAW_SECONDS = 4096, 64, 0.5


class HostClock:
    """Wall times of contestants on the host that take turns, in place of `cuda_gpu.Clock`."""

    rounds = 3

    def device(self, contestants: Contestants) -> dict[str, float]:
        """Medians in seconds."""
        found: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(self.rounds):
            for name, call in random.sample(list(contestants.items()), len(contestants)):
                start = time.perf_counter()
                call()
                found[name].append(time.perf_counter() - start)
        return {name: statistics.median(times) for name, times in found.items()}

    def wall(self, contestants: Contestants, calls: int = 50) -> dict[str, float]:
        """The same: nobody waits for a device."""
        return self.device(contestants)


def about(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what is kept of a run: where, when, and of which versions."""
    found: dict[str, Any] = {
        "kind": "run",
        "seed": seed,
        "options": [Path(x).name for x in sys.argv[1:]],
    }
    found["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found["id"] = f"{found['date']} {secrets.token_hex(4)}"
    found["commit"] = arguments.commit or commit()
    found["versions"] = {
        "numfuse": nf.__version__, "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }  # fmt: skip
    if torch.cuda.is_available():
        from numfuse.backends.cuda.driver.libcuda import driver_version

        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = f"CUDA {driver_version()}"
        found["versions"]["cuDNN"] = torch.backends.cudnn.version()
        found["versions"]["driver"] = smi("driver_version")
    else:
        found["gpu"], found["driver"] = "none", ""
    return found


def commit() -> str:
    """Return the commit of this checkout; "" where there is none."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def smi(what: str) -> str:
    """Return what nvidia-smi says of the first GPU; "" without it."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()


# --- ahead ----------------------------------------------------------------------------------------
def compiled(case: Case, peers: bool) -> str:
    """Call once, in a process of its own, what compiles for a case; return what went wrong."""
    torch.set_num_threads(1)
    failed = []
    try:
        layers = Layers(case, "cuda")
        calls = layers.contestants(peers)
        for name in calls.keys() - {sweep_report.OURS, "torch.compile"}:
            del calls[name]
        if case.ways:
            calls["ways"] = lambda: other_ways(layers, 1)
        for name, call in calls.items():
            try:
                call()
            except Exception as reason:
                failed.append(f"{name}: {type(reason).__name__}: {str(reason)[:300]}")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as reason:
        failed.append(f"{type(reason).__name__}: {str(reason)[:300]}")
    return "; ".join(failed)


def ready(cases: Iterator[Case], processes: int, until: float, peers: bool) -> list[Case]:
    """Compile for cases in many processes until a time; return those that are done, in order."""
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    pool = ProcessPoolExecutor(processes, mp_context=context)
    running: dict[Future[str], tuple[int, Case]] = {}
    done: list[tuple[int, Case]] = []
    number = 0
    try:
        while time.perf_counter() < until:
            while len(running) < 2 * processes and (case := next(cases, None)) is not None:
                running[pool.submit(compiled, case, peers)] = number, case
                number += 1
            if not running:
                break
            left = max(0.0, until - time.perf_counter())
            for future in wait(running, left, FIRST_COMPLETED)[0]:
                entry = running.pop(future)
                problem = future.exception() or future.result()
                if problem:
                    print(f"  ahead, {entry[1]}: {problem}", flush=True)
                done.append(entry)  # it is measured all the same, and fails there by name
    except KeyboardInterrupt:
        raise
    except Exception as reason:  # a pool that broke: what is done is measured
        print(f"  compiling ahead ended: {type(reason).__name__}: {reason}", flush=True)
    mine = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in mine:  # they have the GPU, on which nothing else shall run now
        process.terminate()
    for process in mine:
        process.join(10)
    return [case for _, case in sorted(done, key=lambda entry: entry[0])]


def other_ways(layers: Layers, rounds: int = 15) -> dict[str, Any]:
    """Return what `cuda_fit` wants to know of a product of a case: it, and seconds by its ways."""
    from numfuse.backends.cuda.call import tuner
    from numfuse.backends.cuda.driver.devices import device
    from numfuse.backends.cuda.plan import tiers

    product, seconds = tuner.measured(layers.product(), nf.to_numpy, MOST_WAYS, rounds)
    info = device().info
    return {
        "device": asdict(info),
        "product": cuda_fit.facts(product),
        "chosen": tiers.name_of(product, info),
        "seconds": seconds,
    }


# --- measuring ------------------------------------------------------------------------------------
def _draw_more(layers: Layers, kept: Contestants, off: dict[str, list[Norms]], fewest: int) -> None:
    """Add the norms of other draws, where a result has few elements: `fewest`."""
    until = time.perf_counter() + DRAW_SECONDS
    for seed in range(1, min(DRAWS, -(-ELEMENTS // fewest))):
        if time.perf_counter() > until:
            break
        layers.draw_again(layers.case.seed + seed)
        exact = layers.exact()
        for name, call in kept.items():
            off[name].append(norms(call(), exact))


def measured(case: Case, device: str, clock: Any, peers: bool) -> dict[str, Any]:
    """Return the times and errors of a case, and why a contestant has none."""
    layers = Layers(case, device)
    record: dict[str, Any] = {"kind": "case", "case": case.record(), "errors": {}, "failed": {}}
    exact = layers.exact()
    fewest = min(x.numel() for x in exact)
    kept: Contestants = {}
    off: dict[str, list[Norms]] = {}
    once = 1e-5
    for name, call in layers.contestants(peers).items():
        try:
            off[name] = [norms(call(), exact)]
            if name == sweep_report.OURS:
                told = nf.last_call()
                record["tier"] = "" if told is None else f"{told.tier}: {told.tiling}"
            call()
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            once = max(once, time.perf_counter() - start)
        except Exception as reason:
            record["failed"][name] = f"{type(reason).__name__}: {str(reason)[:300]}"
            continue
        kept[name] = call
    del exact
    _draw_more(layers, kept, off, fewest)
    record["errors"] = {name: errors(*found) for name, found in off.items()}
    # a round flushes the cache too, which takes 0.1 ms
    clock.rounds = max(5, min(15, int(SECONDS / (len(kept) * (once + 2e-4)))))
    record["device"] = clock.device(kept)
    calls = max(2, min(50, int(SECONDS / (8 * len(kept) * once))))
    record["wall"] = clock.wall(kept, calls)
    if case.ways and device == "cuda":
        try:
            record["ways"] = other_ways(layers)
        except Exception as reason:
            record["failed"]["ways"] = f"{type(reason).__name__}: {str(reason)[:300]}"
    return record


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def sweep(
    cases: Iterator[Case], device: str, clock: Any, peers: bool, until: float,
    write: Callable[[dict[str, Any]], None], before: int = 0, memory: float = 0,
) -> int:  # fmt: skip
    """Measure cases until a time, and write each result; return how many there are.

    Their numbers go on from those `before`. With the bytes that `memory` moves in a second, the
    share of them that a case moves is printed too.
    """
    count = 0
    for case in cases:
        if time.perf_counter() > until:
            break
        try:
            record = measured(case, device, clock, peers)
        except Exception as reason:
            why = f"{type(reason).__name__}: {str(reason)[:300]}"
            record = {"kind": "case", "case": case.record(), "failed": {"case": why}}
        write(record)
        count += 1
        ratio, off = sweep_report.ratio(record), sweep_report.error_ratio(record)
        shown = "failed" if ratio is None else f"{ratio:.2f}, error {off or 0:.2g} x"
        if memory and ratio is not None:
            share = thin_cases.moved(case) / record["device"][sweep_report.OURS] / memory
            shown += f", {share:.2f} of a copy's bytes"
        print(f"{before + count}. {case}: {shown}; {record.get('tier', '')}", flush=True)
        for name, why in record["failed"].items():
            print(f"  {name}: {why}", flush=True)
        if device == "cuda":
            try:
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
            except Exception as reason:  # nothing runs in this process any more
                print(f"  the device is lost: {reason}", flush=True)
                break
    return count


def run(arguments: argparse.Namespace) -> int:
    """Draw, compile, measure and keep."""
    begin = time.perf_counter()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    device = "cpu" if arguments.dry else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU is here, or PyTorch has no CUDA: only --dry and --report run", file=sys.stderr
        )
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    rng, most, memory = random.Random(seed), arguments.most or MOST, float(arguments.memory << 20)
    who = about(seed, arguments)
    print(f"seed {seed}; {who['gpu']}; {who['versions']}; commit {who['commit']}", flush=True)
    count = arguments.dry or arguments.cases or sys.maxsize
    if arguments.dry:
        plans(random.Random(seed), count, memory)
        most = 64
    end = begin + 60 * arguments.minutes
    cases: Iterator[Case] = (draw(rng, memory, most) for _ in range(count))
    if arguments.thin:
        cases = thin_cases.cases()
    if arguments.again:
        cases = again(arguments.again, arguments.under)
    peers = not (arguments.dry or arguments.eager)
    clock: Any = HostClock()
    if device == "cuda":
        from cuda_gpu import Clock

        clock = Clock(15)
    speed = copied(clock) if arguments.thin and device == "cuda" else 0.0
    into = Path(arguments.into or (_aside() if arguments.dry else KEPT))
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.open("a") as file:

        def write(record: dict[str, Any]) -> None:
            text = record if record["kind"] == "run" else {**record, "run": who["id"]}
            file.write(json.dumps(text) + "\n")
            file.flush()

        write(who)
        done = 0
        while not arguments.dry and arguments.processes and end - time.perf_counter() > LEAST:
            start = time.perf_counter()
            found = ready(cases, arguments.processes, start + (end - start) * AHEAD, peers)
            if not found:
                break
            taken = time.perf_counter() - start
            print(f"{len(found)} cases compiled in {taken:.0f} s", flush=True)
            done += sweep(iter(found), device, clock, peers, end, write, done, speed)
        if arguments.dry or not arguments.processes:
            done = sweep(cases, device, clock, peers, end, write, 0, speed)
    print(f"{done} cases in {time.perf_counter() - begin:.0f} s; kept in {into}")
    print(sweep_report.report([x for x in sweep_report.read([into]) if x["run"] == who["id"]]))
    return 0


def copied(clock: Any) -> float:
    """Return the bytes that PyTorch's copy of 1 GiB reads and writes in a second."""
    x = torch.empty(1 << 28, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / float(clock.device({"copy": lambda: y.copy_(x)})["copy"])


def again(path: str, under: float) -> Iterator[Case]:
    """Return the cases of a file whose ratio was below this, the lowest first."""
    found = []
    for record in sweep_report.read([Path(path)]):
        ratio = sweep_report.ratio(record)
        if ratio is not None and ratio < under:
            found.append((ratio, len(found), Case(**record["case"])))
    return iter([case for *_, case in sorted(found)])


def _aside() -> str:
    """Return a file for the results of a dry run, which are none to keep."""
    return os.path.join(tempfile.mkdtemp(), "dry.jsonl")


def plans(rng: random.Random, count: int, memory: float) -> None:
    """Print what would be launched for so many cases of full size on an H100."""
    import cuda_plans

    for number in range(count):
        case = draw(rng, memory)
        told, launches = cuda_plans.planned(case, cuda_plans.GPUS["h100"])
        print(f"{number + 1}. {case}: {told}; {len(launches)} launches", flush=True)


def add(paths: list[str]) -> None:
    """Append other files' lines to what is kept, those that it lacks."""
    there = set(KEPT.read_text().splitlines()) if KEPT.exists() else set()
    with KEPT.open("a") as file:
        for path in paths:
            for line in Path(path).read_text().splitlines():
                json.loads(line)  # a line that was cut off is seen here
                if line not in there:
                    there.add(line)
                    file.write(line + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9, help="for everything")
    parser.add_argument("--seed", type=int, help="of the cases; default: a new one, printed")
    parser.add_argument(
        "--thin",
        action="store_true",
        help="a fixed list of few rows and columns",
    )
    parser.add_argument("--again", metavar="FILE", help="the cases of a file, once more")
    parser.add_argument("--under", type=float, default=0.95, help="of these: ratios below this")
    parser.add_argument("--cases", type=int, help="so many at the most")
    parser.add_argument("--most", type=int, help=f"the largest size, {MOST} by default")
    parser.add_argument("--memory", type=int, default=MEMORY >> 20, help="MiB of a case")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2),
                        help="that compile ahead; 0: compile as it goes")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--commit", default="", help="its name, where there is no git")
    parser.add_argument("--into", help="where results are added, in place of docs/history")
    parser.add_argument("--dry", type=int, metavar="N", help="no GPU: plan N cases, run tiny ones")
    parser.add_argument(
        "--report",
        nargs="*",
        metavar="FILE",
        help="of what is kept and of these, the last result of each",
    )
    parser.add_argument("--gpu", default="", help="in the report: of GPUs whose name holds this")
    parser.add_argument("--picture", default=str(PICTURE), help="where the report draws")
    parser.add_argument("--add", nargs="+", metavar="FILE", help="files to keep, too")
    arguments = parser.parse_args()
    if arguments.add:
        add(arguments.add)
    elif arguments.report is not None:
        files = [*([KEPT] if KEPT.exists() else []), *map(Path, arguments.report)]
        records = [x for x in sweep_report.read(files) if arguments.gpu in x["of"].get("gpu", "")]
        records = sweep_report.latest(records)
        print(sweep_report.report(records))
        if records:
            sweep_report.draw(records, Path(arguments.picture))
            print(arguments.picture)
    else:
        return run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
