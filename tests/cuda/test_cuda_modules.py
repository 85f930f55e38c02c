"""How loaded kernels go, without a GPU: a device of Python functions."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

import once
import pytest
from conftest import SIMULATED, unavailable

try:
    from numfuse.backends.cuda.driver import launcher, modules
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.errors import DeviceLost

if SIMULATED:
    pytest.skip("the simulator loads no modules", allow_module_level=True)

I64 = ctypes.c_int64


class Owner:
    """What `Retired` asks of a device; its work is done when `done` says so."""

    def __init__(self):
        self.log, self.captured, self.refused = [], set(), set()
        self.pending: dict[int, int] = {}
        self.done = False
        self.lost = None

    @contextlib.contextmanager
    def current(self):
        if self.lost is not None:
            raise DeviceLost(self.lost)
        yield

    uncaptured = contextlib.nullcontext

    def capturing(self, stream):
        return stream in self.captured

    def event(self, stream):
        number = len(self.log) + 1000
        self.log.append(("event", stream))
        self.pending[number] = stream
        return number

    def passed(self, event):
        assert event in self.pending
        return self.done

    def forget(self, event):
        del self.pending[event]

    def drop(self, graph):
        self.log.append(("drop", graph))

    def unload(self, module):
        if module in self.refused:
            return False
        self.log.append(("unload", module))
        return True

    def wait_for_all(self):
        self.log.append(("wait",))

    def unloaded(self):
        return [number for what, number in (entry for entry in self.log if len(entry) == 2)
                if what == "unload"]  # fmt: skip


@pytest.fixture
def retired():
    return modules.Retired()


def launched(module, *streams, captured=False):
    """Note launches as the compiled loop does."""
    words = (I64 * (2 + modules.STREAMS)).from_address(module.uses)
    for stream in streams:
        if captured:
            words[0] = 1
        elif stream + 1 not in words[2:]:
            free = [i for i in range(2, len(words)) if not words[i]]
            words[free[0] if free else 1] = stream + 1 if free else 1


def test_a_module_goes_after_its_work_and_not_before(retired):
    owner, module = Owner(), modules.Module(70, 71, retired)
    launched(module, 5)
    retired.release(owner, 5)
    assert owner.log == []  # it is there
    del module
    assert len(retired) == 1 and owner.log == []  # nothing is asked of the driver where it ends
    retired.release(owner, 5)
    retired.release(owner, 5)
    assert owner.log == [("event", 5)]
    owner.done = True
    retired.release(owner, 5)
    assert owner.unloaded() == [70] and not owner.pending and not len(retired)
    retired.release(owner, 5)
    assert owner.unloaded() == [70]


def test_a_module_that_was_never_launched_goes_at_once(retired):
    owner = Owner()
    modules.Module(70, 71, retired)
    retired.release(owner, 0)
    assert owner.log == [("unload", 70)]


def test_every_stream_that_it_was_launched_on_is_waited_for(retired):
    owner, module = Owner(), modules.Module(70, 71, retired)
    owner.done = True
    launched(module, 0, 5, 0)
    del module
    for stream, events in ((9, []), (5, [5]), (5, [5]), (9, [5])):
        retired.release(owner, stream)
        assert [entry[1] for entry in owner.log] == events
    retired.release(owner, 0)  # (which may be a stream that is there no more before this)
    assert owner.unloaded() == [70]


def test_what_a_graph_has_captured_stays(retired):
    owner, module = Owner(), modules.Module(70, 71, retired)
    owner.done = True
    launched(module, 5)
    launched(module, 6, captured=True)
    del module
    retired.release(owner, 5)
    retired.synchronize(owner)
    assert owner.unloaded() == [] and len(retired) == 0


def test_nothing_is_unloaded_while_the_stream_is_captured(retired):
    owner = Owner()
    owner.captured.add(5)
    modules.Module(70, 71, retired)
    retired.graphs.append(90)
    retired.release(owner, 5)
    assert owner.log == []
    owner.captured.clear()
    retired.release(owner, 5)
    assert owner.log == [("drop", 90), ("unload", 70)]  # the graph of it first


def test_a_module_that_the_driver_refuses_to_unload_is_tried_again(retired):
    owner = Owner()
    owner.refused.add(70)
    modules.Module(70, 71, retired)
    for _ in range(2):
        retired.release(owner, 0)
        assert len(retired) == 1
    owner.refused.clear()
    retired.release(owner, 0)
    assert owner.unloaded() == [70]


def test_after_more_streams_than_it_notes_it_goes_when_all_work_is_waited_for(retired):
    owner, module = Owner(), modules.Module(70, 71, retired)
    owner.done = True
    launched(module, *range(modules.STREAMS + 1))
    del module
    for stream in range(modules.STREAMS + 1):
        retired.release(owner, stream)
    assert owner.unloaded() == [] and len(retired) == 1
    retired.synchronize(owner)
    assert owner.log[-2:] == [("wait",), ("unload", 70)]


def test_what_comes_while_all_work_is_waited_for_is_not_unloaded_with_it(retired):
    owner, module = Owner(), modules.Module(70, 71, retired)
    launched(module, 5)
    held = [module]
    del module
    owner.wait_for_all = held.clear
    retired.synchronize(owner)
    assert owner.unloaded() == [] and len(retired) == 1


def test_within_a_release_another_waits_for_nothing(retired):
    """As of a signal's handler, or of a second thread."""
    owner = Owner()

    def unload(module):
        retired.release(owner, 0)
        retired.synchronize(owner)
        owner.log.append(("unload", module))
        return True

    owner.unload = unload
    for number in (70, 80):
        modules.Module(number, 0, retired)
    retired.release(owner, 0)
    assert owner.unloaded() == [70, 80] and not len(retired)


def test_an_interrupt_has_no_module_unloaded_twice(retired):
    owner = Owner()
    unload = owner.unload

    def interrupted(module):
        unload(module)
        raise KeyboardInterrupt

    for number in (70, 80):
        modules.Module(number, 0, retired)
    owner.unload = interrupted
    with pytest.raises(KeyboardInterrupt):
        retired.release(owner, 0)
    owner.unload = unload
    modules.Module(90, 0, retired)
    retired.release(owner, 0)
    assert owner.unloaded() == [70, 90]  # (80 stays loaded)


def test_of_a_lost_device_nothing_is_asked(retired):
    owner = Owner()
    owner.lost = "gone"
    modules.Module(70, 71, retired)
    for call in (lambda: retired.release(owner, 0), lambda: retired.synchronize(owner)):
        with pytest.raises(DeviceLost):
            call()
    assert owner.log == []


def test_a_module_of_a_kernel_without_a_formula_never_goes(retired):
    modules.Module(70, 71, None)
    assert len(retired) == 0 and modules.Module(70, 71, None).uses == 0


def test_modules_end_in_a_cycle_of_garbage(retired):
    class Node:
        pass

    node = Node()
    node.module, node.itself = modules.Module(70, 71, retired), node
    del node
    gc.collect()
    assert len(retired) == 1


# --- the compiled loop ----------------------------------------------------------------------------
def noted(module):
    captured, more, *streams = (I64 * (2 + modules.STREAMS)).from_address(module.uses)
    return bool(captured), bool(more), [stream - 1 for stream in streams if stream]


def test_a_launch_notes_its_stream_once_and_a_capture(retired):
    from test_cuda_launch import Driver

    one, two = (modules.Module(i, i, retired) for i in (70, 80))
    device = Driver(uses=(one.uses, two.uses))
    for stream in (55, 0, 55, 1 << 45):
        assert device.run(stream=stream)[0] == -1
        assert device.run(graph=77, stream=stream)[0] == -1
    for module in (one, two):
        assert noted(module) == (False, False, [55, 0, 1 << 45])
    device.captured.add(56)
    device.run(stream=56)
    assert noted(one) == noted(two) == (True, False, [55, 0, 1 << 45])
    assert len(device.launched) == 2 * 5


def test_of_more_streams_than_there_is_room_for_that_is_noted(retired):
    from test_cuda_launch import Driver

    module = modules.Module(70, 71, retired)
    device = Driver(uses=(module.uses,))
    for stream in range(modules.STREAMS):
        device.run(stream=stream)
    assert noted(module) == (False, False, list(range(modules.STREAMS)))
    device.run(stream=modules.STREAMS)
    assert noted(module) == (False, True, list(range(modules.STREAMS)))


def test_a_call_without_a_formula_does_not_ask_for_a_capture():
    from test_cuda_launch import Driver

    device = Driver()
    device.captured = None  # (asking fails)
    assert device.run()[0] == -1 and len(device.launched) == 2
    assert len(launcher.PLAN) == len(device.plan)


# --- calls, on a driver that says yes to all ------------------------------------------------------
CALLS = """
import contextlib, ctypes, gc
import numpy as np
import numfuse as nf
from numfuse.backends.cuda.call.record import REPLAY
from numfuse.backends.cuda.driver import libcuda

I64 = ctypes.c_int64
memory, loaded, unloaded, launches, dropped = [], [], [], [], []
captured, done = set(), [True]

def native(count, function):
    made = ctypes.CFUNCTYPE(ctypes.c_int, *[I64] * count)(function)
    memory.append(made)
    return made

def is_capturing(stream, where):
    ctypes.c_int.from_address(where).value = stream in captured
    return 0

def get_current(where):
    I64.from_address(where).value = 1000
    return 0

class Driver:
    def __init__(self):
        self.cuLaunchKernelEx = native(
            4, lambda config, kernel, *_: launches.append(kernel) or 0)
        self.cuCtxSetCurrent = native(1, lambda _: 0)
        self.cuTensorMapReplaceAddress = native(2, lambda *_: 0)
        self.cuGraphLaunch = native(2, lambda graph, stream: launches.append(graph) or 0)
    def __getattr__(self, name):
        return lambda *_: 0
    def cuDeviceGetCount(self, found):
        found._obj.value = 1
        return 0
    def cuDeviceGetAttribute(self, found, number, _):
        hopper = {75: 9, 76: 0, 16: 132, 97: 227 << 10, 81: 228 << 10, 38: 50 << 20}
        found._obj.value = hopper[number]
        return 0
    def cuDevicePrimaryCtxRetain(self, found, _):
        found._obj.value = 1000
        return 0
    def cuMemAlloc_v2(self, found, nbytes):
        made = (ctypes.c_char * (nbytes + 256))()
        memory.append(made)
        found._obj.value = -(-ctypes.addressof(made) // 256) * 256
        return 0
    def cuModuleLoadData(self, found, binary):
        loaded.append(len(loaded) + 1)
        found._obj.value = loaded[-1]
        return 0
    def cuModuleGetFunction(self, found, module, entry):
        found._obj.value = module + 5000
        return 0
    def cuModuleUnload(self, module):
        assert done[0]
        unloaded.append(module)
        return 0
    def cuEventCreate(self, found, flags):
        found._obj.value = 1
        return 0
    def cuEventQuery(self, event):
        return 0 if done[0] else 600
    def cuGraphInstantiateWithFlags(self, found, graph, _):
        found._obj.value = 9000
        return 0
    def cuStreamEndCapture(self, stream, found):
        found._obj.value = 1
        return 0
    def cuStreamCreate(self, found, _):
        found._obj.value = 4000
        captured.add(4000)
        return 0
    def cuGraphExecDestroy(self, graph):
        dropped.append(graph)
        return 0

libcuda._library = Driver()
# these two are called by the loop, and by Python with other types
libcuda._library.cuStreamIsCapturing = native(2, is_capturing)
libcuda._library.cuCtxGetCurrent = native(1, get_current)
from numfuse.backends.cuda.driver import device as driver, devices
driver.Device.capturing = lambda self, stream: stream in captured
driver.Device.current = lambda self: contextlib.nullcontext()
device = devices.device(0)
x = nf.to_device(np.ones((4, 8), np.float32), "cuda")

def define(factor):
    return nf.activation(lambda x: factor * x * x, name="mine")

# a definition that goes
define(2.0)
for _ in range(3):
    nf.activation_mul(x, x, "mine")
assert (loaded, len(launches)) == ([1], 3), (loaded, launches)
define(3.0)
gc.collect()
assert len(device.retired) == 1 and not unloaded
done[0] = False
nf.activation_mul(x, x, "mine")      # an event of it, which has not passed
assert not unloaded and len(device.retired) == 1
done[0] = True
nf.activation_mul(x, x, "tanh")      # another first call
assert unloaded == [1], unloaded

# one that is captured
captured.add(0)                      # (the legacy stream never is, but nothing is unloaded then)
define(4.0)
gc.collect()
nf.activation_mul(x, x, "mine")
assert unloaded == [1] and len(device.retired) == 1
captured.discard(0)
stream = 48
(kept,) = [k for k in REPLAY.programs() if k.told.kernel.startswith("gated/mine")]
captured.add(stream)
kept.program.launch(stream, [0, 0, 0])
module = kept.program._launches[0][0].module.handle
del kept
define(5.0)
gc.collect()
nf.synchronize(x)
assert module not in unloaded and len(unloaded) == 2, (module, unloaded)
assert len(device.retired) == 0

# a call that became a graph of our own is not captured by anyone, and its graph goes with it
nf.activation_mul(x, x, "mine")
b = nf.to_device(np.ones((8, 8), np.float32), "cuda")
grad = nf.to_device(np.ones((4, 8), np.float32), "cuda")
out = tuple(nf.to_device(np.ones(s, np.float32), "cuda") for s in ((4, 8), (8, 8), (8,)))
bias = nf.to_device(np.ones(8, np.float32), "cuda")
for _ in range(6):
    nf.matmul_bias_activation_bwd(grad, x, b, bias, "mine", out=out)
assert 9000 in launches, launches
before = len(unloaded)
define(6.0)
gc.collect()
assert not dropped
nf.synchronize(x)
assert dropped == [9000]
assert len(unloaded) - before == 2, (unloaded, before)  # of the gate, and of the slope
"""
CALLING = once.Process(lambda _: [sys.executable, "-c", CALLS], timeout=240)


@pytest.mark.long
def test_calls_load_and_unload_and_pin_what_is_captured():
    done = CALLING.result()
    assert done.returncode == 0, done.stderr[-3000:]
