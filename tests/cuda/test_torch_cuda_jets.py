"""Jets of PyTorch's tensors and CuPy's arrays of a GPU: the CPU's results, on their stream."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from conftest import torch_on_a_gpu

import numfuse as nf

torch = torch_on_a_gpu()

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

SECOND = np.array([[1.0, 0.0], [0.5, 2.0]])


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def network(points=37, widths=(2, 5, 7, 3), dtype=np.float64, seed=0):
    """Points, weights and biases of a network."""
    rng = np.random.default_rng(seed)
    pairs = list(itertools.pairwise(widths))
    weights = [(rng.standard_normal(pair) / pair[0] ** 0.5).astype(dtype) for pair in pairs]
    biases = [rng.standard_normal(n).astype(dtype) for _, n in pairs]
    return rng.standard_normal((points, widths[0])).astype(dtype), weights, biases


def there(x, needs=False):
    if isinstance(x, (list, tuple)):
        return [there(y, needs) for y in x]
    return None if x is None else torch.from_numpy(x).cuda().requires_grad_(needs)


def flat(x):
    if x is None:
        return []
    return [z for y in x for z in flat(y)] if isinstance(x, (list, tuple)) else [x]


def close(found, wanted, rtol=1e-12):
    for x, y in zip(flat(found), flat(wanted), strict=True):
        x = x.detach().cpu().double().numpy() if isinstance(x, torch.Tensor) else x.get()
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max(initial=1))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_networks_of_tensors_are_those_of_numpy(keep, dtype, rtol):
    x, weights, biases = network(dtype=dtype)
    wanted = nf.mlp_jet(x, weights, biases, second=SECOND, backend="reference")
    found = nf.mlp_jet(there(x), there(weights), there(biases), second=SECOND, keep=keep)
    found, kept = found if keep else (found, None)
    assert all(y.is_cuda for y in found) and nf.last_call().backend == "cuda"
    close(found, wanted, rtol)
    grads = [np.cos(y) for y in wanted]
    needs = ("x", "weights", "biases")
    asked = {"second": SECOND, "needs": needs}
    exact = nf.mlp_jet_bwd(*grads, x, weights, biases, backend="reference", **asked)
    given = *there(grads), there(x), there(weights), there(biases)
    close(nf.mlp_jet_bwd(*given, kept=kept, **asked), exact, 10 * rtol)


def test_networks_and_layers_are_differentiable_once_and_twice():
    x, weights, biases = network(points=3, widths=(2, 3, 1))
    operands = there([x, *weights, *biases], True)

    def call(x, *rest):
        return tuple(nf.mlp_jet(x, rest[:2], rest[2:], second=SECOND))

    assert all(y.is_cuda for y in call(*operands))
    assert gradcheck(call, operands) and gradgradcheck(call, operands)
    rng = np.random.default_rng(1)
    shapes = (3, 2), (2, 4), (4,), (2, 3, 2), (2, 3, 2)
    a, b, bias, a_dot, a_ddot = there([rng.standard_normal(s) for s in shapes], True)

    def layer(a, b, bias, a_dot, a_ddot):
        options = {"weights": SECOND}
        return tuple(nf.matmul_bias_activation_jet(a, b, bias, "tanh", a_dot, a_ddot, **options))

    assert gradcheck(layer, (a, b, bias, a_dot, a_ddot))
    assert gradgradcheck(layer, (a, b, bias, a_dot, a_ddot))


def loss_of(found):
    u, dot, ddot = found
    return (dot.sum(0) + u * dot[0] - ddot.sum(0)).square().mean()


def test_a_step_is_captured_and_replayed():
    x, weights, biases = network(points=200, dtype=np.float32)
    x, *parameters = there([x, *weights, *biases], True)
    count = len(weights)

    def step():
        value = loss_of(nf.mlp_jet(x, parameters[:count], parameters[count:], second=SECOND))
        return torch.autograd.grad(value, parameters)

    wanted = [d.clone() for d in step()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for d in found:
        d.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(d, want) for d, want in zip(found, wanted, strict=True))
    with torch.no_grad():  # what the graph reads is what is there when it is replayed
        parameters[0].mul_(0.5)
    graph.replay()
    found = [d.clone() for d in found]
    assert all(torch.equal(d, want) for d, want in zip(found, step(), strict=True))


def test_a_program_of_torch_compile_has_the_same_gradients():
    x, weights, biases = network(points=50)
    x, *parameters = there([x, *weights, *biases], True)
    count = len(weights)

    def value(x, *parameters):
        return loss_of(nf.mlp_jet(x, parameters[:count], parameters[count:], second=SECOND))

    wanted = torch.autograd.grad(value(x, *parameters), parameters)
    compiled = torch.compile(value, fullgraph=True)
    found = torch.autograd.grad(compiled(x, *parameters), parameters)
    close(found, [d.cpu().numpy() for d in wanted])


def test_autocast_gives_its_dtype_and_gradients_of_the_operands():
    x, weights, biases = network(points=64, dtype=np.float32)
    x, *parameters = there([x, *weights, *biases], True)
    with torch.autocast("cuda", torch.bfloat16):
        found = nf.mlp_jet(x, parameters[:3], parameters[3:], second=SECOND)
        assert {y.dtype for y in found} == {torch.bfloat16}
    loss_of([y.float() for y in found]).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters)


def test_operands_of_two_devices_are_refused():
    x, weights, biases = network()
    with pytest.raises(TypeError, match=r"weights\[0\]"):
        nf.mlp_jet(there(x), [torch.from_numpy(w) for w in weights], there(biases))
    with pytest.raises((TypeError, ValueError), match="out"):
        nf.mlp_jet(there(x, True), there(weights), there(biases), out=(None, None, None))


def test_networks_of_cupy_stay_there():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    x, weights, biases = network(dtype=np.float64)
    wanted = nf.mlp_jet(x, weights, biases, second=SECOND, backend="reference")
    on = cupy.asarray(x), [cupy.asarray(w) for w in weights], [cupy.asarray(b) for b in biases]
    target = cupy.full_like(cupy.asarray(wanted.u), np.nan)
    found, kept = nf.mlp_jet(*on, second=SECOND, keep=True, out=(target, None, None))
    assert found.u is target and isinstance(found.u_ddot, cupy.ndarray)
    close(found, wanted)
    grads = [np.cos(y) for y in wanted]
    exact = nf.mlp_jet_bwd(*grads, x, weights, biases, second=SECOND, backend="reference")
    given = map(cupy.asarray, grads)
    close(nf.mlp_jet_bwd(*given, *on, second=SECOND, kept=kept), exact)
    wide = cupy.zeros((37, 4))
    with pytest.raises(ValueError, match="overlap"):
        nf.mlp_jet(wide[:, :2], *on[1:], second=SECOND, out=(wide[:, 1:], None, None))
