"""PyTorch's autograd over tensors of a GPU: the derivatives of the CPU's, on their stream."""

from __future__ import annotations

import warnings

import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf

torch = pytest.importorskip("torch", reason="torch is not installed")
status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))
if SIMULATED or not torch.cuda.is_available():
    pytest.skip("PyTorch has no GPU here", allow_module_level=True)

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

from numfuse.adapters.torch import GatedLinear, Linear  # noqa: E402


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def draw(*shapes, dtype=torch.float64, needs=True):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to("cuda", dtype).requires_grad_(needs) for x in made]


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "tanh"])
def test_derivatives_of_first_and_second_order_are_those_of_differences(activation):
    a, b, bias, residual = draw((3, 2), (2, 4), (4,), (3, 4))
    gate, up = draw((3, 4), (3, 4))
    for call, operands in (
        (lambda *x: nf.matmul_bias_activation(*x, activation), (a, b, bias)),
        (nf.matmul_bias_residual, (a, b, bias, residual)),
        (lambda *x: nf.activation_mul(*x, activation), (gate, up)),
    ):
        out = call(*operands)
        assert out.is_cuda and out.requires_grad
        assert nf.last_call().backend == "cuda"
        assert gradcheck(call, operands)
        if activation != "relu":  # the differences step over its kink
            assert gradgradcheck(call, operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_are_those_of_the_direct_call(dtype):
    a, b, bias = draw((65, 40), (40, 72), (72,), dtype=dtype)
    (grad,) = draw((65, 72), dtype=dtype, needs=False)
    out = nf.matmul_bias_activation(a, b, bias, "gelu")
    out.backward(grad)
    with torch.no_grad():
        direct = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
        assert torch.equal(out, nf.matmul_bias_activation(a, b, bias, "gelu"))
    for x, wanted in zip((a, b, bias), direct, strict=True):
        assert torch.equal(x.grad, wanted)


def test_the_current_stream_is_the_one_that_computes():
    a, b, bias = draw((512, 512), (512, 512), (512,), dtype=torch.float32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = nf.matmul_bias_activation(a * 2, b, bias, "silu")
        out.sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    wanted = torch.nn.functional.silu((a * 2) @ b + bias)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        a.grad, torch.autograd.grad(wanted.sum(), a)[0], rtol=1e-3, atol=1e-3
    )


def test_modules_compiled_and_under_autocast():
    torch._dynamo.reset()
    model = torch.nn.Sequential(Linear(16, 32, activation="gelu"), GatedLinear(32, 8)).cuda()
    (x,) = draw((24, 16), dtype=torch.float32, needs=False)
    eager = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), eager)
    with torch.autocast("cuda", torch.bfloat16):
        half = model(x)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), eager, rtol=0.05, atol=0.05)
    half.float().sum().backward()
    assert all(p.grad is not None and p.grad.is_cuda for p in model.parameters())


def test_operands_on_two_devices_are_an_error():
    a, b = draw((3, 2), (2, 4))
    with pytest.raises(TypeError, match=r"on one device|must be on"):
        nf.matmul_bias_activation(a, b.detach().cpu())


# --- calls that come again -----------------------------------------------------------------------


def test_calls_that_come_again_are_known_and_right():
    from numfuse.backends.cuda import entry

    entry._KNOWN.clear()
    a, b, bias = draw((33, 40), (40, 40), (40,), dtype=torch.float32, needs=False)
    (grad,) = draw((33, 40), dtype=torch.float32, needs=False)
    for _ in range(6):  # at other addresses, and at the same ones
        x, y = a.clone(), torch.nn.Parameter(b.clone(), requires_grad=False)
        out = nf.matmul_bias_activation(x, y, bias, "tanh")
        torch.testing.assert_close(out, torch.tanh(x @ y + bias), rtol=1e-4, atol=1e-5)
        given = nf.matmul_bias_activation_bwd(grad, x, y, bias, "tanh")
        slope = grad * (1 - out * out)
        torch.testing.assert_close(given.d_a, slope @ y.T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(given.d_b, x.T @ slope, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(given.d_bias, slope.sum(0), rtol=1e-4, atol=1e-4)
        assert all(g.is_contiguous() and not g.requires_grad for g in given)
        torch.testing.assert_close(nf.silu_mul(x, x), torch.nn.functional.silu(x) * x)
    assert len(entry._KNOWN) == 3


def test_what_looks_like_a_known_call_is_looked_at_again():
    a, b = draw((16, 16), (16, 16), dtype=torch.float32, needs=False)
    wanted = nf.silu_mul(a, b)
    torch.testing.assert_close(nf.silu_mul(a, b), wanted, rtol=0, atol=0)
    leaf = a.clone().requires_grad_()
    assert nf.silu_mul(leaf, b).requires_grad
    with torch.no_grad():
        assert not nf.silu_mul(leaf, b).requires_grad
    with torch.autocast("cuda", torch.bfloat16):
        assert nf.silu_mul(a, b).dtype == torch.bfloat16
    torch.testing.assert_close(torch.vmap(nf.silu_mul)(a, b), wanted)
    negative = torch.complex(b, -a).conj().imag  # a with a bit that says: the other sign
    assert negative.is_neg()
    torch.testing.assert_close(nf.silu_mul(negative, b), nf.silu_mul(a.clone(), b))
    torch.testing.assert_close(nf.silu_mul(a.T, b), nf.silu_mul(a.T.contiguous(), b))
    out = torch.empty_like(a)
    assert nf.silu_mul(a, b, out=out) is out
    with pytest.raises(TypeError, match="strided"):
        nf.silu_mul(a.to_sparse(), b)
    with pytest.raises(TypeError, match="same dtype"):
        nf.silu_mul(a, b.double())

    class Own(torch.Tensor):
        pass

    assert type(nf.silu_mul(a, b)) is torch.Tensor
    own = nf.silu_mul(a.as_subclass(Own), b)
    torch.testing.assert_close(own.as_subclass(torch.Tensor), wanted)
