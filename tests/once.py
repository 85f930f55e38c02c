"""Processes that several tests ask for and that run once.

::

    NARROW = once.Process(lambda directory: [sys.executable, "-c", ...])

    @pytest.mark.long
    def test_it():
        assert NARROW.result().returncode == 0
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

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
        Added to that of this process. A pytest that is run so has no workers, unless it says so:
        what it patches would not reach them.
    timeout : float
        Seconds.
    """

    def __init__(
        self, command: Callable[[Path], list[str]], environment: dict[str, str] | None = None,
        timeout: float = 900,
    ) -> None:  # fmt: skip
        self._command, self._timeout = command, timeout
        alone = f"{os.environ.get('PYTEST_ADDOPTS', '')} -n0"
        self._environment = {"PYTHONPATH": _PATH, "PYTEST_ADDOPTS": alone, **(environment or {})}

    @cached_property
    def _place(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="numfuse-test-")

    @property
    def directory(self) -> Path:
        """For its files; gone with this object."""
        return Path(self._place.name)

    def result(self) -> subprocess.CompletedProcess[str]:
        """Return what became of it; the first call runs it."""
        return self._done

    @cached_property
    def _done(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(self.directory), capture_output=True, text=True, check=False,
            timeout=self._timeout, cwd=_HERE.parent, env={**os.environ, **self._environment},
        )  # fmt: skip
