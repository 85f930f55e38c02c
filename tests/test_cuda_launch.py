"""What happens between a call and the driver, without a GPU: a driver of Python functions."""

from __future__ import annotations

import ctypes

import pytest
from conftest import SIMULATED, unavailable

try:
    from numfuse.backends.cuda import launcher
    from numfuse.backends.cuda.libcuda import Config
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has launches of its own", allow_module_level=True)

I64 = ctypes.c_int64
OUR, THEIR = 1000, 2000


def words(*values):
    return (I64 * max(1, len(values)))(*values)


def at(array):
    return ctypes.addressof(array)


class Driver:
    """Functions with the driver's signatures, and what they were called with."""

    def __init__(self, current=OUR, failing=None):
        self.launched, self.graphs, self.contexts = [], [], []
        self.current, self.failing = current, failing
        kinds = (
            ("launch", 4), ("get_current", 1), ("set_current", 1), (None, 0), ("graph", 2),
        )  # fmt: skip
        self._kept, values = [], []
        for name, count in kinds:
            if name is None:
                values.append(OUR)
                continue
            function = ctypes.CFUNCTYPE(ctypes.c_int, *[I64] * count)(getattr(self, name))
            self._kept.append(function)
            values.append(ctypes.cast(function, ctypes.c_void_p).value)
        self.functions = words(*values)

    def launch(self, config, handle, arguments, extra):
        stream = I64.from_address(config + launcher.STREAM_OFFSET).value
        self.launched.append((handle, I64.from_address(arguments).value, stream, extra))
        return 7 if handle == self.failing else 0

    def get_current(self, where):
        I64.from_address(where).value = self.current
        return 0

    def set_current(self, context):
        self.contexts.append(context)
        return 0

    def graph(self, graph, stream):
        self.graphs.append((graph, stream))
        return 9 if graph == self.failing else 0

    def run(self, count=2, many=2):
        config, first, second = words(*range(20)), words(0), words(0)
        table = words(at(config), 3, at(first), at(config), 5, at(second))
        updates = words(at(first), 1, 100, at(second), 0, 0)
        bases, state = words(10_000, 20_000), words(0, 0, 0)
        launches = at(table) if count else 77
        launcher.launch_all()(
            at(self.functions), count, launches, many, at(updates), at(bases), 55, at(state)
        )
        return list(state)[:2]


def test_the_stream_is_where_the_driver_looks_for_it():
    assert Config.stream.offset == launcher.STREAM_OFFSET


def test_every_launch_gets_its_addresses_and_the_stream():
    driver = Driver()
    assert driver.run()[0] == -1
    assert driver.launched == [(3, 20_100, 55, 0), (5, 10_000, 55, 0)]
    assert driver.contexts == []


def test_addresses_are_left_alone_where_they_are_the_same():
    driver = Driver()
    driver.run(many=0)
    assert [argument for _, argument, _, _ in driver.launched] == [0, 0]


def test_a_failure_ends_the_launches_and_is_told():
    driver = Driver(failing=3)
    assert driver.run() == [0, 7]
    assert len(driver.launched) == 1
    driver = Driver(failing=5)
    assert driver.run() == [1, 7]


def test_the_context_of_the_thread_is_as_before_afterwards():
    driver = Driver(current=THEIR)
    driver.run()
    assert driver.contexts == [OUR, THEIR]
    driver = Driver(current=0)  # none: ours stays, as the CUDA runtime would have it
    driver.run()
    assert driver.contexts == [OUR]


def test_a_graph_is_one_launch():
    driver = Driver()
    assert driver.run(count=0, many=0)[0] == -1
    assert driver.graphs == [(77, 55)] and driver.launched == []
    driver = Driver(failing=77)
    assert driver.run(count=0, many=0) == [0, 9]
