"""Whole networks on the CPU: one launch, bits that the operands alone decide, what is held."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import weekly
from arrays import bits

import numfuse as nf
from numfuse.backends.cpu import networks
from numfuse.backends.cpu.face import BACKEND
from numfuse.backends.cpu.launch import workspace

SECOND = np.array([[1.0, 0.0]])
SIZES = [(2, 32, 32, 1), (3, 17, 40, 33, 2), (5, 9), (2, 256, 3)]


def network(sizes, points, dtype, seed=0):
    rng = np.random.default_rng(seed)
    weights = [
        (rng.standard_normal((k, n)) / np.sqrt(k)).astype(dtype)
        for k, n in itertools.pairwise(sizes)
    ]
    biases = [rng.standard_normal(n).astype(dtype) for n in sizes[1:]]
    return rng.standard_normal((points, sizes[0])).astype(dtype), weights, biases


def results(x, weights, biases, **how):
    """The value and the jet of a network, and all gradients, one after another."""
    second = np.eye(x.shape[-1])[:1]
    out = nf.mlp(x, weights, biases, **how)
    jet = nf.mlp_jet(x, weights, biases, second=second, **how)
    every = ("x", "weights", "biases")
    back = nf.mlp_bwd(out, x, weights, biases, needs=every, **how)
    jet_back = nf.mlp_jet_bwd(*jet, x, weights, biases, second=second, needs=every, **how)
    found = [out, *jet]
    for one in (back, jet_back):
        found += [one.d_x, *one.d_weights, *one.d_biases]
    return found


@pytest.fixture
def launches(monkeypatch):
    """The programs that calls launch, one after another."""
    found, launch = [], BACKEND.launch

    def record(program, arrays):
        found.append(program)
        launch(program, arrays)

    monkeypatch.setattr(type(BACKEND), "launch", staticmethod(record))
    return found


@pytest.mark.parametrize("sizes", SIZES)
def test_a_network_is_one_launch(launches, sizes):
    found = results(*network(sizes, 100, np.float32))
    assert len(found) == 4 + 2 * (1 + 2 * (len(sizes) - 1))
    assert [len(program.sequences) for program in launches] == [1] * 4


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("batch", [(3,), (2, 2)])
def test_a_batch_of_networks_is_one_launch_and_each_has_its_own_bits(launches, batch, apart):
    sizes, points = (2, 17, 9, 3), 120
    count = int(np.prod(batch))
    each = [network(sizes, points, np.float64, seed) for seed in range(count)]
    if not apart:
        each = [(each[0][0], w, b) for _, w, b in each]
    x = np.stack([y for y, _, _ in each]).reshape(*batch, points, 2) if apart else each[0][0]
    weights, biases = [], []
    for layer in range(len(sizes) - 1):
        for group, kind in ((weights, 1), (biases, 2)):
            one = np.stack([given[kind][layer] for given in each])
            group.append(one.reshape(*batch, -1, one.shape[-1]))
    whole = results(x, weights, biases)
    assert [len(program.sequences) for program in launches] == [1] * 4
    alone = [results(*one) for one in each]
    gradients = {4, 5 + 2 * (len(sizes) - 1)}  # of x
    for i, y in enumerate(whole):
        parts = [one[i] for one in alone]
        if i in gradients and not apart:
            np.testing.assert_allclose(y, sum(parts), rtol=1e-12, atol=1e-12)
            continue
        members = i in (2, 3)  # directions and second derivatives come first
        shape = (*y.shape[:members], count, *y.shape[members + len(batch) :])
        for part, own in zip(parts, np.moveaxis(y.reshape(shape), int(members), 0), strict=True):
            assert (bits(own).ravel() == bits(part).ravel()).all(), i


CODE = """
import hashlib, itertools, sys
sys.path[:0] = {path!r}
import numpy as np
from test_cpu_networks import SIZES, network, results
found = [y for sizes in SIZES for y in results(*network(sizes, 2311, "{dtype}"))]
print(hashlib.sha256(b"".join(y.tobytes() for y in found)).hexdigest())
"""


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_any_number_of_threads_gives_a_network_the_same_bits(dtype):
    found = set()
    for threads in (1, 2, 5) if weekly.ALL else (1, 5):
        env = os.environ | {"NUMBA_NUM_THREADS": str(threads)}
        code = CODE.format(path=sys.path, dtype=dtype)
        how = {"env": env, "capture_output": True, "text": True, "check": True}
        found.add(subprocess.run([sys.executable, "-c", code], **how).stdout)
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_bits_of_a_point_depend_on_it_alone(monkeypatch, dtype, sizes):
    """Guards: the bits of a result do not depend on threads, blocks or its company."""
    x, weights, biases = network(sizes, 301, dtype)
    whole = nf.mlp_jet(x, weights, biases)
    d_x = nf.mlp_bwd(np.ones((301, sizes[-1]), dtype), x, weights, biases, needs=("x",)).d_x
    for part in (slice(0, 1), slice(17, 230), slice(None, None, -3)):
        for y, z in zip(whole, nf.mlp_jet(x[part], weights, biases), strict=True):
            assert (bits(y[..., part, :]) == bits(z)).all()
        ones = np.ones((len(x[part]), sizes[-1]), dtype)
        found = nf.mlp_bwd(ones, x[part], weights, biases, needs=("x",)).d_x
        assert (bits(found) == bits(d_x[part])).all()
    monkeypatch.setattr(networks, "ROWS", 24)
    BACKEND.replay.clear()
    for y, z in zip(whole, nf.mlp_jet(x, weights, biases), strict=True):
        assert (bits(y) == bits(z)).all()
    BACKEND.replay.clear()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_value_has_the_bits_of_its_layers(dtype, sizes):
    x, weights, biases = network(sizes, 77, dtype)
    h = x
    for i, (w, bias) in enumerate(zip(weights, biases, strict=True)):
        h = nf.matmul_bias_activation(h, w, bias, "silu" if i < len(weights) - 1 else "tanh")
    assert (bits(nf.mlp(x, weights, biases, "silu", final="tanh")) == bits(h)).all()


@pytest.mark.parametrize("sizes", [*SIZES, (2, 13, 13, 13, 5)])
def test_what_was_in_the_memory_of_a_call_is_in_no_result(sizes):
    """Guards: the padding of stacks is never multiplied, and no sum begins with what was there."""
    given = network(sizes, 45, np.float64)
    wanted = results(*given)
    for memory in workspace.pool:
        np.frombuffer(memory._map, np.uint8)[:] = 0xFF  # NaN
    for y, z in zip(wanted, results(*given), strict=True):
        assert np.isfinite(y).all() and (bits(y) == bits(z)).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sizes", [*SIZES, (2, 13, 13, 13, 5), (31, 33, 7)])
@pytest.mark.parametrize("points", [1, 5, 77])
def test_operands_have_any_order(sizes, points, dtype):
    """Guards: `kernels.network.take`, columns that are rows in memory are turned by vectors."""
    x, weights, biases = network(sizes, points, dtype)
    wanted = results(x, weights, biases)
    wide = [np.zeros((w.shape[1] + 2, w.shape[0] + 3), dtype) for w in weights]
    for room, w in zip(wide, weights, strict=True):
        room[1:-1, 2:-1] = w.T
    turned = [room[1:-1, 2:-1].T for room in wide]
    for rows, own in ((np.asfortranarray(x), turned), (x, [np.asfortranarray(w) for w in weights])):
        found = results(rows, own, biases)
        assert all(np.array_equal(y, z) for y, z in zip(found, wanted, strict=True))


def test_directions_beyond_what_is_unrolled_are_the_same_sums():
    """Guards: row functions with loops have room for their scratch rows behind the stacks."""
    x, weights, biases = network((7, 13, 9, 2), 50, np.float64)
    whole = nf.mlp_jet(x, weights, biases)
    back = nf.mlp_jet_bwd(*whole, x, weights, biases)
    wanted = None
    for unit in np.eye(7):
        one = nf.mlp_jet(x, weights, biases, directions=unit[None])
        at = int(unit.argmax())
        np.testing.assert_allclose(one.u_dot[0], whole.u_dot[at], rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(one.u_ddot[0], whole.u_ddot[at], rtol=1e-12, atol=1e-13)
        grads = whole.u * (at == 0), whole.u_dot[at][None], whole.u_ddot[at][None]
        part = nf.mlp_jet_bwd(*grads, x, weights, biases, directions=unit[None])
        flat = [*part.d_weights, *part.d_biases]
        wanted = flat if wanted is None else [y + z for y, z in zip(wanted, flat, strict=True)]
    for y, z in zip([*back.d_weights, *back.d_biases], wanted, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-10, atol=1e-11)


def test_memory_of_a_network_does_not_grow_with_its_points(launches):
    for points in (1000, 64000):
        results(*network((2, 32, 32, 1), points, np.float64))
    few, many = launches[:4], launches[4:]
    for a, b in zip(few, many, strict=True):
        assert b.size < 2 * max(a.size, 1 << 20)


def test_layers_that_are_too_wide_go_one_by_one(launches):
    """Guards: networks of any width."""
    wide = networks.WIDEST + 1
    x, weights, biases = network((2, wide, 1), 20, np.float64)
    out = nf.mlp(x, weights, biases)
    assert len(launches) == 2
    np.testing.assert_allclose(
        out, np.tanh(x @ weights[0] + biases[0]) @ weights[1] + biases[1], rtol=1e-12, atol=1e-13
    )


def test_a_redefined_activation_is_another_network():
    x, weights, biases = network((2, 8, 1), 30, np.float64)

    def with_slope(slope):
        @nf.activation
        def leaning(z):
            return slope * z

        return nf.mlp(x, weights, biases, "leaning")

    once, twice = with_slope(1.0), with_slope(2.0)
    hidden = x @ weights[0] + biases[0]
    for slope, got in ((1.0, once), (2.0, twice)):
        np.testing.assert_allclose(got, slope * hidden @ weights[1] + biases[1], rtol=1e-12)


def test_an_array_on_an_odd_address_is_taken():
    x, weights, biases = network((2, 16, 1), 40, np.float64)
    raw = np.zeros(x.nbytes + 1, np.uint8)
    odd = np.ndarray(x.shape, x.dtype, raw, 1)
    odd[...] = x
    assert not odd.flags.aligned
    for y, z in zip(results(x, weights, biases), results(odd, weights, biases), strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12, atol=1e-13)


def test_a_gradient_that_some_networks_share_is_summed_silently():
    x, w, bias = np.ones((2, 3, 4, 5)), np.ones((5, 6)), np.ones((1, 3, 1, 6))
    grad = np.ones((2, 3, 4, 6))
    grad[0, 0], grad[1, 0] = np.inf, -np.inf
    with np.errstate(all="raise"):
        _, _, (found,) = nf.mlp_bwd(grad, x, [w], [bias], "relu", backend="cpu")
    assert np.isnan(found[0, 0]).all() and (found[0, 1:] == 8).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_cotangent_at_all_meets_no_infinity(backend):
    x, weights, biases = np.full((3, 2), 1e200), [np.full((2, 3), 1e200), np.ones((3, 1))], None
    outs = np.full_like(x, np.nan), (None, None), (None, None)
    needs = "x", "weights", "biases"
    given = None, None, None, x, weights, biases, "relu"
    found = nf.mlp_jet_bwd(*given, needs=needs, out=outs, backend=backend)
    assert found.d_x is outs[0] and not found.d_x.any()
    for d_w, w in zip(found.d_weights, weights, strict=True):
        assert d_w.shape == w.shape and not d_w.any()
    alone = nf.mlp_jet_bwd(*given, needs=("weights",), backend=backend)
    assert alone.d_x is None and alone.d_biases is None


@pytest.mark.parametrize("kind", ["value", "jet", "layer"])
def test_a_redefined_activation_goes_with_all_that_was_made_of_it(kind):
    """Guards: docs/design.md, keys name a formula by its serial number, in named tuples too."""
    act = nf.activation(lambda z: z * nf.expr.exp(-z * z), name="to be redefined")
    x, weights = np.ones((4, 3)), [np.ones((3, 5)), np.ones((5, 2))]
    dots, grads = np.ones((2, 4, 3)), (np.ones((4, 2)), None, None)
    for _ in range(3):
        if kind == "value":
            nf.mlp_bwd(nf.mlp(x, weights, None, act), x, weights, None, act)
        elif kind == "jet":
            nf.mlp_jet(x, weights, None, act)
            nf.mlp_jet_bwd(*grads, x, weights, None, act)
        else:
            nf.matmul_bias_activation_jet(x, weights[0], None, act, dots, dots)
    gone = weakref.ref(act)
    nf.activation(lambda z: z, name="to be redefined")
    del act
    gc.collect()
    assert gone() is None
