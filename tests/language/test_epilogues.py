"""The table of epilogues and what is derived from it, in float64 over NumPy arrays.

Guards: every gradient of every order is the derivative of the forward (docs/derivatives.md).
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numfuse as nf
from numfuse import epilogues
from numfuse import expr as ex
from numfuse.language import elementary
from numfuse.language.curves import call, inputs, leaf
from numfuse.language.derivatives import forward, reverse, second_order
from numfuse.language.text import dumps, loads

ACTIVATIONS = tuple(nf.activations())
#: A derived formula and the one written here differ by the order of their products: some roundings.
NEAR = {"rtol": 16 * 2.0**-53, "atol": 0}


def drawn(names, seed=0, size=200):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 2, size) for name in names}


def computed(epilogue, x):
    found = elementary.values(epilogue.graphs, {leaf(n): x[n] for n in epilogue.inputs})
    return {name: value for (name, _), value in zip(epilogue.results, found, strict=True)}


def derivatives(name, at):
    act = nf.activations()[name]
    return act(at), act.derivative(at), act.second_derivative(at), act.third_derivative(at)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_everything_of_a_layer_is_derived_from_its_forward(name):
    layer = epilogues.layer(nf.activations()[name].curve)
    x = drawn(("z", "bias", "grad", "t"))
    f, f1, f2, f3 = derivatives(name, x["z"] + x["bias"])
    found = computed(layer, x)
    np.testing.assert_array_equal(found["out"], f)
    np.testing.assert_array_equal(found["pre"], x["z"] + x["bias"])

    backward = layer.select("out").backward()
    found = computed(backward, x)
    np.testing.assert_allclose(found["d_z"], x["grad"] * f1, **NEAR)
    np.testing.assert_array_equal(found["d_bias"], found["d_z"])

    double = backward.select("d_z").pulled_back({"d_z": "t"}, {"grad": "d_grad", "z": "q"})
    found = computed(double, x)
    np.testing.assert_allclose(found["d_grad"], f1 * x["t"], **NEAR)
    if np.any(f2):
        np.testing.assert_allclose(found["q"], x["grad"] * f2 * x["t"], **NEAR)
    else:
        assert "q" not in found  # zero whatever t is

    jet = layer.select("out").jet()
    found = computed(jet, x)
    np.testing.assert_array_equal(np.broadcast_to(found["slope_z"], f1.shape), f1)
    np.testing.assert_array_equal(np.broadcast_to(found.get("bend_z_z", 0.0), f2.shape), f2)
    # the gradient of a loss that holds a second derivative needs the third
    if "bend_z_z" in found:
        third = jet.select("bend_z_z").pulled_back({"bend_z_z": "t"}, {"z": "d_z"})
        np.testing.assert_allclose(computed(third, x)["d_z"], f3 * x["t"], **NEAR)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_everything_of_a_gate_is_derived_from_its_forward(name):
    gate = epilogues.gate(nf.activations()[name].curve)
    x = drawn(("a", "b", "grad", "u", "v", "a_dot", "b_dot"))
    a, b, grad, u, v = (x[n] for n in ("a", "b", "grad", "u", "v"))
    f, f1, f2, _ = derivatives(name, a)
    backward = gate.backward()
    found = computed(backward, x)
    np.testing.assert_allclose(found["d_a"], grad * b * f1, **NEAR)
    np.testing.assert_allclose(found["d_b"], grad * f, **NEAR)
    double = backward.pulled_back(
        {"d_a": "u", "d_b": "v"}, {"grad": "d_grad", "a": "d_a", "b": "d_b"}
    )
    found = computed(double, x)
    terms = {"d_grad": (u * b * f1, v * f), "d_a": (u * grad * b * f2, v * grad * f1)}
    terms["d_b"] = (u * grad * f1, np.zeros_like(u))
    for result, (one, other) in terms.items():
        error = np.abs(found[result] - (one + other))
        assert (error <= 16 * 2.0**-53 * (np.abs(one) + np.abs(other))).all()
    found = computed(gate.tangent(), x)
    one, other = x["a_dot"] * b * f1, x["b_dot"] * f
    np.testing.assert_allclose(found["out"], f * b, **NEAR)
    assert (np.abs(found["out_dot"] - one - other) <= 16 * 2.0**-53 * (abs(one) + abs(other))).all()


def test_a_guard_zeroes_derivatives_alone():
    @nf.activation(name="pole")
    def pole(x):
        return ex.sqrt(x)

    backward = epilogues.gate(pole.curve).backward()
    x = {"a": np.array([0.0, -1.0, 4.0]), "b": np.ones(3), "grad": np.array([1.0, 1.0, np.inf])}
    bare, guarded = computed(backward, x), computed(backward.guarded(), x)
    np.testing.assert_array_equal(bare["d_a"], [np.inf, np.nan, np.inf])
    np.testing.assert_array_equal(guarded["d_a"], [0.0, 0.0, np.inf])
    np.testing.assert_array_equal(guarded["d_b"], [0.0, np.nan, np.inf])  # a value, no derivative


def test_a_curve_ends_where_the_table_does():
    curve = nf.activations()["tanh"].curve
    for _ in range(4):
        curve = curve.derivative()
    with pytest.raises(ValueError, match="ends with third derivatives, got order 4 of 'tanh'"):
        call(curve, leaf("z"))
    flat = nf.activations()["relu"].curve
    for _ in range(6):
        flat = flat.derivative()
    assert call(flat, leaf("z")).payload == 0


# --- any formula --------------------------------------------------------------------------------
LEAVES = tuple(leaf(name) for name in "abc")


@st.composite
def formulas(draw):
    """A graph of some of three inputs, smooth where the arguments of the tests are."""
    known = list(LEAVES)
    one = st.sampled_from
    for _ in range(draw(st.integers(1, 7))):
        x, y = draw(one(known)), draw(one(known))
        known.append(
            draw(
                one(
                    (
                        x + y,
                        x - 0.5 * y,
                        x * y,
                        x / (1 + y * y),
                        -x,
                        ex.tanh(x),
                        ex.sigmoid(y),
                        ex.log1p(x * x),
                        ex.sqrt(1 + x * x),
                        ex.exp(-(x * x)),
                        ex.erf(x),
                        ex.normal_cdf(x),
                        ex.scaled_bell(x, y),
                        ex.scaled_exp(x, -(y * y), 0.0),
                        ex.fma(x, y, x),
                        ex.where(x > y, x, 2 * y),
                        ex.maximum(x, y),
                        call(nf.activations()["gelu"].curve, x),
                        call(nf.activations()["tanh"].curve, y),
                    )
                )
            )
        )
    return known[-1]


def at(exprs, x, **more):
    leaves = dict(zip(LEAVES, x, strict=True)) | {leaf(n): v for n, v in more.items()}
    shape = np.shape(x[0])
    zero = ex.constant(0)
    found = elementary.values([zero if e is None else e for e in exprs], leaves)
    return [np.broadcast_to(value, shape) for value in found]


@given(expr=formulas(), seed=st.integers(0, 2**32 - 1))
def test_forward_and_reverse_mode_are_transposes(expr, seed):
    rng = np.random.default_rng(seed)
    x, dots, weight = rng.normal(size=(3, 50)), rng.normal(size=(3, 50)), rng.normal(size=50)
    tangents = {e: leaf(f"{e.payload}_dot") for e in LEAVES}
    more = {f"{name}_dot": dot for name, dot in zip("abc", dots, strict=True)} | {"w": weight}
    (moved,) = at(forward((expr,), tangents), x, **more)
    pulled = at(reverse((expr,), (leaf("w"),), LEAVES), x, **more)
    terms = np.array([p * dot for p, dot in zip(pulled, dots, strict=True)])
    size = np.abs(terms).sum(0) + np.abs(weight * moved)
    assert (np.abs(terms.sum(0) - weight * moved) <= 1e-12 * size + 1e-300).all()


@given(expr=formulas(), seed=st.integers(0, 2**32 - 1))
def test_second_derivatives_are_those_of_a_curve(expr, seed):
    """Against forward mode of forward mode along one direction: d/dt d/dt f(x + t d)."""
    rng = np.random.default_rng(seed)
    x, dots, ddots = rng.normal(size=(3, 50)), rng.normal(size=(3, 50)), rng.normal(size=(3, 50))
    names = {"dot": dots, "ddot": ddots}
    more = {f"{n}_{k}": v[i] for k, v in names.items() for i, n in enumerate("abc")}
    first = {e: leaf(f"{e.payload}_dot") for e in LEAVES}
    second = {e: leaf(f"{e.payload}_ddot") for e in LEAVES}
    (moved,) = forward((expr,), first)
    bent = None if moved is None else forward((moved,), first)[0]
    (pushed,) = forward((expr,), second)
    whole = np.array(at((bent, pushed), x, **more))
    gradient, hessian = second_order(expr, LEAVES)
    terms = [g * d for g, d in zip(at(gradient, x, **more), ddots, strict=True)]
    terms += [
        value * dots[i] * dots[j]
        for (i, j), value in zip(hessian, at(list(hessian.values()), x, **more), strict=True)
    ]
    size = np.abs(terms).sum(0) + np.abs(whole).sum(0)
    assert (np.abs(np.sum(terms, 0) - whole.sum(0)) <= 1e-11 * size + 1e-300).all()


@given(expr=formulas())
def test_a_graph_of_inputs_and_calls_survives_its_text(expr):
    assert loads(dumps((expr,)))[0] is expr
    assert pickle.loads(pickle.dumps(expr)) is expr
    assert set(inputs((expr,))) <= set("abc")
