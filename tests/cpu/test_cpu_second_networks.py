"""Networks' tangents and double backwards on the CPU: one launch, bits that operands decide."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from arrays import bits
from test_cpu_networks import launches, network  # noqa: F401  (a fixture)

import numfuse as nf
from numfuse import chains, multilayer
from numfuse.backends.cpu import networks
from numfuse.backends.cpu.face import BACKEND, CpuBackend
from numfuse.backends.cpu.launch import workspace

#: Widths that are 1, primes, a vector's and one more or less, and the widest.
SIZES = [(3, 17, 40, 33, 2), (5, 9), (1, 256, 13, 1), (7, 31, 8)]


def like(x, seed=1):
    """Tangents of a network's operands, of which the rows depend on the point alone."""
    rng = np.random.default_rng(seed)

    def one(y):
        if isinstance(y, list):
            return [one(z) for z in y]
        return None if y is None else np.cos(3 * y + rng.uniform(0, 1)).astype(y.dtype)

    return [one(y) for y in x]


def flat(results):
    found = []
    for y in results:
        found += flat(y) if isinstance(y, tuple) else [y]
    return found


def twice(given, along, activation="silu", **how):
    """A network's tangent and its double backward, all results one after another."""
    tangent = nf.mlp_jvp(*given, *along, activation, **how)
    return [*tangent, *flat(nf.mlp_double_bwd(*along, tangent.out, *given, activation, **how))]


@pytest.fixture
def layers(monkeypatch):
    """Calls `twice` layer by layer."""

    def run(*given, **how):
        with monkeypatch.context() as patch:
            for name in ("network_jvp", "network_double_bwd"):
                patch.setattr(CpuBackend, name, lambda *_: None)
            for name in ("again", "gradients_again"):
                patch.setattr(multilayer, name, lambda *_: None)
            return twice(*given, **how)

    return run


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("final", ["none", "tanh"])
def test_each_is_one_launch_and_gives_what_the_layers_give(launches, layers, sizes, final):  # noqa: F811
    given = network(sizes, 100, np.float64)
    found = twice(given, like(given), final=final)
    assert [len(program.sequences) for program in launches] == [1, 1]
    assert nf.last_call().backend == "cpu"
    wanted = layers(given, like(given), final=final)
    assert len(launches) > 2 + 2 * (len(sizes) - 1)
    for y, z in zip(found, wanted, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12, atol=1e-12 * np.abs(z).max())


def test_what_does_not_move_is_not_computed(launches):  # noqa: F811
    """An infinity times the zero that None stands for would be NaN."""
    x, weights, biases = network((2, 9, 5, 3), 30, np.float64)
    x_dot, weights_dot, biases_dot = like((x, weights, biases))
    far = [np.full_like(weights[0], np.inf), *weights[1:]]
    top = None, [None, *weights_dot[1:]], [None, *biases_dot[1:]]
    endless = np.full_like(x, np.inf)
    ones = [np.ones_like(weights[0]), *weights[1:]]
    below = x_dot, None, [*biases_dot[:2], None]
    for given, along in (((abs(x), far, biases), top), ((endless, ones, biases), below)):
        found = nf.mlp_jvp(*given, *along)
        assert np.isfinite(found.out_dot).all() and (found.out_dot != 0).any()
        second = nf.mlp_double_bwd(*along, found.out, *given, needs=("grad", "biases"))
        assert all(np.isfinite(y).all() for y in flat((second.d_grad, second.d_biases)))
    assert [len(program.sequences) for program in launches] == [1] * 4


def test_a_network_that_does_not_move_goes_layer_by_layer():
    given = network((3, 8, 2), 10, np.float64)
    found = nf.mlp_jvp(*given, None, None, None)
    assert (bits(found.out) == bits(nf.mlp(*given))).all() and not found.out_dot.any()
    second = nf.mlp_double_bwd(None, None, None, found.out, *given)
    assert all(not y.any() for y in flat(second))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_value_has_the_bits_of_the_forward(dtype, sizes):
    given = network(sizes, 77, dtype)
    for activation in ("silu", "relu"):
        along = like(given)
        found = nf.mlp_jvp(*given, *along, activation, final="tanh")
        assert (bits(found.out) == bits(nf.mlp(*given, activation, final="tanh"))).all()
        second = nf.mlp_double_bwd(*along, found.out, *given, activation, final="tanh")
        alone = nf.mlp_double_bwd(
            *along, found.out, *given, activation, final="tanh", needs=("grad",)
        )
        for y in (second, alone):
            assert (bits(y.d_grad) == bits(found.out_dot)).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sizes", SIZES[:3])
def test_the_bits_of_a_point_depend_on_it_alone(monkeypatch, dtype, sizes):
    """Guards: the bits of a result do not depend on blocks of points, or on its company."""
    x, weights, biases = network(sizes, 301, dtype)
    x_dot, *along = like((x, weights, biases))

    def rows(part):
        given = x[part], weights, biases
        tangent = nf.mlp_jvp(*given, x_dot[part], *along)
        second = nf.mlp_double_bwd(x_dot[part], *along, tangent.out, *given, needs=("grad", "x"))
        return *tangent, second.d_grad, second.d_x

    whole = rows(slice(None))
    for part in (slice(0, 1), slice(17, 230), slice(None, None, -3)):
        for y, z in zip(whole, rows(part), strict=True):
            assert (bits(y[part]) == bits(z)).all()
    monkeypatch.setattr(networks, "ROWS", 24)
    BACKEND.replay.clear()
    for y, z in zip(whole, rows(slice(None)), strict=True):
        assert (bits(y) == bits(z)).all()
    BACKEND.replay.clear()


CODE = """
import hashlib, sys
sys.path[:0] = {path!r}
from test_cpu_second_networks import SIZES, like, network, twice
digest = hashlib.sha256()
for sizes in SIZES[::2]:
    given = network(sizes, 1511, "float32")
    for y in twice(given, like(given)):
        digest.update(y.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.long
def test_any_number_of_threads_gives_the_same_bits():
    found = set()
    for threads in (1, 3):
        env = os.environ | {"NUMBA_NUM_THREADS": str(threads)}
        code = CODE.format(path=sys.path)
        how = {"env": env, "capture_output": True, "text": True, "check": True}
        found.add(subprocess.run([sys.executable, "-c", code], **how).stdout)
    assert len(found) == 1


@pytest.mark.parametrize("batch", [(3,), (2, 2)])
@pytest.mark.parametrize("apart", [True, False])
def test_a_batch_of_networks_is_one_launch_and_each_has_its_own_bits(launches, batch, apart):  # noqa: F811
    sizes, points, count = (2, 17, 9, 3), 60, int(np.prod(batch))
    each = [network(sizes, points, np.float64, seed) for seed in range(count)]
    if not apart:
        each = [(each[0][0], w, b) for _, w, b in each]
    moving = [like(one) for one in each]

    def stacked(given):
        made = []
        for kind in (1, 2):
            groups = zip(*[one[kind] for one in given], strict=True)
            group = [np.stack(ys).reshape(*batch, -1, ys[0].shape[-1]) for ys in groups]
            made.append(group)
        xs = [one[0] for one in given]
        return np.stack(xs).reshape(*batch, points, 2) if apart else xs[0], *made

    whole = twice(stacked(each), stacked(moving))
    assert [len(program.sequences) for program in launches] == [1, 1]
    alone = [twice(*pair) for pair in zip(each, moving, strict=True)]
    for i, y in enumerate(whole):
        parts = [one[i] for one in alone]
        if i == 3 and not apart:  # the gradient by what all networks share
            np.testing.assert_allclose(y, sum(parts), rtol=1e-12, atol=1e-12)
            continue
        shape = count, *y.shape[len(batch) :]
        for part, own in zip(parts, y.reshape(shape), strict=True):
            assert (bits(own).ravel() == bits(part).ravel()).all(), i


@pytest.mark.parametrize("sizes", SIZES)
def test_what_was_in_memory_is_in_no_result(monkeypatch, sizes):
    """Guards: the padding of stacks is never multiplied, and no sum begins with what was there."""
    given = network(sizes, 45, np.float64)
    some = like(given)
    some[1][-1] = some[2][0] = None
    every = (like(given), some, [None, *some[1:]], [None, None, some[2]])
    wanted = [twice(given, along) for along in every]
    for memory in workspace.pool:
        np.frombuffer(memory._map, np.uint8)[:] = 0xFF  # NaN
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float: np.full(shape, np.nan, dtype))
    for along, results in zip(every, wanted, strict=True):
        for y, z in zip(twice(given, along), results, strict=True):
            assert np.isfinite(y).all() and (bits(y) == bits(z)).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_are_widened_and_rounded_once(dtype):
    given = network((3, 16, 11, 2), 40, dtype)
    along = like(given)
    x, weights, biases = given
    wide = x.astype("f4"), *[[y.astype("f4") for y in group] for group in (weights, biases)]
    moving = along[0].astype("f4"), *[[y.astype("f4") for y in group] for group in along[1:]]
    tangent = nf.mlp_jvp(*given, *along)
    for y, z in zip(tangent, nf.mlp_jvp(*wide, *moving), strict=True):
        assert y.dtype == dtype and (bits(y) == bits(z.astype(dtype))).all()
    second = flat(nf.mlp_double_bwd(*along, tangent.out, *given))
    wanted = flat(nf.mlp_double_bwd(*moving, tangent.out.astype("f4"), *wide))
    for y, z in zip(second, wanted, strict=True):
        assert y.dtype == dtype and (bits(y) == bits(z.astype(dtype))).all()


def test_gradients_of_one_shape_are_not_taken_for_one_another():
    """Guards: a program is found again by the names of its arrays too."""
    x, w, bias, g = np.full((5, 1), 3.0), np.full((1, 3), 2.0), np.ones((1, 3)), np.ones((5, 3))
    given = x, [w], [bias]
    for _ in range(2):
        (d_w,) = nf.mlp_bwd(g, *given, needs=("weights",)).d_weights
        (d_bias,) = nf.mlp_bwd(g, *given, needs=("biases",)).d_biases
        assert (d_w == 15).all() and (d_bias == 5).all()
        (d_w,) = nf.mlp_double_bwd(x, None, None, g, *given, needs=("weights",)).d_weights
        (d_bias,) = nf.mlp_double_bwd(x, None, None, g, *given, needs=("biases",)).d_biases
        assert (d_w == 15).all() and (d_bias == 0).all()
        by_w = nf.mlp_jvp(*given, None, [w], None).out_dot
        by_bias = nf.mlp_jvp(*given, None, None, [w]).out_dot
        assert (by_w == 6).all() and (by_bias == 2).all()


def test_layers_that_are_too_wide_go_one_by_one(launches, monkeypatch):  # noqa: F811
    """Guards: networks of any width."""
    given = network((2, 40, 1), 20, np.float64)
    along = like(given)
    wanted = twice(given, along)
    monkeypatch.setattr(networks, "WIDEST", 39)
    BACKEND.replay.clear()
    called, run = [], chains.Chain.tangents
    monkeypatch.setattr(chains.Chain, "tangents", lambda *how: called.append(how) or run(*how))
    found = twice(given, along)
    assert len(called) == 2 and len(launches) > 4
    for y, z in zip(found, wanted, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12, atol=1e-12)
    BACKEND.replay.clear()


def test_an_array_on_an_odd_address_is_taken():
    given = network((2, 16, 1), 40, np.float64)
    along = like(given)
    raw = np.zeros(given[0].nbytes + 1, np.uint8)
    odd = np.ndarray(given[0].shape, np.float64, raw, 1)
    odd[...] = along[0]
    assert not odd.flags.aligned
    pairs = zip(twice(given, along), twice(given, [odd, *along[1:]]), strict=True)
    assert all((bits(y) == bits(z)).all() for y, z in pairs)


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_that_comes_again_is_the_first_one(monkeypatch, packed):
    """Guards: a repeated call is launched at once, on the arrays of its own."""
    x, weights, biases = network((3, 17, 8, 2), 40, np.float64)
    biases[1] = None
    arrays = x, weights, biases
    along = like(arrays)
    some = [None, along[1], [along[2][0], None, None]]
    given = x, nf.pack(weights) if packed else weights, biases
    forms = [(one, needs) for one in (along, some) for needs in (("x", "weights"), ("grad",))]

    def run(x, along, needs, guard=True):
        operands = x, *given[1:]
        tangent = nf.mlp_jvp(*operands, *along, "silu", guard=guard)
        how = {"needs": needs, "guard": guard}
        second = nf.mlp_double_bwd(*along, tangent.out, *operands, "silu", **how)
        return [*tangent, *flat(second)]

    first = [run(x, *form) for form in forms]
    with monkeypatch.context() as patch:
        patch.setattr(multilayer, "Chain", None)
        again = [run(x, *form) for form in forms]
        other = [run(2 * x, *form) for form in forms]
    BACKEND.replay.clear()
    pairs = zip(again + other, first + [run(2 * x, *form) for form in forms], strict=True)
    for found, wanted in pairs:
        for y, z in zip(found, wanted, strict=True):
            assert (y is None and z is None) or ((bits(y) == bits(z)).all() and y is not z)
    assert all((y != z).any() for y, z in zip(other[0][:2], first[0][:2], strict=True))
    assert run(x, *forms[0], guard=False)[2] is None
    with pytest.raises(ValueError, match="x_dot must have shape"):
        nf.mlp_jvp(*given, along[0][1:], *along[1:], "silu")
    with pytest.raises(ValueError, match="v must be None or a sequence of 3"):
        nf.mlp_double_bwd(along[0], along[1][:2], None, first[0][0], *given, "silu")
