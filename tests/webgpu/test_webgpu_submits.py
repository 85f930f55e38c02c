"""Calls on arrays of a device wait for each other and are submitted together (docs/webgpu.md).

Guards: nothing overtakes a call that waits, none is lost, none runs twice, each error has its call.
"""

from __future__ import annotations

import _thread
import gc
import threading
import time

import numpy as np
import pytest
import wgpu
from arrays import normal

import numfuse as nf
from numfuse.backends.webgpu import tiling

F32 = np.dtype(np.float32)
#: Small whole numbers: every sum and product of these tests is exact.
twice = nf.epilogue(lambda x, y: x + x + y, name="twice and more")
#: It has a temporary: grad_pre.
backward = nf.matmul_bias_activation_bwd


@pytest.fixture
def device(webgpu_device, monkeypatch):
    """A device on which calls wait until they are asked for."""
    monkeypatch.setattr(tiling, "WAITING_SECONDS", 1000.0)
    webgpu_device.submit()
    yield webgpu_device
    webgpu_device.submit()


def there(*shape, seed=0):
    return nf.to_device(normal(np.random.default_rng(seed), shape, F32), "webgpu")


def number(value, n=8):
    return nf.to_device(np.full((n, n), value, F32), "webgpu")


def known(device, n=8):
    """Return an array of ones, with which the calls of these tests are known, and none waits."""
    one = number(1, n)
    for x in (nf.elementwise(twice, one, one), nf.elementwise(twice, number(1, n), one)):
        nf.elementwise(twice, x, one, out=x)
        nf.elementwise(twice, x, one, out=x)
    device.submit()
    return one


def value(x):
    """Return the number that all elements of an array are."""
    (found,) = set(nf.to_numpy(x).reshape(-1).tolist())
    return found


def chain(x, one, count):
    for _ in range(count):
        x = nf.elementwise(twice, x, one)
    return x


def test_a_chain_is_one_submit_when_it_is_asked_for(device):
    one = known(device)
    before = device.submits
    x = chain(one, one, 10)
    assert device.submits == before and len(device.waiting) == 10
    assert value(x) == 2**11 - 1
    assert device.submits == before + 1 and not device.waiting
    chain(one, one, 3)
    nf.synchronize(one)
    assert device.submits == before + 2


def test_what_a_call_tells_it_tells_at_once(device):
    a = there(8, 8)
    for name in ("silu", "tanh", "silu", "tanh"):
        nf.activation_mul(a, a, name)
        assert name in nf.last_call().kernel


def test_much_work_is_submitted_without_a_question(device, monkeypatch):
    one, large = known(device), known(device, 256)
    most = tiling.WAITING_BYTES // tiling.DISPATCH_BYTES
    before = device.submits
    chain(one, one, 4 * most)
    assert device.submits == before + 4

    def submits(most, x, count):
        monkeypatch.setattr(device, "most", most)
        chain(x, x, 1)
        device.submit()
        before = device.submits
        chain(x, x, count)
        return device.submits - before

    # a call with large arrays counts for more
    most = 2 * tiling.DISPATCH_BYTES + (1 << 20)
    assert (submits(most, one, 12), submits(most, large, 12)) == (4, 6)
    assert submits(0, one, 5) == 5 and not device.waiting


def test_old_work_is_submitted_without_a_question(device, monkeypatch):
    one = known(device)
    monkeypatch.setattr(tiling, "WAITING_SECONDS", 0.0)
    before = device.submits
    chain(one, one, 20)  # by the next call, or by the thread
    end = time.monotonic() + 20
    while device.waiting:  # by the thread
        assert time.monotonic() < end
        time.sleep(0.001)
    assert before < device.submits <= before + 20


def test_a_device_that_nobody_has_leaves_no_thread():
    """The thread that submits what is old holds no device."""
    from numfuse.backends.webgpu.device.submits import Submits

    class Idle(Submits):
        def __init__(self):
            super().__init__()
            self.lost = False

    def wait(end):
        assert time.monotonic() < end
        time.sleep(0.001)

    idle, end = Idle(), time.monotonic() + 20
    idle.turn()
    assert idle.due
    while not idle._asleep:
        wait(end)
    threads = _thread._count()
    del idle
    gc.collect()
    while _thread._count() >= threads:
        wait(end)


def test_an_upload_does_not_overtake_a_call_that_reads_what_was_there(device):
    one = known(device)
    x = number(5)
    handle = x.buffer.handle
    y = nf.elementwise(twice, x, one)
    del x  # its buffer is free, and the next of its size
    z = number(7)
    assert z.buffer.handle is handle
    again = nf.elementwise(twice, z, one)
    assert (value(y), value(z), value(again)) == (11, 7, 15)


def test_an_upload_elsewhere_submits_nothing(device):
    one = known(device)
    y = nf.elementwise(twice, one, one)
    before = device.submits
    other = number(3, 24)
    assert device.submits == before and device.waiting
    assert (value(y), value(other)) == (3, 3)


def test_a_buffer_is_not_destroyed_before_its_call_is_submitted(device, monkeypatch):
    one = known(device)
    monkeypatch.setattr(device.free, "_limit", 0)  # what is given back is destroyed
    destroyed = []
    destroy = type(one.buffer.handle).destroy
    monkeypatch.setattr(
        type(one.buffer.handle), "destroy", lambda h: destroyed.append(h) or destroy(h)
    )
    x = number(5)
    handle = x.buffer.handle
    y = nf.elementwise(twice, x, one)
    del x
    assert handle not in destroyed
    assert value(chain(y, one, 3)) == 95
    assert handle in destroyed


def test_temporaries_that_grow_are_those_of_their_calls(device):
    """A later call takes a larger buffer for what all calls share, while an earlier one waits."""
    cases = [[there(m, 24, seed=m), there(m, 16), there(16, 24), there(24)] for m in (40, 80, 160)]
    wanted = [[nf.to_numpy(y) for y in backward(*case, "gelu")] for case in cases]
    device.spares = device.spares[0] + 1, ()
    found = [backward(*case, "gelu") for case in cases]
    assert len(device.waiting) == 3
    for got, exact in zip(found, wanted, strict=True):
        for x, y in zip(got, exact, strict=True):
            assert np.array_equal(nf.to_numpy(x), y)


def test_the_number_of_a_loop_is_uploaded_once(device, monkeypatch):
    x = number(1)
    nf.elementwise(twice, x, 3.0)
    uploads = []
    upload = type(device).upload
    monkeypatch.setattr(type(device), "upload", lambda *a: uploads.append(a) or upload(*a))
    for _ in range(3):
        x = nf.elementwise(twice, x, 3.0)
    assert not uploads and value(x) == 29
    signs = [nf.elementwise(lambda x, y: y + 0 * x, x, s) for s in (0.0, -0.0, 0.0)]
    assert [np.signbit(value(s)) for s in signs] in ([False, True, False], [False] * 3)
    for s in (-2.0, 2.0, -2.0):  # (equal to none before it)
        assert value(nf.elementwise(twice, number(1), s)) == 2 + s


def test_numbers_that_compare_equal_are_those_that_were_given(device):
    """A zero has a sign, and which array of numbers a call has is decided by bytes."""
    x = number(1)
    over = nf.epilogue(lambda x, y: x / y, name="over")
    found = [value(nf.elementwise(over, x, s)) for s in (0.0, -0.0, 0.0)]
    assert found == [np.inf, -np.inf, np.inf]


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_of_a_call_that_waited_names_it_and_spares_the_others(device, monkeypatch):
    one = known(device)
    nf.silu_mul(one, one)
    device.submit()
    nf.silu_mul(one, one)
    ((_, ((pipeline, *_),)),) = device.waiting
    device.submit()
    made = device._commands

    def refused(calls, copies):
        if any(step[0] is pipeline for call in calls for step in call):
            raise wgpu.GPUValidationError("it is not valid")
        return made(calls, copies)

    monkeypatch.setattr(device, "_commands", refused)
    first = nf.elementwise(twice, one, one)
    nf.silu_mul(one, one)
    last = nf.elementwise(twice, first, one)
    with pytest.raises(nf.DeviceError, match="it is not valid") as caught:
        nf.to_numpy(last)
    assert f"refused {pipeline.label!r}" in str(caught.value)
    assert "had returned" in "".join(caught.value.__cause__.__notes__)
    assert not device.waiting
    assert (value(first), value(last)) == (3, 7)
    # the thread has nobody to tell: it is for the next who asks
    nf.silu_mul(one, one)
    device.due = 1e-9
    device.overdue()
    assert not device.waiting
    with pytest.raises(nf.DeviceError, match="it is not valid"):
        nf.to_numpy(last)
    assert value(last) == 7


def test_calls_that_wait_for_a_lost_device_are_lost_with_it(device):
    from numfuse.backends.webgpu.face import WebGpuBackend

    own = WebGpuBackend()
    one = own.to_device(np.ones((8, 8), F32))
    x = chain(one, one, 3)
    own.device.handle.destroy()
    with pytest.raises(nf.DeviceLost, match="is lost"):
        nf.to_numpy(x)
    assert own.device is not x.device and not x.device.waiting
    with pytest.raises(nf.DeviceLost, match="is lost"):
        nf.elementwise(twice, one, one)


# --- interrupts, signals and threads --------------------------------------------------------------


def counted(device, one, count=5):
    """Return an array that calls which wait have changed in place: each may run once, and must."""
    x = number(1)
    device.submit()
    for _ in range(count):
        nf.elementwise(twice, x, one, out=x)
    assert len(device.waiting) == count
    return x


@pytest.mark.parametrize("where", ["before", "behind"])
def test_an_interrupted_submit_loses_nothing_and_does_nothing_twice(device, monkeypatch, where):
    one = known(device)
    x = counted(device, one)
    if where == "before":
        made = device._commands

        def interrupted(*given):
            made(*given)
            raise KeyboardInterrupt

        monkeypatch.setattr(device, "_commands", interrupted)
    else:
        from numfuse.backends.webgpu.device.submits import error_handler

        release = error_handler.release

        def released(name):
            found = release(name)
            if name == "wgpuQueueSubmit":
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(error_handler, "release", released)
    with pytest.raises(KeyboardInterrupt):
        device.submit()
    assert bool(device.waiting) == (where == "before")
    monkeypatch.undo()
    nf.elementwise(twice, x, one, out=x)
    assert value(x) == 2**7 - 1


def test_a_question_in_the_handler_of_a_signal_does_nothing_twice(device, monkeypatch):
    one = known(device)
    x = counted(device, one)
    made, asked = device._commands, []

    def interrupted(*given):
        commands = made(*given)
        if not asked:  # (a handler may come at any step)
            asked.append(1)
            asked.append(value(x))
        return commands

    monkeypatch.setattr(device, "_commands", interrupted)
    nf.elementwise(twice, x, one, out=x)
    assert value(x) == 2**7 - 1 and asked[1] == value(x)


def test_threads_whose_calls_wait_together_get_their_own_results(device, monkeypatch):
    monkeypatch.setattr(tiling, "WAITING_SECONDS", 1e-4)
    one = known(device)
    wrong, start = [], threading.Barrier(4)

    def work(first):
        start.wait()
        for turn in range(25):
            x = number(first + turn)
            y = chain(x, one, 5)
            nf.elementwise(twice, x, one, out=x)
            if (value(y), value(x)) != (32 * (first + turn) + 31, 2 * (first + turn) + 1):
                wrong.append((first, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- waiting -----------------------------------------------------------------------------------
def test_a_device_that_is_asked_gives_what_one_that_is_slept_for_gives(device, monkeypatch):
    """Guards: an answer that comes while it is asked, one that comes later, none at all."""
    rng = np.random.default_rng()
    x = rng.standard_normal((300, 300)).astype(np.float32)
    here = nf.to_device(x, "webgpu")
    bias = nf.to_device(x[0], "webgpu")
    found = []
    for seconds in (0.0, 1e-9, 60.0):
        monkeypatch.setattr(device, "asks", seconds)
        made = nf.matmul_bias_activation(here, here, bias, "none")
        found.append(nf.to_numpy(made))
        made = nf.matmul_bias_activation(here, here, bias, "none")
        nf.synchronize(made)
        start = time.perf_counter()
        nf.synchronize(made)  # and there is nothing left to wait for
        assert time.perf_counter() - start < 30
        found.append(nf.to_numpy(made))
    np.testing.assert_allclose(found[0], x @ x + x[0], rtol=1e-3, atol=1e-3)
    assert all((y == found[0]).all() for y in found)


def test_a_wait_ends_when_the_device_has_done_all(device, monkeypatch):
    monkeypatch.setattr(device, "asks", 60.0)
    x = nf.to_device(np.ones((600, 600), np.float32), "webgpu")
    bias = nf.to_device(np.ones(600, np.float32), "webgpu")
    nf.synchronize(x)
    for _ in range(2):
        made = nf.matmul_bias_activation(x, x, bias, "none")
    nf.synchronize(made)
    start = time.perf_counter()
    nf.to_numpy(made)
    copied = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(2):
        made = nf.matmul_bias_activation(x, x, bias, "none")
    nf.to_numpy(made)
    assert copied < time.perf_counter() - start, "the wait ended before the work did"
