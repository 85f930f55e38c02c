"""The figures of `precision.py` and `cpu_precision.py` in one file, from which docs draw a picture.

The file is a list of records. Each has

- where: "cuda" or "cpu", and device: its name, on a processor with its threads;
- library: "numfuse" or who else, mode, dtype;
- operation: "forward" or "backward", epilogue: what follows the product, shape (M, N, K), kind of
  operands;
- error: the largest of some elements' errors, each as a share of the norms of its row and column;
- tflops, and share: its speed as a multiple of the fastest product that another library makes of
  this dtype as IEEE 754 says, in the same run;
- source: the script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: What other libraries call products as IEEE 754 says.
STRICT = "strict"


def with_shares(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the contestants of one case, each with its share of the fastest strict peer."""
    peers = [r["tflops"] for r in records if r["library"] != "numfuse" and r["mode"] == STRICT]
    best = max(peers, default=None)
    return [r | {"share": None if best is None else r["tflops"] / best} for r in records]


def write(path: str | Path, where: str, records: list[dict[str, Any]]) -> None:
    """Put these in the place of all that the file has of the same kind of device."""
    path = Path(path)
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = [r for r in kept if r["where"] != where] + [{"where": where} | r for r in records]
    lines = ",\n ".join(json.dumps(r) for r in kept)
    path.write_text(f"[\n {lines}\n]\n", encoding="utf-8")
