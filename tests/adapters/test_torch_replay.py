"""PyTorch on the CPU: calls that come again, by the addresses of tensors."""

from __future__ import annotations

import gc
import weakref

import numba
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numfuse as nf  # noqa: E402
from numfuse.adapters.torch import Linear, jets, replayed, replayed_networks, tensors  # noqa: E402


def _forms(rng, dtype):
    """Operands of one product: contiguous, turned, with steps, repeated and beginning anywhere."""

    def tensor(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    a, b, bias = tensor(6, 5), tensor(5, 7), tensor(7)
    yield "contiguous", (a, b, bias)
    yield "turned", (tensor(5, 6).t(), tensor(7, 5).t(), bias)
    yield "steps", (tensor(12, 10)[::2, ::2], tensor(5, 14)[:, ::2], tensor(14)[::2])
    yield "repeated", (tensor(1, 5).expand(6, 5), b, tensor(1).expand(7))
    yield "one row", (tensor(1, 5), b, bias)
    yield "batch", (tensor(2, 6, 5), b, bias)
    yield "vector", (tensor(5), b, bias)
    if dtype is torch.float64:
        yield "negative", (torch.imag(torch.conj(torch.complex(a, a))), b, bias)
    if dtype is torch.float32:
        raw = torch.zeros(6 * 5 * 4 + 1, dtype=torch.uint8)[1:]
        odd = torch.frombuffer(memoryview(raw.numpy()), dtype=dtype).reshape(6, 5)
        yield "unaligned", (odd.copy_(a), b, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_call_that_comes_again_gives_what_it_gave(dtype, monkeypatch):
    """Guards: what is repeated by addresses is the call that was recorded of arrays."""
    rng = np.random.default_rng(5)
    for name, (a, b, bias) in _forms(rng, dtype):
        taken = []

        def run(*x, real=replayed.run, taken=taken):
            taken.append(real(*x))
            return taken[-1]

        monkeypatch.setattr(replayed, "run", run)
        with torch.no_grad():
            found = [nf.matmul_bias_activation(a, b, bias, "gelu") for _ in range(3)]
            grad = torch.from_numpy(rng.standard_normal(found[0].shape)).to(dtype)
            backs = [nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu") for _ in range(3)]
            gates = [nf.activation_mul(a, a, "silu") for _ in range(3)]
        monkeypatch.undo()
        assert (taken[-1] is None) == (name in ("negative", "unaligned")), name
        for several in (found, gates):
            assert all(torch.equal(x, several[0]) for x in several), name
            assert all(x.dtype is dtype for x in several)
        for again in backs[1:]:
            assert all(torch.equal(x, y) for x, y in zip(again, backs[0], strict=True)), name
        wanted = nf.matmul_bias_activation(
            *(x.resolve_neg().double().numpy() for x in (a, b, bias)), "gelu"
        )
        bound = 2e-2 if dtype is torch.bfloat16 else 1e-5
        assert np.abs(found[-1].double().numpy() - wanted).max() <= bound * np.abs(wanted).max()


def test_a_layer_that_comes_again_has_gradients_of_its_own_memory():
    """Guards: the gradient of a weight that is given transposed lies as the weight does."""
    layer = Linear(5, 7, activation="gelu", dtype=torch.float64)
    plain = torch.nn.Linear(5, 7, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    rng = np.random.default_rng(6)
    for _ in range(4):
        x, g = (torch.from_numpy(rng.standard_normal((6, n))) for n in (5, 7))
        layer.zero_grad()
        plain.zero_grad()
        layer(x).backward(g)
        torch.nn.functional.gelu(plain(x), approximate="tanh").backward(g)
        assert layer.weight.grad.is_contiguous()
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
        kept = layer.weight.grad
    layer.zero_grad()
    layer(x).backward(g)
    assert layer.weight.grad is not kept


def test_a_large_call_comes_again_by_addresses(monkeypatch):
    """Guards: what depends on the number of threads is found by it, forward and backward."""
    taken = []

    def run(*x, real=replayed.run):
        taken.append(real(*x))
        return taken[-1]

    monkeypatch.setattr(replayed, "run", run)
    layer, x = Linear(300, 700, activation="gelu"), torch.randn(64, 300)
    for again in range(3):
        taken.clear()
        layer(x).sum().backward()
        assert len(taken) == 2
        assert again == 0 or all(made is not None for made in taken)


def test_a_call_that_comes_again_knows_a_definition_and_the_threads_of_now():
    layer = Linear(5, 7)
    x = torch.randn(6, 5)
    with torch.no_grad():
        z = torch.nn.functional.linear(x, layer.weight, layer.bias)
        for function in (lambda z: z * z, lambda z: z * z * z):
            nf.activation(function, name="comes again")
            for _ in range(3):
                found = nf.matmul_bias_activation(x, layer.weight.t(), layer.bias, "comes again")
                torch.testing.assert_close(found, function(z), rtol=1e-4, atol=1e-5)
        large = torch.randn(700, 300), torch.randn(300, 700)
        wanted = large[0].double() @ large[1].double()
        for threads in (1, 2, 1):
            numba.set_num_threads(threads)
            for _ in range(2):
                found = nf.matmul_bias_activation(*large)
                torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)


# --- networks -------------------------------------------------------------------------------------
def _network(dtype, seed=7):
    torch.manual_seed(seed)
    x = torch.randn(9, 5, dtype=dtype)
    weights = [torch.randn(5, 6, dtype=dtype), torch.randn(3, 6, dtype=dtype).t()]
    biases = [torch.randn(6, dtype=dtype), None]
    for y in (*weights, biases[0]):
        y.requires_grad_()
    return x, weights, biases


def _networks(dtype):
    """Networks of tensors of any strides, lists, and memory that has not its values."""
    x, weights, biases = _network(dtype)
    yield "lists", (x, weights, biases)
    yield "no biases", (x, tuple(weights), None)
    yield "steps", (torch.randn(18, 10, dtype=dtype)[::2, ::2], weights, tuple(biases))
    yield "repeated", (torch.randn(1, 5, dtype=dtype).expand(9, 5), weights, biases)
    parameters = torch.nn.ParameterList([y.detach().clone() for y in weights])
    yield "parameters", (x.clone().requires_grad_(), parameters, biases)
    if dtype is torch.float64:
        yield "negative", (torch.imag(torch.conj(torch.complex(x, x))), weights, biases)
    if dtype is torch.float32:
        raw = torch.zeros(x.numel() * 4 + 1, dtype=torch.uint8)[1:]
        odd = torch.frombuffer(memoryview(raw.numpy()), dtype=dtype).reshape(x.shape)
        yield "unaligned", (odd.copy_(x), weights, biases)


def _looked_at(monkeypatch, module):
    """What is looked at as arrays, as no known call is."""
    seen = []

    def arrays_over(x):
        seen.append(x)
        return tensors.arrays_over(x)

    monkeypatch.setattr(module, "arrays_over", arrays_over)
    return seen


def _moving(given):
    every = given[0], *given[1], *(given[2] or ())
    return [y for y in every if y is not None and y.requires_grad]


def _in_numpy(given):
    """The operands as arrays of float64."""
    a, *weights = [y.detach().resolve_neg().double().numpy() for y in (given[0], *given[1])]
    biases = given[2] and [y if y is None else y.detach().double().numpy() for y in given[2]]
    return a, weights, biases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_network_that_comes_again_gives_what_it_gave(dtype, monkeypatch):
    """Guards: what is repeated by addresses is the call that was recorded of arrays."""
    for name, given in _networks(dtype):
        seen = _looked_at(monkeypatch, replayed_networks)
        asked = _moving(given)
        results = []
        for turn in range(3):
            seen.clear()
            out = nf.mlp(*given, "gelu", final="tanh")
            assert out.dtype is dtype and out.is_contiguous()
            with torch.no_grad():
                value = nf.mlp(*given, "gelu", final="tanh")
            # (a cotangent that repeats a number, and one that does not)
            found = torch.autograd.grad(out, asked, torch.ones(()).to(dtype).expand(out.shape))
            more = torch.autograd.grad(nf.mlp(*given, "gelu", final="tanh").square().sum(), asked)
            results.append((out, value, *found, *more))
            assert torch.equal(out, value), name
            assert turn < 2 or bool(seen) == (name in ("negative", "unaligned")), name
        for again in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(again, results[0], strict=True)), name
        a, weights, biases = _in_numpy(given)
        wanted = nf.mlp(a, weights, biases, "gelu", final="tanh", backend="reference")
        assert np.abs(results[0][0].detach().double().numpy() - wanted).max() <= 1e-5


def test_a_network_is_known_by_its_activations_and_its_backend():
    x, weights, biases = _network(torch.float64)
    expr = nf.expr
    for factor in (2.0, 3.0):  # the name of another function now
        act = nf.activation(lambda z, factor=factor: expr.tanh(factor * z), name="again")
        for _ in range(3):
            found = nf.mlp(x, weights, biases, act)
        hidden = torch.tanh(factor * (x @ weights[0] + biases[0]))
        torch.testing.assert_close(found, hidden @ weights[1])
    for _ in range(3):
        with nf.use_backend("reference"):
            nf.mlp(x, weights, biases, "tanh")
            assert nf.last_call().backend == "reference"
        nf.mlp(x, weights, biases, "tanh")
        assert nf.last_call().backend == "cpu"


def test_what_knows_a_network_does_not_hold_its_activation():
    x, weights, biases = _network(torch.float32)
    expr = nf.expr
    act = nf.activation(lambda z: z * expr.exp(-z * z), name="dropped")
    for _ in range(3):
        nf.mlp(x, weights, biases, act).sum().backward()
    gone = weakref.ref(act)
    nf.activation(lambda z: z, name="dropped")  # (a name holds its activation)
    del act
    gc.collect()
    assert gone() is None


def test_a_network_that_does_not_fit_is_told_so_each_time():
    x, weights, biases = _network(torch.float32)
    nf.mlp(x, weights, biases, "tanh")
    for _ in range(2):
        with pytest.raises(ValueError, match="activation must be one of"):
            nf.mlp(x, weights, biases, "tanhh")
        with pytest.raises(ValueError, match="got"):
            nf.mlp(x[:, :4], weights, biases, "tanh")
        with pytest.raises(TypeError, match="dtype"):
            nf.mlp(x.double(), weights, biases, "tanh")
    out = nf.mlp(x, weights, biases, "tanh")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        with torch.no_grad():
            weights[0].add_(1)
        out.sum().backward()


def test_a_gradient_by_points_makes_none_by_weights(monkeypatch):
    """Guards: where PyTorch's engine asks for d_x alone, as a loss with derivatives does."""
    x, weights, biases = _network(torch.float64)
    points = x.repeat(4000, 1).requires_grad_()
    asked = []

    def backward(known, call, g, given, needs, kept, real=replayed_networks.KnownNetwork.backward):
        asked.append(list(needs))
        return real(known, call, g, given, needs, kept)

    monkeypatch.setattr(replayed_networks.KnownNetwork, "backward", backward)
    for _ in range(2):
        (found,) = torch.autograd.grad(nf.mlp(points, weights, biases, "tanh").sum(), points)
        torch.autograd.grad(nf.mlp(points, weights, biases, "tanh").sum(), [weights[1]])
    assert asked == 2 * [[True, False, False, False, False], [False, False, True, False, False]]
    h = torch.tanh(points @ weights[0] + biases[0])
    torch.testing.assert_close(found, ((1 - h * h) * weights[1].sum(1)) @ weights[0].t())


@pytest.mark.parametrize("unpack", [
    lambda y: y, lambda y: y.clone(), lambda y: y.double() if y.ndim == 1 else y,
    lambda y: torch.stack((y, y), -1)[..., 0],
], ids=["same", "copy", "wider", "steps"])  # fmt: skip
def test_what_a_small_network_keeps_is_a_saved_tensor(unpack):
    """Guards: PyTorch may move what it saves; where it is another tensor, it is made again."""
    torch.manual_seed(0)
    x = torch.randn(40, 24)
    weights = [torch.randn(24, 48, requires_grad=True), torch.randn(48, 3, requires_grad=True)]
    seen = []

    def pack(y):
        seen.append(y)
        return y

    def stays(y):
        return unpack(y) if y.ndim == 1 else y

    for _ in range(3):
        wanted = torch.autograd.grad(nf.mlp(x, weights, None).sin().sum(), weights)
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, stays):
            out = nf.mlp(x, weights, None)
        found = torch.autograd.grad(out.sin().sum(), weights)
        for y, z in zip(found, wanted, strict=True):
            torch.testing.assert_close(y, z)
    kept = [y for y in seen if y.ndim == 1]
    assert len(kept) == 1 and kept[0].dtype is x.dtype
    exact = [w.detach().double().requires_grad_() for w in weights]
    out = torch.tanh(x.double() @ exact[0]) @ exact[1]
    for y, z in zip(found, torch.autograd.grad(out.sin().sum(), exact), strict=True):
        torch.testing.assert_close(y.double(), z, rtol=1e-4, atol=1e-4)


# --- jets -----------------------------------------------------------------------------------------
SECOND = np.array([[1.0, 0.5, *[0.0] * 14]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_jet_that_comes_again_gives_what_it_gave(dtype, monkeypatch):
    """Guards: what is repeated by addresses is the call that was recorded of arrays."""
    for name, given in _networks(dtype):
        seen = _looked_at(monkeypatch, jets)
        width = given[0].shape[-1]
        how = {"directions": np.eye(width)[:3], "second": SECOND[:, :3]}
        asked = _moving(given)
        results = []
        for turn in range(3):
            seen.clear()
            found = nf.mlp_jet(*given, "gelu", **how)
            with torch.no_grad():
                values = nf.mlp_jet(*given, "gelu", **how)
            # (cotangents that are there, one that is not, and one that repeats a number)
            loss = found.u.square().sum() + (found.u_dot[0] * found.u_dot[1]).sum()
            first = torch.autograd.grad(loss, asked, retain_graph=True)
            more = torch.autograd.grad(found.u_ddot.sum(), asked, allow_unused=True)
            more = [torch.zeros(()) if y is None else y for y in more]
            results.append((*found, *values, *first, *more))
            assert all(torch.equal(x, y) for x, y in zip(found, values, strict=True)), name
            assert turn < 2 or bool(seen) == (name in ("negative", "unaligned")), name
        for again in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(again, results[0], strict=True)), name
        a, weights, biases = _in_numpy(given)
        wanted = nf.mlp_jet(a, weights, biases, "gelu", backend="reference", **how)
        for x, y in zip(results[0], wanted, strict=False):
            assert np.abs(x.detach().double().numpy() - y).max() <= 1e-4 * max(1, np.abs(y).max())


def test_a_jet_is_known_by_all_that_it_depends_on():
    x, weights, biases = _network(torch.float64)
    calls = [
        {}, {"second": SECOND[:, : x.shape[1]]}, {"second": 2 * SECOND[:, : x.shape[1]]},
        {"second": SECOND[:, : x.shape[1]].tolist()}, {"directions": np.eye(x.shape[1])[1:]},
        {"guard": False}, {"final": "tanh"}, {"backend": "reference"},
    ]  # fmt: skip
    wanted = [nf.mlp_jet(x.detach().numpy(), [w.detach().numpy() for w in weights],
                         [y if y is None else y.detach().numpy() for y in biases], "tanh", **how)
              for how in calls]  # fmt: skip
    for _ in range(3):
        for how, exact in zip(calls, wanted, strict=True):
            found = nf.mlp_jet(x, weights, biases, "tanh", **how)
            for y, z in zip(found, exact, strict=True):
                np.testing.assert_allclose(y.detach().numpy(), z, rtol=1e-12, atol=1e-13)
            assert nf.last_call().backend == how.get("backend", "cpu")
    kept, changed = calls[1]["second"].copy(), calls[1]["second"]
    changed[0, 0] = 3.0  # (a constant is known by what it holds)
    found = nf.mlp_jet(x, weights, biases, "tanh", second=changed)
    assert not torch.equal(found.u_ddot, nf.mlp_jet(x, weights, biases, second=kept).u_ddot)


def test_derivatives_of_a_known_jet_are_differentiable_and_refused_as_ever():
    x, weights, biases = _network(torch.float64)
    how = {"second": SECOND[:, : x.shape[1]]}

    def call(x, *own):
        return tuple(nf.mlp_jet(x, own[:2], own[2:], **how))

    small = x.detach()[:2].clone().requires_grad_()
    own = [*weights, biases[0], torch.ones(3, dtype=torch.float64, requires_grad=True)]
    for _ in range(3):
        call(small, *own)
    assert torch.autograd.gradcheck(call, (small, *own))
    assert torch.autograd.gradgradcheck(call, (small, *own))
    for _ in range(2):
        with pytest.raises(TypeError, match="dtype"):
            nf.mlp_jet(x.float(), weights, biases)
        with pytest.raises(TypeError, match="dtype"):
            nf.mlp_jet(x.int(), weights, biases)
        with pytest.raises(ValueError, match="second"):
            nf.mlp_jet(x, weights, biases, second=np.ones((1, 9)))
    out = nf.mlp_jet(x, weights, biases, **how).u
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        with torch.no_grad():
            weights[0].add_(1)
        out.sum().backward()
