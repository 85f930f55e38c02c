"""Processes that tests wait for, begun before these tests have their turn.

Most of a run's time is one process compiling. What has a process of its own anyway runs beside it,
one after the other in the order of the tests that want it::

    NARROW = ahead.Process(lambda directory: [sys.executable, "-c", ...])

    @pytest.mark.ahead(process=NARROW)  # or a function of the test's parameters that gives one
    def test_it():
        assert NARROW.result().returncode == 0

Tests with the mark `apart` take minutes on one core: all of them run in one process of their own
beside the others, which come first; what it reports is their outcome.

Only what a test of this run wants is begun. Not within a worker of pytest-xdist, nor in a process
that was begun so: there it runs when it is asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as xml
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

_SET = "NUMFUSE_TEST_AHEAD"
_HERE = Path(__file__).parent
# The modules beside this one, for a test file that is run by itself.
_PATH = os.pathsep.join(filter(None, [str(_HERE), os.environ.get("PYTHONPATH")]))


class Process:
    """A command that runs once.

    Parameters
    ----------
    command : callable
        From a directory of its own to the words of the command.
    environment : dict, optional
        Added to that of this process.
    timeout : float
        Seconds.
    """

    def __init__(
        self, command: Callable[[Path], list[str]], environment: dict[str, str] | None = None,
        timeout: float = 900,
    ) -> None:  # fmt: skip
        self._command, self._timeout = command, timeout
        self._environment = environment or {}
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._done: subprocess.CompletedProcess[str] | None = None

    @cached_property
    def _place(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="numfuse-test-")

    @property
    def directory(self) -> Path:
        """For its files; gone with this object."""
        return Path(self._place.name)

    def result(self) -> subprocess.CompletedProcess[str]:
        """What became of it; it is begun where it was not."""
        with self._lock:
            if self._done is None:
                command = self._command(self.directory)
                self._running = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    cwd=_HERE.parent,
                    env={**os.environ, **self._environment, "PYTHONPATH": _PATH, _SET: "0"},
                )  # fmt: skip
                try:
                    out, err = self._running.communicate(timeout=self._timeout)
                except subprocess.TimeoutExpired:
                    self._running.kill()
                    out, err = self._running.communicate()
                    err += f"\nkilled after {self._timeout} seconds"
                self._done = subprocess.CompletedProcess(
                    command, self._running.returncode, out, err
                )
            return self._done

    def stop(self) -> None:
        """End it, if it runs."""
        if self._running is not None and self._running.poll() is None:
            self._running.kill()


class Plugin:
    """Begins what the tests of a run want, and ends what is left."""

    def __init__(self) -> None:
        self._wanted: list[Process] = []
        self._over = False
        self._apart: Process | None = None
        #: What the tests with the mark `apart` came to: {their file and name: (how, text)}.
        self._outcomes: dict[tuple[str, str], tuple[str, str]] | None = None

    @staticmethod
    def _alone(config: pytest.Config) -> bool:
        """Whether nothing is begun."""
        return (
            config.option.collectonly or os.environ.get(_SET) == "0"
            or "PYTEST_XDIST_WORKER" in os.environ
        )  # fmt: skip

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Tests with the mark `apart` to the end, where others run meanwhile."""
        apart = [item for item in items if item.get_closest_marker("apart")]
        if self._alone(config) or not 0 < 2 * len(apart) < len(items):
            return
        items.sort(key=lambda item: item.get_closest_marker("apart") is not None)
        words = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
            *(item.nodeid for item in apart),
        ]  # fmt: skip
        self._apart = Process(
            lambda directory: [*words, f"--junitxml={directory / 'report.xml'}"], timeout=1800
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """In place of a test with the mark `apart`: what it came to in its process."""
        if self._apart is None or item.get_closest_marker("apart") is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if self._outcomes is None:
            self._outcomes = self._read(self._apart)
        how, text = self._outcomes.get((item.path.stem, item.name), ("", ""))
        if not how:
            done = self._apart.result()
            text = f"no outcome: {(done.stdout + done.stderr)[-5000:]}"
        where: Any = (str(item.path), item.location[1] or 0, text)
        for when in ("setup", "call", "teardown"):
            outcome: Any = "passed"
            if when == "call" and how != "passed":
                outcome = "skipped" if how == "skipped" else "failed"
            longrepr = {"passed": None, "skipped": where, "failed": text}[outcome]
            report = pytest.TestReport(
                item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, longrepr,
                when,  # type: ignore[arg-type]
            )  # fmt: skip
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @staticmethod
    def _read(process: Process) -> dict[tuple[str, str], tuple[str, str]]:
        process.result()
        path = process.directory / "report.xml"
        found = {}
        for case in xml.parse(path).iter("testcase") if path.exists() else ():
            bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
            how = bad[0].tag if bad else "passed"
            text = "".join(child.text or child.get("message", "") for child in bad)
            found[case.get("classname", "").rpartition(".")[2], case.get("name", "")] = how, text
        return found

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._alone(session.config):
            return
        for item in session.items:
            mark = item.get_closest_marker("ahead")
            if mark is None or any(
                m.args and m.args[0] is True for m in item.iter_markers("skipif")
            ):
                continue
            made = mark.kwargs["process"]
            if not isinstance(made, Process):
                made = made(**item.callspec.params)
            if made is not None and made not in self._wanted:
                self._wanted.append(made)
        if self._apart is not None:
            self._wanted.append(self._apart)
        if self._wanted:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for process in self._wanted:
            if self._over:
                return
            process.result()

    def pytest_sessionfinish(self) -> None:
        self._over = True
        for process in self._wanted:
            process.stop()
