"""The benchmark's picture: every case under the ceilings of the machine that it was measured on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numfuse.cli.picture import BLUE, GREY, ORANGE, note
from numfuse.cli.report import fastest_peer, threads_text

COLOURS = {"float32": BLUE, "float64": ORANGE}
MIB = 1 << 20


def draw(path: Path, report: dict[str, Any]) -> None:
    """One row of two plots per number of threads.

    On the left products, GFLOP/s against flops per byte of their operands and results, under the
    memory's slope and the FMA peak; on the right gated operations, GB/s against their bytes, with
    the triad. A filled mark is numfuse, a hollow one the fastest peer of the same case.
    """
    from matplotlib.figure import Figure  # not pyplot: no display is needed, nothing stays open
    from matplotlib.lines import Line2D

    sessions = [s for s in report["sessions"] if _cases(report, s["threads"])]
    figure = Figure(figsize=(10, 0.6 + 3.9 * len(sessions)), dpi=130, layout="constrained")
    figure.suptitle(f"numfuse {report['numfuse']} on {report['processor']}", fontsize=11)
    rows = figure.subplots(len(sessions), 2, squeeze=False)
    for (left, right), session in zip(rows, sessions, strict=True):
        cases = _cases(report, session["threads"])
        triad = session.get("triad", {}).get("gbs")
        text = threads_text(session["threads"])
        left.set(xlabel="arithmetic intensity (flop/byte)", ylabel="speed (GFLOP/s)")
        right.set(xlabel="operands and results (MiB)", ylabel="bandwidth (GB/s)")
        _plot(left, [case for case in cases if case["flop"]], _products, triad)
        _plot(right, [case for case in cases if not case["flop"]], _gates, triad)
        left.set_title(f"Products, {text}", fontsize=10)
        right.set_title(f"Gated operations, {text}", fontsize=10)
    marks = [
        Line2D([], [], color=colour, marker="o", linestyle="", label=f"numfuse, {dtype}")
        for dtype, colour in COLOURS.items()
    ]
    marks.append(
        Line2D([], [], color=GREY, marker="D", linestyle="", fillstyle="none", label="fastest peer")
    )
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, format="png")


def _cases(report: dict[str, Any], threads: int) -> list[dict[str, Any]]:
    return [case for case in report["cases"] if case["threads"] == threads]


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
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _plot(axes: Any, cases: list[dict[str, Any]], plot: Callable[..., None], triad: Any) -> None:
    """Draw the cases by `plot`, or say that there are none."""
    if cases:
        plot(axes, cases, triad)
        axes.grid(alpha=0.25)
    else:
        axes.text(0.5, 0.5, "no case measured", transform=axes.transAxes, ha="center", color=GREY)
        axes.set(xticks=[], yticks=[])


def _products(axes: Any, cases: list[dict[str, Any]], triad: float | None) -> None:
    intensities = [case["flop"] / case["bytes"] for case in cases]
    low, high = min(intensities) / 2, max(intensities) * 2
    for dtype, colour in COLOURS.items():
        peaks = [c["peak_gflops"] for c in cases if c["dtype"] == dtype and c["peak_gflops"]]
        if not peaks:
            continue
        peak = max(peaks)
        ridge = peak / triad if triad else low
        corner = [x for x in (low, ridge, high) if low <= x <= high]
        roof = [min(peak, x * triad) if triad else peak for x in corner]
        axes.loglog(corner, roof, color=colour, linewidth=1.5)
        text = f"FMA peak, {dtype}: {peak:.0f}"
        note(axes, text, (high, peak), dx=-2, dy=3, color=colour, fontsize=8)
    axes.set(xscale="log", yscale="log")
    for case, x in zip(cases, intensities, strict=True):
        _marks(axes, case, x, case["flop"])
    for axis in (axes.xaxis, axes.yaxis):
        _plain_logarithms(axis)
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])


def _gates(axes: Any, cases: list[dict[str, Any]], triad: float | None) -> None:
    if triad:
        axes.axhline(triad, color=GREY, linewidth=1.5)
        right = {"xycoords": ("axes fraction", "data")}
        text = f"triad, from memory: {triad:.0f}"
        note(axes, text, (1, triad), dx=-2, dy=3, color=GREY, fontsize=8, **right)
    for case in cases:
        _marks(axes, case, case["bytes"] / MIB, case["bytes"])
    axes.set_xscale("log")
    _plain_logarithms(axes.xaxis)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
