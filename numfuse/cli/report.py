"""The report that ``bench`` prints and writes: a table per dtype and thread count, the verdict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from numfuse.cli.timing import readable

if TYPE_CHECKING:
    from rich.console import Console

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
USES_LEGEND = (
    "ratio: the fastest peer's time as a multiple of numfuse's; above 1 numfuse is faster. "
    "error: the largest difference from float64, relative to the largest element."
)
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
    #: The columns that a narrow terminal gets, and how many on the left hold text.
    narrow: tuple[int, ...]
    text: int

    def narrowed(self) -> Table:
        rows = [([cells[i] for i in self.narrow], lost) for cells, lost in self.rows]
        return self._replace(head=[self.head[i] for i in self.narrow], rows=rows)


def ours(name: str) -> bool:
    """Return whether a contestant is numfuse, in one of its forms."""
    return name.startswith("numfuse")


def fastest_peer(case: dict[str, Any]) -> tuple[str, float] | None:
    """Name of the fastest peer, and its time as a multiple of numfuse's."""
    peers = {name: t for name, t in case["seconds"].items() if not ours(name)}
    if not peers or "numfuse" not in case["seconds"]:
        return None
    name = min(peers, key=peers.__getitem__)
    return name, peers[name] / case["seconds"]["numfuse"]


def behind(rival: tuple[str, float] | None) -> bool:
    """Return whether the fastest peer is faster than numfuse."""
    return rival is not None and rival[1] < 1 - EQUAL


def size_text(case: dict[str, Any]) -> str:
    sizes = [case["m"], case["n"], *([case["k"]] if case["k"] else [])]
    if len(sizes) == 3 and len(set(sizes)) == 1:
        return f"{sizes[0]}³"
    return "x".join(map(str, sizes))


def operation_text(case: dict[str, Any]) -> str:
    name = case["operation"].replace("_saved", ", saved").replace("_fresh", ", fresh")
    layout = "" if case["layout"] == "contiguous" else f", {case['layout']}"
    return name.replace("_", " ") + layout


def rate_text(case: dict[str, Any]) -> str:
    seconds = case["seconds"]["numfuse"]
    if case["flop"]:
        return f"{case['flop'] / seconds / 1e9:.3g} GFLOP/s"
    return f"{case['bytes'] / seconds / 1e9:.3g} GB/s"


def floor(case: dict[str, Any], peak: float, triad: float) -> tuple[float, str]:
    """The least seconds that the case can take by what is counted, and what needs them.

    That is its arithmetic at the FMA peak (GFLOP/s), or its operands and results, each once, at the
    bandwidth of memory (GB/s).
    """
    bounds = [(case["bytes"] / triad / 1e9, "memory")]
    if case["flop"]:
        bounds.append((case["flop"] / peak / 1e9, "arithmetic"))
    return max(bounds)


def threads_text(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def tables(report: dict[str, Any]) -> list[Table]:
    found = [uses_table(report["uses"])] if report["uses"] else []
    for session in report["sessions"]:
        threads, triad = session["threads"], session["triad"]["gbs"]
        here = [case for case in report["cases"] if case["threads"] == threads]
        for dtype in dict.fromkeys(case["dtype"] for case in here):
            cases = [case for case in here if case["dtype"] == dtype]
            found.append(table(f"{dtype}, {threads_text(threads)}", cases, triad, report["peers"]))
    return found


def table(title: str, cases: list[dict[str, Any]], triad: float, peers: list[str]) -> Table:
    peak = max((case["peak_gflops"] or 0.0 for case in cases), default=0.0)
    title += f"; FMA peak {peak:.0f} GFLOP/s" if peak else ""
    head = ["operation", "MxNxK", "numfuse", "rate", "floor", "of floor", *peers, "fastest peer"]
    rows = []
    for case in cases:
        rival = fastest_peer(case)
        seconds = case["seconds"]
        least, bound = floor(case, peak, triad)
        cells = [
            operation_text(case),
            size_text(case),
            readable(seconds["numfuse"]),
            rate_text(case),
            f"{readable(least)} {bound}",
            f"{least / seconds['numfuse']:.0%}",
            *(readable(seconds[p]) if p in seconds else "failed" for p in peers),
            f"{rival[0]} {rival[1]:.2f}x" if rival else "none",
        ]
        rows.append((cells, behind(rival)))
    columns = (0, 1, 2, 4, 5, len(head) - 1)
    return Table(f"{title}; triad {triad:.0f} GB/s", head, rows, columns, 2)


def uses_table(found: list[dict[str, Any]]) -> Table:
    """Return the table of what `numfuse.cli.uses.measure` found."""
    rows = []
    for row in found:
        seconds, errors = row["seconds"], row["error"]
        peers = [name for name in seconds if name != "numfuse"]
        rival = fastest_peer(row)
        best = min((e for name, e in errors.items() if not ours(name)), default=0.0)
        cells = [
            row["use"],
            readable(seconds["numfuse"]) if "numfuse" in seconds else "failed",
            ", ".join(f"{name} {readable(seconds[name])}" for name in peers) or "none",
            f"{rival[1]:.2f}" if rival else "none",
            f"{errors.get('numfuse', float('nan')):.0e} ({best:.0e})",
        ]
        rows.append((cells, behind(rival)))
    head = ["use", "numfuse", "others", "ratio", "error (best peer's)"]
    return Table("Uses: a whole step, wall time", head, rows, (0, 1, 2, 3), 1)


def wrong_uses(found: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each use that failed, or is further from float64 than it may be."""
    wrong = []
    for row in found:
        for name in filter(ours, (*row["error"], *row["failed"])):
            error = row["error"].get(name)
            if error is None:
                wrong.append(f"{name}: {row['use']}: failed: {row['failed'][name]}")
            elif not error <= row["tolerance"]:
                wrong.append(
                    f"{name}: {row['use']}: relative error {error:.1e}, at most "
                    f"{row['tolerance']:.1e} expected"
                )
    return wrong


def verdict(report: dict[str, Any]) -> list[str]:
    """In words: how often numfuse leads, and every case in which a peer does."""
    rivals = [(case, rival) for case in report["cases"] if (rival := fastest_peer(case))]
    if not rivals:
        return ["No peer was run: nothing to compare with."]
    ahead = sum(ratio > 1 + EQUAL for _, (_, ratio) in rivals)
    lost = [(case, *rival) for case, rival in rivals if behind(rival)]
    equal = len(rivals) - ahead - len(lost)
    lines = [
        f"numfuse is faster than every peer in {ahead} of {len(rivals)} cases, equal to the "
        f"fastest within {EQUAL:.0%} in {equal}, and slower in {len(lost)}."
    ]
    for case, name, ratio in sorted(lost, key=lambda item: item[2]):
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
    probes = [found["disturbed"] for found in report["sessions"]]
    again, stretches = (sum(x[n] for x in probes) for n in ("disturbed", "stretches"))
    if again:
        text += (
            f" {again} of {stretches} stretches were timed again, because the processor was "
            "slower before or after them than it can be."
        )
    return text


def show(report: dict[str, Any], console: Console) -> None:
    """Print everything; a terminal too narrow for all columns gets those that decide."""
    from rich.markdown import Markdown

    console.print(Markdown(markdown(report, console.width)))


def markdown(report: dict[str, Any], width: float = math.inf) -> str:
    """Return the report as Markdown; tables wider than `width` are narrowed."""
    lines = [f"Measured on {report['date']}: {machine(report)}.", "", method(report)]
    for session in report["sessions"]:
        if libraries := session.get("libraries"):
            names = ", ".join(libraries["libraries"])
            lines += ["", f"{session['threads']} thread(s), BLAS: {names}."]
    for found in tables(report):
        rows = markdown_table(found)
        if max(map(len, rows)) > width:
            rows = markdown_table(found.narrowed())
        lines += ["", f"### {found.title}", "", *rows]
    if report["uses"]:
        lines += ["", USES_LEGEND]
    lines += ["", LEGEND, "", "### In words", ""]
    lines += [f"- {line}" for line in (*verdict(report), *remarks(report))]
    return "\n".join(lines) + "\n"


def markdown_table(table: Table) -> list[str]:
    """Return the lines of a table; the ratio of a row that is behind its peer is bold."""
    ends = ["|---"] * table.text + ["|---:"] * (len(table.head) - table.text)
    lines = [f"| {' | '.join(table.head)} |", f"{''.join(ends)}|"]
    place = table.head.index("ratio") if "ratio" in table.head else len(table.head) - 1
    for cells, lost in table.rows:
        marked = [f"**{x}**" if lost and i == place else x for i, x in enumerate(cells)]
        lines.append(f"| {' | '.join(marked)} |")
    return lines


def write_markdown(report: dict[str, Any], path: Path) -> None:
    """Put the tables between the marks of an existing file, else make them the whole file."""
    text = markdown(report)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        text = f"{before}{BEGIN}\n{text}{END}{after}"
    path.write_text(text, encoding="utf-8")
