"""PyTorch's autograd over tensors of a GPU: the derivatives of the CPU's, on their stream."""

from __future__ import annotations

import warnings

import pytest
from conftest import torch_on_a_gpu

import numfuse as nf

torch = torch_on_a_gpu()

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
        wanted, pre = nf.matmul_bias_activation(a, b, bias, "gelu", return_pre_activation=True)
        assert torch.equal(out, wanted)
        # a graph keeps the pre-activation in the operands' dtype
        x = grad, a, b, bias, "gelu"
        direct = nf.matmul_bias_activation_bwd(*x, pre_activation=pre.to(dtype))
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
    from numfuse.backends.cuda.call.record import REPLAY

    REPLAY.clear()
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
    assert REPLAY.statistics().entries == 3


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


# --- what PyTorch knows of a call ----------------------------------------------------------------


def test_what_is_written_through_out_is_noticed_by_a_backward():
    a, grad = draw((16, 16), (16, 16), dtype=torch.float32, needs=False)
    for write in (
        lambda y: nf.matmul_bias_activation(a, a, None, "gelu", out=y),
        lambda y: nf.silu_mul(y, a, out=y),
        lambda y: nf.matmul_bias_activation_bwd(grad, a, a, out=(None, y, None)),
    ):
        for _ in range(2):  # a new call and a known one
            x = torch.ones(16, 16, device="cuda").requires_grad_()
            y = torch.ones(16, 16, device="cuda")
            kept = (x * y[:]).sum()  # the backward reads y
            write(y)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept.backward()
            version = y._version
            with torch.inference_mode():
                write(y)
            assert y._version > version


def test_what_may_not_be_written_to_is_refused():
    (a,) = draw((16, 16), dtype=torch.float32, needs=False)
    leaf = torch.zeros_like(a).requires_grad_()
    with pytest.raises(ValueError, match="out must be None under PyTorch's autograd"):
        nf.silu_mul(a, a, out=leaf)
    with torch.inference_mode():
        inference = torch.zeros_like(a)
        assert nf.silu_mul(a, a, out=inference) is inference
        assert nf.silu_mul(a, a).is_inference()
        inference.zero_()
    assert not nf.silu_mul(a, a).is_inference()
    with pytest.raises(RuntimeError, match="out must be no inference tensor"):
        nf.silu_mul(a, a, out=inference)
    with pytest.raises(ValueError, match="a negative bit"):
        nf.silu_mul(a, a, out=torch._neg_view(torch.zeros_like(a)))
    assert not leaf.any() and not inference.any()


def test_operands_that_their_memory_does_not_hold():
    a, b = draw((16, 16), (16, 16), dtype=torch.float32, needs=False)
    negative = torch._neg_view(-a)
    zeros = torch._efficientzerotensor(16, 16, device="cuda")
    out = torch.empty_like(a)
    wanted = nf.matmul_bias_activation(a, b, None, "gelu")
    for _ in range(2):
        assert nf.matmul_bias_activation(negative, b, None, "gelu", out=out) is out
        assert torch.equal(out, wanted)
        assert torch.equal(nf.matmul_bias_activation(negative, b, None, "gelu"), wanted)
        assert not nf.silu_mul(a, zeros).any()
        assert not nf.silu_mul(a, zeros, out=out).any()


def test_a_known_call_is_traced_all_the_same():
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    a, b = draw((16, 16), (16, 16), dtype=torch.float32, needs=False)

    def call(a, b):
        return nf.matmul_bias_activation(a, b, None, "gelu")

    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    wanted = call(a, b)
    assert torch.equal(call(a, b), wanted)
    with Log():
        assert torch.equal(call(a, b), wanted)
    assert "numfuse.product.default" in seen
    for graph in (make_fx(call)(a, b), torch.jit.trace(call, (a, b))):
        assert torch.equal(graph(b, a), call(b, a))
    with torch.device("cpu"):  # a mode for what makes tensors out of nothing
        assert torch.equal(call(a, b), wanted)


def test_a_saved_pre_activation_and_an_activation_have_gradients():
    grad, a, b, bias = draw((3, 4), (3, 2), (2, 4), (4,), needs=False)
    pre = (a @ b + bias).requires_grad_()

    def backward(pre):
        return tuple(nf.matmul_bias_activation_bwd(grad, a, b, bias, "tanh", pre_activation=pre))

    assert all(x.requires_grad for x in backward(pre)) and gradcheck(backward, (pre,))
    with pytest.raises(ValueError, match="pre_activation must have the result's shape"):
        backward(pre[:1])
    gelu = nf.activations()["gelu"]
    out = gelu(pre)
    assert out.is_cuda and gradcheck(gelu, (pre,))
    torch.testing.assert_close(out, torch.nn.functional.gelu(pre, approximate="tanh"))
    torch.testing.assert_close(gelu(pre.detach()), out)


@pytest.mark.parametrize("activation", ["none", "tanh", "gelu"])
def test_forward_over_reverse_with_dual_tensors(activation):
    from torch.autograd import forward_ad

    a, b, a_dot = draw((3, 2), (2, 4), (3, 2), needs=False)
    functions = {
        "none": lambda x: x, "tanh": torch.tanh,
        "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }  # fmt: skip

    def found(layer):
        with forward_ad.dual_level():
            leaf = a.clone().requires_grad_()
            out = layer(forward_ad.make_dual(leaf, a_dot))
            (gradient,) = torch.autograd.grad((out**2).sum(), leaf)
            return forward_ad.unpack_dual(gradient)

    ours = found(lambda x: nf.matmul_bias_activation(x, b, None, activation))
    theirs = found(lambda x: functions[activation](x @ b))
    torch.testing.assert_close(ours.primal, theirs.primal)
    torch.testing.assert_close(ours.tangent, theirs.tangent)
