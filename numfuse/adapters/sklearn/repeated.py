"""Calls on arrays that stay where they are: recorded once, and repeated by their launches alone.

A step of training makes the same calls on the same arrays, thousands of times. What a call that
comes again pays, a look at each of its arrays, is half of such a step where batches are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from numfuse.backends import resolve
from numfuse.backends.cpu.face import CpuBackend

_T = TypeVar("_T")


class _Recorder(CpuBackend):
    """The CPU backend, which remembers what it launches."""

    def __init__(self, backend: CpuBackend) -> None:
        super().__init__(backend.precision)
        self.replay = backend.replay
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []

    def launch(self, program: Any, arrays: tuple[Any, ...]) -> None:
        CpuBackend.launch(program, arrays)
        self.launches.append((program, arrays))


class Repeated(Generic[_T]):
    """Calls of numfuse's functions, to be made again and again on the same arrays.

    `calls` takes the backend to pass on, and makes them. It is called the first time; from then on
    what was launched is launched again, and results are where they were: so it does nothing else
    that counts, and the arrays that it takes are contiguous. On another backend than the CPU's it
    is called every time.
    """

    __slots__ = ("_calls", "_found", "_launches")

    def __init__(self, calls: Callable[[Any], _T]) -> None:
        self._calls: Callable[[Any], _T] | None = calls

    def __call__(self) -> _T:
        """Make the calls, and return what they did."""
        if self._calls is not None:
            return self._first(self._calls)
        for program, arrays in self._launches:
            _launch(program, arrays)
        return self._found

    def _first(self, calls: Callable[[Any], _T]) -> _T:
        backend = resolve(None)
        if type(backend) is not CpuBackend:
            return calls(None)
        recorder = _Recorder(backend)
        self._found: _T = calls(recorder)
        self._launches = tuple(recorder.launches)
        self._calls = None  # (whose method it may be: memory goes with its last owner)
        return self._found


_launch = CpuBackend.launch
