"""The benchmark's picture: every case under the ceilings of the machine that it was measured on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numfuse.cli.picture import BLUE, GREY, ORANGE, note
from numfuse.cli.report import fastest_peer, threads_text

COLOURS = {"float32": BLUE, "float64": ORANGE}


def draw(path: Path, report: dict[str, Any]) -> None:
    """One row of two plots per number of threads.

    On the left products, GFLOP/s against flops per byte of their operands and results, under the
    memory's slope and the FMA peak; on the right gated operations, GB/s against their bytes, with
    the triad. A filled mark is numfuse, a hollow one the fastest peer of the same case.
    """
    from matplotlib.figure import Figure  # not pyplot: no display is needed, nothing stays open
    from matplotlib.lines import Line2D

    by_threads: dict[int, list[dict[str, Any]]] = {}
    for case in report["cases"]:
        by_threads.setdefault(case["threads"], []).append(case)
    triads = {session["threads"]: session["triad"]["gbs"] for session in report["sessions"]}
    figure = Figure(figsize=(10, 0.6 + 3.9 * len(by_threads)), dpi=130, layout="constrained")
    figure.suptitle(f"numfuse {report['numfuse']} on {report['processor']}", fontsize=11)
    rows = figure.subplots(len(by_threads), 2, squeeze=False)
    for (left, right), (threads, cases) in zip(rows, by_threads.items(), strict=True):
        left.set(xlabel="arithmetic intensity (flop/byte)", ylabel="speed (GFLOP/s)")
        right.set(xlabel="operands and results (MiB)", ylabel="bandwidth (GB/s)")
        _plot(left, [case for case in cases if case["flop"]], _products, triads[threads])
        _plot(right, [case for case in cases if not case["flop"]], _gates, triads[threads])
        left.set_title(f"Products, {threads_text(threads)}", fontsize=10)
        right.set_title(f"Gated operations, {threads_text(threads)}", fontsize=10)
    mark = functools.partial(Line2D, [], [], linestyle="")
    marks = [mark(color=COLOURS[x], marker="o", label=f"numfuse, {x}") for x in COLOURS]
    marks += [mark(color=GREY, marker="D", fillstyle="none", label="fastest peer")]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, format="png")


def _marks(axes: Any, case: dict[str, Any], x: float, amount: float) -> None:
    """numfuse and its fastest peer at `x`, `amount` over their times."""
    colour = COLOURS.get(case["dtype"], GREY)
    ours = amount / case["seconds"]["numfuse"] / 1e9
    rival = fastest_peer(case)
    if rival is not None:
        theirs = ours / rival[1]
        axes.plot([x, x], [ours, theirs], color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(x, theirs, "D", color=colour, fillstyle="none", markersize=5)
    axes.plot(x, ours, "o", color=colour, markersize=5)


def _plain_logarithms(axis: Any) -> None:
    """1, 2, 5, 10, 20 ... as numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _plot(axes: Any, cases: list[dict[str, Any]], plot: Callable[..., None], triad: float) -> None:
    """Draw the cases by `plot`, or say that there are none."""
    if cases:
        plot(axes, cases, triad)
        axes.grid(alpha=0.25)
    else:
        axes.text(0.5, 0.5, "no case measured", transform=axes.transAxes, ha="center", color=GREY)
        axes.set(xticks=[], yticks=[])


def _products(axes: Any, cases: list[dict[str, Any]], triad: float) -> None:
    intensities = [case["flop"] / case["bytes"] for case in cases]
    low, high = min(intensities) / 2, max(intensities) * 2
    for dtype, colour in COLOURS.items():
        peak = max((case["peak_gflops"] for case in cases if case["dtype"] == dtype), default=None)
        if peak is None:
            continue
        corner = [x for x in (low, peak / triad, high) if low <= x <= high]
        axes.loglog(corner, [min(peak, x * triad) for x in corner], color=colour, linewidth=1.5)
        text = f"FMA peak, {dtype}: {peak:.0f}"
        note(axes, text, (high, peak), dx=-2, dy=3, color=colour, fontsize=8)
    for case, x in zip(cases, intensities, strict=True):
        _marks(axes, case, x, case["flop"])
    _plain_logarithms(axes.xaxis)
    _plain_logarithms(axes.yaxis)
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])


def _gates(axes: Any, cases: list[dict[str, Any]], triad: float) -> None:
    axes.axhline(triad, color=GREY, linewidth=1.5)
    right = {"xycoords": ("axes fraction", "data")}
    text = f"triad, from memory: {triad:.0f}"
    note(axes, text, (1, triad), dx=-2, dy=3, color=GREY, fontsize=8, **right)
    for case in cases:
        _marks(axes, case, case["bytes"] / 2**20, case["bytes"])
    axes.set_xscale("log")
    _plain_logarithms(axes.xaxis)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
