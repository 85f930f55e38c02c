"""tests/in_parts.py: the suite in parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]

TESTS = """
import pathlib
def test_first(): pass
def test_second(): pass
def test_last(): assert pathlib.Path({switch!r}).exists()
"""


def test_a_part_goes_on_where_the_one_before_was_cut_off(tmp_path):
    tests, record, switch = (tmp_path / name for name in ("test_it.py", "record.jsonl", "switch"))
    tests.write_text(TESTS.format(switch=str(switch)))

    def part(minutes: float) -> tuple[int, list[str]]:
        before = len(record.read_text().splitlines()) if record.exists() else 0
        words = ["--minutes", str(minutes), "--record", str(record), "--", str(tests)]
        code = subprocess.run(
            [sys.executable, HERE / "in_parts.py", *words],
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        ).returncode
        entries = [json.loads(line) for line in record.read_text().splitlines()[before:]]
        return code, [entry["test"].partition("::")[2] for entry in entries]

    assert part(0) == (3, ["test_first"])
    assert part(0) == (3, ["test_second"])
    assert part(5) == (1, ["test_last"])
    switch.touch()
    assert part(5) == (0, ["test_last"])
    assert part(5) == (0, [])
