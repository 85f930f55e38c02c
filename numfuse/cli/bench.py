"""Measure this machine: its ceilings (fused multiply-adds and bytes a second), numfuse, and the
installed peers doing the same work on the same operands. First uses, which are whole steps of a
training or an inference through NumPy, PyTorch and JAX; then kernels. One process per number of
threads, pinned to as many cores; contestants interleaved, medians over the rounds, results checked
against float64. Tables, a picture of the kernels under the machine's ceilings, and a file for a bug
report.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import platform
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numfuse as nf
from numfuse.cli import missing_extra
from numfuse.cli.peers import ACTIVATIONS, LAYOUTS, OPERATIONS, PEERS, PRODUCTS, Case, installed
from numfuse.cli.report import wrong_uses

SIZES = {
    "quick": ["64", "256"],
    "default": ["512", "64", "1000x777x1003", "1024", "256"],
    "full": [
        *("64", "256", "512", "1024", "2048"),
        *("8192x512x2048", "4096x4096x64", "1000x777x1003"),
    ],
}
# What --full adds on views: where packing weighs most, where it weighs least, and odd sizes.
VIEW_SIZES = ["256", "1024", "8192x512x2048", "1000x777x1003"]
VIEW_OPERATIONS = ["forward", "backward"]
# Beside those, for gated operations alone: 32 Mi elements, far beyond any cache and beyond what an
# allocator keeps for the next array.
GATED_SIZES = {"quick": [], "default": ["2048x2048x1"], "full": ["8192x4096x1"]}
# Rounds and the least seconds of one timed stretch.
EFFORT = {"quick": (3, 1e-3), "default": (5, 2e-3), "full": (15, 5e-3)}
# A plain `bench` is done within two minutes on any machine: after this many seconds the cases that
# are left are left out, and it says so. They come by turns, so that none of operations and dtypes
# goes without. What follows the last case takes some seconds more.
SECONDS = 105.0
# Of these, the uses take so many at the most, and each about so many of measuring.
USES_SECONDS, USE_SECONDS = 45.0, {"quick": 0.1, "default": 2.0, "full": 6.0}
DEFAULT_OPERATIONS = OPERATIONS[:5]  # without "fresh"
SLOW_TO_COMPILE = "torch.compile"  # seconds per case: only where asked for
GATED_ELEMENTS = 1 << 16  # below, a gated call measures the caller and not the kernel
# Called with what is measured next and how many of how many are done, as rich's bar names them.
Advance = Callable[..., None]


def size(text: str) -> tuple[int, int, int]:
    """``512`` or ``1000x777x1003``: M, N, K."""
    try:
        numbers = [int(part) for part in text.split("x")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= 3
    if len(numbers) != 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected N or MxNxK, got {text!r}")
    m, n, k = numbers
    return m, n, k


def add_arguments(parser: argparse.ArgumentParser) -> None:
    effort = parser.add_mutually_exclusive_group()
    full = "every size, layout and peer, torch.compile too, more rounds: up to two hours"
    for name, text in (("quick", "some seconds"), ("full", full)):
        effort.add_argument(f"--{name}", dest="effort", action="store_const", const=name, help=text)
    parser.set_defaults(effort="default")
    add = parser.add_argument
    text = "measure for so long at the most; default: "
    text += f"{SECONDS:.0f} where nothing else is asked for, else no limit"
    add("--seconds", type=float, metavar="S", help=text)
    text = "a is M x K, b is K x N; N for a cube"
    add("--sizes", nargs="+", type=size, metavar="MxNxK", help=text)
    add("--dtype", nargs="+", choices=("float32", "float64"))
    add("--operations", nargs="+", choices=OPERATIONS)
    text = "of the operands of products; default: contiguous, with --full some of each"
    add("--layouts", nargs="+", choices=tuple(LAYOUTS), help=text)
    add("--activation", choices=ACTIVATIONS, default="gelu")
    text = "the uses whose names hold one of these, all without a word; default: all (with --quick "
    text += "those of NumPy), none where sizes, dtypes, layouts or operations are given"
    add("--uses", nargs="*", metavar="WORD", help=text)
    text = "default: 1, and one per core"
    add("--threads", nargs="+", type=int, metavar="N", help=text)
    add("--peers", nargs="*", choices=tuple(PEERS))
    add("--rounds", type=int, metavar="N")
    add("--seed", type=int, help="default: a new one each time")
    for name, file, text in (
        ("json", Path("numfuse_bench.json"), "where to write everything measured"),
        ("picture", Path("numfuse_bench.png"), "where to draw it under the machine's ceilings"),
    ):
        text += " (default: %(default)s)"
        add(f"--{name}", type=Path, metavar="FILE", default=file, help=text)
    text = "write the tables; between the marks of an existing file, if it has them"
    add("--markdown", type=Path, metavar="FILE", help=text)


def choose_peers(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The peers to run, and why each other one is not run."""
    wanted = arguments.peers if arguments.peers is not None else list(PEERS)
    chosen, left_out = [], {}
    for name in wanted:
        if not installed(name):
            left_out[name] = f"{PEERS[name][0]} is not installed"
        elif name == SLOW_TO_COMPILE and arguments.peers is None and arguments.effort != "full":
            left_out[name] = "it compiles for seconds in each case; --full or --peers includes it"
        else:
            chosen.append(name)
    return chosen, left_out


def choose_threads(arguments: argparse.Namespace, cores: list[int]) -> tuple[list[int], list[str]]:
    """Numbers of threads, and a sentence for each that this machine has no cores for."""
    available = len(cores) or os.cpu_count() or 1
    if arguments.threads is None:
        return ([1] if arguments.effort == "quick" else sorted({1, available})), []
    possible = [n for n in arguments.threads if 1 <= n <= available]
    return possible, [
        f"{n} threads are left out: this process may use {available} core(s)"
        for n in arguments.threads
        if n not in possible
    ]


def choose_cases(arguments: argparse.Namespace) -> list[Case]:
    effort = arguments.effort
    default = {"quick": OPERATIONS[:2], "default": DEFAULT_OPERATIONS, "full": OPERATIONS}
    operations = arguments.operations or default[effort]
    sizes = gates = arguments.sizes or list(map(size, SIZES[effort]))
    if not arguments.sizes:
        gates = [x for x in sizes if x[0] * x[1] >= GATED_ELEMENTS]
        gates += map(size, GATED_SIZES[effort])
    parts = [(layout, operations, sizes) for layout in arguments.layouts or ["contiguous"]]
    if effort == "full" and not (arguments.sizes or arguments.layouts):
        viewed = [operation for operation in operations if operation in VIEW_OPERATIONS]
        parts += [(layout, viewed, list(map(size, VIEW_SIZES))) for layout in LAYOUTS]
    # A gated operation works on (M, N): one case where two sizes differ in K only.
    cases: dict[Case, None] = {}
    for dtype in arguments.dtype or ["float32", "float64"][: 1 if effort == "quick" else 2]:
        for layout, chosen, shapes in parts:
            for operation in chosen:
                gated = operation not in PRODUCTS
                if gated and layout != "contiguous":
                    continue
                for m, n, k in gates if gated else shapes:
                    k = 0 if gated else k
                    cases[Case(operation, m, n, k, dtype, arguments.activation, layout)] = None
    return list(cases)


def by_turns(cases: list[Case]) -> list[Case]:
    """The first case of every operation, dtype and layout, then the second of each, and so on."""
    seen: Counter[tuple[str, ...]] = Counter()

    def turn(case: Case) -> int:
        group = (case.operation, case.dtype, case.layout)
        seen[group] += 1
        return seen[group]

    return sorted(cases, key=turn)


def asked(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments choose among the kernels."""
    return any((arguments.sizes, arguments.dtype, arguments.operations, arguments.layouts))


def budget(arguments: argparse.Namespace) -> float:
    """Seconds that the measurements may take; infinite for as long as they do."""
    if arguments.seconds is not None:
        return float(arguments.seconds)
    other = asked(arguments) or arguments.rounds or arguments.threads
    return SECONDS if arguments.effort == "default" and not other else math.inf


def choose_uses(arguments: argparse.Namespace) -> list[str] | None:
    """Return words of the names of the uses to measure, none for all; None for no use."""
    if arguments.uses is not None:
        return list(arguments.uses)
    if asked(arguments):
        return None
    return ["NumPy"] if arguments.effort == "quick" else []


def measure_part(
    plan: dict[str, Any],
    cores: list[int],
    names: list[str],
    end: float,
    report: dict[str, Any],
    advance: Advance,
) -> dict[str, Any]:
    """Measure uses, or cases on one number of threads, until their time is up, but at least one.

    The results join those of the report; what else the process told is returned.
    """
    from numfuse.cli import session

    kind = "uses" if "uses" in plan else "cases"
    what = kind if kind == "uses" else f"cases on {plan['threads']} thread(s)"
    found = {"threads": plan["threads"]}
    done = 0
    advance(description=f"{what}: {names[0]}", completed=0, total=len(names))
    for event in session.start(plan, cores):
        told = event.pop("event")
        if told != kind:
            found[told] = event
            continue
        report[kind].append(event)
        done += 1
        if done == len(names):
            continue  # the process ends by itself
        if time.monotonic() > end:
            report["notes"].append(
                f"{len(names) - done} of {len(names)} {what} were left out, as the time was up: "
                "--seconds sets it, --full has no limit"
            )
            break  # ends the measuring process, too
        advance(description=f"{what}: {names[done]}", completed=done)
    return found


def measure(arguments: argparse.Namespace, advance: Advance) -> dict[str, Any]:
    """Run everything."""
    from numfuse.cli import ceilings, uses
    from numfuse.cli.info import REQUIRED, version

    cores = ceilings.cores()
    threads, notes = choose_threads(arguments, cores)
    chosen, left_out = choose_peers(arguments)
    cases = choose_cases(arguments)
    rounds, sample = EFFORT[arguments.effort]
    rounds = arguments.rounds or rounds
    seed = arguments.seed if arguments.seed is not None else secrets.randbits(32)
    if not cores:
        notes.append("this system cannot pin a process: JAX takes as many threads as it likes")
    report: dict[str, Any] = {
        "numfuse": nf.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": ceilings.processor(),
        "cores": len(cores) or None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in (*REQUIRED, "torch", "jax")},
        "seed": seed,
        "rounds": rounds,
        "activation": arguments.activation,
        "peers": chosen,
        "left_out": left_out,
        "notes": notes,
        "uses": [],
        "sessions": [],
        "cases": [],
    }
    limit, began = budget(arguments), time.monotonic()
    words = choose_uses(arguments)
    names = [use.name for use in uses.chosen(words)] if words is not None else []
    if names:
        every = len(cores) or os.cpu_count() or 1
        plan = {"threads": every, "peers": [], "uses": words, "seed": seed}
        plan |= {"rounds": rounds * 3, "seconds": USE_SECONDS[arguments.effort]}
        end = began + (min(limit, USES_SECONDS) if limit < math.inf else limit)
        measure_part(plan, cores, names, end, report, advance)
    turns = by_turns(cases)
    names = [f"{case.operation} {case.dtype} {case.m}x{case.n}" for case in turns]
    for turn, count in enumerate(threads if turns else (), 1):
        plan = {"threads": count, "peers": chosen, "cases": turns, "seed": seed}
        # (one pinned thread has nobody to wait for)
        plan |= {"rounds": rounds, "sample": sample, "rest": count > 1}
        # Each number of threads gets its share, and what those before it have left.
        end = began + limit * turn / len(threads)
        found = measure_part(plan, cores[:count], names, end, report, advance)
        report["sessions"].append(found)

    def place(found: dict[str, Any]) -> tuple[int, int]:
        case = Case(*(found[name] for name in Case._fields))
        return threads.index(found["threads"]), cases.index(case)

    report["cases"].sort(key=place)
    return report


def wrong_results(report: dict[str, Any]) -> list[str]:
    """A sentence for each result that is further from float64 than its rounding allows."""
    return wrong_uses(report["uses"]) + [
        f"{name}: {case['operation']} {case['dtype']} {case['m']}x{case['n']}x{case['k']} "
        f"{case['layout']}: "
        f"relative error {error:.1e}, at most {case['tolerance']:.1e} expected"
        for case in report["cases"]
        for name, error in case["error"].items()
        if not error <= case["tolerance"]
    ]


def draw(report: dict[str, Any], path: Path, say: Callable[[str], None]) -> None:
    """The picture, where there is something to draw and something to draw with."""
    if not report["cases"]:
        return
    if importlib.util.find_spec("matplotlib") is None:
        say('no picture: matplotlib is not installed: python -m pip install "numfuse[bench]"')
        return
    from numfuse.cli.roofline import draw as roofline

    roofline(path, report)
    say(f"picture: {path}")


def run(arguments: argparse.Namespace) -> int:
    if missing_extra("bench", ("rich",), "bench"):
        return 2
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from numfuse.cli import report as reports

    # A pipe or a file has no width of its own: wide enough for every column.
    console = Console(width=None if sys.stdout.isatty() else 200)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    try:
        for path in (arguments.json, arguments.picture, arguments.markdown):
            if path and not path.parent.is_dir():
                raise FileNotFoundError(f"no directory for {path}")
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            advance = functools.partial(bar.update, bar.add_task("starting", total=None))
            report = measure(arguments, advance)
        reports.show(report, console)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        console.print(f"everything measured: {arguments.json}")
        draw(report, arguments.picture, console.print)
        if arguments.markdown:
            reports.write_markdown(report, arguments.markdown)
            console.print(f"tables: {arguments.markdown}")
    except (OSError, RuntimeError) as error:
        print(f"numfuse bench: {error}", file=sys.stderr)
        return 1
    wrong = wrong_results(report)
    for sentence in wrong:
        print(f"WRONG RESULT  {sentence}", file=sys.stderr)
    return 1 if wrong else 0
