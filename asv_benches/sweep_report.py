"""The kept results of `cuda_sweep.py`: shares, means, the worst cases, and the distribution."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: Unit roundoffs: an error of one is that of the last rounding, and no matter of a sum.
UNITS = {"bf16": 2.0**-9, "f16": 2.0**-12, "f32": 2.0**-24, "f64": 2.0**-53}
OURS = "numfuse"
#: The goals: a ratio that this share of the shapes reaches, the least one, their mean, and the
#: largest error beside the peer's.
GOOD, SHARE, LEAST, MEAN, ERROR = 0.95, 0.95, 0.85, 1.15, 2.0
Record = dict[str, Any]


def read(paths: Iterable[Path]) -> list[Record]:
    """Return the results of all runs in these files, each once; runs are joined to their cases.

    A line that is no JSON (the last of a run that was cut off) is left out.
    """
    runs: dict[str, Record] = {}
    found: dict[tuple[str, str], Record] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["kind"] == "run":
                runs[record["id"]] = record
            else:
                found[record["run"], json.dumps(record["case"], sort_keys=True)] = record
    return [{**x, "of": runs.get(x["run"], {})} for x in found.values()]


def latest(records: list[Record]) -> list[Record]:
    """Return the last result of each shape on each GPU: those that were slow are timed again."""
    found = {}
    for x in sorted(records, key=lambda x: str(x["of"].get("date", ""))):
        case = {k: v for k, v in x["case"].items() if k not in ("compiled", "ways")}
        found[x["of"].get("gpu", ""), json.dumps(case, sort_keys=True)] = x
    return list(found.values())


def ratio(record: Record, clock: str = "device") -> float | None:
    """Return the best peer's time by numfuse's; None where one of them has none."""
    times = record.get(clock, {})
    peers = [t for name, t in times.items() if name != OURS]
    if OURS not in times or not peers:
        return None
    return float(min(peers) / times[OURS])


def best_peer(record: Record) -> str:
    """Return the name of the fastest peer."""
    times = {name: t for name, t in record.get("device", {}).items() if name != OURS}
    return min(times, key=lambda name: times[name], default="")


def error_ratio(record: Record) -> float | None:
    """Return the largest error of a result beside PyTorch's own, of one unit roundoff at least."""
    found = record.get("errors", {})
    if OURS not in found or len(found) < 2:
        return None
    peer = found.get(best_peer(record)) or next(e for name, e in found.items() if name != OURS)
    unit = UNITS[record["case"]["dtype"]]
    return max(float(x) / max(float(y), unit) for x, y in zip(found[OURS], peer, strict=True))


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def row(name: str, records: list[Record], clock: str = "device") -> str:
    """Return a line of the table: a group's figures."""
    ratios = [x for r in records if (x := ratio(r, clock)) is not None]
    off = [x for r in records if (x := error_ratio(r)) is not None]
    if not ratios:
        return f"| {name} | 0 | | | | | |"
    good = sum(x >= GOOD for x in ratios) / len(ratios)
    under = sum(x < LEAST for x in ratios)
    worse = sum(x > ERROR for x in off) / max(1, len(off))
    return (
        f"| {name} | {len(ratios)} | {good:.1%} | {under} | {min(ratios):.2f} | "
        f"{mean(ratios):.3f} | {worse:.1%} |"
    )


def text_of(case: Record) -> str:
    """Return a case in words."""
    size = f"{case['m']} x {case['k']} x {case['n']}"
    words = [f"{case['batch']} x ({size})" if case["batch"] else size]
    words += ["one weight"] * (case["batch"] > 0 and case["shared"])
    words += ["(out, in)"] * case["turned"] + ["bias"] * case["bias"]
    return f"{case['operation']}, {case['dtype']}, {case['activation']}: {', '.join(words)}"


def report(records: list[Record], worst: int = 25) -> str:
    """Return the tables, as Markdown."""
    if not records:
        return "No results are kept."
    groups: dict[str, Callable[[Record], str]] = {
        "GPU": lambda r: str(r["of"].get("gpu", "?")),
        "operation": lambda r: str(r["case"]["operation"]),
        "dtype": lambda r: str(r["case"]["dtype"]),
        "weight": lambda r: "(out, in)" if r["case"]["turned"] else "(in, out)",
        "sizes": lambda r: "of models" if r["case"]["real"] else "any",
        "batch": lambda r: "batch" if r["case"]["batch"] else "no batch",
        "tier": lambda r: str(r.get("tier", "")).partition(":")[0],
    }
    head = f"| | shapes | {GOOD} or more | under {LEAST} | worst | mean | error over {ERROR:g} x |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|", row("all, device time", records)]
    lines.append(row("all, wall time", records, "wall"))
    for what, key in groups.items():
        names = sorted({key(r) for r in records})
        lines += [row(f"{what}: {x}", [r for r in records if key(r) == x]) for x in names]
    timed = sorted((r for r in records if ratio(r) is not None), key=lambda r: ratio(r) or 0.0)
    lines += ["", f"| the worst {worst} | ratio | wall | peer | error | tier |"]
    lines += ["|---|---:|---:|---|---:|---|"]
    for r in timed[:worst]:
        wall, off = ratio(r, "wall"), error_ratio(r)
        cells = [
            text_of(r["case"]), f"{ratio(r):.2f}", "" if wall is None else f"{wall:.2f}",
            best_peer(r), "" if off is None else f"{off:.2g}", str(r.get("tier", "")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    large = [r for r in records if (error_ratio(r) or 0) > ERROR]
    lines += [""] + [f"error {error_ratio(r):.3g} x: {text_of(r['case'])}" for r in large]
    for r in records:
        failed = {k: v for k, v in r.get("failed", {}).items() if k in (OURS, "case")}
        lines += [f"failed: {text_of(r['case'])}: {name}: {x}" for name, x in failed.items()]
    return "\n".join(lines) + "\n"


def draw(records: list[Record], path: Path) -> None:
    """Draw which share of the shapes has which ratio at most, by dtype and by operation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=130, layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    for axes, key in zip(both, ("dtype", "operation"), strict=True):
        for name in sorted({r["case"][key] for r in records}):
            mine = [r for r in records if r["case"][key] == name]
            found = sorted(x for r in mine if (x := ratio(r)) is not None)
            if found:
                share = [(i + 1) / len(found) for i in range(len(found))]
                axes.step(found, share, where="post", label=f"{name} ({len(found)})")
        axes.axvline(GOOD, color="#555555", linestyle=":")
        axes.axhline(1 - SHARE, color="#555555", linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("the best peer's device time by numfuse's")
        axes.grid(alpha=0.3)
        if axes.get_lines():
            axes.legend(fontsize=8)
    both[0].set_ylabel("share of the shapes at or below")
    gpus = sorted({str(r["of"].get("gpu", "?")) for r in records})
    figure.suptitle(f"{len(records)} drawn shapes on {', '.join(gpus)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
