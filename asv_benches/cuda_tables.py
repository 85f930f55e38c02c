"""The figures of `cuda_gpu.py` as the tables of docs/cuda.md, and as a roofline.

    python asv_benches/cuda_gpu.py --json run.json
    python asv_benches/cuda_tables.py run.json [more.json ...]

What a later file has takes the place of an earlier one's. All records are kept in
docs/history/h200.json, with which it begins; the tables go between the marks in docs/cuda.md.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "history" / "h200.json"
PAGE = ROOT / "docs" / "cuda.md"
PICTURE = ROOT / "docs" / "images" / "roofline_h200.png"
BEGIN, END = "<!-- figures of asv_benches/cuda_tables.py -->", "<!-- end of figures -->"
#: Names of peers in the tables.
NAMES = {
    "torch": "addmm, gelu", "torch mm + add": "mm, add, gelu",
    "torch._addmm_activation": "fused cuBLAS",
}  # fmt: skip
SIZES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8}
#: Measured on the same device: a product of 8192 x 4096 x 4096 by cuBLAS (float32 and float64:
#: 4096 cubed), and a copy; operations and bytes a second.
CEILINGS = {"bf16": 787e12, "f64": 62.9e12, "f32": 51.8e12}
COPY = 4.13e12
Records = dict[tuple[str, str], dict[str, Any]]


def shape_of(case: str) -> tuple[int, ...]:
    return tuple(map(int, case.split()[1].split("x")))


def microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def best_of(times: dict[str, float]) -> tuple[str, float]:
    """The fastest peer."""
    peers = {k: t for k, t in times.items() if k not in ("numfuse", "copy")}
    name = min(peers, key=lambda k: peers[k])
    return name, peers[name]


def products(records: Records) -> str:
    """The table of products."""
    lines = [
        "| dtype | M x K x N | forward us | best peer us | ratio | backward us | best peer us "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = ("bf16", "f16", "f32 bf16x6", "f32 tf32", "f32", "f64")
    groups: dict[tuple[str, tuple[int, ...]], dict[str, dict[str, float]]] = {}
    for (table, case), record in records.items():
        if table != "gated":
            name = table.removesuffix(" small").removesuffix(" odd")
            group = groups.setdefault((name, shape_of(case)), {})
            group[case.split()[0]] = record["device"]
    for (name, shape), pair in sorted(
        groups.items(), key=lambda item: (order.index(item[0][0]), -item[0][1][0] * item[0][1][2])
    ):
        cells = [name, " x ".join(map(str, shape))]
        for operation in ("forward", "backward"):
            times = pair[operation]
            peer, seconds = best_of(times)
            label = f" ({NAMES.get(peer, peer)})" if operation == "forward" else ""
            cells += [
                microseconds(times["numfuse"]), microseconds(seconds) + label,
                f"{seconds / times['numfuse']:.2f}",
            ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gates(records: Records) -> str:
    """The table of gates."""
    lines = [
        "| gate (silu) | numfuse us | torch.compile us | ratio | GB/s | of a copy |",
        "|---|---|---|---|---|---|",
    ]
    for (table, case), record in records.items():
        if table != "gated":
            continue
        operation, dtype = case.split()
        times, count = record["device"], record.get("elements", 1 << (26 if dtype == "f64" else 27))
        moved = (3 if operation == "forward" else 5) * count * SIZES[dtype]
        rate = moved / times["numfuse"]
        peer = times["torch.compile"]
        lines.append(
            f"| {dtype} {operation} | {microseconds(times['numfuse'])} | {microseconds(peer)} | "
            f"{peer / times['numfuse']:.3f} | {rate / 1e9:.0f} | {rate / COPY:.0%} |"
        )
    return "\n".join(lines)


def draw(records: Records) -> None:
    """Operations a second over operations a byte, of products and of their peers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 5), layout="constrained")
    intensity = [2.0 ** (i / 16) for i in range(-40, 193)]
    colours = {"bf16": "C0", "f32": "C1", "f64": "C2"}
    for dtype, ceiling in CEILINGS.items():
        roof = [min(ceiling, COPY * x) / 1e12 for x in intensity]
        label = f"{dtype}, products at {ceiling / 1e12:.0f} TFLOP/s"
        axes.plot(intensity, roof, color=colours[dtype], lw=1.2, label=label)
    for (table, case), record in records.items():
        dtype = table.split()[0]
        if dtype not in colours or "x6" in table or "tf32" in table:
            continue
        m, k, n = shape_of(case)
        forward = case.startswith("forward")
        flops = (2.0 if forward else 6.0) * m * k * n
        parts = m * k + k * n + m * n if forward else 2 * m * k + 2 * k * n + m * n
        x = flops / (parts * SIZES[dtype])
        peer = best_of(record["device"])[1]
        for seconds, marker in ((record["device"]["numfuse"], "o"), (peer, "x")):
            axes.plot(
                x, flops / seconds / 1e12, marker, color=colours[dtype], ms=5, mfc="none", alpha=0.9
            )
    for label, marker in (("numfuse", "o"), ("best peer", "x")):
        axes.plot([], [], marker, color="black", ms=5, mfc="none", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte that must move (FLOP/B)")
    axes.set_ylabel("speed (TFLOP/s)")
    axes.set_title("H200: forward and backward, and what memory and products allow")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=9)
    figure.savefig(PICTURE, dpi=130)


def main() -> None:
    records: Records = {}
    for path in (*([KEPT] if KEPT.exists() else []), *map(pathlib.Path, sys.argv[1:])):
        for record in json.loads(path.read_text()):
            table = record["table"].removesuffix(" odd")
            if table.removesuffix(" small") in ("f32", "f64", "bf16", "f16"):
                table = table.removesuffix(" small")
            records[table, record["case"]] = {**record, "table": table}
    KEPT.write_text(json.dumps(list(records.values()), indent=1) + "\n")
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{products(records)}\n\n{gates(records)}\n\n{END}{after}")
    draw(records)


if __name__ == "__main__":
    main()
