"""Names, sources and constants of a user's activation: what is refused before a text has it."""

from __future__ import annotations

import functools
import math
import pickle
import time
from fractions import Fraction

import hypothesis.strategies as st
import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as of

import numfuse as nf
from numfuse import expr as ex


def double(x):
    return x * 2.0


WRONG = [
    "", "a\nb", "a\rb", "a\0b", "\t", 'a"b', "a'b", "a\\b", "a`b", "\u2028", "a\u2028b", "\ud800",
    "\u00e9 \u00e9", "\N{FIRE}", "\x7f", "\x1b[0m", "x" * 101, "x" * 100_000, "a\n" * 50_000,
]  # fmt: skip


@pytest.mark.parametrize("name", WRONG, ids=range(len(WRONG)))
def test_a_name_that_no_text_can_hold_is_refused(name):
    before = nf.activations()
    with pytest.raises(ValueError, match=r"name must be 1 to 100 characters of printable ASCII"):
        nf.activation(double, name=name)
    with pytest.raises(ValueError, match="name must be") as caught:
        nf.activation(name=name)(double)
    assert len(str(caught.value)) < 300
    assert nf.activations() == before


def test_the_name_of_a_function_is_refused_as_one_that_is_given():
    def named(x):
        return x

    named.__name__ = "a\nb"
    with pytest.raises(ValueError, match="name must be 1 to 100"):
        nf.activation(named)


@pytest.mark.parametrize("name", [5, b"double", True, ["a"], 1.5])
def test_a_name_that_is_no_text_is_refused(name):
    with pytest.raises(TypeError, match="name must be a str, got"):
        nf.activation(double, name=name)


@pytest.mark.parametrize("formula", [5, "double", b""])
def test_a_formula_that_is_no_function_is_refused(formula):
    with pytest.raises(TypeError, match="formula must be a function of one argument, got"):
        nf.activation(formula, name="a")


def test_a_formula_without_a_name_of_its_own_needs_one():
    formula = functools.partial(lambda a, x: a * x, 2.0)
    with pytest.raises(TypeError, match=r"name must be given .*, got a partial"):
        nf.activation(formula)
    assert nf.activation(formula, name="doubled")(1.5) == 3.0


def test_a_source_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="source must be a str, got int"):
        nf.activation(double, source=5)


@pytest.mark.parametrize(
    "name", ["<lambda>", "leaky relu 0.1", "f(x) = {x}%$", "\u03c3", "gr\u00f6\u00dfe", "x" * 100]
)  # fmt: skip
def test_a_name_that_every_text_can_hold_serves_every_use(name):
    act = nf.activation(double, name=name)
    assert nf.activations()[name] is act and pickle.loads(pickle.dumps(act)) is act
    x = np.arange(3.0)
    for backend in ("cpu", "reference"):
        np.testing.assert_array_equal(
            nf.matmul_bias_activation(x[:, None], np.ones((1, 1)), None, name, backend=backend),
            2 * x[:, None],
        )
    inner = act.njit
    assert numba.njit(lambda x: inner(x))(1.5) == 3.0


def test_lambdas_share_a_name_and_keep_their_formulas():
    once, twice = nf.activation(lambda x: x), nf.activation(lambda x: x * 2.0)
    assert once.name == twice.name == "<lambda>"
    assert (once(3.0), twice(3.0)) == (3.0, 6.0)


@given(st.text(max_size=200))
@of(max_examples=60)
def test_any_text_is_a_name_or_refused(name):
    try:
        act = nf.activation(double, name=name)
    except ValueError as error:
        assert "name must be" in str(error)
    else:
        assert act.name == name
        for text in (act.name, repr(act), f"{act.njit}"):
            assert "\n" not in text and '"' not in name and "\\" not in name


def test_an_unknown_activation_of_any_length_is_refused_at_once():
    start = time.monotonic()
    with pytest.raises(ValueError, match="activation must be one of none, relu") as caught:
        nf.matmul_bias_activation(np.ones((1, 1)), np.ones((1, 1)), None, "gelu" * 1_000_000)
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - start < 5


# --- constants ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text", ["abc", "", "1/0", "1e10000000", "1e-10000000", "1e99999999999999999999", "1" * 5000,
             "nan", "inf", "1\nret", "1_e1", "0x10"],
)  # fmt: skip
def test_a_text_that_is_no_constant_is_refused_at_once(text):
    start = time.monotonic()
    with pytest.raises(ValueError, match="a constant in a formula must be"):
        ex.constant(text)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "number", [10**5000, -(10**5000), Fraction(1, 10**5000)], ids=["large", "negative", "small"]
)
def test_a_constant_of_more_bits_than_a_text_can_hold_is_refused(number):
    with pytest.raises(ValueError, match="a constant in a formula must be a fraction of numbers"):
        nf.activation(lambda x: x * number)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("number", "value"),
    [(10**400, math.inf), (-(10**400), -math.inf), (Fraction(1, 10**400), 0.0), (2**70, 2.0**70)],
    ids=["large", "negative", "small", "exact"],
)
def test_a_constant_beyond_a_dtype_is_rounded_as_ieee_rounds_it(number, value, backend):
    act = nf.activation(lambda x: x + number, name="shifted")
    one = np.ones((1, 1))
    assert nf.matmul_bias_activation(one, one, None, act, backend=backend) == 1 + value
    assert repr(act.trace(0))


def test_folded_constants_never_grow_without_end():
    def formula(x):
        c = ex.constant("0.1")
        for _ in range(40):  # 10^-(2^40) as a fraction would need a terabit
            c = c * c
        return x + c

    act = nf.activation(formula, name="tiny")
    assert act(1.0) == 1.0
    assert pickle.loads(pickle.dumps(act)) is act


@pytest.mark.parametrize("power", [math.inf, -math.inf, math.nan, 1e300])
def test_a_power_that_is_no_small_whole_number_is_refused(power):
    with pytest.raises(TypeError, match="cannot be raised to the power"):
        nf.activation(lambda x: x**power)
