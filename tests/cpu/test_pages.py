"""Operands beside inaccessible pages, with the CPU's own way to cut a call.

The conformance suite holds every backend to reading and writing arrays alone, with the block sizes
that it has; this is the same for blocks of one chunk of rows (docs/design.md, "A backward goes by
blocks of rows").
"""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="guard pages are set up with mprotect")
def test_a_backward_by_blocks_reads_and_writes_nothing_past_its_pages():
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "guard_pages.py"), "cpu", "blocks"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, f"died in the case {run.stdout[-300:]!r}: {run.stderr[-2000:]}"
    assert run.stdout.endswith("all cases passed\n")
