"""Networks' values of PyTorch's tensors on a GPU: one node, whose gradients are one launch."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from conftest import torch_on_a_gpu

import numfuse as nf

torch = torch_on_a_gpu()

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", True)
    monkeypatch.setattr("numfuse.adapters.cuda_whole.HALF", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def network(widths, points, dtype, needs=True):
    """Points, weights as the transposed views of a layer's, and biases."""
    made = torch.Generator().manual_seed(sum(widths))

    def normal(*shape, scale=1.0):
        x = scale * torch.randn(*shape, generator=made, dtype=torch.float64)
        return x.to(dtype).cuda().requires_grad_(needs)

    pairs = list(itertools.pairwise(widths))
    own = [normal(n, k, scale=k**-0.5) for k, n in pairs]
    return normal(points, widths[0]), own, [normal(n) for n in widths[1:]]


def call(x, own, biases, **how):
    return nf.mlp(x, [w.T for w in own], biases, "tanh", **how)


def exact(x, own, biases):
    for i, (w, bias) in enumerate(zip(own, biases, strict=True)):
        x = torch.nn.functional.linear(x, w, bias)
        x = torch.tanh(x) if i < len(own) - 1 else x
    return x


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [
        (torch.float64, 2.0**-53),
        (torch.float32, 2.0**-24),
        (torch.float16, 2.0**-11),
        (torch.bfloat16, 2.0**-8),
    ],
)
@pytest.mark.parametrize("widths", [(3, 64, 64, 64, 1), (64, 64, 64, 64)])
def test_a_step_of_training_is_that_of_pytorch_in_float64(widths, dtype, unit):
    x, own, biases = network(widths, 1000, dtype)
    wide = [[y.detach().double().requires_grad_() for y in group] for group in ((x,), own, biases)]
    out, wanted = call(x, own, biases), exact(wide[0][0], *wide[1:])
    if widths[0] < 8 or dtype.itemsize == 2:
        assert "network" in nf.last_call().kernel
    grad = torch.randn_like(wanted).to(dtype)
    # PyTorch runs a backward of CUDA tensors in a thread of its own; each thread has its last call.
    kernels = []
    own[0].register_hook(lambda _: kernels.append(nf.last_call().kernel))
    out.backward(grad)
    if widths[0] < 8 or dtype.itemsize == 2:
        assert len(kernels) == 1 and "network backward" in kernels[0]
    wanted.backward(grad.double())
    pairs = [(out, wanted)]
    pairs += [
        (y.grad, z.grad) for y, z in zip([x, *own, *biases], itertools.chain(*wide), strict=True)
    ]
    for y, z in pairs:
        assert y.shape == z.shape and y.dtype == dtype
        bound = (64 if dtype.itemsize > 2 else 2) * len(widths) * unit * z.norm()
        assert (y.double() - z).norm() <= bound


def test_a_network_is_differentiable_once_and_twice():
    x, own, biases = network((2, 5, 4, 1), 3, torch.float64)

    def function(x, *rest):
        return call(x, rest[:3], rest[3:])

    assert gradcheck(function, (x, *own, *biases))
    assert gradgradcheck(function, (x, *own, *biases))


def test_frozen_parameters_have_no_gradient_and_inference_records_nothing():
    x, own, biases = network((16, 32, 32, 16), 50, torch.bfloat16, needs=False)
    assert not call(x, own, biases).requires_grad
    own[1].requires_grad_()
    call(x, own, biases).sum().backward()
    assert own[1].grad is not None and own[0].grad is None and x.grad is None


def test_a_step_is_captured_and_replayed():
    x, own, biases = network((64, 64, 64, 64), 4096, torch.bfloat16, needs=False)
    call(x, own, biases)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x, own, biases)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call(x, own, biases))
    assert np.isfinite(out.float().cpu().numpy()).all()
