"""PyTorch's derivatives of a network that a GPU's kernels run whole, with the CPU in their place.

Guards: what a node asks of the kernels, and what it makes of their results, to the second
derivative; `tests/cuda/test_torch_cuda_values.py` runs the kernels themselves on a GPU.
"""

from __future__ import annotations

import pytest
from conftest import unavailable

import numfuse as nf

try:
    import torch
except ImportError:
    unavailable("torch", "PyTorch is not installed")

from numfuse.activations import get
from numfuse.adapters.perceptrons import ValueCall
from numfuse.adapters.torch import device_perceptrons

ASKED: list[tuple[str, tuple[str, ...]]] = []


def arrays(x):
    if isinstance(x, (list, tuple)):
        return [arrays(y) for y in x]
    return None if x is None else x.detach().numpy()


def tensors(x):
    if isinstance(x, tuple):
        return type(x)(*map(tensors, x)) if hasattr(x, "_fields") else tuple(map(tensors, x))
    return None if x is None else torch.from_numpy(x)


def serve(grad, x, weights, biases, how, needs, out):
    activation, final, guard, _ = how
    ASKED.append(("value" if grad is None else "gradients", tuple(needs)))
    given = arrays([x, weights, biases])
    if grad is None:
        return tensors(nf.mlp(*given, activation, final=final))
    options = {"final": final, "guard": guard, "needs": needs}
    return tensors(nf.mlp_bwd(arrays(grad), *given, activation, **options))


def serve_along(x_dot, grad, x, weights, biases, how, needs):
    activation, final, guard, _ = how
    ASKED.append(("second gradients", tuple(needs)))
    given = arrays([x, weights, biases])
    options = {"final": final, "guard": guard, "needs": needs}
    operands = arrays(x_dot), None, None, arrays(grad), *given, activation
    return tensors(nf.mlp_double_bwd(*operands, **options))


class Device:
    """In place of a GPU's functions: no call comes again."""

    @staticmethod
    def call_again(asked, arrays, call, long):
        return long()


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(device_perceptrons, "on_cuda", lambda: Device)
    monkeypatch.setattr(device_perceptrons, "_serve", serve)
    monkeypatch.setattr(device_perceptrons, "_serve_along", serve_along)
    ASKED.clear()


def network(biases=True):
    made = torch.Generator().manual_seed(0)

    def normal(*shape):
        x = torch.randn(*shape, generator=made, dtype=torch.float64)
        return x.requires_grad_()

    pairs = ((2, 5), (5, 4), (4, 2))
    weights = [normal(*pair) for pair in pairs]
    return normal(7, 2), weights, [normal(n) if biases else None for _, n in pairs]


def value(x, weights, biases):
    call = ValueCall((get("tanh"), get("tanh"), get("none")), True, None)
    return device_perceptrons._apply_value(x, *weights, *biases, call)


def textbook(x, weights, biases):
    for i, (w, bias) in enumerate(zip(weights, biases, strict=True)):
        x = x @ w + (0 if bias is None else bias)
        x = torch.tanh(x) if i < 2 else x
    return x


def penalty(function, x, weights, biases):
    """A loss of the value and of its gradient by the points."""
    found = function(x, weights, biases)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + found.square().mean()


@pytest.mark.parametrize("biases", [True, False])
def test_a_penalty_on_the_gradient_by_points_is_made_by_the_kernels(biases):
    x, weights, given = network(biases)
    own = [x, *weights, *[y for y in given if y is not None]]
    made = torch.autograd.grad(penalty(value, x, weights, given), own)
    asked = [what for what, _ in ASKED]
    assert asked.count("second gradients") == 1
    wanted = torch.autograd.grad(penalty(textbook, x, weights, given), own, materialize_grads=True)
    for got, exact in zip(made, wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)


def test_gradients_of_weights_that_are_differentiated_again_are_those_of_layers():
    x, weights, given = network()
    own = [x, *weights, *given]

    def loss(function):
        found = function(x, weights, given).square().sum()
        slopes = torch.autograd.grad(found, weights, create_graph=True)
        return sum(y.square().sum() for y in slopes)

    made = torch.autograd.grad(loss(value), own)
    assert "second gradients" not in [what for what, _ in ASKED]
    wanted = torch.autograd.grad(loss(textbook), own, materialize_grads=True)
    for got, exact in zip(made, wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-11)


def test_a_third_derivative_is_that_of_layers():
    x, weights, given = network()

    def third(function):
        found = penalty(function, x, weights, given)
        (slope,) = torch.autograd.grad(found, weights[1], create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, *weights])

    for got, exact in zip(third(value), third(textbook), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-10)
