"""Draw the pictures of measured figures from the tables of the pages, so that both say the same.

    python docs/pictures.py            images/uses.png and images/roofline_cpu.png

images/uses.png shows the column "ratio" of the first table of docs/performance.md;
images/roofline_cpu.png the products and gated operations of docs/performance/tables.md. A picture
carries a digest of the figures that it was drawn from, which tests/product/test_docs.py compares.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
IMAGES = HERE / "images"
USES = HERE / "performance.md"
TABLES = HERE / "performance" / "tables.md"
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
    axes.set_xlim(0.5, 9)
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
    draw_uses()
    draw_roofline()
