"""Processes that tests wait for, begun before these tests have their turn.

Most of a run's time is one process compiling. What has a process of its own anyway runs beside it,
one after the other in the order of the tests that want it::

    NARROW = ahead.Process(lambda directory: [sys.executable, "-c", ...])

    @pytest.mark.ahead(process=NARROW)  # or a function of the test's parameters that gives one
    def test_it():
        assert NARROW.result().returncode == 0

Only what a test of this run wants is begun. Not within a worker of pytest-xdist, nor in a process
that was begun so: there it runs when it is asked for.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pytest

_SET = "NUMFUSE_TEST_AHEAD"


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
                    cwd=Path(__file__).parents[1],
                    env={**os.environ, **self._environment, _SET: "0"},
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

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly or os.environ.get(_SET) == "0":
            return
        if "PYTEST_XDIST_WORKER" in os.environ:
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
