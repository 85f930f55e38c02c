"""Draw the pictures of measured figures from the tables of the pages, so that both say the same.

    python docs/pictures.py            all of them
    python docs/pictures.py precision  images/precision.png

images/uses.png shows the column "ratio" of the first table of docs/performance.md;
images/roofline_cpu.png the products and gated operations of docs/performance/tables.md;
images/precision.png the products of docs/history/precision.json, which `asv_benches/precision.py`
and `asv_benches/cpu_precision.py` write, each the part of its own kind of device. A picture
carries a digest of the figures that it was drawn from, which tests/product/test_docs.py compares.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
IMAGES = HERE / "images"
USES = HERE / "performance.md"
TABLES = HERE / "performance" / "tables.md"
DIAL = HERE / "history" / "precision.json"
#: The key of the digest among a picture's own texts.
KEY = "Figures"
UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
#: Two medians nearer than this are called equal, as in `python -m numfuse bench`.
EQUAL = 0.02


class Use(NamedTuple):
    """A row of the table of uses: what, where, beside what, and the least and largest ratio."""

    use: str
    where: str
    beside: str
    low: float
    high: float


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of every row of a Markdown table, the head first, without its rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not set("".join(row)) <= set("-: ")]


def uses() -> list[Use]:
    """Return the rows of the table of uses, in its order."""
    text = USES.read_text(encoding="utf-8").partition("\n## In use\n")[2].partition("\n## ")[0]
    found = []
    for use, where, beside, ratio, _ in rows_of(text)[1:]:
        low, _, high = ratio.partition(" to ")
        found.append(Use(use, where, beside, float(low), float(high or low)))
    return found


def digest(figures: Any) -> str:
    """Return what a picture of these figures carries."""
    return hashlib.sha256(repr(figures).encode()).hexdigest()[:16]


def cases() -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Return the cases of the tables as `numfuse.cli.roofline` takes them, and the triads."""
    from numfuse.cli.peers import Case

    found: list[dict[str, Any]] = []
    triads: dict[int, float] = {}
    text = TABLES.read_text(encoding="utf-8")
    for section in re.split(r"^##+ ", text, flags=re.M)[1:]:
        title = re.match(
            r"(?:Gated: )?(float\d\d), (\d) threads?; (?:FMA peak (\d+) GFLOP/s; )?"
            r"triad (\d+) GB/s",
            section,
        )
        if title is None:  # products measured again, and words
            continue
        dtype, threads = title[1], int(title[2])
        triads[threads] = max(triads.get(threads, 0.0), float(title[4]))
        head, *rows = rows_of(section)
        peers = head[head.index("NumPy") : -1]
        for row in rows:
            at = dict(zip(head, row, strict=True))
            m, n, k = sizes(at["MxNxK"])
            operation = at["operation"].replace(", ", "_").replace(" ", "_")
            case = Case(operation, m, n, k, dtype, "gelu")
            times = {"numfuse": seconds(at["numfuse"])} | {p: seconds(at[p]) for p in peers}
            found.append(
                {
                    "threads": threads, "dtype": dtype, "flop": case.flop, "bytes": case.bytes,
                    "peak_gflops": float(title[3] or 0), "seconds": times,
                }
            )  # fmt: skip
    return found, triads


def sizes(text: str) -> tuple[int, int, int]:
    """Return m, n and k of "512³", "8192x2048x512" or "256x256", whose k is 0."""
    if text.endswith("³"):
        return (int(text[:-1]),) * 3
    m, n, *k = map(int, text.split("x"))
    return m, n, k[0] if k else 0


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


def draw_roofline() -> None:
    """Draw the tables by the picture of `python -m numfuse bench`."""
    import numfuse
    from numfuse.cli import roofline

    found, triads = cases()
    report = {
        "cases": found,
        "sessions": [{"threads": n, "triad": {"gbs": gbs}} for n, gbs in triads.items()],
        "numfuse": numfuse.__version__,
        "processor": "two cores of an Intel Xeon (Granite Rapids)",
    }
    path = IMAGES / "roofline_cpu.png"
    roofline.draw(path, report)
    sign(path, digest(cases()))


def draw_uses() -> None:
    """Draw a bar for each use from the line of equal speed: to the right where numfuse is faster.

    The picture is narrow, so that its words can be read on a telephone.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter

    from numfuse.cli.picture import BLUE, GREY, ORANGE

    found = uses()
    figure = Figure(figsize=(4.9, 0.9 + 0.5 * len(found)), dpi=150, layout="constrained")
    axes = figure.subplots()
    note = functools.partial(axes.annotate, textcoords="offset points", in_layout=False)
    for place, row in enumerate(found):
        colour = BLUE if row.low > 1 + EQUAL else ORANGE if row.high < 1 - EQUAL else GREY
        axes.barh(place, (row.low * row.high) ** 0.5 - 1, left=1, height=0.28, color=colour)
        if row.low != row.high:
            axes.plot([row.low, row.high], [place] * 2, color="black", linewidth=1.2)
        axes.plot([1, 1], [place - 0.2, place + 0.2], color="black", linewidth=0.8)
        near = dict.fromkeys((row.low, row.high))
        note(" to ".join(map(str, near)), (max(row.high, 1), place), xytext=(4, 0), va="center",
             fontsize=8, color=colour)  # fmt: skip
        note(row.use.replace("`", ""), (0.5, place), xytext=(0, 20), va="center", fontsize=8)
        note(f"beside {row.beside}; {row.where}", (0.5, place), xytext=(0, 11), va="center",
             fontsize=7.5, color=GREY)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(0.5, 13)
    axes.set_ylim(len(found) - 0.5, -0.9)
    axes.xaxis.set_major_locator(FixedLocator([0.5, 0.7, 1, 2, 3, 5, 7]))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelsize=8)
    axes.set_yticks([])
    axes.set_xlabel(
        "time of the peer / time of numfuse\n(right of 1: numfuse is faster)", fontsize=8
    )
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    path = IMAGES / "uses.png"
    figure.savefig(path, format="png")
    sign(path, digest(found))


class Mode(NamedTuple):
    """How far a product is off, and how fast it is."""

    name: str
    ours: bool
    dtype: str
    error: float
    tflops: float


#: {library, mode: its name in the picture}; numfuse's modes have their own, with the dtype.
PEERS = {
    ("PyTorch", "strict"): "PyTorch", ("NumPy", "strict"): "NumPy",
    ("PyTorch", "tf32"): "PyTorch, TF32", ("PyTorch", "medium"): 'PyTorch, "medium"',
}  # fmt: skip


def dial(where: str) -> tuple[str, list[Mode]]:
    """Return a kind of device's title and its modes: the largest size, by the most threads."""
    found = [
        r for r in json.loads(DIAL.read_text(encoding="utf-8"))
        if (r["where"], r["operation"], r["epilogue"], r["kind"])
        == (where, "forward", "none", "normal")
    ]  # fmt: skip
    largest = max((tuple(r["shape"]), r.get("threads", 0)) for r in found)
    found = [r for r in found if (tuple(r["shape"]), r.get("threads", 0)) == largest]
    modes = [
        Mode(
            PEERS.get((r["library"], r["mode"]), r["mode"]), r["library"] == "numfuse",
            r["dtype"], r["error"], r["tflops"],
        )
        for r in found
    ]  # fmt: skip
    return f"{found[0]['device']}, {largest[0][0]} cubed", modes


def precisions() -> list[tuple[str, list[Mode]]]:
    """Return what images/precision.png shows, panel by panel."""
    return [dial("cuda"), dial("cpu")]


def label(axes: Any, modes: list[Mode], colours: dict[bool, str]) -> None:
    """Write each mode's name beside its point, where no other point or name is."""
    figure = axes.figure
    figure.canvas.draw()  # settles the layout, in which names are measured
    points = [axes.transData.transform((m.tflops, m.error)) for m in modes]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    frame = axes.get_window_extent()
    sides = {
        (dx, dy): (("left", "right", "center")[(dx < 0) + 2 * (dx == 0)],
                   ("bottom", "top", "center")[(dy < 0) + 2 * (dy == 0)])
        for dx, dy in ((7, 0), (-7, 0), (0, 7), (0, -7), (6, 6), (-6, 6), (6, -6), (-6, -6),
                       (6, 14), (-6, 14), (6, -14), (-6, -14), (6, 24), (6, -24))
    }  # fmt: skip

    def overlap(box: Any) -> float:
        left, low, right, high = box
        common = sum(
            max(0.0, min(right, r) - max(left, a)) * max(0.0, min(high, h) - max(low, b))
            for a, b, r, h in taken
        )
        outside = max(0, frame.x0 - left) + max(0, right - frame.x1)
        return common + 100 * (outside + max(0, frame.y0 - low) + max(0, high - frame.y1))

    for mode, point in zip(modes, points, strict=True):
        tries = []
        for shift, (ha, va) in sides.items():
            text = axes.annotate(
                mode.name, (mode.tflops, mode.error), xytext=shift, textcoords="offset points",
                ha=ha, va=va, fontsize=7.5, color=colours[mode.ours], in_layout=False,
            )  # fmt: skip
            box = text.get_window_extent()
            own = (point[0] - 5, point[1] - 5, point[0] + 5, point[1] + 5)
            taken.remove(own)
            tries.append((overlap(box.extents), len(tries), text, box.extents))
            taken.append(own)
        best = min(tries, key=lambda tried: tried[:2])
        taken.append(tuple(best[3]))
        for tried in tries:
            if tried is not best:
                tried[2].remove()


def draw_precisions() -> None:
    """Draw the error of each mode's product over its speed, a panel for each kind of device."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from numfuse.cli.picture import BLUE, GREY, ORANGE

    panels, colours = precisions(), {True: BLUE, False: ORANGE}
    figure = Figure(figsize=(4.9, 6.6), dpi=150, layout="constrained")
    for axes, (title, modes) in zip(figure.subplots(len(panels), 1), panels, strict=True):
        axes.set(xscale="log", yscale="log")
        for mode in modes:
            marker = "s" if mode.dtype == "float64" else "o"
            inside = colours[True] if mode.ours else "none"
            axes.plot(mode.tflops, mode.error, marker, color=colours[mode.ours], mfc=inside, ms=6)
        speeds, errors = ([m[i] for m in modes] for i in (4, 3))
        axes.set_xlim(min(speeds) / 1.6, max(speeds) * 1.6)
        axes.set_ylim(min(errors) / 12, max(errors) * 12)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.set_title(title, fontsize=8.5)
        axes.set_ylabel("error / (norm of row x norm of column)", fontsize=8)
        for side in ("right", "top"):
            axes.spines[side].set_visible(False)
    axes.set_xlabel("TFLOP/s  (better: to the right, and below)", fontsize=8)
    for name, marker, colour, inside in (
        ("numfuse", "o", BLUE, BLUE),
        ("others", "o", ORANGE, "none"),
        ("float32", "o", GREY, GREY),
        ("float64", "s", GREY, GREY),
    ):
        axes.plot([], [], marker, color=colour, mfc=inside, label=name)  # fmt: skip
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False, handletextpad=0.1)
    for axes, (_, modes) in zip(figure.axes, panels, strict=True):
        label(axes, modes, colours)
    path = IMAGES / "precision.png"
    figure.savefig(path, format="png")
    sign(path, digest(panels))


def sign(path: Path, value: str) -> None:
    """Write the digest of its figures into a picture."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    information = PngInfo()
    information.add_text(KEY, value)
    with Image.open(path) as picture:
        picture.load()
        picture.save(path, pnginfo=information, optimize=True)


if __name__ == "__main__":
    DRAWN = {"uses": draw_uses, "roofline_cpu": draw_roofline, "precision": draw_precisions}
    for name in sys.argv[1:] or DRAWN:
        DRAWN[name]()
