"""The submits of a device: calls wait for each other, and go to the device together.

An encoder, a pass and a submit of its own are most of a small call's time, and a device idles
between two submits. So what a call that comes again dispatches waits in a list, and the list is
submitted as one: when a result is asked for, when it is much work, or when its first call has
waited a while, which a thread sees to where no other call does.

Nothing overtakes a call that waits. All else that is submitted comes behind it; an upload to a
buffer that it uses submits it first; and such a buffer is not destroyed before.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import chain, starmap
from typing import Any

import wgpu

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.device import forks
from numfuse.backends.webgpu.device.memory import Dispatch, Memory, Waiting
from numfuse.errors import DeviceLost

clock = time.perf_counter

#: The calls of the C library of wgpu for a dispatch and a submit, as wgpu makes them itself.
#: Its Python methods take 2 to 4 us each, of which a dispatch has three. (An error in one is told
#: by the end of the pass, which is wgpu's own method.) None where this wgpu is built otherwise.
_DIRECT: tuple[Any, ...] | None = None
with contextlib.suppress(ImportError, AttributeError):
    from wgpu.backends.wgpu_native import ffi, lib
    from wgpu.backends.wgpu_native._api import error_handler
    from wgpu.backends.wgpu_native._helpers import ERROR_TYPES

    _DIRECT = (
        lib.wgpuComputePassEncoderSetPipeline,
        lib.wgpuComputePassEncoderSetBindGroup,
        lib.wgpuComputePassEncoderDispatchWorkgroups,
        ffi.NULL,
        lib.wgpuQueueSubmit,
    )


class _Overtaken(Exception):
    """The calls that were encoded are submitted: by a call in the handler of a signal."""


class Submits(Memory):
    """The part of a device that is given work.

    A call takes no lock: it appends to `waiting`, takes its work from `left`, and does its `turn`
    where there is need (`Program.run`). Of two threads' calls at once `left` may miss one.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Bytes of the work that waits at the most, and what is left of them. 0: no call waits.
        self.most = self.left = tiling.WAITING_BYTES
        #: When the calls that wait are to be submitted; 0: it is not known yet.
        self.due = 0.0
        #: Submits so far, of all threads.
        self.submits = 0
        self._submitting = threading.RLock()
        #: Tokens of the commands that are encoded; none where their calls went otherwise.
        self._encoded: set[object] = set()
        #: Buffers to be destroyed behind the next submit.
        self._doomed: list[Any] = []
        #: An error in the thread, for the next who asks.
        self._failure: Exception | None = None
        #: Whether the thread sleeps, and a lock that is taken until it is to wake; None: there is
        #: no thread yet.
        self._asleep = False
        self._wake: Any = None

    def turn(self) -> None:
        """Submit the calls that wait, if they are much work or old; else see that they will be."""
        if self.left >= 0 and not self.due:
            self.due = clock() + tiling.WAITING_SECONDS
            if self._wake is None:
                wake = _thread.allocate_lock()
                wake.acquire()
                self._wake = wake
                gone = weakref.ref(self, lambda _: _release(wake))
                with contextlib.suppress(RuntimeError, MemoryError):  # (then calls see to it)
                    _thread.start_new_thread(_watch, (gone, wake))
            elif self._asleep:
                self._asleep = False
                _release(self._wake)
        else:
            self.submit()

    def submit(
        self,
        dispatches: Sequence[Dispatch] = (),
        copies: Sequence[tuple[Any, int, Any, int, int]] = (),
    ) -> None:
        """Give the device the calls that wait, these dispatches, then these copies; do not wait.

        A copy is a handle and an offset there, the target's, and a size. An error of a call that
        waited is raised here, and names its dispatches; the other calls are submitted.
        """
        if self.lost:
            self.waiting.clear()
            forks.refuse()
            raise DeviceLost(f"{self.name} is lost")
        with self._submitting:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            while self.waiting or dispatches or copies:
                with contextlib.suppress(_Overtaken):
                    self._submit(dispatches, copies)
                    break

    def _submit(self, dispatches: Sequence[Dispatch], copies: Sequence[Any]) -> None:
        # In this order: what comes to wait, or is doomed, from here on is the next submit's.
        self.due, self.left = 0.0, self.most
        doomed, self._doomed = self._doomed, []
        calls = self.waiting[:]
        try:
            self._give(calls, dispatches, copies)
        except BaseException as error:
            self._doomed += doomed
            if not isinstance(error, Exception) or isinstance(error, _Overtaken):
                raise
            if not calls:
                with self.reported(dispatches):
                    raise
            self._one_by_one()
            self._submit(dispatches, copies)
        else:
            for handle in doomed:
                handle.destroy()

    def _one_by_one(self) -> None:
        """Submit each call that waits alone, and raise the error of the first that has one."""
        first: tuple[Exception, Sequence[Dispatch]] | None = None
        while self.waiting:
            call = self.waiting[0]
            try:
                self._give([call])
            except _Overtaken:
                continue
            except Exception as error:
                self._encoded.clear()
                del self.waiting[:1]
                first = first or (error, call[1])
        if first is not None:
            first[0].add_note("The call had returned before: it waited to be submitted.")
            with self.reported(first[1]):
                raise first[0]

    def _give(
        self,
        calls: Sequence[Waiting],
        dispatches: Sequence[Dispatch] = (),
        copies: Sequence[Any] = (),
    ) -> None:
        """Submit the first calls that wait, which then no longer do, and more behind them."""
        token, count = object(), len(calls)
        self._encoded.add(token)
        commands = self._commands([*[call for _, call in calls], dispatches], copies)
        if _DIRECT is None:
            self.queue.submit([commands])
            del self.waiting[:count]
        else:
            # Without a step of Python between them, as an interrupt may come at each: a call that
            # is submitted and still waits would run twice.
            handed = ffi.new("WGPUCommandBuffer[]", [commands._internal])
            steps = (
                (self._encoded.remove, token),
                (self._encoded.clear,),
                (_DIRECT[4], self.queue._internal, 1, handed),
                (operator.delitem, self.waiting, slice(count)),
            )
            error_handler.capture("wgpuQueueSubmit")
            try:
                deque(starmap(operator.call, steps), 0)
            except KeyError:
                raise _Overtaken from None
            finally:
                found = error_handler.release("wgpuQueueSubmit")
            if found is not None:
                self.waiting[:0] = calls
                raise ERROR_TYPES.get(found[0], wgpu.GPUError)(found[1])
        self.submits += 1

    def _commands(self, calls: Sequence[Sequence[Dispatch]], copies: Sequence[Any]) -> Any:
        """Return a command buffer: a pass of all dispatches, then the copies."""
        encoder = self.handle.create_command_encoder()
        if any(calls):
            run = encoder.begin_compute_pass()
            if _DIRECT is None:
                for pipeline, group, grid in chain.from_iterable(calls):
                    run.set_pipeline(pipeline.handle)
                    run.set_bind_group(0, group)
                    run.dispatch_workgroups(*grid)
            else:
                set_pipeline, set_bind_group, dispatch, null, _ = _DIRECT
                number, before = run._internal, None
                for pipeline, group, grid in chain.from_iterable(calls):
                    if pipeline is not before:
                        set_pipeline(number, pipeline.handle._internal)
                        before = pipeline
                    set_bind_group(number, 0, group._internal, 0, null)
                    dispatch(number, *grid)
            run.end()
        for copy in copies:
            encoder.copy_buffer_to_buffer(*copy)
        return encoder.finish()

    # --- memory ---------------------------------------------------------------------------------

    def settle(self, handle: Any) -> None:
        """Submit the calls that wait, if one uses a buffer."""
        for handles, _ in self.waiting[:]:
            if handle in handles:
                self.submit()
                return

    def trim(self) -> None:
        """Give the memory of the pool back to the driver, behind the calls that wait."""
        if self.waiting:
            self.submit()
        super().trim()

    def _destroy(self, handle: Any) -> None:
        if self.waiting and not self.lost:
            # (The garbage collector comes here, in the middle of any line: nothing is submitted.)
            self._live.discard(handle)
            self._doomed.append(handle)
            self.left -= handle.size
        else:
            super()._destroy(handle)

    def stop(self) -> None:
        """Forget the calls that wait: nobody will ask for their results."""
        with self._submitting:
            self.waiting.clear()

    def overdue(self) -> None:
        """Submit the calls that wait, if they are due; the thread's part."""
        if not self.due:
            self.due = clock() + tiling.WAITING_SECONDS
        elif clock() > self.due and self.waiting:
            try:
                self.submit()
            except Exception as error:
                self._failure = error


def _release(lock: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it is released already
        lock.release()


def _watch(known: weakref.ref[Submits], wake: Any) -> None:
    """Submit the calls that are due, until the device is no more."""
    while True:
        time.sleep(tiling.WAITING_SECONDS)
        device = known()
        if device is None or device.lost:
            return
        device._asleep = True  # before what it depends on is looked at
        if device.waiting:
            device._asleep = False
            device.overdue()
            del device
        else:
            del device
            wake.acquire()


@atexit.register
def _at_exit() -> None:
    for device in list(forks.DEVICES):
        if not device.lost:
            device.stop()
