"""Machine code of kernels, as Numba makes it for a processor that need not be at hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

#: Prints the assembly of each of `listings`, by its name.
PRINT = """
import json, sys
json.dump({name: kernel.assembly() for name, kernel in listings.items()}, sys.stdout)
"""


def listings_of(code: str, environment: dict[str, str], cache: Path) -> dict[str, str]:
    """Return the instructions of kernels (not their C wrappers') that `code` lists, by name."""
    done = subprocess.run(
        [sys.executable, "-c", code + PRINT],
        capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name, text in json.loads(done.stdout).items():
        assert "\t.globl\t_ZN7numfuse" in text, name
        body = text[text.index("\n_ZN7numfuse") :]
        found[name] = body[: body.index("\n.Lfunc_end")]
    return found


def loops(text: str, jump: str) -> list[str]:
    """Return the innermost loops: blocks that end with a jump to their own beginning."""
    blocks = re.split(r"\n(?=\.LBB\w+:)", text)
    return [
        b for b in blocks if re.search(rf"\s{jump}\S*\s.*{re.escape(b[: b.find(':')])}$", b, re.M)
    ]


def operations(text: str) -> Counter[str]:
    return Counter(re.findall(r"^\t([a-z]\w*)", text, re.M))
