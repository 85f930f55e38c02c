"""The suite in parts, for a machine whose clock cuts runs off: a part goes on where one ended.

A record has one JSON line per test: what the test came to, and in which state of the sources. The
state is a digest of ``numfuse/`` and ``tests/``, so that an outcome never counts for other sources.
A test that has passed in this state does not run again, one that has failed comes first::

    python tests/in_parts.py --minutes 9 --record passed.jsonl -- -n 4 tests/conformance

This ends after 9 minutes at the latest (but for the test that is running), with exit code 0 where
every test has passed, 1 where one has failed and 3 where tests are left. pytest is given what
follows ``--``. ``--earlier`` names records that are read but not written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_RECORDS, _DIGEST = "NUMFUSE_TEST_RECORDS", "NUMFUSE_TEST_DIGEST"
#: Exit code: nothing failed, but tests are left.
UNFINISHED = 3


def state() -> str:
    """Return a digest of every file that the outcome of a test may depend on."""
    digest = hashlib.sha256()
    for folder in ("numfuse", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".wgsl", ".json") and path.is_file():
                digest.update(f"{path.relative_to(ROOT)}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def lines(path: Path) -> Iterator[dict[str, str]]:
    """Yield the entries of a record; a line that a clock cut off is left out."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def outcomes(paths: list[Path], digest: str) -> dict[str, str]:
    """Return the latest outcome of each test in one state of the sources."""
    return {
        entry["test"]: entry["outcome"]
        for path in paths
        for entry in lines(path)
        if entry["state"] == digest
    }


class Part:
    """A plugin that leaves out what has passed, records what happens and stops at the deadline."""

    def __init__(self, record: Path, known: dict[str, str], digest: str, deadline: float) -> None:
        self.known, self.left = dict(known), 0
        self._record, self._digest, self._deadline = record, digest, deadline
        self._session: pytest.Session | None = None
        self._so_far: dict[str, str] = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._so_far.get(report.nodeid, "passed")
        if before == "passed":
            self._so_far[report.nodeid] = report.outcome
        if report.when == "teardown":
            outcome = self._so_far.pop(report.nodeid)
            self.known[report.nodeid] = outcome
            entry = {"state": self._digest, "test": report.nodeid, "outcome": outcome}
            with self._record.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        if self._session is not None and time.monotonic() > self._deadline:
            self._session.shouldstop = "the clock"


class Choice:
    """A plugin of every worker: leaves out each test that is known to have passed."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        records = [Path(path) for path in os.environ[_RECORDS].split(os.pathsep)]
        known = outcomes(records, os.environ[_DIGEST])
        done = [item for item in items if known.get(item.nodeid) in ("passed", "skipped")]
        if done:
            config.hook.pytest_deselected(items=done)
        kept = [item for item in items if known.get(item.nodeid) not in ("passed", "skipped")]
        items[:] = sorted(kept, key=lambda item: item.nodeid not in known)


def pytest_configure(config: pytest.Config) -> None:
    """Register the choice, where pytest (or a worker of it) is told to load this module."""
    if _RECORDS in os.environ:
        config.pluginmanager.register(Choice())


def main() -> int:
    """Run a part, print what is known of the whole and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="of this part")
    parser.add_argument("--record", type=Path, required=True, help="the file to read and write")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="files to read")
    parser.add_argument("words", nargs="*", help="what pytest is given")
    arguments = parser.parse_args()

    deadline = time.monotonic() + 60 * arguments.minutes
    digest, records = state(), [*arguments.earlier, arguments.record]
    os.environ[_RECORDS] = os.pathsep.join(str(path.resolve()) for path in records)
    os.environ[_DIGEST] = digest
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")])
    )
    os.chdir(ROOT)
    part = Part(arguments.record.resolve(), outcomes(records, digest), digest, deadline)
    code = pytest.main(["-q", "-p", "in_parts", *arguments.words], plugins=[part])
    count = Counter(part.known.values())
    print(f"state {digest}: " + ", ".join(f"{n} {name}" for name, n in sorted(count.items())))
    for test, outcome in part.known.items():
        if outcome == "failed":
            print(f"  failed: {test}")
    if count["failed"]:
        return 1
    stopped = time.monotonic() > deadline or code == pytest.ExitCode.INTERRUPTED
    return UNFINISHED if stopped else int(code) * (code != pytest.ExitCode.NO_TESTS_COLLECTED)


if __name__ == "__main__":
    sys.exit(main())
