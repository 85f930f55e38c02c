"""Epilogues of a user's own: what is recorded of a function, once, and under which name.

Guards: a call compiles what it did not have, and nothing else.
"""

from __future__ import annotations

import functools
import math
import operator
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import scipy.special

import numfuse as nf
from numfuse import definitions
from numfuse import expr as ex
from numfuse.runtime import specialise

A = np.linspace(-1, 1, 20).reshape(4, 5)
B = np.linspace(0, 1, 15).reshape(5, 3)
ROW = np.ones(3)


def compiled():
    return {kernel.name for kernel in specialise.kernels()}


# --- recording ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("formula", "told"),
    [
        (lambda z: z if z > 0 else 0 * z, "numfuse.expr.where(condition, a, b)"),
        (lambda z: max(z, 0.0), "numfuse.expr.maximum and minimum"),
        (lambda z: math.exp(z), "write numfuse.expr.exp(x) for math.exp(x)"),
        (lambda z: scipy.special.j0(z), "j0: use arithmetic and the functions of numfuse.expr"),
        (lambda z: np.sin(z), "numpy.sin: use arithmetic and the functions of numfuse.expr"),
        (lambda z: z * ROW, "cannot be mixed with arrays"),
        (lambda z: z[0], "cannot be iterated, indexed or measured"),
        (lambda z: None, "must return a value, or a tuple of values .* got NoneType"),
        (lambda z: [z, z], "must return a value, or a tuple of values .* got list"),
        (lambda z: (), "must return a value, got an empty tuple"),
        (lambda z: z > 0, r"returned a condition: write numfuse.expr.where\(condition, 1, 0\)"),
        (lambda z: (z, z < 0), "returned a condition"),
        (lambda z, c=1.0: z * c, "positional parameters without defaults, .* got c=1.0"),
        (lambda *z: z[0], r"positional parameters without defaults, .* got \*z"),
        (lambda z, *, c: z * c, "positional parameters without defaults, .* got c"),
        (max, "a function whose parameters are known, got <built-in function max>"),
        (np.tanh, "positional parameters without defaults"),
    ],
    ids=lambda x: x if type(x) is str else "",
)  # fmt: skip
def test_a_function_that_cannot_be_recorded_is_told_what_to_write(formula, told):
    told = told if ".*" in told or "\\" in told else told.replace("(", r"\(").replace(")", r"\)")
    for call in (
        lambda: nf.epilogue(formula, name="wrong"),
        lambda: nf.elementwise(formula, A),
        lambda: nf.elementwise_bwd(A, formula, A),
    ):
        for _ in range(2):  # (no half of a definition is left)
            with pytest.raises(TypeError, match=told):
                call()
    assert "wrong" not in definitions.TABLE
    np.testing.assert_array_equal(nf.elementwise(lambda z: z + z, A), 2 * A)


def test_a_formula_of_too_many_operations_is_refused():
    def long(z):
        for _ in range(ex.MOST):
            z = ex.tanh(z) + 1.0
        return z

    with pytest.raises(ValueError, match="at most 1000 operations, got 2000"):
        nf.epilogue(long)


@pytest.mark.parametrize("wrong", [3, None, 1.5, ["z"]])
def test_what_is_no_formula_is_refused(wrong):
    with pytest.raises(TypeError, match="epilogue must be a function, a name"):
        nf.matmul_epilogue(A, B, wrong)
    with pytest.raises(TypeError, match="formula must be a function"):
        nf.epilogue(name="wrong")(wrong)


def test_an_unknown_name_is_refused_with_those_that_are_known():
    nf.epilogue(lambda z: z, name="known one")
    with pytest.raises(ValueError, match=r"defined \(.*known one.*\), got 'unknown'"):
        nf.matmul_epilogue(A, B, "unknown")
    with pytest.raises(ValueError, match="got 'xxx") as caught:
        nf.matmul_epilogue(A, B, "x" * 10**6)
    assert len(str(caught.value)) < 500


def test_what_is_called_with_scalars_is_a_formula():
    """An activation, a function of numfuse.expr, a partial, a method, another epilogue."""

    class Scaled:
        def __call__(self, z, c):
            return z * c

        def method(self, z, c):
            return z * c

    @nf.epilogue
    def inner(z, c):
        return z * c

    for formula in (
        Scaled(), Scaled().method, inner, operator.mul if sys.version_info >= (3, 13) else inner,
        functools.partial(lambda k, z, c: k * z * c, 1.0), lambda z, c: inner(z, c),
    ):  # fmt: skip
        np.testing.assert_array_equal(nf.elementwise(formula, A, 2.0), 2 * A)
    gelu = nf.activations()["gelu"]
    np.testing.assert_allclose(nf.elementwise(gelu, A), gelu(A), 1e-14)
    np.testing.assert_allclose(nf.elementwise(ex.tanh, A), np.tanh(A), 1e-14)


# --- what is compiled ---------------------------------------------------------------------------
def test_a_function_that_finds_others_around_it_is_recorded_anew():
    """Whether it was called before makes no difference."""
    space = {"inner": lambda x: x + x}
    exec("def outer(x): return inner(x) * 3.0\ndef plain(x): return x * 5.0", space)

    def enclosing(inner):
        def outer(x):
            return inner(x) * 3.0

        def change(other):
            nonlocal inner
            inner = other

        return outer, change

    outer, change = enclosing(space["inner"])
    for _ in range(2):
        np.testing.assert_array_equal(nf.elementwise(space["outer"], A), 6 * A)
        np.testing.assert_array_equal(nf.elementwise(outer, A), 6 * A)
    space["inner"] = lambda x: x * 4.0
    change(space["inner"])
    for _ in range(2):
        np.testing.assert_array_equal(nf.elementwise(space["outer"], A), 12 * A)
        np.testing.assert_array_equal(nf.elementwise(outer, A), 12 * A)
    space["outer"].__code__ = space["plain"].__code__
    np.testing.assert_array_equal(nf.elementwise(space["outer"], A), 5 * A)


def test_a_lambda_in_a_loop_and_another_number_compile_nothing():
    def call(s):
        nf.matmul_epilogue(A, B, lambda z, s: ex.tanh(z) * s + 0.123, s)
        nf.matmul_epilogue_bwd(A @ B, A, B, lambda z, s: ex.tanh(z) * s + 0.124, s)
        return nf.elementwise(lambda x, s: x * s + 0.125, A, s)

    call(1.0)
    before = compiled()
    for s in (1.0, 2, -0.5, 1e300, math.inf, 10**400):
        got = call(s)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, A * (s if s != 10**400 else math.inf) + 0.125)
    assert compiled() == before


@pytest.mark.parametrize("number", [1e300, 10**400, -(10**400), 1e-300, math.nan])
def test_a_number_beyond_a_dtype_is_rounded_silently(number):
    x = np.ones(3, np.float32)
    with np.errstate(all="raise"):
        got = nf.elementwise(lambda x, s: x * s, x, number)
    wanted = math.inf if number > 1 else -math.inf if number < 0 else number
    np.testing.assert_array_equal(got, np.full(3, np.float32(wanted if wanted != 1e-300 else 0)))


def test_a_number_around_a_formula_may_not_change():
    def made(factor):
        def scaled(z):
            return z * factor

        return scaled

    np.testing.assert_array_equal(nf.elementwise(made(2.0), A), 2 * A)
    np.testing.assert_array_equal(nf.elementwise(made(2.0), A), 2 * A)
    with pytest.raises(ValueError, match=r"recorded with factor = 2.0, which is now 3.0: make fac"):
        nf.elementwise(made(3.0), A)
    two, three = nf.epilogue(made(2.0), name="two"), nf.epilogue(made(3.0), name="three")
    for _ in range(2):
        np.testing.assert_array_equal(nf.elementwise(two, A), 2 * A)
        np.testing.assert_array_equal(nf.elementwise("three", A), three(A))


def test_a_decorated_formula_notices_a_number_that_changes():
    factor = 2.0

    @nf.epilogue
    def scaled(z):
        return z * factor

    np.testing.assert_array_equal(nf.elementwise(scaled, A), 2 * A)
    factor = 3.0
    with pytest.raises(ValueError, match=r"which is now 3\.0"):
        nf.elementwise(scaled, A)


def test_an_activation_that_is_redefined_is_taken_anew():
    act = nf.activation(lambda x: 2.0 * x, name="mine")

    def formula(z):
        return act(z) + 1.0

    np.testing.assert_allclose(nf.elementwise(formula, A), 2 * A + 1, 1e-13, 1e-15)
    act = nf.activation(lambda x: 3.0 * x, name="mine")
    np.testing.assert_allclose(nf.elementwise(formula, A), 3 * A + 1, 1e-13, 1e-15)
    act.derivative(lambda x: 0.0 * x + 7.0)
    np.testing.assert_allclose(nf.elementwise_bwd(A, formula, A)[0], 7 * A, 1e-14)


def test_threads_record_and_call_one_formula():
    wrong: list[object] = []

    def work():
        try:
            for i in range(20):
                got = nf.elementwise(lambda x, s: x * s - 0.5, A, float(i))
                wrong.extend([] if np.allclose(got, A * i - 0.5, 1e-13, 1e-13) else [i])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- names and pickles --------------------------------------------------------------------------
def test_a_name_is_redefined():
    first = nf.epilogue(lambda z: z + 1.0, name="mine")
    np.testing.assert_array_equal(nf.elementwise("mine", A), A + 1)
    second = nf.epilogue(lambda z: z + 2.0, name="mine", source="a book")
    np.testing.assert_array_equal(nf.elementwise("mine", A), A + 2)
    np.testing.assert_array_equal(nf.elementwise(first, A), A + 1)
    assert repr(second) == "<epilogue 'mine': a book>" and second.parameters == ("z",)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 101])
def test_a_name_that_no_text_can_hold_is_refused(name):
    with pytest.raises(ValueError, match="name must be 1 to 100"):
        nf.epilogue(lambda z: z, name=name)


@pytest.mark.parametrize("name", ["gr\u00f6\u00dfe", "leaky 0.1", "f(x) = {x}%"])
def test_a_name_that_every_text_can_hold_serves_every_backend(name):
    made = nf.epilogue(lambda z, c: z * c, name=name)
    for backend in ("cpu", "reference"):
        np.testing.assert_allclose(nf.matmul_epilogue(A, B, name, ROW, backend=backend), A @ B)
    assert pickle.loads(pickle.dumps(made)) is made


def test_called_it_evaluates_its_formula_or_becomes_part_of_another():
    @nf.epilogue
    def both(x, y):
        return x * y, x + y

    product, total = both(A, 2.0)
    np.testing.assert_array_equal(product, 2 * A)
    np.testing.assert_array_equal(total, A + 2)
    outer = nf.epilogue(lambda x: both(x, 3.0)[0] + both(x, 3.0)[1], name="outer")
    np.testing.assert_allclose(outer(A), 3 * A + (A + 3), 1e-13, 1e-13)
    with pytest.raises(TypeError, match=r"takes 2 arguments \(x, y\), got 1"):
        both(A)


PROGRAM = """
import pickle, sys
import numpy as np
import numfuse as nf
from numfuse.language.text import dumps

made = pickle.loads(bytes.fromhex(sys.argv[1]))
out = nf.matmul_epilogue(np.full((2, 3), 0.1), np.ones((3, 2)), made, np.ones(2))
grads = nf.matmul_epilogue_bwd(out, np.full((2, 3), 0.1), np.ones((3, 2)), made, np.ones(2))
print(made, made.parameters, dumps(made.graphs) == sys.argv[2])
print(out.tobytes().hex(), grads.d_a.tobytes().hex())
"""


def test_a_pickle_has_the_same_formula_in_a_fresh_process():
    act = nf.activation(lambda x: x / (1.0 + ex.abs(x)), name="soft")
    made = nf.epilogue(lambda z, x: ex.tanh(z) * act(x + z), name="kept", source="a book")
    text = pickle.dumps(made).hex()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, text, definitions.dumps(made.graphs)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told, results = done.stdout.splitlines()
    assert told == "<epilogue 'kept': a book> ('z', 'x') True"
    given = np.full((2, 3), 0.1), np.ones((3, 2)), made, np.ones(2)
    out = nf.matmul_epilogue(*given)
    d_a = nf.matmul_epilogue_bwd(out, *given).d_a
    assert results == f"{out.tobytes().hex()} {d_a.tobytes().hex()}"
    # Where the name has another formula by now, a pickle keeps its own, and registers nothing.
    later = nf.epilogue(lambda z, x: z + x, name="kept")
    own = pickle.loads(bytes.fromhex(text))
    assert own is not later and definitions.TABLE["kept"] is later
    assert (nf.matmul_epilogue(*given[:2], own, given[3]) == out).all()
