"""Epilogues, formulas element by element and gated layers of tensors: values and derivatives."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse import expr as ex  # noqa: E402
from numfuse.adapters import torch as adapter  # noqa: E402
from numfuse.adapters.torch import GatedLinear, eager  # noqa: E402

func, silu = torch.func, torch.nn.functional.silu


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@nf.epilogue
def scaled(z, bias, scale):
    return ex.tanh(z + bias) * scale


@nf.epilogue
def two_products(z, w, x):
    return nf.activations()["gelu"](z) * w + ex.exp(0.3 * x) * z


@nf.epilogue
def several(x, y, c):
    return ex.sigmoid(x) * y * c, x * y * y


def gelu(z):
    return torch.nn.functional.gelu(z, approximate="tanh")


#: By name: ours, PyTorch's own, and the shapes of the operands.
CALLS = {
    "epilogue": (
        lambda a, b, bias, scale: nf.matmul_epilogue(a, b, scaled, bias, scale),
        lambda a, b, bias, scale: torch.tanh(a @ b + bias) * scale,
        ((5, 6), (6, 4), (4,), (5, 1)),
    ),
    "epilogue of two": (
        lambda a, b, c, x: nf.matmul_epilogue(a, (b, c), two_products, x),
        lambda a, b, c, x: gelu(a @ b) * (a @ c) + torch.exp(0.3 * x) * (a @ b),
        ((2, 3, 3), (3, 2), (3, 2), ()),
    ),
    "elementwise": (
        lambda x, y: nf.elementwise(several, x, y, 1.5)[0],
        lambda x, y: torch.sigmoid(x) * y * 1.5,
        ((5, 6), (5, 1)),
    ),
    "gated layer": (
        lambda *x: nf.matmul_activation_mul(*x),
        lambda a, b, c, d, e: silu(a @ b + d) * (a @ c + e),
        ((5, 6), (6, 4), (6, 4), (4,), (4,)),
    ),
    "gated layer without biases": (
        lambda *x: nf.matmul_activation_mul(*x, activation="tanh"),
        lambda a, b, c: torch.tanh(a @ b) * (a @ c),
        ((4, 3), (3, 2), (3, 2)),
    ),
}


def operands(name, dtype=torch.float64, gradient=True):
    shapes = CALLS[name][2]
    return [draw(*s, seed=i, dtype=dtype).requires_grad_(gradient) for i, s in enumerate(shapes)]


@pytest.fixture
def calls(monkeypatch):
    """The names of the core's operations that are run, and what is asked of each."""
    made, run = [], eager.run

    def watched(operation, given, activation, flags=(), needs=(), *rest, **named):
        made.append((operation.name, tuple(needs)))
        return run(operation, given, activation, flags, needs, *rest, **named)

    monkeypatch.setattr(eager, "run", watched)
    return made


# --- derivatives --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CALLS)
def test_two_orders_of_derivatives_and_batches_of_them(name):
    call, _, _ = CALLS[name]
    x = operands(name)
    assert gradcheck(call, x, check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(call, x)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_three_orders_are_those_of_torch(name, recompute):
    found = []
    for call in CALLS[name][:2]:
        x = operands(name)
        with adapter.recompute(recompute):
            last = call(*x)
        for _ in range(2):
            (last,) = torch.autograd.grad(last.square().sum(), x[0], create_graph=True)
        found.append([last, *torch.autograd.grad(last.square().sum(), x)])
    torch.testing.assert_close(*found)


FUNC = {
    "grad": lambda f, x: func.grad(lambda *x: f(*x).square().sum(), tuple(range(len(x))))(*x),
    "jvp": lambda f, x: func.jvp(f, x, x),
    "jvp of jvp": lambda f, x: func.jvp(lambda *x: func.jvp(f, x, x)[1], x, x),
    "vmap": lambda f, x: func.vmap(f, (1, *[None] * (len(x) - 1)))(
        torch.stack([x[0], 2 * x[0]], 1), *x[1:]
    ),
    "vmap of grad": lambda f, x: func.vmap(
        func.grad(lambda *x: f(*x).square().sum(), tuple(range(len(x)))),
        (None, *[0] * (len(x) - 1)),
    )(x[0], *(torch.stack([y, 2 * y, y]) for y in x[1:])),
    "hessian": lambda f, x: func.hessian(lambda y: f(y, *x[1:]).sum())(x[0]),
    "jacrev of jacfwd": lambda f, x: func.jacrev(func.jacfwd(lambda y: f(x[0], y, *x[2:])))(x[1]),
    "grad of vjp": lambda f, x: func.grad(
        lambda y: func.vjp(f, y, *x[1:])[1](f(*x))[0].square().sum()
    )(x[0]),
}


@pytest.mark.parametrize("case", FUNC)
@pytest.mark.parametrize("name", CALLS)
def test_torch_func_gives_the_derivatives_of_torch(name, case):
    x = tuple(operands(name, gradient=False))
    ours, theirs, _ = CALLS[name]
    torch.testing.assert_close(FUNC[case](ours, x), FUNC[case](theirs, x))


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_is_one_call_where_no_gradient_is_asked_for(name, calls):
    ours, theirs, _ = CALLS[name]
    x = operands(name, gradient=False)
    dots = [draw(*y.shape, seed=10 + i) for i, y in enumerate(x)]
    found = []
    for call in (ours, theirs):
        with forward_ad.dual_level():
            duals = map(forward_ad.make_dual, x, dots)
            found.append(tuple(forward_ad.unpack_dual(call(*duals))))
    torch.testing.assert_close(*found)
    assert len(calls) == 1


def test_a_gradient_of_a_tangent_is_not_lost():
    found = []
    name = "gated layer without biases"
    for call in CALLS[name][:2]:
        x = operands(name)
        with forward_ad.dual_level():
            out = call(forward_ad.make_dual(x[0], torch.ones_like(x[0])), *x[1:])
            dot = forward_ad.unpack_dual(out).tangent
            found.append(torch.autograd.grad(dot.square().sum(), x))
    torch.testing.assert_close(*found)


def test_a_step_is_one_operation_forward_and_one_backward(calls):
    for name in CALLS:
        x = operands(name)
        x[1].requires_grad_(False)
        calls.clear()
        CALLS[name][0](*x).sum().backward()
        (forward, _), (backward, needs) = calls
        assert backward == f"{forward}_bwd"
        assert len(needs) == len(x) - 1
        assert x[1].grad is None


def test_a_gradient_that_nobody_asks_for_is_not_made(calls, monkeypatch):
    monkeypatch.setattr(eager, "_SMALL_PRODUCT", 0)
    x = operands("gated layer")
    out = CALLS["gated layer"][0](*x)
    torch.autograd.grad(out.sum(), x[2])
    assert calls[1:] == [("matmul_activation_mul_bwd", ("b_1",))]


def test_what_a_gated_layer_keeps_and_recomputes():
    layer = GatedLinear(6, 4, dtype=torch.bfloat16)
    x = draw(5, 6, dtype=torch.bfloat16)
    for recompute, count in ((False, 2), (True, 0)):
        layer.recompute, kept = recompute, []
        with torch.autograd.graph.saved_tensors_hooks(lambda y, k=kept: k.append(y) or y, id):
            out = layer(x)
        made = [y for y in kept if y is not None and y.shape == out.shape]
        assert len(made) == count
        assert all(y.dtype == torch.bfloat16 for y in made)


# --- the functions of derivatives ---------------------------------------------------------------
def bwd(g, a, b, c, d, e, **options):
    return nf.matmul_activation_mul_bwd(g, a, b, c, d, e, **options)


PUBLIC = {
    "gated bwd": bwd,
    "gated bwd of a saved pair": lambda g, a, b, c, d, e: bwd(
        g, a, b, c, d, e, pre_activation=(a @ b + d, a @ c + e)
    ),
    "gated jvp": lambda g, *x: nf.matmul_activation_mul_jvp(*x, *(y * y for y in x)),
    "gated double bwd": lambda g, *x: nf.matmul_activation_mul_double_bwd(*x, g, *x),
    "gated pre-activations": lambda g, *x: (lambda out, pre: (out, *pre))(
        *nf.matmul_activation_mul(*x, return_pre_activation=True)
    ),
    "epilogue bwd": lambda g, a, b, c, d, e: nf.matmul_epilogue_bwd(g, a, b, scaled, d, 0.5)[:2],
    "epilogue jvp": lambda g, a, b, c, d, e: nf.matmul_epilogue_jvp(
        a, b, scaled, (d, 0.5), a * a, b, (d, None)
    ),
    "epilogue pre-activations": lambda g, a, b, c, d, e: (lambda out, pre: (out, *pre))(
        *nf.matmul_epilogue(a, (b, c), two_products, d, return_pre_activation=True)
    ),
    "elementwise bwd": lambda g, a, b, c, d, e: nf.elementwise_bwd((g, None), several, g, d, 2.0)[
        :2
    ],
}


@pytest.mark.parametrize("name", PUBLIC)
def test_no_function_loses_a_gradient(name):
    call = PUBLIC[name]
    x = [draw(5, 4, seed=7).requires_grad_(), *operands("gated layer")]
    torch.testing.assert_close(call(*x), call(*(y.detach() for y in x)))
    assert gradcheck(lambda *x: tuple(y for y in call(*x) if y.requires_grad), x)


@pytest.mark.parametrize("name", CALLS)
def test_a_backend_may_be_asked_for(name):
    found = []
    for backend in ("cpu", "reference"):
        with nf.use_backend(backend):
            x = operands(name)
            out = CALLS[name][0](*x)
            (first,) = torch.autograd.grad(out.square().sum(), x[0], create_graph=True)
            found.append([out, first, *torch.autograd.grad(first.square().sum(), x)])
            assert nf.last_call().backend == backend
    torch.testing.assert_close(*found)


def test_a_number_has_a_gradient_in_the_accumulators_dtype():
    x, g = draw(5, 6, dtype=torch.float16), draw(5, 6, seed=1, dtype=torch.float16)
    for gradient in (False, True):
        found = nf.elementwise_bwd(g, lambda x, c: x * c, x.requires_grad_(gradient), 3.0)
        assert found[1].dtype == torch.float32 and found[1].ndim == 0
        torch.testing.assert_close(found[1], (g * x).sum().float(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found[0], 3 * g)


def test_results_may_be_given_and_be_operands():
    p, m = draw(9, dtype=torch.float32), draw(9, seed=1, dtype=torch.float32)
    g = draw(9, seed=2, dtype=torch.float32)

    @nf.epilogue
    def momentum(p, m, g, rate):
        moved = 0.9 * m + g
        return p - rate * moved, moved

    wanted = p - 0.1 * (0.9 * m + g), 0.9 * m + g
    p = torch.nn.Parameter(p)
    at, version = p.data_ptr(), p._version
    with torch.no_grad():
        found = nf.elementwise(momentum, p, m, g, 0.1, out=(p, m))
    assert found[0] is p and found[1] is m and p.data_ptr() == at
    assert p._version > version
    torch.testing.assert_close((p.detach(), m), wanted)
    with pytest.raises(ValueError, match="out must be None under PyTorch's autograd"):
        nf.elementwise(momentum, p, m, g, 0.1, out=(p, m))


def test_what_is_changed_in_place_is_noticed():
    x = operands("gated layer")
    out = nf.matmul_activation_mul(*x)
    with torch.no_grad():
        x[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_keeps_its_kind(dtype):
    unit = torch.finfo(dtype).eps
    for name, (ours, theirs, _) in CALLS.items():
        found = []
        for call, own in ((ours, dtype), (theirs, torch.float64)):
            x = [y.detach().to(dtype).to(own).requires_grad_() for y in operands(name)]
            out = call(*x)
            out.sum().backward()
            found.append([out.detach(), *(y.grad for y in x)])
            assert all(y.dtype == own for y in found[-1])
        for got, wanted in zip(*found, strict=True):
            # (the pair of a half type is rounded once, and so are its slopes)
            bound = 8 * unit * (1 + wanted.abs().max()) * 6
            assert (got.double() - wanted).abs().max() <= bound, name


def test_weights_that_are_halves_of_one_array_and_batches():
    a, both = draw(3, 5, 6), draw(6, 8, seed=1).requires_grad_()
    for halves in (lambda w: w.chunk(2, -1), lambda w: (w[:, ::2], w[:, 1::2])):
        found = []
        for call in CALLS["gated layer without biases"][:2]:
            out = call(a, *halves(both))
            found.append([out, *torch.autograd.grad(out.square().sum(), both)])
        torch.testing.assert_close(*found)


def test_wrong_arguments_are_refused():
    a, b = draw(5, 6), draw(6, 4)
    message = "must be a torch.Tensor as the other operands, got numpy.ndarray"
    for x, y in ((a, b.numpy()), (a.numpy(), b)):
        with pytest.raises(TypeError, match=message):
            nf.matmul_activation_mul(x, y, y)
    with pytest.raises(TypeError, match="must have the same dtype"):
        nf.elementwise(several, a, a.float(), 1.0)
    with pytest.raises(TypeError, match="must have the same dtype"):
        nf.elementwise(several, a.requires_grad_(), a.float(), 1.0)
    with pytest.raises(TypeError, match="float"):
        nf.elementwise(several, torch.ones(3, dtype=torch.int64), 2.0, 1.0)
    with pytest.raises(ValueError, match="broadcast"):
        nf.matmul_epilogue(a, b, scaled, b, 1.0)
    saved = (draw(5, 4).requires_grad_(), draw(5, 4))
    x = [y.detach() for y in operands("gated layer")]
    with pytest.raises(ValueError, match=r"pre_activation .* must have no gradient"):
        nf.matmul_activation_mul_double_bwd(*x, draw(5, 4), *x, pre_activation=saved)


def test_past_the_table_a_derivative_raises():
    corner = nf.activation(lambda z: z * ex.exp(-z), name="a curve of one order")
    x = operands("elementwise")[0]
    out = nf.elementwise(lambda x: corner(x), x)
    for _ in range(8):
        try:
            (out,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        except ValueError as error:
            assert "the table of activations ends" in str(error)
            return
    pytest.fail("derivatives without an end")


def test_autocast_takes_products_to_its_dtype():
    x = [y.float() for y in operands("gated layer")]
    with torch.autocast("cpu", torch.bfloat16):
        assert nf.matmul_activation_mul(*x).dtype == torch.bfloat16
        assert nf.matmul_epilogue(x[0], x[1], scaled, x[3], 2.0).dtype == torch.bfloat16
        assert nf.elementwise(several, x[0], x[0], 2.0)[0].dtype == torch.float32


# --- the module ---------------------------------------------------------------------------------
def test_a_hook_or_another_layer_inside_of_a_gated_layer_has_its_say():
    layer = GatedLinear(6, 4, dtype=torch.float64)
    x, seen = draw(5, 6), []
    wanted = layer(x)
    handle = layer.up.register_forward_hook(lambda module, given, out: seen.append(1) or 2 * out)
    torch.testing.assert_close(layer(x), 2 * wanted)
    handle.remove()
    torch.testing.assert_close(layer(x), wanted)
    assert len(seen) == 1
    layer.gate = torch.nn.Sequential(layer.gate, torch.nn.Tanh())
    torch.testing.assert_close(layer(x), silu(torch.tanh(layer.gate[0](x))) * layer.up(x))
    torch.nn.utils.parametrizations.weight_norm(layer.up)
    assert layer(x).shape == (5, 4)


def test_gradients_of_a_module_have_the_layout_of_its_weights():
    layer = GatedLinear(6, 40, bias=True)
    for x in (draw(7, 6, dtype=torch.float32), draw(2, 7, 6, dtype=torch.float32)):
        for _ in range(2):  # (a call that comes again is another way)
            layer.zero_grad()
            layer(x).sum().backward()
            for p in layer.parameters():
                assert p.grad.stride() == p.stride()


# --- programs -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CALLS)
def test_a_program_has_the_eager_gradients_and_no_break(name):
    torch._dynamo.reset()
    ours, _, _ = CALLS[name]
    found = []
    for call in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        x = operands(name, torch.float32)
        out = call(*x)
        out.square().sum().backward()
        with torch.no_grad():
            found.append([out, call(*x), *(y.grad for y in x)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("case", ["grad", "jvp", "vmap of grad", "hessian"])
@pytest.mark.parametrize("name", ["epilogue", "gated layer"])
def test_torch_func_in_a_program(name, case):
    torch._dynamo.reset()
    x = tuple(operands(name, gradient=False))
    ours, theirs, _ = CALLS[name]
    run = torch.compile(lambda *x: FUNC[case](ours, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(*x), FUNC[case](theirs, x))


def test_another_number_is_no_other_program():
    from torch._dynamo.utils import counters

    found = []
    for call in (
        lambda x, s: nf.elementwise(lambda z, s: ex.tanh(z) * s, x, s),
        lambda x, s: torch.tanh(x) * s,
    ):
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(call, fullgraph=True, backend="aot_eager")
        x = draw(5, 6)
        for s in (0.1, 0.2, 0.3, 0.7):
            torch.testing.assert_close(run(x, s), torch.tanh(x) * s)
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1]


def test_a_program_knows_a_formula_behind_many_others(monkeypatch):
    """Guards: the formulas that programs stand for are held within a bound."""
    monkeypatch.setattr("numfuse.adapters.torch.keys._HELD", 2)
    torch._dynamo.reset()
    x = draw(5, 6).requires_grad_()
    run = torch.compile(
        lambda x: nf.elementwise(lambda z, w: ex.tanh(z) * w, x, x), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    (wanted,) = torch.autograd.grad(run(x).sum(), x)
    for i in range(3):
        formula = nf.epilogue(lambda z: z * z + i, name=f"formula {i}")  # noqa: B023
        func.grad(lambda y, f=formula: nf.elementwise(f, y).sum())(x.detach())
    torch.testing.assert_close(torch.autograd.grad(run(x).sum(), x)[0], wanted)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_formula_keeps_its_gradient(strict):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(draw(6, 4))

        def forward(self, x):
            return nf.matmul_epilogue(x, self.weight, scaled, x[:, :4], 2.0)

    net, x, found = Net(), draw(5, 6), []
    for call in (net, torch.export.export(net, (x,), strict=strict).module()):
        out = call(x)
        (weight,) = call.parameters()
        found.append([out, *torch.autograd.grad(out.square().sum(), weight)])
    torch.testing.assert_close(*found)
