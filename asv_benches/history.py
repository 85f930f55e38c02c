"""The performance history: measured commit by commit by asv, drawn and summed up for the docs.

    python asv_benches/history.py measure --commits 12 --passes 3
    python asv_benches/history.py summary            docs/history/<version>.json, picture, tables

`measure` runs `asv run COMMIT^!` with a small part of the suite. A machine that is shared with
others drifts by more than most commits change, so all commits are visited in a fresh random order,
once in each of several passes: a commit's figures come from different hours, and their spread says
how small a change can be seen. (`asv run --interleave-rounds` does the same within one run, for
machines that are free that long.) Each pass adds its samples to asv's results, which `asv compare`
and `asv publish` read, and its figures to `results/passes.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
BEGIN, END = "<!-- history: begin -->", "<!-- history: end -->"
PASSES = HERE / "results" / "passes.json"
# What is followed from commit to commit, as a pattern for asv.
PART = "|".join(
    (
        r"forward\.\w+\.\w+\(('cpu', )?'float(32|64)', 'cube_512'\)",
        r"backward\.\w+\.\w+\(('cpu', )?'backward(_saved)?', 'float32', 'cube_512'\)",
        r"gated\.Gated(Ratio)?\.\w+\('cpu', 'gated(_backward)?', 'float32', 'square'\)",
    )
)
TIMES = PART.replace(r"\w+\(", r"time_\w+\(")  # the same kernels, called once each
# {line of the picture: (benchmark, parameters)}
RATIOS = {
    "forward, float32": ("forward.ForwardRatio.track_forward_ratio", "cpu", "float32", "cube_512"),
    "forward, float64": ("forward.ForwardRatio.track_forward_ratio", "cpu", "float64", "cube_512"),
    "backward": (
        *("backward.BackwardRatio.track_backward_ratio", "cpu", "backward"),
        *("float32", "cube_512"),
    ),
    "backward, saved": (
        *("backward.BackwardRatio.track_backward_ratio", "cpu", "backward_saved"),
        *("float32", "cube_512"),
    ),
    "gated": ("gated.GatedRatio.track_gated_ratio", "cpu", "gated", "float32", "square"),
    "gated backward": (
        *("gated.GatedRatio.track_gated_ratio", "cpu", "gated_backward"),
        *("float32", "square"),
    ),
}
SHARES = {
    "forward, float32": ("forward.ForwardShareOfPeak.track_forward_share", "float32", "cube_512"),
    "forward, float64": ("forward.ForwardShareOfPeak.track_forward_share", "float64", "cube_512"),
    "backward": (
        *("backward.BackwardShareOfPeak.track_backward_share", "backward"),
        *("float32", "cube_512"),
    ),
}


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=HERE, check=True, capture_output=True, text=True
    ).stdout.strip()


def commits(count: int, branch: str) -> list[str]:
    """`count` commits of the branch's own line, evenly spaced, the newest one among them.

    Only those that changed the package: the others have the same figures.
    """
    every = git("log", "--first-parent", "--format=%H", branch, "--", "../numfuse").split()
    step = max(1.0, (len(every) - 1) / max(1, count - 1))
    return [every[min(len(every) - 1, round(i * step))] for i in range(min(count, len(every)))]


def asv(wrap: str, commit: str, *arguments: str) -> int:
    # A cache of compiled kernels for each commit, which the next pass finds as this one left it.
    base = os.environ.get("NUMBA_CACHE_DIR", str(HERE / "results" / "numba"))
    return subprocess.run(
        [*shlex.split(wrap), sys.executable, "-m", "asv", "run", f"{commit}^!", *arguments],
        cwd=HERE,
        env={**os.environ, "NUMBA_CACHE_DIR": f"{base}/{commit[:10]}"},
    ).returncode


def measure(options: argparse.Namespace) -> int:
    chosen = options.hashes or commits(options.commits, options.branch)
    for _ in range(options.passes):
        random.shuffle(chosen)
        for commit in chosen:
            # Installed, compiled and kept in the disk cache before anything is timed.
            asv(options.prepare, commit, "--quick", "--dry-run", "--bench", TIMES)
            before = figures(commit)
            asv(
                options.wrap, commit, "--append-samples", "--no-pull",
                "-a", "rounds=1", "--bench", PART,
            )  # fmt: skip
            note(commit, before)
    return 0


def result_of(commit: str) -> Any:
    """asv's own record of a commit; None where it has none."""
    from asv.results import Results

    for path in sorted((HERE / "results").glob(f"*/{commit[:8]}-*.json")):
        if "existing" not in path.name:
            return Results.load(str(path))
    return None


def figures(commit: str) -> dict[str, Any]:
    """{benchmark with parameters: its value, or the samples of a timing} as asv holds them now."""
    import itertools

    result = result_of(commit)
    found: dict[str, Any] = {}
    for key in result.get_all_result_keys() if result else ():
        params = result.get_result_params(key)
        values = result.get_result_value(key, params)
        samples = result.get_result_samples(key, params)
        for position, chosen in enumerate(itertools.product(*params)):
            value = values[position]
            if value is None or value != value:
                continue
            name = f"{key}({', '.join(chosen)})".replace("'", "")
            found[name] = (samples and samples[position]) or value
    return found


def note(commit: str, before: dict[str, Any]) -> None:
    """Add a pass to passes.json; of a timing, the median of the samples that are new."""
    noted = json.loads(PASSES.read_text()) if PASSES.exists() else {}
    entry = noted.setdefault(commit, defaultdict(list))
    for name, value in figures(commit).items():
        if isinstance(value, list):
            fresh = value[len(before.get(name, ())) :]
            value = statistics.median(fresh) if fresh else None
        elif value == before.get(name):
            value = None
        if value is not None:
            entry.setdefault(name, []).append(value)
    PASSES.parent.mkdir(exist_ok=True)
    PASSES.write_text(json.dumps(noted, indent=1) + "\n")


# --- what the docs keep ---------------------------------------------------------------------------


def distances(values: list[float]) -> list[float]:
    """How far each pass is from the median of all, as a share of it; nothing of a single pass."""
    if len(values) < 2:
        return []
    middle = statistics.median(values)
    return [round(abs(value - middle) / middle, 4) for value in values]


def summary(options: argparse.Namespace) -> int:
    noted = json.loads(PASSES.read_text())
    order = git("log", "--date-order", "--reverse", "--format=%H", options.branch).split()
    order = [commit for commit in order if noted.get(commit)]  # one may not even build
    if not order:
        print(f"no commit of {options.branch} in {PASSES}", file=sys.stderr)
        return 1
    import numfuse
    from numfuse.cli import ceilings

    names = sorted({name for commit in order for name in noted[commit]})
    spreads = {
        name: [x for c in order for x in distances(noted[c].get(name, []))] for name in names
    }
    kept = {
        "version": numfuse.__version__,
        "processor": ceilings.processor(),
        "threads": 1,
        "passes": max(len(values) for c in order for values in noted[c].values()),
        "commits": [
            {"commit": c[:10], "subject": git("log", "-1", "--format=%s", c)} for c in order
        ],
        "figures": {
            name: [
                float(f"{statistics.median(noted[c][name]):.4g}") if name in noted[c] else None
                for c in order
            ]
            for name in names
        },
        # Of each pass: how far it was from the median of its commit's passes, as a share of that.
        "spread": {name: found for name, found in spreads.items() if found},
    }
    folder = DOCS / "history"
    folder.mkdir(exist_ok=True)
    path = folder / f"{kept['version']}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")
    picture = DOCS / "images" / "history.png"
    draw(noted, order, picture)
    page = DOCS / "history.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    page.write_text(f"{before}{begin}\n{tables(kept)}{end}{after}", encoding="utf-8")
    print(path, picture, page, sep="\n")
    return 0


def tables(kept: dict[str, Any]) -> str:
    """What the page shows: the picture, the commits, and how far passes are apart."""
    lines = [
        "## What was measured",
        "",
        f"{kept['processor']}, one thread, at most {kept['passes']} pass(es); NumPy with "
        "OpenBLAS in the same rounds. Points are medians of a commit's passes, the lines through "
        "them reach from the least to the largest pass.",
        "",
        "![Time of numfuse as a share of NumPy's, and its share of the FMA peak, commit by commit]"
        "(images/history.png)",
        "",
        "| number | commit | subject |",
        "|---:|---|---|",
    ]
    lines += [
        f"| {i} | `{entry['commit']}` | {entry['subject'].replace('|', '/')} |"
        for i, entry in enumerate(kept["commits"], 1)
    ]
    if not any(kept["spread"].values()):
        return "\n".join([*lines, "", ""])
    lines += [
        "",
        "How far a pass is from the median of its commit's passes, as a share of it:",
        "",
        "| kind of figure | half of them within | nine of ten within | the furthest |",
        "|---|---:|---:|---:|",
    ]
    kinds = {"time_": "times", "_ratio": "ratios to NumPy", "_share": "shares of the FMA peak"}
    for part, kind in kinds.items():
        found = sorted(x for name, xs in kept["spread"].items() if part in name for x in xs)
        if len(found) > 1:
            deciles = statistics.quantiles(found, n=10)
            lines.append(
                f"| {kind} | {statistics.median(found):.0%} | {deciles[8]:.0%} | {found[-1]:.0%} |"
            )
    return "\n".join([*lines, "", ""])


def draw(noted: dict[str, Any], order: list[str], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(6.4, 7.2), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    colours = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7")
    markers = "osD^vP"
    for axes, lines in ((upper, RATIOS), (lower, SHARES)):
        for i, (label, (name, *params)) in enumerate(lines.items()):
            key = f"{name}({', '.join(params)})"
            at = [x for x, commit in enumerate(order, 1) if key in noted[commit]]
            values = [noted[order[x - 1]][key] for x in at]
            middles = [statistics.median(v) for v in values]
            axes.plot(at, middles, color=colours[i], marker=markers[i], markersize=4, label=label)
            axes.vlines(
                at, [min(v) for v in values], [max(v) for v in values], color=colours[i], alpha=0.5
            )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=2)
        axes.set_ylim(bottom=0)
    upper.axhline(1, color="#555555", linestyle=":")
    upper.set_ylabel("time / that of NumPy (below 1 is faster)")
    upper.set_title("512 x 512 x 512, gates of 2048 x 2048; one thread")
    lower.set_ylabel("share of the FMA peak")
    lower.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    lower.set_xlabel("commit (numbers as in the table), oldest first")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--commits", type=int, default=12)
    measuring.add_argument("--hashes", nargs="+", help="these commits, in place of --commits")
    measuring.add_argument("--passes", type=int, default=3)
    for name, text in (("wrap", "each timed run"), ("prepare", "each run that compiles")):
        measuring.add_argument(
            f"--{name}", default="", help=f"a command in front of {text}: 'taskset -c 1', 'flock x'"
        )
    commands.add_parser("summary")
    for command in commands.choices.values():
        command.add_argument("--branch", default="main")
    options = parser.parse_args()
    if options.command == "measure":
        options.hashes = options.hashes and [git("rev-parse", h) for h in options.hashes]
        return measure(options)
    return summary(options)


if __name__ == "__main__":
    sys.exit(main())
