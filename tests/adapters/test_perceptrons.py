"""Networks' values of tensors and boxes on the CPU: one operation, whose derivatives are too."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

import numfuse as nf
from numfuse.adapters import perceptrons
from numfuse.adapters.perceptrons import ValueCall
from numfuse.backends.cpu.face import BACKEND

SHAPES = (3, 6), (6, 5), (5, 2)
HOW = {"activation": "silu", "final": "tanh"}


def drawn(bias=True):
    """Points, weights and biases, one of which is None."""
    rng = np.random.default_rng(3)
    x, *weights = [rng.standard_normal(s) for s in ((4, 3), *SHAPES)]
    biases = [rng.standard_normal(6), None, rng.standard_normal(2)]
    return x, weights, biases if bias else None


@pytest.fixture
def launches(monkeypatch):
    """What calls of the core are made of a network, and how many sequences each launches."""
    found, launch = [], BACKEND.launch
    monkeypatch.setattr(
        type(BACKEND),
        "launch",
        staticmethod(lambda *how: (found.append(len(how[0].sequences)), launch(*how))[1]),
    )

    def told(name):
        run = getattr(ValueCall, name)
        monkeypatch.setattr(ValueCall, name, lambda *how: (found.append(name), run(*how))[1])

    for name in ("forward", "backward", "twice"):
        told(name)
    if "torch" in sys.modules:  # (its module may not be there yet: the first call imports it)
        from numfuse.adapters.torch.replayed_networks import KnownNetwork

        for name in ("forward", "backward"):
            run = getattr(KnownNetwork, name)
            monkeypatch.setattr(KnownNetwork, name, _noted(found, name, run))
    return found


def _noted(found, name, run):
    """Note a call that PyTorch's node makes by addresses, or by the other one."""

    def call(*how):
        at = len(found)
        result = run(*how)
        if name not in found[at:]:
            found.insert(at, name)
        return result

    return call


# --- PyTorch --------------------------------------------------------------------------------------
@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def leaves(torch, given):
    x, weights, biases = given
    flat = [x, *weights, *(biases or ())]
    return [None if y is None else torch.from_numpy(y).requires_grad_() for y in flat]


def run(flat, **how):
    biases = flat[4:] or None
    return nf.mlp(flat[0], flat[1:4], biases, **(HOW | how))


def by_layers(flat):
    h = flat[0]
    acts = "silu", "silu", "tanh"
    for w, bias, f in zip(flat[1:4], flat[4:] or [None] * 3, acts, strict=True):
        h = nf.matmul_bias_activation(h, w, bias, f)
    return h


def test_torchs_value_backward_and_double_backward_are_a_launch_each(torch, launches):
    flat = leaves(torch, drawn())
    there = [y for y in flat if y is not None]
    out = run(flat)
    first = torch.autograd.grad(out.square().sum(), there, create_graph=True)
    second = torch.autograd.grad(sum(d.square().sum() for d in first), there)
    assert launches == ["forward", 1, "backward", 1, "twice", 1, "backward", 1]
    launches.clear()
    wanted = torch.autograd.grad(by_layers(flat).square().sum(), there, create_graph=True)
    torch.testing.assert_close(first, wanted)
    twice = torch.autograd.grad(sum(d.square().sum() for d in wanted), there)
    torch.testing.assert_close(second, twice)
    assert "twice" not in launches


@pytest.mark.parametrize("bias", [True, False])
def test_torch_differentiates_a_network_twice_and_more(torch, bias):
    flat = leaves(torch, drawn(bias))
    there = [y for y in flat if y is not None]

    def call(*given):
        rest = iter(given)
        return run([None if y is None else next(rest) for y in flat])

    assert torch.autograd.gradcheck(call, there)
    assert torch.autograd.gradgradcheck(call, there)

    def third(x, w):
        (first,) = torch.autograd.grad(call(x, w, *there[2:]).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), w, create_graph=True)

    assert torch.autograd.gradcheck(third, there[:2])


def test_torch_makes_the_gradients_that_are_asked_for(torch, launches, monkeypatch):
    x, *rest = drawn()
    flat, asked, back = leaves(torch, (np.tile(x, (5000, 1)), *rest)), [], nf.mlp_bwd

    def spy(*given, **how):
        asked.append(how["needs"])
        return back(*given, **how)

    monkeypatch.setattr(perceptrons, "mlp_bwd", spy)
    for group in ([flat[0]], flat[1:4], [flat[4]], [flat[0], flat[2]]):
        torch.autograd.grad(run(flat).sum(), group)
    # (the sums of biases come with the products of weights, without a question)
    assert asked == [("x",), ("weights", "biases"), ("biases",), ("x", "weights")]
    with torch.no_grad():
        assert not run(flat).requires_grad
    assert launches.count("forward") == 5


def test_torch_sees_that_an_operand_was_written(torch):
    flat = leaves(torch, drawn())
    out = run(flat)
    with torch.no_grad():
        flat[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_torchs_transformations_go_by_layers(torch, launches):
    flat = leaves(torch, drawn())
    x, *rest = [None if y is None else y.detach() for y in flat]

    def call(x):
        return run([x, *rest])

    def exact(x):
        return by_layers([x, *rest])

    same = torch.testing.assert_close
    same(torch.func.jvp(call, (x,), (x,)), torch.func.jvp(exact, (x,), (x,)))
    launches.clear()
    out = run([flat[0], *rest])
    along = torch.stack([torch.ones_like(out), out.detach()])
    (batched,) = torch.autograd.grad(out, flat[0], along, is_grads_batched=True)
    for u, found in zip(along, batched, strict=True):
        same(found, torch.autograd.grad(exact(flat[0]), flat[0], u)[0])
    assert launches.count("forward") == 1 and "backward" not in launches


@pytest.mark.parametrize("way", ["ticket", "saved tensor"])
def test_what_a_node_of_torch_keeps_goes_with_its_graph(torch, way, monkeypatch):
    """Guards: a graph's memory is given back with it, and `recompute` keeps nothing."""
    from numfuse.adapters.torch import recompute, replayed_networks, saved

    made = []

    def empty(*shape, own=torch.empty, **how):
        made.append(weakref.ref(found := own(*shape, **how)))
        return found

    flat = leaves(torch, drawn())
    there = [y for y in flat if y is not None]
    if way == "ticket":
        monkeypatch.setattr(replayed_networks, "_SAVED", 0)
    monkeypatch.setattr(replayed_networks, "empty", empty)
    for _ in range(2):  # (what a first call keeps has a ticket)
        run(flat)
    gc.collect()

    def held():
        return len(saved._KEPT) if way == "ticket" else sum(y() is not None for y in made)

    before = held()
    out = run(flat)
    assert held() == before + 1
    kept = torch.autograd.grad(out.sum(), there)
    assert held() == before
    with recompute():
        out = run(flat)
        assert held() == before
    for y, z in zip(kept, torch.autograd.grad(out.sum(), there), strict=True):
        torch.testing.assert_close(y, z)


def test_a_program_of_torch_has_no_break(torch):
    flat = leaves(torch, drawn())
    there = [y for y in flat if y is not None]
    program = torch.compile(lambda *given: run(given), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(program(*flat).square().sum(), there)
    torch.testing.assert_close(found, torch.autograd.grad(run(flat).square().sum(), there))


@pytest.mark.parametrize("why", ["half", "wide", "one axis"])
def test_torchs_networks_of_other_forms_go_by_layers(torch, launches, why):
    flat = leaves(torch, drawn())
    if why == "half":
        flat = [None if y is None else y.bfloat16() for y in flat]
    elif why == "wide":
        shapes = (3, 300), (300, 5), (5, 2)
        flat = leaves(torch, (np.ones((2, 3)), [np.ones(s) for s in shapes], None))
    else:
        flat[0] = flat[0][0]
    out = run(flat)
    assert "forward" not in launches
    torch.testing.assert_close(out, by_layers(flat))


def test_what_does_not_fit_is_said(torch):
    flat = leaves(torch, drawn())
    with pytest.raises(TypeError, match="same dtype"):
        run([flat[0], flat[1].float(), *flat[2:]])
    with pytest.raises(ValueError, match="must have shape"):
        run([flat[0], flat[2], *flat[2:]])


# --- autograd -------------------------------------------------------------------------------------
def test_autograds_value_backward_and_double_backward_are_a_launch_each(launches):
    autograd = pytest.importorskip("autograd")
    x, weights, biases = drawn()

    def loss(x, *flat):
        return autograd.numpy.sum(run([x, *flat, *biases]) ** 2)

    def slopes(x, *flat):
        return autograd.numpy.sum(autograd.grad(loss)(x, *flat) ** 2)

    found = autograd.grad(slopes, (0, 1, 2, 3))(x, *weights)
    # (the value's own part comes twice: by the operands, and by the cotangent)
    assert launches[:4] == ["forward", 1, "backward", 1] and launches.count("twice") == 1
    assert set(launches[1::2]) == {1}
    step, along = 1e-6, [np.cos(y) for y in (x, *weights)]
    ends = [
        slopes(*[y + s * step * d for y, d in zip((x, *weights), along, strict=True)])
        for s in (1, -1)
    ]
    slope = sum((d * u).sum() for d, u in zip(found, along, strict=True))
    assert abs(slope - (ends[0] - ends[1]) / (2 * step)) < 1e-6 * (1 + abs(slope))


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_autograd_differentiates_a_network_in_every_mode_and_order(mode):
    pytest.importorskip("autograd")
    from autograd.test_util import check_grads

    x, weights, biases = drawn()

    def call(x, first, bias):
        return run([x, first, *weights[1:], bias, *biases[1:]])

    check_grads(call, modes=[mode], order=2)(x, weights[0], biases[0])
    check_grads(lambda x: call(x, weights[0], biases[0]), modes=[mode], order=3)(x[:2])
