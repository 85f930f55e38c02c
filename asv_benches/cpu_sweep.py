"""Calls that nobody chose, on the processor: numfuse beside the best of what is installed.

    python asv_benches/cpu_sweep.py --minutes 4                    draw, check, time, report
    python asv_benches/cpu_sweep.py --threads 1 --only layer       on one core, some operations
    python asv_benches/cpu_sweep.py --seed 7 --minutes 4           the cases of another run
    python asv_benches/cpu_sweep.py --case '{"operation": ...}'    one case, as a report prints it
    python asv_benches/cpu_sweep.py --again FILE --under 0.9       what was slow, once more
    python asv_benches/cpu_sweep.py --report FILE ...              the distribution of kept results

Operation, dtype, sizes, layout and activation are drawn anew, sizes log-uniformly: any ones, small
ones, large ones, thin ones (M, N or K of 1 to 8) and long sums. Operands are drawn anew at every
run. Peers are NumPy (values, and gradients of single layers and gates by hand), eager PyTorch with
its autograd, JAX under ``jax.jit``, and with ``--compile`` torch.compile. Where a call of numfuse
is given the pre-activation, PyTorch's graph and JAX's residuals are kept too. All are checked
against float64 and timed in turns (`numfuse.cli.uses.measure`), after a rest; times are wall times,
and a ratio is the fastest peer's time by ours. ``--into FILE`` keeps each result as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import secrets
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cpu_cases import OPERATIONS
from cpu_contestants import Contestants

from numfuse.cli.session import OPENBLAS_TIMEOUT, THREAD_VARIABLES
from numfuse.cli.steps import Maker, Work
from numfuse.cli.uses import Use, measure

#: Seconds that the contestants of a case are timed for, together.
SECONDS = 0.8
#: Flops of a case and bytes of its arrays at the most: a tenth of a second of one core.
WORK, MEMORY = 1e10, 2e8
GOOD = 0.95
#: {kind of size: how often it is drawn}
SIZES = {"any": 4, "small": 2, "large": 2, "thin": 3, "long": 1}
DTYPES = {"float32": 5, "float64": 5, "bfloat16": 1, "float16": 1}
#: {layout of the operands: how often it is drawn}
LAYOUTS = {"rows": 5, "b turned": 3, "a turned": 1, "a apart": 1}
ACTIVATIONS = ("none", "relu", "gelu", "gelu_erf", "silu", "sigmoid", "tanh", "softplus")


@dataclass(frozen=True)
class Case:
    """One call: what is computed, of what."""

    operation: str
    #: value, gradients, saved (gradients from a kept pre-activation), tangent or second.
    order: str
    dtype: str
    activation: str
    m: int
    k: int
    n: int
    #: Members of a batch, of which each has a weight or all share one; 0: there is none.
    batch: int = 0
    shared: bool = True
    #: How the factors lie: b as (out, in), a as (K, M), or a as columns of a wider array.
    layout: str = "rows"
    #: Layers of a network, which has k inputs and n columns in each.
    depth: int = 1

    def __str__(self) -> str:
        of = f"{self.batch} x " * bool(self.batch) + f"{self.m} x {self.k} x {self.n}"
        words = [self.operation, self.order, self.dtype, self.activation, of]
        words += [f"depth {self.depth}"] * (self.depth > 1)
        words += ["one weight"] * (self.batch > 0 and self.shared)
        return ", ".join([*words, *[self.layout] * (self.layout != "rows")])

    @property
    def work(self) -> float:
        """Flops of the products, of which each order has a multiple of the value's."""
        products = {"value": 1, "gradients": 3, "saved": 2, "tangent": 3, "second": 6}[self.order]
        wide = self.k * self.n + (self.depth - 1) * self.n * self.n
        return 2.0 * products * max(1, self.batch) * self.m * wide

    @property
    def nbytes(self) -> float:
        """Bytes of the operands and results, about."""
        weights = 1 if self.shared else max(1, self.batch)
        rows = max(1, self.batch) * self.m * (self.k + 3 * self.n * self.depth)
        return 8.0 * (rows + weights * self.n * (self.k + self.n * (self.depth - 1)))


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    """Return a whole number from `least` to `most`, of which each octave is as likely."""
    return min(most, int(least * math.exp(rng.uniform(0, math.log((most + 1) / least)))))


def sizes(rng: random.Random) -> tuple[int, int, int]:
    """Return M, K and N of one of the kinds of size."""
    kind = rng.choices(list(SIZES), list(SIZES.values()))[0]
    least, most = {"any": (1, 4096), "small": (1, 64), "large": (400, 3000), "thin": (16, 8192),
                   "long": (1, 256)}[kind]  # fmt: skip
    found = [log_uniform(rng, least, most) for _ in range(3)]
    if kind == "thin":
        found[rng.randrange(3)] = rng.randint(1, 8)
    if kind == "long":
        found[1] = log_uniform(rng, 4096, 1 << 17)
    m, k, n = found
    return m, k, n


def draw(rng: random.Random, only: Iterable[str] = ()) -> Case:
    """Return a case within the limits, of an operation whose name holds a word of `only`."""
    only = tuple(only)
    names = [x for x in OPERATIONS if not only or any(word in x for word in only)]
    while True:
        name = rng.choices(names, [OPERATIONS[x].often for x in names])[0]
        operation = OPERATIONS[name]
        dtype = rng.choices(list(DTYPES), list(DTYPES.values()))[0]
        m, k, n = sizes(rng)
        if operation.network:  # (widths of networks, whose rows are what is many)
            m, k, n = log_uniform(rng, 1, 20000), log_uniform(rng, 1, 128), log_uniform(rng, 4, 320)
        batch = log_uniform(rng, 2, 64) if operation.batches and rng.random() < 0.15 else 0
        plain = operation.batches and not batch
        case = Case(
            name, rng.choice(operation.orders), dtype, rng.choice(ACTIVATIONS[not plain :]),
            m, 0 if operation.pointwise else k, n, batch, not batch or rng.random() < 0.5,
            rng.choices(list(LAYOUTS), list(LAYOUTS.values()))[0] if plain else "rows",
            rng.randint(2, 5) if operation.network else 1,
        )  # fmt: skip
        if case.work <= WORK and case.nbytes <= MEMORY:
            return case


def use(case: Case, compiled: bool) -> Use:
    """Return a case as a row that is measured."""

    def make(generator: np.random.Generator) -> Work:
        contestants = Contestants(case, generator)
        return Work(contestants.runs(compiled), contestants.exact, case.dtype)

    maker: Maker = make
    # (a rest for OpenBLAS's threads would be longer: here its timeout is short)
    return Use(str(case), ("torch", "jax"), maker)


# --- results --------------------------------------------------------------------------------------
Record = dict[str, Any]


def ratio(record: Record) -> float | None:
    """Return the fastest peer's time by numfuse's; None where one of them has none."""
    times = record.get("seconds", {})
    peers = [t for name, t in times.items() if name != "numfuse"]
    return min(peers) / times["numfuse"] if peers and "numfuse" in times else None


def line(name: str, ratios: list[float]) -> str:
    """Return a row of the table: a group's count, mean, shares and least ratio."""
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    good, under = (sum(map(test, ratios)) for test in (GOOD.__le__, (0.85).__gt__))
    return (
        f"| {name} | {len(ratios)} | {mean:.2f} | {good / len(ratios):.0%} | "
        f"{under / len(ratios):.0%} | {min(ratios):.2f} |"
    )


def report(records: list[Record], worst: int) -> str:
    """Return the distribution of ratios as tables, and the cases that are furthest behind."""
    groups: dict[tuple[int, str], list[float]] = defaultdict(list)
    timed = [(x, record) for record in records if (x := ratio(record)) is not None]
    for x, record in timed:
        case = Case(**record["case"])
        us = record["seconds"]["numfuse"] * 1e6
        length = next((f"up to {t} us" for t in (10, 100, 1000, 10000) if us <= t), "more")
        of = "all", f"threads: {record['threads']}", case.dtype, f"calls of {length}"
        for group in enumerate((*of, f"{case.operation}, {case.order}")):
            groups[group].append(x)
    head = f"| of | cases | geometric mean | at least {GOOD} | below 0.85 | least |"
    lines = [head, "|---|---:|---:|---:|---:|---:|"]
    lines += [line(group[1], groups[group]) for group in sorted(groups)]
    lines += ["", "The worst:"]
    for x, record in sorted(timed, key=lambda pair: pair[0])[:worst]:
        times = {name: round(1e6 * t, 2) for name, t in record["seconds"].items()}
        lines += [f"{x:.2f} {Case(**record['case'])}; us: {times}; {record['threads']} threads"]
        lines += [f"     --case '{json.dumps(record['case'])}'"]
    for record in records:
        told = f"{Case(**record['case'])}: {json.dumps(record['case'])}"
        error = record.get("error", {}).get("numfuse")
        if error is None or not error <= record["tolerance"]:
            why = record.get("failed", {}).get("numfuse", f"relative error {error}")
            lines += [f"WRONG {told}: {why}"]
    return "\n".join(lines)


def read(paths: Iterable[Path]) -> list[Record]:
    """Return the results that files hold."""
    return [json.loads(x) for path in paths for x in path.read_text().splitlines()]


def tolerance(case: Case) -> float:
    """Return how far from float64 the longest sum of a case may be.

    A sum that PyTorch has made in float64 too is as exact as what it is compared with, and where a
    result has few elements, all of them may be small differences.
    """
    longest = max(case.m * max(1, case.batch), case.n, case.k)
    return 1000 * float(np.finfo(np.float64).eps) * math.sqrt(longest)


def cases(arguments: argparse.Namespace, seed: int) -> Iterator[Case]:
    """Return what is to be measured."""
    if arguments.case:
        yield from (Case(**json.loads(x)) for x in arguments.case)
    elif arguments.again:
        for record in read([arguments.again]):
            found = ratio(record)
            if found is not None and found < arguments.under:
                yield Case(**record["case"])
    else:
        rng = random.Random(seed)
        while True:
            yield draw(rng, arguments.only)


def start_again(threads: int) -> None:
    """Start this script anew with so many cores and threads, if it has others."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) > threads:  # JAX sizes its pool by the cores that it is allowed
        os.sched_setaffinity(0, allowed[:threads])
    wanted = dict.fromkeys(THREAD_VARIABLES, str(threads))
    wanted |= {"OPENBLAS_THREAD_TIMEOUT": OPENBLAS_TIMEOUT, "JAX_ENABLE_X64": "1"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)


def main() -> int:
    """Measure what was asked for, and print the distribution."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=4.0, help="no case begins later")
    add("--seed", type=int, help="of the cases; default: a new one")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--only", nargs="+", default=[], metavar="WORD", help="of operations' names")
    add("--case", nargs="+", metavar="JSON", help="these cases")
    add("--again", type=Path, metavar="FILE", help="cases of kept results")
    add("--under", type=float, default=0.9, help="those whose ratio was below it")
    add("--compile", action="store_true", help="torch.compile too, some ten seconds a case")
    add("--seconds", type=float, default=SECONDS, help="of a case")
    add("--into", type=Path, metavar="FILE", help="append one object a case")
    add("--report", nargs="+", type=Path, metavar="FILE", help="of kept results, nothing else")
    add("--worst", type=int, default=12, help="rows that are printed")
    arguments = parser.parse_args()
    if arguments.report:
        print(report(read(arguments.report), arguments.worst))
        return 0
    start_again(arguments.threads)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    end = time.monotonic() + 60 * arguments.minutes
    generator, found = np.random.default_rng(), []
    for case in cases(arguments, seed):
        if time.monotonic() > end:
            break
        row = measure(use(case, arguments.compile), generator, arguments.seconds)
        record = {"case": asdict(case), "threads": arguments.threads, **row}
        record["tolerance"] = max(row["tolerance"], tolerance(case))
        found.append(record)
        shown = {name: f"{1e6 * t:.1f}" for name, t in row["seconds"].items()}
        print(f"{ratio(record) or math.nan:.2f} {case}: {shown} {row['failed'] or ''}", flush=True)
        if arguments.into:
            with arguments.into.open("a") as file:
                file.write(json.dumps(record) + "\n")
    print(f"\nseed {seed}, {arguments.threads} threads\n{report(found, arguments.worst)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
