"""Operands beside inaccessible pages, with the CPU's own way to cut a call.

``docs/numerics.md`` promises that a call reads its operands and writes its results, no more; the
conformance suite holds every backend to it with the block sizes that it has.
"""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="guard pages are set up with mprotect")
def test_a_backward_by_blocks_reads_and_writes_nothing_past_its_pages():
    """Guards that no operand is read past its end, whatever blocks a backward is cut into."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "guard_pages.py"), "cpu", "blocks"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, f"died in the case {run.stdout[-300:]!r}: {run.stderr[-2000:]}"
    assert run.stdout.endswith("all cases passed\n")
