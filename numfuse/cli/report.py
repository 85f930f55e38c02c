"""The report that ``bench`` prints and writes: a table per dtype and thread count, the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from numfuse.cli.timing import readable

if TYPE_CHECKING:
    from rich.console import Console

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
OPERATION_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "backward_saved": "backward, saved",
    "gated": "gated",
    "gated_backward": "gated backward",
    "gated_fresh": "gated, fresh",
    "gated_backward_fresh": "gated backward, fresh",
}
LEGEND = (
    "floor: flops at the FMA peak or bytes at the triad's bandwidth, the longer of the two; "
    "of floor: its share of numfuse's time. "
    "fastest peer: its time as a multiple of numfuse's; above 1 numfuse is faster."
)
# Two medians nearer than this are called equal: what the same program differs by between runs.
EQUAL = 0.02


class Table(NamedTuple):
    """A row is one case as text, and whether numfuse is behind its fastest peer."""

    title: str
    head: list[str]
    rows: list[tuple[list[str], bool]]


def fastest_peer(case: dict[str, Any]) -> tuple[str, float] | None:
    """Name of the fastest peer, and its time as a multiple of numfuse's."""
    peers = {name: t for name, t in case["seconds"].items() if name != "numfuse"}
    if not peers:
        return None
    name = min(peers, key=peers.__getitem__)
    return name, peers[name] / case["seconds"]["numfuse"]


def size_text(case: dict[str, Any]) -> str:
    sizes = [case["m"], case["n"], *([case["k"]] if case["k"] else [])]
    if len(sizes) == 3 and len(set(sizes)) == 1:
        return f"{sizes[0]}³"
    return "x".join(map(str, sizes))


def operation_text(case: dict[str, Any]) -> str:
    name = OPERATION_NAMES[case["operation"]]
    return name if case["layout"] == "contiguous" else f"{name}, {case['layout']}"


def rate_text(case: dict[str, Any]) -> str:
    seconds = case["seconds"]["numfuse"]
    if case["flop"]:
        return f"{case['flop'] / seconds / 1e9:.3g} GFLOP/s"
    return f"{case['bytes'] / seconds / 1e9:.3g} GB/s"


def floor(
    case: dict[str, Any], peak: float | None, triad: float | None
) -> tuple[float, str] | None:
    """The least seconds that the case can take by what is counted, and what needs them.

    That is its arithmetic at the FMA peak (GFLOP/s), or its operands and results, each once, at the
    bandwidth of memory (GB/s). None where a ceiling that it needs is unknown.
    """
    if not triad or (case["flop"] and not peak):
        return None
    bounds = [(case["bytes"] / triad / 1e9, "memory")]
    if case["flop"] and peak:
        bounds.append((case["flop"] / peak / 1e9, "arithmetic"))
    return max(bounds)


def floor_text(case: dict[str, Any], peak: float | None, triad: float | None) -> tuple[str, str]:
    """The floor with its name, and its share of numfuse's time."""
    found = floor(case, peak, triad)
    if found is None:
        return "unknown", "unknown"
    seconds, name = found
    return f"{readable(seconds)} {name}", f"{seconds / case['seconds']['numfuse']:.0%}"


def threads_text(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def tables(report: dict[str, Any]) -> list[Table]:
    found = []
    for session in report["sessions"]:
        threads = session["threads"]
        triad = session.get("triad", {}).get("gbs")
        here = [case for case in report["cases"] if case["threads"] == threads]
        for dtype in dict.fromkeys(case["dtype"] for case in here):
            cases = [case for case in here if case["dtype"] == dtype]
            title = f"{dtype}, {threads_text(threads)}"
            found.append(table(title, cases, triad, report["peers"]))
    return found


def table(title: str, cases: list[dict[str, Any]], triad: float | None, peers: list[str]) -> Table:
    peaks = [case["peak_gflops"] for case in cases if case["peak_gflops"]]
    if peaks:
        title += f"; FMA peak {max(peaks):.0f} GFLOP/s"
    if triad:
        title += f"; triad {triad:.0f} GB/s"
    head = ["operation", "MxNxK", "numfuse", "rate", "floor", "of floor", *peers, "fastest peer"]
    rows = []
    for case in cases:
        rival = fastest_peer(case)
        seconds = case["seconds"]
        cells = [
            operation_text(case),
            size_text(case),
            readable(seconds["numfuse"]),
            rate_text(case),
            *floor_text(case, max(peaks, default=None), triad),
            *(readable(seconds[p]) if p in seconds else "failed" for p in peers),
            f"{rival[0]} {rival[1]:.2f}x" if rival else "none",
        ]
        rows.append((cells, rival is not None and rival[1] < 1 - EQUAL))
    return Table(title, head, rows)


def verdict(report: dict[str, Any]) -> list[str]:
    """In words: how often numfuse leads, and every case in which a peer does."""
    rivals = [(case, rival) for case in report["cases"] if (rival := fastest_peer(case))]
    if not rivals:
        return ["No peer was run: nothing to compare with."]
    ahead = sum(ratio > 1 + EQUAL for _, (_, ratio) in rivals)
    behind = [(case, *rival) for case, rival in rivals if rival[1] < 1 - EQUAL]
    equal = len(rivals) - ahead - len(behind)
    lines = [
        f"numfuse is faster than every peer in {ahead} of {len(rivals)} cases, equal to the "
        f"fastest within {EQUAL:.0%} in {equal}, and slower in {len(behind)}."
    ]
    for case, name, ratio in sorted(behind, key=lambda item: item[2]):
        lines.append(
            f"{name} is {1 / ratio:.2f} times as fast as numfuse: "
            f"{operation_text(case)}, {case['dtype']}, {size_text(case)}, "
            f"{threads_text(case['threads'])}."
        )
    return lines


def remarks(report: dict[str, Any]) -> list[str]:
    """Return what was not run and why, so that no gap in a table goes unexplained."""
    lines = [f"{name} was not run: {reason}." for name, reason in report["left_out"].items()]
    lines += [f"{note}." for note in report["notes"]]
    if any(case["flop"] and not case["peak_gflops"] for case in report["cases"]):
        lines.append("The FMA peak could not be measured: the CPU backend has no fma_peak here.")
    failures = {
        f"{name} failed: {reason}"
        for case in report["cases"]
        for name, reason in case["failed"].items()
    }
    return lines + sorted(failures)


def machine(report: dict[str, Any]) -> str:
    packages = ", ".join(f"{k} {v}" for k, v in report["packages"].items() if v)
    cores = f", {report['cores']} core(s)" if report["cores"] else ""
    return (
        f"{report['processor']}{cores}; {report['platform']}; Python {report['python']}, "
        f"numfuse {report['numfuse']}, {packages}"
    )


def method(report: dict[str, Any]) -> str:
    text = (
        f"Activation {report['activation']}; medians of {report['rounds']} interleaved rounds; "
        f"fresh random operands (seed {report['seed']}); every result checked against float64."
    )
    worst = max((case["spread"]["numfuse"] for case in report["cases"]), default=0.0)
    if worst:
        text += f" numfuse's half interquartile range is at most {worst:.0%} of its median."
    probes = [found["disturbed"] for found in report["sessions"] if "disturbed" in found]
    again, stretches = (sum(x[n] for x in probes) for n in ("disturbed", "stretches"))
    if again:
        text += (
            f" {again} of {stretches} stretches were timed again, because the processor was "
            "slower before or after them than it can be."
        )
    return text


def show(report: dict[str, Any], console: Console) -> None:
    """Print everything; a terminal too narrow for all columns gets those that decide."""
    from rich.box import SIMPLE
    from rich.table import Table as RichTable

    console.print(machine(report), highlight=False)
    console.print(method(report), highlight=False)
    for found in tables(report):
        columns = list(range(len(found.head)))
        for shown in (columns, [*columns[:3], *columns[4:6], columns[-1]]):
            grid = RichTable(
                title=found.title, title_justify="left", title_style="bold", box=SIMPLE
            )
            for column in shown:
                justify = "left" if column < 2 else "right"
                grid.add_column(found.head[column], justify=justify, no_wrap=True)  # type: ignore[arg-type]
            for cells, behind in found.rows:
                grid.add_row(*(cells[i] for i in shown), style="yellow" if behind else None)
            unlimited = console.options.update(max_width=1 << 20)
            if console.measure(grid, options=unlimited).maximum <= console.width:
                break
        console.print(grid)
    console.print(LEGEND, highlight=False, soft_wrap=True)
    for line in (*verdict(report), *remarks(report)):
        console.print(line, highlight=False, soft_wrap=True)


def markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown for documentation; a figure behind the fastest peer is bold."""
    lines = [f"Measured on {report['date']}: {machine(report)}.", "", method(report)]
    for session in report["sessions"]:
        libraries = session.get("libraries", {}).get("libraries")
        if libraries:
            lines += ["", f"{session['threads']} thread(s), BLAS: {', '.join(libraries)}."]
    for found in tables(report):
        lines += ["", f"### {found.title}", ""]
        lines += [f"| {' | '.join(found.head)} |", f"|---|---{'|---:' * (len(found.head) - 2)}|"]
        for (*others, last), behind in found.rows:
            lines.append(f"| {' | '.join([*others, f'**{last}**' if behind else last])} |")
    lines += ["", LEGEND, "", "### In words", ""]
    lines += [f"- {line}" for line in (*verdict(report), *remarks(report))]
    return "\n".join(lines) + "\n"


def write_markdown(report: dict[str, Any], path: Path) -> None:
    """Put the tables between the marks of an existing file, else make them the whole file."""
    text = markdown(report)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        text = f"{before}{BEGIN}\n{text}{END}{after}"
    path.write_text(text, encoding="utf-8")
