"""Networks that come again on a CUDA device: one program, whatever the layers are.

Run on a GPU where there is one, and in the simulator by `test_cuda_simulator`.
"""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest
from conftest import unavailable
from frames import frames
from on_device import poisoned

import numfuse as nf
from numfuse import expr as ex

status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))

from numfuse.backends.cuda.compile.toolchain import SIMULATED  # noqa: E402
from numfuse.backends.cuda.plan.program import Program  # noqa: E402

LIBRARY = ["numfuse"]
SECOND = np.array([[1.0, 0.5]])
#: (the simulator takes the first and the last of these)
WIDTHS = {"whole": (2, 5, 5, 1), "no plain last layer": (2, 5, 3), "layers": (2, 5, 5, 1)}


@pytest.fixture(params=["numfuse", "cupy", "torch"] if not SIMULATED else ["numfuse"], autouse=True)
def library(request):
    """The library of the arrays; in the simulator numfuse's own alone."""
    if request.param != "numfuse":
        pytest.importorskip(request.param)
    LIBRARY[:] = [request.param]


@pytest.fixture(params=WIDTHS, autouse=True)
def widths(request, monkeypatch):
    poisoned(monkeypatch, "cuda")
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", request.param == "whole")
    return WIDTHS[request.param]


@pytest.fixture
def launched(monkeypatch):
    """The programs that are launched, in their order."""
    found = []
    launch = Program.launch

    def noted(self, *arguments):
        found.append(self)
        return launch(self, *arguments)

    monkeypatch.setattr(Program, "launch", noted)
    return found


def draw(widths, points=7, seed=0):
    """Points, weights, biases and cotangents of a network's jet."""
    rng = np.random.default_rng(seed)
    pairs = list(itertools.pairwise(widths))
    x = rng.standard_normal((points, widths[0]))
    ws = [rng.standard_normal(pair) for pair in pairs]
    bs = [rng.standard_normal(n) for _, n in pairs]
    grads = [rng.standard_normal((*c, points, widths[-1])) for c in ((), (2,), (1,))]
    return x, ws, bs, grads


def there(x):
    """An array on the device, or a list of them."""
    if isinstance(x, list):
        return [there(y) for y in x]
    (name,) = LIBRARY
    if name == "numfuse":
        return nf.to_device(x, "cuda")
    module = importlib.import_module(name)
    return module.asarray(x) if name == "cupy" else module.from_numpy(x.copy()).cuda()


def how(widths):
    """The last layer has an activation where the name says that it is no plain product."""
    final = "tanh" if widths[-1] == 3 else "none"
    return {"second": SECOND, "final": final}


def step(x, ws, bs, grads, options, activation="tanh", **more):
    """A forward that keeps, and the gradients, as one flat list of arrays."""
    found, kept = nf.mlp_jet(x, ws, bs, activation, keep=True, **options)
    back = nf.mlp_jet_bwd(*grads, x, ws, bs, activation, kept=kept, **options, **more)
    return [*found, *flat(back)]


def flat(gradients):
    d_x, d_ws, d_bs = gradients
    return [y for y in (d_x, *(d_ws or ()), *(d_bs or ())) if y is not None]


def same(found, wanted, bits=False):
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        x, y = (nf.to_numpy(z) for z in (x, y))
        if bits:
            assert (x == y).all()
        else:
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def test_a_step_that_comes_again_is_two_programs_with_the_same_bits(widths, launched):
    options, host = how(widths), draw(widths)
    device = [there(y) for y in host]
    first = step(*device, options)
    long = len(launched)
    for _ in range(2):
        launched.clear()
        again = step(*device, options)
        assert len(launched) == 2 <= long
        same(again, first, bits=True)
        told = nf.last_call()
        assert (told.backend == "cuda" and "network" in told.kernel) or "jet" in told.kernel
    same(first, step(*host, options))


def test_other_arrays_are_read_and_what_was_returned_stays(widths, launched):
    options = how(widths)
    held = []
    for seed in range(4):
        host = draw(widths, seed=seed)
        held.append((step(*[there(y) for y in host], options), step(*host, options)))
    assert len(launched) >= 8  # (two at the least for each)
    for found, wanted in held:
        same(found, wanted)


def test_arrays_that_share_memory_are_read_where_they_are(widths):
    options = how(widths)
    for seed in range(3):
        x, ws, bs, grads = draw(widths, seed=seed)
        wide = np.concatenate([w.ravel() for w in ws])
        on = there(wide)
        ends = np.cumsum([0, *(w.size for w in ws)])
        parts = [on[i:j].reshape(*w.shape) for i, j, w in zip(ends, ends[1:], ws, strict=False)]
        found = step(there(x), parts, there(bs), there(grads), options)
        same(found, step(x, ws, bs, grads, options))
        # columns of one array, whose ranges overlap
        pair = there(np.stack([bs[0], bs[0] + 1], axis=1))
        both = [pair[:, 0], *there(bs[1:])]
        found = step(there(x), there(ws), both, there(grads), options)
        same(found, step(x, ws, bs, grads, options))


def test_one_array_given_twice_and_two_equal_ones_are_told_apart(widths):
    if widths[1] != widths[2]:
        pytest.skip("no two of its layers are alike")
    options = how(widths)
    x, ws, bs, grads = draw(widths)
    for turn in range(3):
        one = there(bs[0] + turn)
        found = step(there(x), there(ws), [one, one, there(bs[2])], there(grads), options)
        same(found, step(x, ws, [bs[0] + turn, bs[0] + turn, bs[2]], grads, options))
        other = [there(bs[0] + turn), there(bs[1] - turn), there(bs[2])]
        found = step(there(x), there(ws), other, there(grads), options)
        same(found, step(x, ws, [bs[0] + turn, bs[1] - turn, bs[2]], grads, options))


def test_all_that_a_call_depends_on_makes_another_program(widths):
    host = draw(widths)
    device = [there(y) for y in host]
    calls = [
        ({}, {}),
        ({"guard": False}, {}),
        ({"second": SECOND * 2}, {}),
        ({"directions": np.array([[1.0, 1.0], [0.0, 2.0]])}, {}),
        ({}, {"needs": ("weights",)}),
        ({}, {"needs": ("x", "biases")}),
        ({}, {"activation": "gelu"}),
    ]
    for _ in range(3):
        for options, more in calls:
            options = how(widths) | options
            same(step(*device, options, **more), step(*host, options, **more))


def test_a_formula_of_the_users_own_that_is_gone_is_not_found_again(widths):
    host = draw(widths)
    device = [there(y) for y in host]
    for scale in (1.0, 3.0):
        wave = nf.activation(lambda x, s=scale: ex.tanh(x * s) * x, name=f"series wave {scale}")
        for _ in range(2):
            found = step(*device, how(widths), activation=wave)
            same(found, step(*host, how(widths), activation=wave))


def test_an_error_leaves_a_call_that_works(widths):
    options, host = how(widths), draw(widths)
    device = [there(y) for y in host]
    wanted = step(*host, options)
    for _ in range(3):
        with pytest.raises(ValueError, match="weights"):
            x, ws, *rest = device
            step(x, [*ws[:-1], ws[-1][:-1]], *rest, options)
        same(step(*device, options), wanted)


def test_a_step_that_comes_again_opens_a_bounded_number_of_frames(widths):
    """Guards: no layer is run by Python, whose way is 1.5 ms long (docs/cuda.md)."""
    options = how(widths)
    x, ws, bs, grads = (there(y) for y in draw(widths))
    for _ in range(2):
        step(x, ws, bs, grads, options)
    _, opened = frames(lambda: step(x, ws, bs, grads, options))
    assert len(opened) <= 330, opened


def chains(x, ws, bs, grads, final):
    """Every function of a network's value, as lists of arrays."""
    grad, moving = grads[0], (x, ws, bs)
    value, kept = nf.mlp(x, ws, bs, "tanh", final=final, keep=True)
    back = nf.mlp_bwd(grad, x, ws, bs, "tanh", final=final)
    by_kept = nf.mlp_bwd(grad, x, ws, bs, "tanh", final=final, kept=kept)
    tangent = nf.mlp_jvp(x, ws, bs, *moving, "tanh", final=final)
    twice = nf.mlp_double_bwd(*moving, grad, x, ws, bs, "tanh", final=final)
    alone = nf.mlp(x, ws, None, "tanh", final=final)
    found = [value, *flat(back), *flat(by_kept), *tangent, twice[0], *flat(twice[1:]), alone]
    return [nf.to_numpy(y) if hasattr(y, "device") else y for y in found]


def test_a_networks_value_and_its_derivatives_are_programs_too(widths, launched):
    final = how(widths)["final"]
    for seed in range(3):
        host = draw(widths, seed=seed)
        launched.clear()
        found = chains(*map(there, host), final)
        same(found, chains(*host, final))
    assert len(launched) == 6  # each is one program by now
