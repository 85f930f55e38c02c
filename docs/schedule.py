"""Simulate the schedule of a product's cells on more cores than are at hand.

    python docs/schedule.py                       the table, as text
    python docs/schedule.py --write               the table and the picture of docs/schedule.md
    python docs/schedule.py --threads 1 96 --sizes 3000 --noise 0.1

The cells are those of `numfuse.tiling.gemm`, asked as a launch asks it, and they are drawn in order
from one counter, as `launch.entries.work` draws them.  What a cell costs is a model, told in
docs/schedule.md; every parameter of it is a field of `Processor`.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from numfuse.backends.cpu import tiling
from numfuse.cli.bench import SIZES, size

HERE = Path(__file__).parent
BEGIN, END = "<!-- schedule: begin -->", "<!-- schedule: end -->"
THREADS = (1, 4, 16, 64, 128)
SHAPES = (*SIZES["full"], "4096", "8192", "16384")
MIB = 1 << 20


@dataclass(frozen=True)
class Processor:
    """A processor of `vector_bytes` vectors, as the model sees it (docs/schedule.md)."""

    vector_bytes: int = 64
    lanes: bool = False
    #: FMAs a cycle and their latency in cycles: what bounds a tile, and one of few rows.
    ports: int = 2
    latency: int = 4
    clock: float = 3.1e9
    #: Share of the FMA peak that the micro-kernel reaches inside a cell, without packing.
    kernel: float = 0.95
    #: What it costs a tile to read B in place (`tiling.reads_in_place`).
    in_place: float = 1.12
    pack_a_cycles: float = tiling.PACK_A_CYCLES
    pack_b_cycles: float = tiling.PACK_B_CYCLES
    level2: int = 2 * MIB
    #: Bytes a second: of a core from level 3, of a core from memory, of all cores from memory.
    level3_core: float = 28e9
    memory_core: float = 17e9
    memory: float = 290e9
    #: Seconds until the first thread has work, from one thread to the next, and to draw a cell.
    launch: float = 5e-6
    wake: float = 0.1e-6
    draw: float = 0.1e-6
    #: Standard deviation of a cell's duration, relative; only ever slower.
    noise: float = 0.0


class Problem(NamedTuple):
    """A forward product of contiguous operands."""

    m: int
    n: int
    k: int
    itemsize: int = 4

    @property
    def name(self) -> str:
        return f"{self.m}³" if self.m == self.n == self.k else f"{self.m}x{self.n}x{self.k}"


class Cell(NamedTuple):
    """A rectangle of the output, and where it stands among the cells."""

    band: int  # of rows
    column: int
    rows: int
    columns: int


class Cost(NamedTuple):
    """Seconds of a core, and bytes, of one cell."""

    fma: float
    pack: float
    level3: int
    memory: int


class Result(NamedTuple):
    """What a simulated launch did."""

    seconds: float
    #: The same arithmetic at the FMA peak of all cores.
    ideal: float
    busy: list[float]  # by core
    cells: list[Cell]
    tiling: tiling.Tiling
    pack: float  # seconds of all cores together, as the next two
    fma: float
    waiting: float  # for level 3 or memory, beyond the arithmetic that hides it
    level3: int  # bytes of all cores together
    memory: int
    #: Core-seconds lost, by reason.
    losses: dict[str, float]

    @property
    def efficiency(self) -> float:
        return self.ideal / self.seconds

    @property
    def balance(self) -> float:
        """Busy time of the busiest core over the mean of all."""
        return max(self.busy) * len(self.busy) / sum(self.busy)

    @property
    def packing(self) -> float:
        """Share of packing in the busy time."""
        return self.pack / sum(self.busy)

    @property
    def bound(self) -> str:
        """The reason that most time is lost for."""
        return max(self.losses, key=self.losses.__getitem__)


@contextlib.contextmanager
def level2(size: int) -> Iterator[None]:
    """The tiling's rules as on a host with this level-2 cache."""
    own = tiling.level2_bytes
    tiling.level2_bytes = lambda: size  # type: ignore[assignment]
    tiling.gemm.cache_clear()
    try:
        yield
    finally:
        tiling.level2_bytes = own
        tiling.gemm.cache_clear()


def tiled(
    problem: Problem, threads: int, processor: Processor
) -> tuple[tiling.Tiling, tiling.Registers, int, bool]:
    """The tiling of a launch, its registers, its number of threads, and whether B is in place."""
    m, n, k, itemsize = problem
    r = tiling.registers(processor.vector_bytes, itemsize, processor.lanes)
    count = threads if m * n * k >= tiling.parallel_fmas(r) else 1
    with level2(processor.level2):
        t = tiling.gemm(m, n, k, 1, 1, count, r, r.mr, (n * itemsize, itemsize))
    return t, r, count, t.in_place


def cells_of(problem: Problem, t: tiling.Tiling) -> list[Cell]:
    """The cells in the order in which they are drawn (`kernels.cell_of`)."""
    return [
        Cell(
            i,
            j,
            min(problem.m, (i + 1) * t.cell_m) - i * t.cell_m,
            min(problem.n, (j + 1) * t.cell_n) - j * t.cell_n,
        )
        for i in range(t.cells_m)
        for j in range(t.cells_n)
    ]


def fma_seconds(cell: Cell, k: int, r: tiling.Registers, p: Processor) -> float:
    """Of the cell's tiles, edges included: a tile of few sums waits for their latency."""

    def update(rows: int, vectors: int) -> float:
        return max(rows * vectors / p.ports, p.latency)

    full_rows, rest_rows = divmod(cell.rows, r.mr)
    full, rest = divmod(cell.columns, r.nr)
    narrow = 0 if rest == 0 else 1 if rest <= r.vl else r.vectors
    cycles = 0.0
    for tiles, rows in ((full_rows, r.mr), (1, rest_rows)):
        if rows:
            cycles += tiles * full * update(rows, r.vectors)
            if narrow:
                cycles += tiles * update(rows, narrow)
    return cycles * k / p.clock


def cost_of(
    cell: Cell, problem: Problem, t: tiling.Tiling, r: tiling.Registers, in_place: bool,
    touched: set[tuple[str, int]], shared: str, p: Processor,
) -> Cost:  # fmt: skip
    """What the cell costs, and note in `touched` what it brings from memory first."""
    k, item = problem.k, problem.itemsize
    a, b = cell.rows * k, k * cell.columns
    fma = fma_seconds(cell, k, r, p) / p.kernel * (p.in_place if in_place else 1.0)
    # Shared: packed once, by all cells that need it together.
    pack = p.pack_a_cycles * a / (t.cells_n if "a" in shared else 1)
    if not in_place:
        pack += p.pack_b_cycles * b / (t.cells_m if "b" in shared else 1)
    level3, memory = 0, cell.rows * cell.columns * item
    for which, number, elements in (("a", cell.band, a), ("b", cell.column, b)):
        if (which, number) in touched:
            level3 += elements * item
        else:
            touched.add((which, number))
            memory += elements * item
    k_blocks = -(-k // max(1, t.kc))
    # The plane of accumulators is read and written by every block of K but the first or the last.
    level3 += 2 * (k_blocks - 1) * cell.rows * cell.columns * item
    # Kept panels of A are written once and read again for each further block of columns.
    column_blocks = -(-cell.columns // t.nc)
    if column_blocks > 1:
        level3 += a * item * column_blocks
    return Cost(fma, pack / p.clock, level3, memory)


def simulate(
    problem: Problem,
    threads: int,
    processor: Processor | None = None,
    shared: str = "",
    seed: int = 0,
) -> Result:
    """One launch: the next cell goes to the core that asks first.

    `shared` names the operands ("b", "ab") that are packed once for all cells, which numfuse does
    not do.
    """
    p = processor if processor is not None else Processor()
    t, r, count, in_place = tiled(problem, threads, p)
    cells = cells_of(problem, t)
    draw = random.Random(seed).gauss
    touched: set[tuple[str, int]] = set()
    start = p.launch + p.wake * (count - 1) if count > 1 else 0.0
    free = [(p.launch + p.wake * core if count > 1 else 0.0, core) for core in range(count)]
    heapq.heapify(free)
    busy = [0.0] * count
    fma = pack = waiting = end = 0.0
    level3 = memory = 0
    for cell in cells:
        now, core = heapq.heappop(free)
        cost = cost_of(cell, problem, t, r, in_place, touched, shared, p)
        work = cost.fma + cost.pack
        # Requests run ahead of the arithmetic, so the slowest of the three decides.
        seconds = max(work, cost.level3 / p.level3_core, cost.memory / p.memory_core)
        waiting += seconds - work
        if p.noise:
            seconds *= 1 + abs(draw(0.0, p.noise))
        fma, pack = fma + cost.fma, pack + cost.pack
        level3, memory = level3 + cost.level3, memory + cost.memory
        busy[core] += seconds
        done = now + p.draw + seconds
        end = max(end, done)
        heapq.heappush(free, (done, core))
    # All cores together cannot have more of the memory than there is.
    crowded = max(0.0, start + memory / p.memory - end)
    end += crowded
    flops = 2.0 * problem.m * problem.n * problem.k
    peak = 2 * p.ports * r.vl * p.clock
    ideal = flops / (threads * peak)
    total = threads * end
    # A core that has woken may be idle or at work while others have still to wake.
    starts = (p.launch + p.wake * core if count > 1 else 0.0 for core in range(count))
    spent = sum(min(end - crowded, begin) for begin in starts) + p.draw * len(cells)
    losses = {
        "arithmetic": fma - flops / peak,  # edges, and what the micro-kernel lacks to the peak
        "packing": pack,
        "memory": waiting + threads * crowded,
        "launch": spent,
        "balance": total - sum(busy) - spent - threads * crowded,
    }
    return Result(
        end, ideal, busy + [0.0] * (threads - count), cells, t, pack, fma, waiting, level3, memory,
        losses,
    )  # fmt: skip


HEAD = (
    "MxNxK", "cores", "cells", "of", "efficiency", "balance", "packing", "level 3", "memory",
    "most lost to", "B shared", "both",
)  # fmt: skip


def row(problem: Problem, threads: int, p: Processor) -> tuple[str, ...]:
    """A line of the table."""
    result = simulate(problem, threads, p)
    gains = [
        result.seconds / simulate(problem, threads, p, shared).seconds for shared in ("b", "ab")
    ]
    t = result.tiling
    first = result.cells[0]
    return (
        problem.name,
        str(threads),
        f"{t.cells_m} x {t.cells_n}",
        f"{first.rows} x {first.columns}",
        f"{result.efficiency:.0%}",
        f"{result.balance:.2f}",
        f"{result.packing:.0%}",
        f"{result.level3 / threads / MIB:.3g}",
        f"{result.memory / threads / MIB:.3g}",
        result.bound,
        *(f"{gain:.2f}x" for gain in gains),
    )


def markdown(rows: list[tuple[str, ...]]) -> str:
    rule = tuple("---" if i == 0 else "---:" for i in range(len(HEAD)))
    return "".join(f"| {' | '.join(line)} |\n" for line in (HEAD, rule, *rows))


def text(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in (HEAD, *rows)) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (HEAD, *rows)
    )


def write_page(path: Path, table: str) -> None:
    """Put the table between the marks of the page."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} must have the marks {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")


def draw_picture(path: Path, problems: list[Problem], p: Processor) -> None:
    """Efficiency against cores, as the tiling is and with packed operands shared."""
    from matplotlib.figure import Figure

    counts = sorted({*(2**i for i in range(8)), *(round(2 ** (i + 0.5)) for i in range(2, 7))})
    rows = math.ceil(len(problems) / 4)
    figure = Figure(figsize=(11, 2.6 * rows), dpi=130, layout="constrained")
    axes = figure.subplots(rows, 4, sharex=True, sharey=True, squeeze=False)
    for each in axes.flat[len(problems) :]:
        each.set_visible(False)
    for each, problem in zip(axes.flat, problems, strict=False):
        for shared, style, color, label in (
            ("", "-", "#0072B2", "as tiled"),
            ("b", "--", "#D55E00", "packed B shared"),
            ("ab", ":", "#555555", "both shared"),
        ):
            found = [simulate(problem, count, p, shared).efficiency for count in counts]
            each.plot(counts, found, style, color=color, linewidth=2, label=label)
        each.set_title(problem.name, fontsize=10)
        each.set_xscale("log", base=2)
        each.set_xticks([1, 4, 16, 64, 128], ["1", "4", "16", "64", "128"])
        each.set_ylim(0, 1)
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("cores")
    figure.supylabel("share of all cores' FMA peak")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower right", frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=size, metavar="MxNxK")
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS, metavar="N")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    defaults = Processor()
    for name in ("vector_bytes", "level2", "clock", "memory", "memory_core", "level3_core",
                 "launch", "noise"):  # fmt: skip
        value = getattr(defaults, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, metavar="X")
    parser.add_argument("--write", action="store_true", help="rewrite docs/schedule.md's figures")
    arguments = parser.parse_args()
    chosen = {name: x for name, x in vars(arguments).items() if hasattr(defaults, name)}
    p = replace(defaults, **chosen)
    itemsize = {"float32": 4, "float64": 8}[arguments.dtype]
    shapes = arguments.sizes or [size(shape) for shape in SHAPES]
    problems = [Problem(*shape, itemsize) for shape in shapes]
    rows = [row(problem, threads, p) for problem in problems for threads in arguments.threads]
    print(text(rows))
    if arguments.write:
        write_page(HERE / "schedule.md", markdown(rows))
        draw_picture(HERE / "images" / "schedule.png", problems, p)


if __name__ == "__main__":
    main()
