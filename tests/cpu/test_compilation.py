"""Compilations that are interrupted, called into by a signal's handler, or forked beside.

What fails here ends the process or waits for ever, so it has one of its own.

Guards: Ctrl-C, a signal's handler or a fork during a first call leaves the next call right.
"""

from __future__ import annotations

import _thread
import operator
import os
import signal
import sys
import threading
import time

import once
import pytest

from numfuse.runtime import call_types, interrupts

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
needs_timers = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="this system has no timers"
)

PRELUDE = """
import os, signal, sys, threading, time, warnings
import numpy as np
import numfuse as nf

# What Python says from 3.12 on of every fork beside a thread is what is tested here.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

x = np.linspace(-3, 3, 12).reshape(3, 4)
def gate(name="silu"):
    return nf.activation_mul(x, x, name)
def right(out, name="silu"):
    return np.allclose(out, nf.activation_mul(x, x, name, backend="reference"))
"""


def process(code: str, cached: bool = False) -> once.Process:
    """A process with a cache of its own; `cached`: a second one that finds what the first left."""
    words = [sys.executable, "-c", PRELUDE + code]
    if cached:
        # (one argument, so that the shell has nothing to quote)
        words = ["sh", "-c", '"$0" -c "$1" && "$0" -c "$1"', sys.executable, PRELUDE + code]

    def command(directory: object) -> list[str]:
        return ["env", f"NUMBA_CACHE_DIR={directory}", *words]

    return once.Process(command, {"NUMBA_NUM_THREADS": "2"}, timeout=300)


def lines(of: once.Process) -> list[str]:
    """What it has printed; it ended well and complained of nothing."""
    done = of.result()
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr[-3000:])
    return done.stdout.split("\n")[:-1]


# --- threads ------------------------------------------------------------------------------------
TARGET = process(
    """
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numfuse.backends.cpu.llvm import primitives

assert "_toplevel_target_context" not in vars(cpu_target)
waits = threading.Event()
def made():
    waits.set()
    assert right(gate())
first = threading.Thread(target=made)
with global_compiler_lock:
    first.start()
    waits.wait()
    time.sleep(1)  # it is where it waits for the compiler
    cpu_target.target_context  # as the first kernel of a process asks for it
first.join()
"""
)


@pytest.mark.long
def test_two_threads_whose_calls_are_the_first_do_not_wait_for_each_other():
    """Guards: first calls in several threads end. One has the compiler, and asks Numba for what it
    shares of a target, which the other is about to make."""
    assert TARGET.result().returncode == 0


# --- interrupts ---------------------------------------------------------------------------------
INTERRUPTED = process(
    """
import random
class Interrupt(KeyboardInterrupt): pass
armed, count = False, 0
# What these raise, Python prints and drops, whoever has written them.
FINALISERS = "__del__", "remove", "_remove", "cb", "_on_type_disposal"
def handler(_, frame):
    global armed, count
    while armed and frame is not None:
        if frame.f_code.co_name in FINALISERS: return
        frame = frame.f_back
    if armed:
        armed, count = False, count + 1
        raise Interrupt
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.029)
while True:
    try:
        armed = True
        out = gate()  # imports the compiler, compiles or loads three kernels, and runs them
        armed = False
        break
    except Interrupt:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
assert right(out) and right(gate("relu"), "relu")
print(count)
""",
    cached=True,
)


@needs_timers
@pytest.mark.long
def test_a_first_call_interrupted_again_and_again_is_right_in_the_end():
    """Each call raises the interrupt and gets on, whether kernels are compiled or read from disk;
    the process ends as one that was never interrupted."""
    compiling, reading = map(int, lines(INTERRUPTED))
    assert compiling >= 3 and reading >= 1, (compiling, reading)


def interrupt_soon(seconds: float) -> None:
    """Ctrl-C, from another thread."""

    def later() -> None:
        time.sleep(seconds)
        _thread.interrupt_main()

    threading.Thread(target=later).start()


def test_an_interrupt_is_raised_after_the_work_and_not_lost():
    done = []

    def work() -> None:
        time.sleep(0.5)
        done.append(threading.get_ident())

    interrupt_soon(0.1)
    with pytest.raises(KeyboardInterrupt):
        interrupts.deferred(work)
    assert len(done) == 1 and done[0] != threading.get_ident()


def test_deferred_work_returns_and_raises_what_it_does_by_itself(monkeypatch):
    def fail() -> None:
        raise LookupError("by itself")

    monkeypatch.setattr(interrupts, "BEGINS", 0.05)
    ways = "another thread", "no thread can be started", "a thread ends before its first step"
    for way in (*ways, "not the main thread"):
        found: list[object] = []

        def both(found=found) -> None:
            found.append(interrupts.deferred(lambda: None))
            found.append(interrupts.deferred(lambda: 5))
            with pytest.raises(LookupError, match="by itself"):
                interrupts.deferred(fail)

        if way == "not the main thread":
            caller = threading.Thread(target=both)
            caller.start()
            caller.join()
        else:

            def refuse(*_: object, way=way) -> None:
                if way == "no thread can be started":
                    raise RuntimeError("can't start new thread")

            with monkeypatch.context() as patch:
                if way != "another thread":
                    patch.setattr(_thread, "start_new_thread", refuse)
                both()
        assert found == [None, 5], way
        assert not interrupts._JOBS


# --- types --------------------------------------------------------------------------------------
def test_types_of_operators_are_found_once_and_numbas_own_compilations_find_them_themselves():
    from numba.core import errors, types
    from numba.core.registry import cpu_target

    context = cpu_target.typing_context
    context.refresh()
    numbas = types.BaseFunction.get_call_type
    asked = []

    class Add(context.resolve_value_type(operator.add).templates[0]):
        """Numba's first template of an addition, which tells what it is asked for."""

        def apply(self, args, kws):
            asked.append(args)
            return super().apply(args, kws)

    def find(*args):
        found = known.get_call_type(context, args, {})
        return found.return_type, known.get_impl_key(found)

    templates = context.resolve_value_type(operator.add).templates
    known = types.Function((Add, *templates))
    numbers = types.int64, types.float32
    pairs = types.UniTuple(types.int64, 2), types.UniTuple(types.float64, 1)
    rows = types.Array(types.float32, 1, "C"), types.Array(types.float64, 1, "C")
    before = {args: find(*args) for args in (numbers, pairs, rows)}
    with call_types.remembered():
        assert types.BaseFunction.get_call_type is not numbas
        with call_types.remembered():
            assert {args: find(*args) for args in before} == before
        count = len(asked)
        assert {args: find(*args) for args in before} == before and len(asked) == count
        for _ in range(2):  # what has failed may be there later
            count = len(asked)
            with pytest.raises(errors.TypingError):
                find(types.int64, types.unicode_type)
            assert len(asked) > count
    assert types.BaseFunction.get_call_type is numbas
    count = len(asked)
    assert find(*numbers) == before[numbers] and len(asked) > count


# --- handlers of signals ------------------------------------------------------------------------
CALLED = process(
    """
import numba
from llvmlite.binding import ffi
found, refused = [], []
names = [n for n in nf.activations() if n not in ("silu", "none")]
def handler(*_):
    if found and found[-1] is None or not names: return  # within the call below
    name = names.pop()
    found.append(None)
    try:
        found[-1] = right(gate(name), name)
    except RuntimeError as error:
        assert "interrupted in its middle" in str(error), error
        found[-1] = True
        refused.append(name)
# (An import that is interrupted leaves half of a module to who calls in its middle.)
import numfuse.runtime.array_objects
nf.backends(), right(x)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.1)
assert right(gate())
print("own", len(found) > 0 and all(found), len(refused))
del found[:]
@numba.njit
def users(x):
    return np.sort(x.ravel()).sum() + np.linalg.norm(x)
assert np.isclose(users(x), x.sum() + np.linalg.norm(x))
signal.setitimer(signal.ITIMER_REAL, 0)
print("user's", all(found))
# Where LLVM itself has been interrupted (it calls Python back) nothing can be compiled.
import llvmlite.binding
nf.relu_mul(x, x)
fresh = nf.activation(source="a test")(lambda x: 3 * x * x)
said = []
def inside():
    ffi.unregister_lock_callback(inside, outside)
    assert right(nf.relu_mul(x, x), "relu")
    try:
        nf.activation_mul(x, x, fresh)
    except RuntimeError as error:
        said.append(f"inside LLVM: {error}")
def outside(): pass
ffi.register_lock_callback(inside, outside)
llvmlite.binding.get_process_triple()
print(*said)
ffi.lib._lock._lock.acquire()  # as an interrupt leaves it that comes when it has just been taken
print("left taken", np.allclose(nf.activation_mul(x, x, fresh), 3 * x**3))
"""
)


@needs_timers
@pytest.mark.long
def test_a_signals_handler_may_call_while_a_kernel_is_compiled():
    own, users, inside, left = lines(CALLED)
    assert own == "own True 0"
    assert users == "user's True"
    assert inside.startswith("inside LLVM: a kernel must be compiled when no compilation of this")
    assert left == "left taken True"


# --- forks --------------------------------------------------------------------------------------
FORKED = process(
    """
import gc
from numfuse.runtime import compilation
names = [n for n in nf.activations() if n != "none"]
gate("none")
def compile_on():
    for name in names[:-2]: gate(name)
    nf.matmul_bias_activation(x, x.T)
team = [threading.Thread(target=compile_on) for _ in range(2)]
for t in team: t.start()
children, waits = [], []
for i in range(4):
    time.sleep(0.15)
    busy = all(t.is_alive() for t in team)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # ends a child that waits for ever
        ok = right(gate("none"), "none") and right(gate(names[-1 - i % 2]), names[-1 - i % 2])
        os._exit(0 if ok else 1)
    waits.append(time.monotonic() - start)
    children.append(child)
    assert busy, "the test is too slow to see anything"
statuses = [os.waitpid(child, 0)[1] for child in children]
for t in team: t.join()
print("beside", statuses, max(waits) < compilation.FORK_PATIENCE)

# The handler of a signal forks while the main thread waits for a compilation.
children = []
def handler(*_):
    children.append(os.fork())
    if children[-1] == 0: signal.alarm(100)
signal.signal(signal.SIGALRM, handler)
fresh = nf.activation(source="a test")(lambda x: 3 * x * x)
signal.setitimer(signal.ITIMER_REAL, 0.05)
ok = np.allclose(nf.activation_mul(x, x, fresh), 3 * x**3)
while not children: time.sleep(0.001)  # (no child may come after the next line)
if children == [0]: os._exit(0 if ok else 1)
assert len(children) == 1, children
print("in a handler", ok, os.waitpid(children[0], 0)[1])

# A compilation that takes longer than a fork waits.
compilation.FORK_PATIENCE = 0.3
begun, over = threading.Event(), threading.Event()
def users():
    with compilation.global_compiler_lock, compilation._ungathered():
        begun.set()
        over.wait(100)
long = threading.Thread(target=users)
long.start(); begun.wait()
other = nf.activation(source="a test")(lambda x: 5 * x * x)
start = time.monotonic()
child = os.fork()
if child == 0:
    signal.alarm(100)
    assert right(gate("none"), "none") and gc.isenabled()
    try:
        nf.activation_mul(x, x, other)
    except RuntimeError as error:
        print("refused:", error, flush=True)
    start = time.monotonic()
    grandchild = os.fork()
    if grandchild == 0: os._exit(0 if right(gate("none"), "none") else 1)
    assert os.waitpid(grandchild, 0)[1] == 0
    os._exit(0)
waited = time.monotonic() - start
assert os.waitpid(child, 0)[1] == 0
# Ctrl-C while a fork waits: the fork takes place, and then the interrupt is raised.
compilation.FORK_PATIENCE = 60
def interrupt():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
start = time.monotonic()
try:
    child = os.fork()
    if child == 0: os._exit(0)
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 25)
assert os.waitpid(child, 0)[1] == 0
over.set(); long.join()
print("afterwards", np.allclose(nf.activation_mul(x, x, other), 5 * x**3))
"""
)


@needs_fork
@pytest.mark.long
def test_a_child_forked_while_a_thread_compiles_may_call():
    beside, handler, refused, interrupted, afterwards = lines(FORKED)
    assert beside == "beside [0, 0, 0, 0] True"
    assert handler == "in a handler True 0"
    assert refused.startswith("refused: a forked process can compile if no thread of its parent")
    assert interrupted == "interrupted True"
    assert afterwards == "afterwards True"
