"""PyTorch: jets of layers and networks, as nodes, in programs and under transformations."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse.adapters import torch as adapter  # noqa: E402
from numfuse.adapters.torch import saved  # noqa: E402

WIDTHS = (2, 6, 6, 1)
LAYERS = len(WIDTHS) - 1
WEIGHTS = [[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]


def draw(*shape, seed=0, dtype=torch.float64, moves=True):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return made.requires_grad_(moves)


def parameters(dtype=torch.float64):
    pairs = list(itertools.pairwise(WIDTHS))
    weights = [draw(m, n, seed=i, dtype=dtype) for i, (m, n) in enumerate(pairs)]
    return weights, [draw(n, seed=9 + i, dtype=dtype) for i, (_, n) in enumerate(pairs)]


def nested(x, weights, biases, act=torch.tanh):
    """The value and the pure derivatives, by PyTorch's own reverse mode, three times."""
    h = x
    for w, bias in zip(weights[:-1], biases[:-1], strict=True):
        h = act(h @ w + bias)
    u = h @ weights[-1] + biases[-1]
    (first,) = grad(u.sum(), x, create_graph=True)
    second = [grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    return u, first.T[..., None], torch.stack(second)[..., None]


def cotangents(results):
    return [draw(*y.shape, seed=20 + i, moves=False) for i, y in enumerate(results)]


def gradients(results, operands):
    gs = [g.to(y.dtype) for g, y in zip(cotangents(results), results, strict=True)]
    return grad(sum((g * y).sum() for g, y in zip(gs, results, strict=True)), operands)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("act", ["tanh", "silu"])
def test_a_network_and_its_gradients_are_those_of_nested_autograd(dtype, act):
    weights, biases = parameters(dtype)
    x = draw(7, 2, seed=5, dtype=dtype)
    own = {"tanh": torch.tanh, "silu": nn.functional.silu}[act]
    theirs, ours = nested(x, weights, biases, own), nf.mlp_jet(x, weights, biases, act)
    operands = x, *weights, *biases
    torch.testing.assert_close(tuple(ours), theirs)
    close = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    found, wanted = gradients(ours, operands), gradients(theirs, operands)
    torch.testing.assert_close(found, wanted, **close)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"second": np.ones((1, 2))},
        {"second": np.zeros((0, 2))},
        {"directions": np.array([[1.0, 0.5]]), "final": "sigmoid"},
    ],
    ids=["pure", "Laplacian", "none", "one direction"],
)
def test_a_network_is_differentiable_once_and_twice(options):
    weights, biases = parameters()

    def call(x, *rest):
        return tuple(nf.mlp_jet(x, rest[:LAYERS], rest[LAYERS:], **options))

    operands = draw(3, 2, seed=5), *weights, *biases
    assert gradcheck(call, operands)
    assert gradgradcheck(call, operands)


def test_a_layer_is_differentiable_once_and_twice():
    def call(a, b, bias, a_dot, a_ddot):
        more = {"weights": WEIGHTS}
        return tuple(nf.matmul_bias_activation_jet(a, b, bias, "gelu", a_dot, a_ddot, **more))

    shapes = (4, 3), (3, 2), (2,), (3, 4, 3), (2, 4, 3)
    operands = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    assert gradcheck(call, operands)
    assert gradgradcheck(call, operands)


def test_only_what_requires_a_gradient_gets_one():
    weights, biases = parameters()
    for y in (*weights[1:], *biases):
        y.requires_grad_(False)
    u = nf.mlp_jet(draw(5, 2, moves=False), weights, biases).u_ddot
    u.sum().backward()
    assert weights[0].grad is not None
    assert weights[1].grad is None
    assert all(bias.grad is None for bias in biases)


def test_a_linear_layers_transposed_weight_is_a_weight():
    modules = [nn.Linear(m, n).double() for m, n in itertools.pairwise(WIDTHS)]
    weights, biases = [y.weight.T for y in modules], [y.bias for y in modules]
    x = draw(5, 2)
    leaves = [p for y in modules for p in (y.weight, y.bias)]
    found = gradients(nf.mlp_jet(x, weights, biases), leaves)
    torch.testing.assert_close(found, gradients(nested(x, weights, biases), leaves))
    listed = nf.mlp_jet(x, weights, nn.ParameterList(biases))
    torch.testing.assert_close(listed.u, nf.mlp_jet(x, weights, biases).u)


def test_what_a_forward_keeps_is_used_once_and_goes_with_the_graph(monkeypatch):
    """Guards: a training step neither runs the forward twice nor holds memory behind it.

    The network is wider than those that the core runs whole, of which nothing is kept.
    """
    weights = [draw(2, 300), draw(300, 1)]
    biases = [draw(300), None]
    gc.collect()
    before = len(saved._KEPT)
    found = []
    monkeypatch.setattr(
        saved, "kept_of", lambda x, own=saved.kept_of: found.append(own(x)) or found[-1]
    )
    u = nf.mlp_jet(draw(5, 2), weights, biases).u_ddot
    assert len(saved._KEPT) == before + 1
    u.sum().backward(retain_graph=True)
    first = weights[0].grad.clone()
    u.sum().backward()
    torch.testing.assert_close(weights[0].grad, 2 * first, rtol=0, atol=0)
    assert len(found) == 2 and all(kept.inputs for kept in found)
    found.clear()
    assert len(saved._KEPT) == before


def test_a_backward_without_what_was_kept_makes_it_again():
    weights, biases = parameters()
    x = draw(5, 2)
    kept = gradients(nf.mlp_jet(x, weights, biases), weights)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda y: y):
        results = nf.mlp_jet(x, weights, biases)
    gc.collect()
    torch.testing.assert_close(gradients(results, weights), kept)


def test_an_operand_that_has_changed_since_is_noticed():
    weights, biases = parameters()
    u = nf.mlp_jet(draw(5, 2), weights, biases).u_ddot
    with torch.no_grad():
        weights[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        u.sum().backward()


def test_transformations_go_the_plain_way():
    weights, biases = parameters()
    x = draw(5, 2)
    theirs = nested(x, weights, biases)
    found = torch.func.vmap(lambda p: nf.mlp_jet(p[None], weights, biases).u_ddot[:, 0])(x)
    torch.testing.assert_close(found.movedim(1, 0), theirs[2])

    def loss(w):
        return nf.mlp_jet(x, [w, *weights[1:]], biases).u_ddot.square().sum()

    (wanted,) = grad(theirs[2].square().sum(), weights[0])
    torch.testing.assert_close(torch.func.grad(loss)(weights[0]), wanted)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weights[0].detach(), torch.ones_like(weights[0]))
        dot = forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(dot, wanted.sum())


@pytest.mark.long
@pytest.mark.parametrize(
    "second", [None, [[1.0, 1.0]], np.ones((1, 2))], ids=["pure", "list", "array"]
)
def test_a_program_has_no_break_and_the_same_gradients(second, monkeypatch):
    weights, biases = parameters()
    x, kept = draw(5, 2), []

    def loss(x, weights, biases):
        u, first, bent = nf.mlp_jet(x, weights, biases, second=second)
        return (bent**2).sum() + (u * first).sum()

    monkeypatch.setattr(
        saved, "kept_of", lambda y, own=saved.kept_of: kept.append(own(y)) or kept[-1]
    )
    operands = x, *weights, *biases
    compiled = torch.compile(loss, fullgraph=True)(x, weights, biases)
    torch.testing.assert_close(compiled, loss(x, weights, biases))
    found = grad(compiled, operands)
    assert kept
    assert kept[0] is not None
    torch.testing.assert_close(found, grad(loss(x, weights, biases), operands))


@pytest.mark.long
def test_a_program_of_a_layer_has_no_break():
    shapes = (4, 3), (3, 2), (2,), (3, 4, 3)
    operands = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]

    def loss(*x):
        return sum(y.square().sum() for y in nf.matmul_bias_activation_jet(*x[:3], "silu", x[3]))

    compiled = torch.compile(loss, fullgraph=True)
    torch.testing.assert_close(grad(compiled(*operands), operands), grad(loss(*operands), operands))


def test_the_backward_of_tensors_is_differentiable():
    weights, biases = parameters()
    x = draw(3, 2, moves=False)

    def call(g, *weights):
        found = nf.mlp_jet_bwd(g, None, None, x, weights, [y.detach() for y in biases])
        return tuple(found.d_weights)

    assert gradcheck(call, (draw(3, 1, seed=7), *weights))


def test_tensors_without_gradients_may_keep_and_give_back():
    weights, biases = ([y.detach() for y in group] for group in parameters())
    x = draw(5, 2, moves=False)
    results, kept = nf.mlp_jet(x, weights, biases, keep=True)
    found = nf.mlp_jet_bwd(*cotangents(results), x, weights, biases, kept=kept)
    plain = nf.mlp_jet_bwd(*cotangents(results), x, weights, biases)
    torch.testing.assert_close(found.d_weights, plain.d_weights)
    assert found.d_x is None
    arrays = [[y.numpy() for y in group] for group in (weights, biases)]
    wanted = nf.mlp_jet(x.numpy(), *arrays)
    np.testing.assert_array_equal(results.u_ddot.numpy(), wanted.u_ddot)


def test_bfloat16_under_autocast_is_bfloat16():
    weights, biases = parameters(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = adapter.mlp_jet(draw(5, 2, dtype=torch.float32), weights, biases)
    assert {y.dtype for y in found} == {torch.bfloat16}
    found.u_ddot.sum().backward()
    assert weights[0].grad.dtype == torch.float32


def test_bad_calls_are_refused_before_anything_is_computed():
    weights, biases = parameters()
    x = draw(5, 2)
    with pytest.raises(TypeError, match=r"weights\[1\] float32"):
        nf.mlp_jet(x, [weights[0], weights[1].float(), weights[2]], biases)
    with pytest.raises(TypeError, match=r"weights\[0\] must be a torch.Tensor"):
        nf.mlp_jet(x, [y.detach().numpy() for y in weights], biases)
    with pytest.raises(ValueError, match="keep must be False"):
        nf.mlp_jet(x, weights, biases, keep=True)
    with pytest.raises(ValueError, match="out must be None"):
        nf.mlp_jet(x, weights, biases, out=(None, None, None))
    with pytest.raises(ValueError, match=r"weights\[1\] must have shape"):
        nf.mlp_jet(x, [weights[0], *weights[::2]], biases)


@nf.epilogue(name="formula of the tests of jets")
def formula(z, shift, scale, square):
    return nf.activations()["gelu"](z + shift) * scale + square * z * z


FORMULA = [
    draw(*s, seed=i) for i, s in enumerate([(4, 3), (3, 2), (2,), (4, 1), (3, 4, 3), (2, 4, 3)])
]


def of_formula(a, b, shift, scale, a_dot, a_ddot):
    operands = shift, scale, 0.5
    return tuple(nf.matmul_epilogue_jet(a, b, formula, operands, a_dot, a_ddot, weights=WEIGHTS))


def test_a_formula_is_differentiable_once_and_twice():
    assert gradcheck(of_formula, FORMULA)
    assert gradgradcheck(of_formula, FORMULA)


def test_a_program_of_a_formula_has_no_break():
    found = torch.compile(of_formula, fullgraph=True)(*FORMULA)
    wanted = of_formula(*FORMULA)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(gradients(found, FORMULA), gradients(wanted, FORMULA), strict=True):
        torch.testing.assert_close(x, y)


def test_the_backward_of_a_formula_is_the_cores():
    a, b, *operands, a_dot, a_ddot = [x.detach() for x in FORMULA]
    given = a, b, formula, (*operands, 0.5), a_dot, a_ddot
    grads = cotangents(of_formula(*FORMULA))
    found = nf.matmul_epilogue_jet_bwd(*grads, *given, weights=WEIGHTS)
    assert type(found.d_a) is torch.Tensor and found.d_operands[2].shape == ()
    arrays = a.numpy(), b.numpy(), formula, (*(x.numpy() for x in operands), 0.5)
    grads = [g.numpy() for g in grads]
    dots = a_dot.numpy(), a_ddot.numpy()
    wanted = nf.matmul_epilogue_jet_bwd(*grads, *arrays, *dots, weights=WEIGHTS)
    pairs = [(found.d_a, wanted.d_a), (found.d_a_ddot, wanted.d_a_ddot)]
    for x, y in (*pairs, *zip(found.d_operands, wanted.d_operands, strict=True)):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-13)
