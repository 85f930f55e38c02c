"""PyTorch on the CPU: calls that come again, by the addresses of tensors."""

from __future__ import annotations

import numba
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numfuse as nf  # noqa: E402
from numfuse.adapters.torch import Linear, replayed  # noqa: E402


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
