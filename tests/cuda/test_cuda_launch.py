"""What happens between a call and the driver, without a GPU: a driver of Python functions."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
from types import SimpleNamespace

import once
import pytest
from conftest import SIMULATED, unavailable

try:
    from numfuse.backends.cuda.driver import launcher, modules
    from numfuse.backends.cuda.driver.libcuda import Config
    from numfuse.backends.cuda.plan.program import Program
    from numfuse.errors import DeviceError, DeviceLost
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

    def __init__(self, current=OUR, failing=None, uses=()):
        self.launched, self.graphs, self.contexts, self.replaced = [], [], [], []
        self.captured: set[int] = set()
        self.current, self.failing = current, failing
        kinds = (
            (None, 0), ("launch", 4), ("get_current", 1), ("set_current", 1), ("graph", 2),
            ("replace", 2), ("is_capturing", 2),
        )  # fmt: skip
        self._kept, self.functions = [], []
        for name, count in kinds:
            if name is None:
                self.functions.append(OUR)
                continue
            function = ctypes.CFUNCTYPE(ctypes.c_int, *[I64] * count)(getattr(self, name))
            self._kept.append(function)
            self.functions.append(ctypes.cast(function, ctypes.c_void_p).value)
        config, self.first, self.second = words(*range(20)), words(0), words(0)
        self.maps = words(31, 1, 16, 0, 0, 32, 0, 0, 1, 0)
        tables = (
            words(at(config), 3, at(self.first), at(config), 5, at(self.second)),
            words(at(self.first), 1, 100, at(self.second), 0, 0), self.maps, words(*uses),
        )  # fmt: skip
        self.bases = words(10_000, 20_000)
        self._kept += [config, *tables]
        lengths = 2, 2, 2, len(uses)
        plan = list(self.functions)
        assert len(plan) == launcher.PLAN.index("LAUNCH_COUNT")
        for length, table in zip(lengths, tables, strict=True):
            plan += [length, at(table)]
        self.plan = words(*plan, at(self.bases), 0, 0, 0)
        assert len(self.plan) == len(launcher.PLAN)

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

    def replace(self, where, address):
        self.replaced.append((where, address))
        return 8 if where == self.failing else 0

    def is_capturing(self, stream, where):
        ctypes.c_int.from_address(where).value = stream in self.captured
        return 0

    def run(self, graph=0, stream=55):
        failed = launcher.launch_all()(at(self.plan), stream, graph)
        return failed, self.plan[launcher.PLAN.index("STATUS")]


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (1, 1), (4, 6), (1, 6), (6, 1), (0, 4), (4, 0), (3, 1, 5), (2, 0, 3)]
)
def test_a_result_of_pytorch_that_comes_again_is_one_in_c_order(shape):
    torch = pytest.importorskip("torch")
    from numfuse.adapters.cuda_arrays import Torch

    kind = Torch()
    kind.device = lambda ordinal: torch.device("cpu")
    with torch.inference_mode():
        first = kind.maker(0, shape, "bfloat16")()
    made = kind.maker(0, shape, "bfloat16")
    x, y = made(), made()
    at, there = map(kind.address, (x, y))
    wanted = torch.empty(shape, dtype=torch.bfloat16)
    for found in (first, x, y):
        assert found.shape == wanted.shape and found.stride() == wanted.stride()
        assert found.dtype is wanted.dtype and not found.requires_grad
        assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    assert first.is_inference() and not x.is_inference()
    assert (at, there) == (x.data_ptr(), y.data_ptr())
    assert at != there or not x.numel()


def test_a_call_of_pytorch_is_recalled_for_operands_of_the_same_forms_alone():
    """Guards: a repeated call on tensors is told by all that its program depends on."""
    torch = pytest.importorskip("torch")
    from numfuse.adapters.cuda_arrays import Torch
    from numfuse.backends.cuda.call.foreign import KINDS
    from numfuse.backends.cuda.call.record import Recorded

    class Program:
        pass

    def ones(*shape, offset=0):
        memory = torch.ones(math.prod(shape) + 16)
        start = -(memory.data_ptr() // 4) % 4 + offset
        return memory[start : start + math.prod(shape)].view(shape)

    kind, program, asked = Torch(), Program(), ("forward", "gelu")
    assert kind not in KINDS.values()  # (a test has kinds of its own)
    kept = Recorded(program, (), None, None, (), (), frozenset(), "float32")
    x, w = ones(8, 16), torch.nn.Parameter(ones(16, 8))
    with torch.no_grad():
        kind.keep(asked, (x, w, None), kept, 0)

        def known(*operands, asked=asked):
            addresses = []
            found, *_ = kind.recall(asked, operands, addresses)
            assert addresses == ([z.data_ptr() for z in operands if z is not None] if found else [])
            return found is not None

        assert known(x, w, None) and known(ones(8, 16), torch.nn.Parameter(ones(16, 8)), None)
        negative = torch.complex(x, x).conj().imag
        assert negative.is_neg()
        for other in (
            x[:4], x.t().contiguous().t(), x.double(), ones(8, 16, offset=1), x.to("meta"),
            negative, torch._efficientzerotensor(8, 16),
            x.as_subclass(type("Own", (torch.Tensor,), {})), [x], x.numpy(), w.detach().t(),
        ):  # fmt: skip
            assert not known(other, w, None)
        assert not known(x, w.detach(), None)
        assert not known(x, w, ones(8)) and not known(x, None, w)
        assert not known(x, w, None, asked=("forward", "silu"))
        assert not known(x, w, None, asked=("forward", ["silu"]))
        seen = []
        torch.vmap(lambda z: seen.append(known(z, w, None)) or z)(torch.ones(2, 8, 16))
        assert seen == [False]
        for other in (["a"],), (("forward", {}),):
            kind.keep(other, (x, w, None), kept, 0)
            assert not known(x, w, None, asked=other)
        kind.keep(("twice",), (x, x, None), kept, 0)
        assert not known(x, x, None, asked=("twice",))
        kind.keep(asked, (ones(4, 16), w, None), kept, 0)
        assert known(x, w, None) and known(ones(4, 16), w, None)
        kind.keep(asked, (x, "number", w), kept, 0)  # an epilogue's number is an argument
        found = kind.recall(asked, (x, "number", w), [])[0]
        assert found is not None and not known(x, w) and not known(x, x, w)
    assert not known(x, w, None)  # a gradient would be lost
    with torch.no_grad():
        del program, kept  # as the replay does with a definition
        gc.collect()
        assert not known(x, w, None)


def test_the_stream_is_where_the_driver_looks_for_it():
    assert Config.stream.offset == launcher.STREAM_OFFSET


def test_every_launch_gets_its_addresses_and_the_stream():
    driver = Driver()
    assert driver.run()[0] == -1
    assert driver.launched == [(3, 20_100, 55, 0), (5, 10_000, 55, 0)]
    assert driver.contexts == []


def test_a_map_gets_an_address_where_that_is_another_one():
    driver = Driver()
    driver.run()
    assert driver.replaced == [(31, 20_016), (32, 10_000)]
    driver.run()
    assert len(driver.replaced) == 2
    driver.bases[0] = 30_000
    driver.run()
    assert driver.replaced[2:] == [(32, 30_000)]


def test_a_failure_ends_the_launches_and_is_told():
    driver = Driver(failing=3)
    assert driver.run() == (0, 7)
    assert len(driver.launched) == 1
    driver = Driver(failing=5)
    assert driver.run() == (1, 7)


def test_a_map_that_is_refused_is_tried_again():
    driver = Driver(failing=32)
    assert driver.run() == (1, 8)
    assert driver.launched == []
    driver.failing = None
    assert driver.run()[0] == -1
    assert driver.replaced == [(31, 20_016), (32, 10_000), (32, 10_000)]


def test_the_context_of_the_thread_is_as_before_afterwards():
    driver = Driver(current=THEIR)
    driver.run()
    assert driver.contexts == [OUR, THEIR]
    driver = Driver(current=0)  # none: ours stays, as the CUDA runtime would have it
    driver.run()
    assert driver.contexts == [OUR]


def test_a_graph_is_one_launch():
    driver = Driver()
    assert driver.run(graph=77)[0] == -1
    assert driver.graphs == [(77, 55)] and driver.launched == []
    driver = Driver(failing=77)
    assert driver.run(graph=77) == (0, 9)


class Owner:
    """What `Program` asks of a device."""

    def __init__(self, driver):
        self.entries, self.lost, self.noted = tuple(driver.functions), None, []
        self.retired = modules.Retired()

    def note(self, names):
        self.noted.append(names)

    def check(self, status, what):
        if status:
            raise DeviceError(f"{what}: {status}")


@pytest.mark.parametrize("failing", [None, 3])
def test_a_launch_takes_the_addresses_that_it_is_given(failing):
    driver = Driver(failing=failing)
    owner = Owner(driver)
    config, first, second = words(*range(20)), words(0), words(0)
    table = words(at(first), at(second))
    prepared = SimpleNamespace(
        name="one kernel", handles=(at(config), 3, at(table)),
        slots=((at(first), 0, 0), (at(second), 1, 64)), maps=(), module=SimpleNamespace(uses=0),
    )  # fmt: skip
    program = Program(owner, ((prepared, ((2, 16), (3, 0))),), 0, 0, "tier", None, 2)
    assert program.simple
    for call in (
        lambda *addresses: program.launch(55, list(addresses)),
        lambda *addresses: program.launch(55, list(addresses), 0),
    ):
        for addresses in ((10_000, 20_000), (30_000, 40_000)):
            driver.launched.clear()
            if failing is None:
                call(*addresses)
            else:
                with pytest.raises(DeviceError, match="one kernel: 7"):
                    call(*addresses)
            assert driver.launched == [(3, at(first), 55, 0)]
            assert (first[0], second[0]) == (addresses[0] + 16, addresses[1] + 64)
        owner.lost = "why"
        with pytest.raises(DeviceLost, match="why"):
            call(1, 2)
        owner.lost = None
        assert (first[0], second[0]) == (30_016, 40_064)
    assert owner.noted == ["one kernel"] * 4


def test_pytorch_tells_of_cudas_autocast_where_no_device_is_named():
    torch = pytest.importorskip("torch")
    before = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    try:
        for cuda in (True, False):
            torch.set_autocast_enabled("cuda", cuda)
            torch.set_autocast_enabled("cpu", not cuda)
            assert torch.is_autocast_enabled() is cuda
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_enabled("cpu", before[1])


# --- a fork -------------------------------------------------------------------------------------

FORKS = """
import os, sys
import numpy as np
import numfuse as nf
from numfuse.backends import load
from numfuse.backends.cuda.driver import libcuda

class Driver:  # one that says yes to all
    def __getattr__(self, name):
        return lambda *_: 0
    def cuDeviceGetCount(self, found):
        found._obj.value = 1
        return 0

a = np.ones(3, np.float32)
def child(what):
    pid = os.fork()
    if pid == 0:
        what()
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def unused():  # a child may begin where its parent has not
    libcuda._library = Driver()
    load("cuda").device.synchronize()

def raised(error, call):
    try:
        call()
    except error as found:
        assert "forked after CUDA had begun: start it with 'spawn'" in str(found), found
    else:
        raise AssertionError("no error")

def used():
    raised(nf.BackendUnavailable, lambda: nf.silu_mul(a, a, backend="cuda"))
    raised(nf.BackendUnavailable, lambda: nf.to_device(a, "cuda"))
    raised(nf.DeviceLost, device.synchronize)
    device.free(4096)  # it is the parent's
    assert nf.silu_mul(a, a, backend="reference").shape == (3,)

assert child(unused) == 7
libcuda._library = Driver()
libcuda._library.cuMemFree_v2 = lambda _: os._exit(3)
device = load("cuda").device
assert child(used) == 7
assert child(lambda: child(used) == 7 or os._exit(1)) == 7
device.synchronize()
"""
FORKING = once.Process(lambda _: [sys.executable, "-c", FORKS], timeout=120)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.long
def test_a_forked_child_is_told_to_use_spawn():
    done = FORKING.result()
    assert done.returncode == 0, done.stderr[-3000:]
