"""What is kept of a formula goes with it, and never under a call that runs it.

A notebook that redefines its activation all day must not grow with every definition.

Guards: memory does not grow with definitions, and a call that runs outlives its formula.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

import numfuse as nf
from numfuse import expr as ex
from numfuse.backends.cpu.face import BACKEND
from numfuse.backends.cpu.launch import sequence
from numfuse.repeats import Checked
from numfuse.runtime import lifetimes, replay, specialise

A = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
EYE = np.eye(8, dtype=np.float32)


def define(factor, name="mine"):
    return nf.activation(lambda x: factor * x * x, name=name)


def used(activation, factor):
    """Every kind of call, with a check of what it gives."""
    out = nf.matmul_bias_activation(A, EYE, None, activation)
    np.testing.assert_allclose(out, factor * A * A, 1e-5)
    d_a = nf.matmul_bias_activation_bwd(EYE, A, EYE, None, activation).d_a
    np.testing.assert_allclose(d_a, EYE * 2 * factor * A, 1e-5)
    np.testing.assert_allclose(nf.activation_mul(A, A, activation), factor * A**3, 1e-5)


def programs():
    """Return the programs that the backend has recorded, but those that depend on threads."""
    # (a network's entry is its program, or that there is none)
    entries = [entry for entry in BACKEND.replay.programs() if type(entry) is not Checked]
    found = [getattr(entry, "program", entry) for entry in entries]
    return [program for program in found if program is not None]


def living():
    gc.collect()
    return {kernel.name for kernel in specialise.kernels() if kernel.formulas}


@pytest.fixture
def before():
    """What lives before the test, which is no matter of its own."""
    return living()


@pytest.mark.long
def test_kernels_and_plans_of_a_definition_that_is_gone_are_let_go(before):
    kept = set(programs())
    for step in range(4):
        define(2.0 + step)
        used("mine", 2.0 + step)
        if step == 0:
            once, plans = len(living() - before), len(set(programs()) - kept)
            assert once >= 3 and plans >= 3
        assert len(living() - before) == once
        assert len(set(programs()) - kept) == plans
    nf.activation(lambda x: x, name="mine")
    assert not living() - before
    assert not set(programs()) - kept
    recorded = programs()
    assert BACKEND.replay.statistics().nbytes == sum(program.nbytes for program in recorded)


def test_a_redefined_derivative_takes_its_own_kernels_alone(before):
    act = define(3.0)
    used(act, 3.0)
    forward = {name for name in living() - before if name.startswith("layer_row")}
    for slope in (5.0, 7.0):
        act.derivative(lambda x, slope=slope: slope * x)
        d_a = nf.matmul_bias_activation_bwd(EYE, A, EYE, None, act).d_a
        np.testing.assert_allclose(d_a, EYE * slope * A, 1e-5)
        rows = living() - before
        assert forward <= rows
        assert len([name for name in rows if name.startswith("layer_backward_row")]) == 1


def test_an_activation_that_somebody_has_keeps_its_kernels(before):
    held = define(11.0)
    used(held, 11.0)
    own = living() - before
    for step in range(3):
        define(12.0 + step)
        used("mine", 12.0 + step)
    assert own <= living()
    used(held, 11.0)  # (and is what it was)
    assert nf.activations()["mine"] is not held
    del held
    assert not own & living()


def test_an_equal_formula_under_another_name_keeps_the_kernels(before):
    define(17.0)
    define(17.0, "other")
    used("mine", 17.0)
    used("other", 17.0)
    own = living() - before
    define(18.0)
    assert own <= living()
    used("other", 17.0)
    define(19.0, "other")
    assert not own & living()


def test_a_formula_that_is_part_of_another_keeps_its_kernels_no_longer_than_that(before):
    parts = [define(23.0)]
    used("mine", 23.0)
    own = living() - before
    nf.activation(lambda x: parts[0](x) + 1.0, name="wrapped")
    parts.clear()
    nf.activation(lambda x: x, name="mine")
    assert own & living()  # its graph is part of the other's
    nf.activation(lambda x: x, name="wrapped")
    assert not own & living()


@pytest.mark.long
def test_kernels_and_plans_of_an_epilogue_that_is_gone_are_let_go(before):
    kept = set(programs())
    for step in range(3):
        factor = 2.0 + step
        defined(factor)
        out = nf.matmul_epilogue(A, EYE, "mine", A)
        np.testing.assert_allclose(out, factor * A + A, 1e-5)
        d = nf.matmul_epilogue_bwd(EYE, A, EYE, "mine", A)
        np.testing.assert_allclose(d.d_a, factor * EYE, 1e-5)
        np.testing.assert_allclose(nf.elementwise("mine", A, A), factor * A + A, 1e-5)
        if step == 0:
            once, plans = len(living() - before), len(set(programs()) - kept)
            assert once >= 3 and plans >= 3
        assert len(living() - before) == once
        assert len(set(programs()) - kept) == plans
    defined(0.0)
    assert not living() - before
    assert not set(programs()) - kept


def defined(factor):
    """Return an epilogue whose formula nothing else holds."""
    return nf.epilogue(lambda z, x: factor * z + x, name="mine")


def test_what_runs_a_kernel_holds_it(before):
    """A definition that goes between the look-up of a call and its launch."""
    define(29.0)
    kept = set(programs())
    nf.matmul_bias_activation(A, EYE, None, "mine")
    (program,) = set(programs()) - kept
    nf.activation(lambda x: x, name="mine")
    gc.collect()  # (an activation and its derivatives refer to each other)
    assert program not in programs()
    assert len(living() - before) == 1
    out = np.empty_like(A)
    sequence.run(program, (A, EYE, None, out))
    np.testing.assert_allclose(out, 29 * A * A, 1e-5)
    del program
    assert not living() - before


def test_threads_that_compute_while_others_redefine_get_what_they_asked_for():
    errors: list[BaseException] = []
    stop = threading.Event()

    def compute(which):
        try:
            for step in range(10):
                if stop.is_set():
                    break
                factor = 2.0 + step % 5 + 100 * which
                act = define(factor, f"thread {which}")
                used(act, factor)
                out = nf.matmul_bias_activation(A, EYE, None, "tanh")
                np.testing.assert_allclose(out, np.tanh(A), 1e-5)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=compute, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


# --- tables -------------------------------------------------------------------------------------
def test_a_table_forgets_what_names_a_formula_that_is_gone():
    table = replay.Replay(10, 0)
    one, two = ex.exp(ex.SYMBOL * 1.25), ex.exp(ex.SYMBOL * 1.5)
    table.keep(lifetimes.named((one, two, "both")), 1, (one, two))
    table.keep(lifetimes.named((one, "one")), 2, (one,))
    table.keep("none", 3, ())
    assert table.find(lifetimes.named((one, two, "both"))) == 1
    number = two.serial
    del two
    gc.collect()
    assert len(table.programs()) == 2 and table.find((("formula", one.serial), "one")) == 2
    again = ex.exp(ex.SYMBOL * 1.5)
    assert again.serial != number
    del one
    gc.collect()
    assert len(table.programs()) == 1 and table.find("none") == 3


def test_a_table_is_bounded_and_so_is_what_it_knows_of_formulas():
    table = replay.Replay(3, 0)
    formula = ex.exp(ex.SYMBOL * 1.75)
    for i in range(20):
        table.keep((lifetimes.named(formula), i), i, (formula,))
        assert len(table.programs()) <= 3
    assert [table.find((lifetimes.named(formula), i)) for i in (16, 17, 18, 19)] == [
        None,
        17,
        18,
        19,
    ]
    assert len(table._ties._keys[formula.serial]) == 3


def test_threads_that_make_the_same_at_once_share_what_was_kept_first():
    @replay.kept(10)
    def make(formula):
        if made:
            return "later"
        made.append("first")
        return make(formula)  # another thread, in the middle of this one's

    made = []
    formula = ex.exp(ex.SYMBOL * 1.875)
    assert make(formula) == make(formula) == "later"


def test_keys_name_formulas_inside_tuples():
    x = ex.SYMBOL
    value = ex.exp(x * 2.25)
    key = lifetimes.named((value, (x, None), 1.0, "a"))
    assert key == (("formula", value.serial), (("formula", x.serial), None), 1.0, "a")
    assert [e.serial for e in lifetimes.formulas_of((value, (x, None)))] == [value.serial, x.serial]


# --- memory -------------------------------------------------------------------------------------
MEMORY = """
import ctypes, gc, json
import numpy as np
import numfuse as nf

a = np.ones((8, 8), np.float32)

class Counted(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split())]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Counted

def taken():
    gc.collect()
    now = mallinfo()
    return now.uordblks + now.hblkhd

def maps():
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)

def define(step):
    nf.activation(lambda x: x * (1.0 + step / 64), name="mine")
    nf.matmul_bias_activation(a, a, None, "mine")
    nf.matmul_bias_activation_bwd(a, a, a, None, "mine")

for step in range(4):
    define(step)
start = taken(), maps()
for step in range(4, 24):
    define(step)
print(json.dumps([taken() - start[0], maps() - start[1]]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library's own count")
def test_twenty_definitions_take_little_memory(tmp_path):
    """20 forwards and backwards: what LLVM and Numba keep of them, and the maps of machine code.

    Kept as they were, they would take 80 MiB and 100 maps.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    memory, maps = json.loads(done.stdout)
    assert memory < 20 * 0.5 * 2**20, f"{memory / 2**20:.1f} MiB"
    assert maps < 30
