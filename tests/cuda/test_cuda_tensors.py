"""Networks of PyTorch's tensors on a device, in Numba's simulator: nodes, and known calls.

Run by `test_cuda_simulator`, which runs much of `test_torch_cuda*.py` beside it.
"""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from conftest import SIMULATED

import numfuse as nf

torch = pytest.importorskip("torch")
if not SIMULATED:
    pytest.skip("the simulator has a process of its own", allow_module_level=True)

import simulated_tensors  # noqa: E402

simulated_tensors.install()

from numfuse.adapters import cuda_networks  # noqa: E402
from numfuse.adapters.torch import eager  # noqa: E402
from numfuse.backends.cuda.plan.program import Program  # noqa: E402
from numfuse.chains import Chain  # noqa: E402
from numfuse.perceptron import Network  # noqa: E402

WIDTHS = (2, 5, 5, 1)
SECOND = np.array([[1.0, 0.5]])


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", True)


@pytest.fixture
def launched(monkeypatch):
    """The kernels of what is launched."""
    found = []
    launch = Program.launch

    def noted(self, *arguments):
        launch(self, *arguments)
        found.append(self.names)

    monkeypatch.setattr(Program, "launch", noted)
    return found


def draw(points=5, widths=WIDTHS, dtype=torch.float32, seed=0, grads=True):
    made = torch.Generator().manual_seed(seed)

    def normal(*shape):
        x = torch.randn(*shape, generator=made, dtype=torch.float64)
        return x.to(dtype).requires_grad_(grads)

    pairs = list(itertools.pairwise(widths))
    return normal(points, widths[0]), [normal(*p) for p in pairs], [normal(n) for n in widths[1:]]


def wide(*operands):
    """The operands in float64, of a graph of their own."""
    made = {}

    def one(y):
        if isinstance(y, list):
            return [one(z) for z in y]
        if y is not None and id(y) not in made:
            made[id(y)] = y.detach().double().requires_grad_(y.requires_grad)
        return None if y is None else made[id(y)]

    return [one(y) for y in operands]


def textbook(x, weights, biases, activation=torch.tanh):
    last = len(weights) - 1
    for i, (w, bias) in enumerate(zip(weights, biases, strict=True)):
        x = x @ w + (0 if bias is None else bias)
        x = activation(x) if i < last else x
    return x


def leaves(x, weights, biases):
    every = [x, *weights, *biases]
    own = {id(y): y for y in every if y is not None and y.requires_grad}
    return list(own.values())


def close(found, wanted, unit=2.0**-24):
    for y, z in zip(found, wanted, strict=True):
        assert y.shape == z.shape
        scale = max(1.0, float(z.detach().abs().max()))
        assert float((y.detach().double() - z.detach()).abs().max()) < 500 * unit * scale


def step(function, operands, loss=lambda y: (y * y).sum()):
    return torch.autograd.grad(loss(function(*operands)), leaves(*operands))


def penalty(function, x, weights, biases):
    (d,) = torch.autograd.grad(function(x, weights, biases).sum(), x, create_graph=True)
    own = leaves(x, weights, biases)
    return torch.autograd.grad((d * d).sum(), own, allow_unused=True, materialize_grads=True)


def unknown(*_):
    raise AssertionError("the call was not known")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_that_comes_again_is_right_and_looked_at_once(dtype, launched, monkeypatch):
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    for seed in range(4):
        operands = draw(dtype=dtype, seed=seed)
        if seed == 3:  # it is known: no operand is looked at by itself
            monkeypatch.setattr(Chain, "__init__", unknown)
            monkeypatch.setattr(cuda_networks, "_formulas", unknown)
            launched.clear()
        found = step(nf.mlp, operands)
        assert nf.last_call().backend == "cuda"
        close(found, step(textbook, wide(*operands)), unit)
    value, gradients = launched
    assert "network" in value and "network" in gradients
    assert "backward" not in value and "backward" in gradients


def test_what_is_like_a_known_call_is_another_one():
    x, weights, biases = draw()
    for _ in range(3):
        step(nf.mlp, (x, weights, biases))
    first, *rest = weights
    frozen = first.detach()
    turned = first.detach().T.contiguous().T.requires_grad_()
    some = [None, *biases[1:]]
    square = draw(widths=(5, 5, 5, 5), seed=3)
    tied = [square[1][0]] * 3
    cases = [
        (x, [frozen, *rest], biases), (x, [turned, *rest], biases), (x, weights, some),
        (x.detach(), weights, biases), draw(points=6), draw(widths=(2, 6, 6, 1)),
        draw(dtype=torch.float64), (square[0], tied, square[2]), (x[:4], weights, biases),
        (x.detach().conj(), weights, biases), (x, weights, biases),
    ]  # fmt: skip
    negative = torch.complex(x.detach(), x.detach()).conj().imag
    assert negative.is_neg()
    cases.append((negative, weights, biases))
    for _ in range(3):
        for operands in cases:
            given = wide(*operands)
            wanted = torch.autograd.grad(textbook(*given).sin().sum(), leaves(*given))
            found = torch.autograd.grad(nf.mlp(*operands).sin().sum(), leaves(*operands))
            close(found, wanted)


def test_other_activations_and_ways_are_other_calls(launched, monkeypatch):
    operands = draw()
    for _ in range(3):
        for name, torchs in (("tanh", torch.tanh), ("sigmoid", torch.sigmoid)):
            found = step(lambda *x, name=name: nf.mlp(*x, name), operands)
            textbooks = lambda *x, torchs=torchs: textbook(*x, torchs)  # noqa: E731
            close(found, step(textbooks, wide(*operands)))
    launched.clear()
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", False)
    for _ in range(2):
        close(step(nf.mlp, operands), step(textbook, wide(*operands)))
    assert launched and not any("network" in names for names in launched)


def test_values_without_gradients_record_nothing():
    operands = draw()
    wanted = textbook(*wide(*operands))
    for _ in range(3):
        found = nf.mlp(*operands)
        assert found.requires_grad
        with torch.no_grad():
            quiet = nf.mlp(*operands)
        assert not quiet.requires_grad and torch.equal(quiet, found)
        plain = nf.mlp(*[y.detach() if isinstance(y, torch.Tensor) else
                         [z.detach() for z in y] for y in operands])  # fmt: skip
        assert not plain.requires_grad and torch.equal(plain, found)
        close([found], [wanted])


def test_a_penalty_on_the_gradient_that_comes_again_is_right(launched):
    for seed in range(4):
        operands = draw(seed=seed)
        launched.clear()
        found = penalty(nf.mlp, *operands)
        close(found, penalty(textbook, *wide(*operands)))
    assert len(launched) == 3 and all("network" in names for names in launched)


def test_what_is_no_plain_tensor_is_refused_or_served_as_ever():
    x, weights, biases = draw()
    own = x.as_subclass(type("Own", (torch.Tensor,), {}))
    for _ in range(3):
        step(nf.mlp, (x, weights, biases))
        for wrong in (x.detach().to_sparse(), [1.0], x.detach().int()):
            with pytest.raises(TypeError):
                nf.mlp(wrong, weights, biases)
        with pytest.raises(TypeError, match="torch"):
            nf.mlp(x, [weights[0].detach().numpy(), *weights[1:]], biases)
        close([nf.mlp(own, weights, biases)], [textbook(*wide(x, weights, biases))])


def test_transformations_see_the_layers():
    x, weights, biases = draw()
    for _ in range(3):
        step(nf.mlp, (x, weights, biases))

    def loss(function, own):
        return function(x, own, biases).square().sum()

    found = torch.func.grad(lambda own: loss(nf.mlp, own))(weights)
    given = wide(x, weights, biases)
    wanted = torch.func.grad(lambda own: textbook(given[0], own, given[2]).square().sum())(given[1])
    close(found, wanted)


# --- layers as one node ---------------------------------------------------------------------------
TORCHS = {
    "tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "none": lambda x: x,
}  # fmt: skip


def layers(activation, final):
    """The same network by numfuse and by PyTorch."""

    def by_torch(x, weights, biases):
        last = len(weights) - 1
        for i, (w, bias) in enumerate(zip(weights, biases, strict=True)):
            x = TORCHS[activation if i < last else final](x @ w + (0 if bias is None else bias))
        return x

    return lambda *x: nf.mlp(*x, activation, final=final), by_torch


@pytest.fixture
def chained(monkeypatch):
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", False)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("final", ["none", "sigmoid", "gelu"])
@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
def test_layers_are_one_node_that_comes_again(
    activation, final, recomputes, chained, launched, monkeypatch
):
    ours, theirs = layers(activation, final)
    how = nf.adapters.torch.recompute if recomputes else contextlib.nullcontext
    for seed in range(4):
        x, weights, biases = draw(dtype=torch.float64, seed=seed)
        weights[1] = weights[1].detach().T.contiguous().T.requires_grad_()  # as `Linear` has it
        biases[0] = None
        if seed == 3:
            monkeypatch.setattr(Chain, "__init__", unknown)
            launched.clear()
        with how():
            found = step(ours, (x, weights, biases))
        assert found[2].stride() == weights[1].stride()
        close(found, step(theirs, wide(x, weights, biases)), 2.0**-53)
    assert len(launched) == 2 and nf.last_call().backend == "cuda"


def test_layers_make_the_gradients_that_are_asked_for(chained, launched, monkeypatch):
    monkeypatch.setattr(eager, "_SMALL_PRODUCT", 0)  # (of small ones all are made)
    x, weights, biases = draw(dtype=torch.float64)
    ours, theirs = layers("tanh", "none")
    given = wide(x, weights, biases)
    pairs = [
        ([x], [given[0]]), (weights[1:], given[1][1:]), (biases[2:], given[2][2:]),
        ([x, weights[0]], [given[0], given[1][0]]),
    ]  # fmt: skip
    kernels = []
    for own, exact in pairs:
        for _ in range(3):
            out = ours(x, weights, biases).sin().sum()
            launched.clear()
            found = torch.autograd.grad(out, own)
        kernels.append(launched[0].count(","))
        assert len(launched) == 1
        close(found, torch.autograd.grad(theirs(*given).sin().sum(), exact), 2.0**-53)
    # of x alone no product is made for the weights, of a last bias but its sum
    assert kernels[2] < kernels[0] < kernels[3], kernels


def test_layers_of_frozen_parameters_and_of_leading_axes(chained):
    ours, theirs = layers("gelu", "none")
    _, weights, biases = draw(dtype=torch.float64)
    points = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    frozen = [weights[0].detach(), weights[1], weights[2].detach()]
    for _ in range(3):
        for own in (weights, frozen):
            operands = points, own, biases
            close(step(ours, operands), step(theirs, wide(*operands)), 2.0**-53)


def test_second_derivatives_of_layers_are_those_of_nodes_of_their_own(chained):
    ours, theirs = layers("tanh", "none")
    for seed in range(3):
        operands = draw(dtype=torch.float64, seed=seed)
        found = penalty(ours, *operands)
        close(found, penalty(theirs, *wide(*operands)), 2.0**-53)


def test_layers_that_do_not_fit_are_told_by_name(chained):
    x, weights, biases = draw()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\(5, 5\)|\(2, 5\)"):
            nf.mlp(x, [weights[0], weights[0], weights[2]], biases)
        close(step(nf.mlp, (x, weights, biases)), step(textbook, wide(x, weights, biases)))


# --- jets -----------------------------------------------------------------------------------------
def jet(x, weights, biases):
    return nf.mlp_jet(x, weights, biases, second=SECOND)


def by_nesting(x, weights, biases):
    """u, u_x and u_t, and u_xx + u_tt / 2, by gradients of gradients."""
    x = x if x.requires_grad else x.requires_grad_()
    u = textbook(x, weights, biases)
    (d,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [torch.autograd.grad(d[:, i].sum(), x, create_graph=True)[0][:, i] for i in (0, 1)]
    return u, d.T[..., None], (second[0] + second[1] / 2)[None, :, None]


def residual(found):
    u, dot, ddot = found
    return (dot[1] + u * dot[0] - 0.1 * ddot[0]).square().sum()


@pytest.mark.parametrize("widths", [WIDTHS, (2, 5, 3, 1)])
def test_a_jet_that_comes_again_is_right_and_looked_at_once(widths, launched, monkeypatch):
    for seed in range(5):
        x, weights, biases = draw(widths=widths, seed=seed)
        own = [*weights, *biases]
        wanted_jet = by_nesting(*(given := wide(x, weights, biases)))
        wanted = torch.autograd.grad(residual(wanted_jet), [*given[1], *given[2]],
                                     allow_unused=True, materialize_grads=True)  # fmt: skip
        x = x.detach()
        if seed == 4:
            monkeypatch.setattr(Network, "__init__", unknown)
            launched.clear()
        found_jet = jet(x, weights, biases)
        close(found_jet, wanted_jet)
        close(torch.autograd.grad(residual(found_jet), own), wanted)
    assert len(launched) == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_what_a_jet_keeps_goes_through_the_hooks_of_saved_tensors(enabled, monkeypatch):
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", enabled)
    x, weights, biases = draw()
    x, own = x.detach(), [*weights, *biases]
    for _ in range(3):
        wanted = torch.autograd.grad(residual(jet(x, weights, biases)), own)
        packed = []

        def pack(y, packed=packed):
            packed.append(y)
            return y.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            out = residual(jet(x, weights, biases))
        found = torch.autograd.grad(out, own)
        assert all(torch.equal(y, z) for y, z in zip(found, wanted, strict=True))
        kept = [y for y in packed if y.ndim > 2]
        assert kept, "nothing was kept"


def test_a_jet_of_some_frozen_parameters_and_of_none():
    x, weights, biases = draw()
    frozen = [weights[0].detach(), *weights[1:]]
    for _ in range(3):
        for own in (weights, frozen):
            given = wide(x, own, biases)
            ends, exact = leaves(x.detach(), own, biases), leaves(given[0].detach(), *given[1:])
            wanted = torch.autograd.grad(residual(by_nesting(*given)), exact,
                                         allow_unused=True, materialize_grads=True)  # fmt: skip
            close(torch.autograd.grad(residual(jet(x.detach(), own, biases)), ends), wanted)
        with torch.no_grad():
            assert not any(y.requires_grad for y in jet(x, weights, biases))


# --- the backend of a backward --------------------------------------------------------------------
def test_a_backward_has_the_precision_of_its_forward(monkeypatch):
    """PyTorch runs a GPU's backward in a thread that is in no block of `use_backend`."""
    seen = []
    repeated, run = cuda_networks.repeated, eager.run

    def of_networks(mark, arrays, backend, *rest):
        seen.append(backend)
        return repeated(mark, arrays, backend, *rest)

    def of_layers(operation, operands, activation, flags=(), needs=(), backend=None, flipped=()):
        seen.append(backend)
        return run(operation, operands, activation, flags, needs, backend, flipped)

    monkeypatch.setattr(cuda_networks, "repeated", of_networks)
    monkeypatch.setattr(eager, "run", of_layers)
    x, weights, biases = draw()
    a, b, bias = x, weights[0], biases[0]
    calls = [
        lambda: nf.mlp(x, weights, biases), lambda: jet(x.detach(), weights, biases).u,
        lambda: nf.matmul_bias_activation(a, b, bias, "tanh"),
        lambda: nf.activation_mul(a, a + 1, "silu"),
        lambda: nf.matmul_bias_residual(a, b, bias, torch.ones(5, 5, requires_grad=True)),
    ]  # fmt: skip
    for call in calls:
        for _ in range(3):
            seen.clear()
            with nf.use_backend("cuda", precision="tf32"):
                out = call()
            out.square().sum().backward()
            assert len(seen) > 1 and all(y.precision == "tf32" for y in seen), seen
        seen.clear()
        call().square().sum().backward()
        assert len(seen) > 1 and all(y is None for y in seen), seen
