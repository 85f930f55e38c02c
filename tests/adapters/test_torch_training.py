"""PyTorch's training steps: what a layer keeps, makes and is asked for, beside torch.nn.Linear."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse.adapters import torch as adapter  # noqa: E402
from numfuse.adapters.torch import eager  # noqa: E402

FUNCTIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Peer(torch.nn.Module):
    """torch.nn.Linear and an activation, over the parameters of one of ours."""

    def __init__(self, fused):
        super().__init__()
        self.weight, self.bias, self.name = fused.weight, fused.bias, fused.activation.name

    def forward(self, x):
        return FUNCTIONS[self.name](torch.nn.functional.linear(x, self.weight, self.bias))


def pair(activation="gelu", dtype=torch.float64, shape=(6, 4)):
    fused = adapter.Linear(*shape, activation=activation, dtype=dtype)
    return fused, Peer(fused)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the core that are made: (operation, activation, needs, M x K x N)."""
    made, run = [], eager.run

    def watched(operation, operands, activation, flags=(), needs=(), *rest, **named):
        name = getattr(activation, "name", activation)
        made.append((operation.name, name, tuple(needs)))
        return run(operation, operands, activation, flags, needs, *rest, **named)

    monkeypatch.setattr(eager, "run", watched)
    monkeypatch.setattr(eager, "_SMALL_PRODUCT", 0)
    monkeypatch.setattr(eager, "_SMALL_GATE", 0)
    return made


# --- what is kept -------------------------------------------------------------------------------
def kept_by(call):
    """Bytes that a forward keeps beside its operands and its result."""
    kept = []

    def pack(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    return [x for x in kept if x.data_ptr() != out.data_ptr() and x.shape == out.shape]


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_layer_keeps_its_pre_activation_only_where_the_result_does_not_do(activation, dtype):
    fused, _ = pair(activation, dtype)
    x = draw(5, 6, dtype=torch.float64).to(dtype)
    kept = kept_by(lambda: fused(x))
    narrow = dtype is torch.bfloat16 and activation in ("tanh", "sigmoid")
    assert len(kept) == (activation in ("gelu", "silu") or narrow)
    assert all(x.dtype == dtype for x in kept)
    fused.recompute = True
    assert not kept_by(lambda: fused(x))
    fused.recompute = False
    with adapter.recompute():
        assert not kept_by(lambda: fused(x))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gradients_of_two_orders_are_those_of_torch(activation, recompute):
    fused, peer = pair(activation)
    fused.recompute = recompute
    x = draw(2, 5, 6).requires_grad_()
    found = []
    for net in (fused, peer):
        loss = (net(x) ** 3).sum()
        first = torch.autograd.grad(loss, (x, net.weight, net.bias), create_graph=True)
        total = sum((g**2).sum() for g in first)
        second = torch.autograd.grad(total, (x, net.weight, net.bias), create_graph=True)
        third = torch.autograd.grad(sum((g**2).sum() for g in second), (x, net.weight, net.bias))
        found.append((*first, *second, *third))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_pre_activation_beside_the_result_costs_no_product(calls):
    a, b, bias = draw(5, 6).requires_grad_(), draw(6, 4, seed=1), draw(4, seed=2)
    for activation in ("gelu", "tanh", "none"):
        calls.clear()
        out, pre = nf.matmul_bias_activation(a, b, bias, activation, return_pre_activation=True)
        assert len(calls) == 1
        (ours,) = torch.autograd.grad((out * pre).sum(), a)
        z = a @ b + bias
        (theirs,) = torch.autograd.grad((FUNCTIONS[activation](z) * z).sum(), a)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(pre, z)


def test_a_derivative_that_is_not_finite_counts_as_0_at_the_first_and_second_order():
    root = nf.activation(lambda x: nf.expr.sqrt(x), name="root with an infinite slope")
    a = torch.tensor([[0.0, 4.0]], dtype=torch.float64, requires_grad=True)
    out = nf.matmul_bias_activation(a, torch.eye(2, dtype=torch.float64), None, root)
    for graph in (True, False):
        (slope,) = torch.autograd.grad(out.sum(), a, create_graph=graph, retain_graph=True)
        assert slope.tolist() == [[0.0, 0.25]]
    (slope,) = torch.autograd.grad(out.sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), a)
    torch.testing.assert_close(second[0, 1].item(), -1 / 32)
    assert second[0, 0] == 0


def test_a_cotangent_that_is_not_there_is_zero_where_nothing_is_differentiated():
    a, b, bias, grad, v = draw(5, 6), draw(6, 4, seed=1), draw(4, seed=2), draw(5, 4), draw(6, 4)
    found = nf.matmul_bias_activation_double_bwd(None, v, None, grad, a, b, bias, "tanh")
    u, w = torch.zeros_like(a), torch.zeros_like(bias)
    wanted = nf.matmul_bias_activation_double_bwd(u, v, w, grad, a, b, bias, "tanh")
    torch.testing.assert_close(tuple(found), tuple(wanted))


# --- what is asked for --------------------------------------------------------------------------
def test_gradients_that_nobody_asks_for_are_not_made(calls):
    first, second = pair("tanh")[0], pair("gelu", shape=(4, 3))[0]
    x = draw(5, 6).requires_grad_()

    def backward_needs():
        found = [needs for name, _, needs in calls if name == "matmul_bias_activation_bwd"]
        calls.clear()
        return found

    out = second(first(x)).sum()
    backward_needs()
    torch.autograd.grad(out, x, retain_graph=True)
    assert backward_needs() == [("a",), ("a",)]
    torch.autograd.grad(out, first.weight, retain_graph=True)
    assert backward_needs() == [("a",), ("b",)]
    torch.autograd.grad(out, (second.bias, x), retain_graph=True)
    assert backward_needs() == [("a", "bias"), ("a",)]
    out.backward(inputs=[second.weight], retain_graph=True)
    assert backward_needs() == [("b",)]
    out.backward()
    assert backward_needs() == [("a", "b", "bias")] * 2
    first.weight.requires_grad_(False)
    second(first(x.detach())).sum().backward()
    assert backward_needs() == [("a", "b", "bias"), ("bias",)]


def test_a_nested_gradient_makes_no_gradient_of_the_weights(calls):
    layer = pair("tanh")[0]
    x = draw(5, 6).requires_grad_()
    (u_x,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    torch.autograd.grad(u_x.sum(), x, create_graph=True)
    products = [name for name, _, _ in calls if name.startswith("matmul")]
    # the layer; its gradient; and of that one the other way, and the layer's again
    assert products == ["matmul_bias_activation"] * 4


def test_the_graph_of_a_second_order_is_made_where_it_is_asked_for():
    layer, x = pair("gelu")[0], draw(5, 6).requires_grad_()
    out = layer(x).sum()
    for x_grad in torch.autograd.grad(out, (x, layer.weight), retain_graph=True):
        assert x_grad.grad_fn is None and not x_grad.requires_grad
    for x_grad in torch.autograd.grad(out, (x, layer.weight), create_graph=True):
        assert x_grad.requires_grad


@pytest.mark.parametrize("shape", [(6, 4), (300, 200)])
def test_gradients_of_weights_have_the_weights_layout_and_accumulate_in_place(shape):
    layer, peer = pair("gelu", shape=shape)
    x, g = draw(2, 5, shape[0]).requires_grad_(), draw(2, 5, shape[1], seed=1)
    wanted = torch.autograd.grad(peer(x), (x, layer.weight, layer.bias), g)
    for recompute in (True, False):
        layer.recompute = recompute
        found = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), g)
        torch.testing.assert_close(found, wanted)
    x = x.detach()
    layer(x).sum().backward()
    once, place = layer.weight.grad.clone(), layer.weight.grad.data_ptr()
    assert layer.weight.grad.stride() == layer.weight.stride()
    layer(x).sum().backward()
    assert layer.weight.grad.data_ptr() == place
    torch.testing.assert_close(layer.weight.grad, 2 * once)


def test_a_graph_is_freed_by_its_backward():
    layer, x = pair("gelu")[0], draw(5, 6)
    out = layer(x)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


# --- as torch.nn.Linear -------------------------------------------------------------------------
@pytest.mark.parametrize("changed", ["weight", "input", "output"])
@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "gelu"])
def test_a_change_in_place_is_noticed_where_torch_notices_it(activation, changed):
    found = []
    for net in pair(activation):
        x = draw(5, 6).requires_grad_()
        h = x * 1
        out = net(h)
        with torch.no_grad():
            {"weight": net.weight, "input": h, "output": out}[changed].mul_(2)
        try:
            out.sum().backward()
            found.append("passes")
        except RuntimeError as error:
            found.append("modified by an inplace operation" in str(error))
    assert found[0] == found[1]


def test_the_result_of_a_plain_layer_may_be_changed_in_place():
    found = []
    for net in pair("none"):
        x = draw(5, 6).requires_grad_()
        out = net(x)
        out.mul_(3).relu_()
        found.append(torch.autograd.grad(out.sum(), (x, net.weight, net.bias)))
    torch.testing.assert_close(*found)


def test_hooks_are_called_as_those_of_torch():
    found = []
    for net in pair("gelu"):
        seen = []
        handles = [
            net.register_forward_hook(lambda m, x, y, s=seen: s.append(y.detach()) or y * 2),
            net.register_full_backward_hook(lambda m, gi, go, s=seen: s.extend((*gi, *go))),
            net.weight.register_hook(lambda g, s=seen: s.append(g) or g * 3),
            net.bias.register_post_accumulate_grad_hook(lambda p, s=seen: s.append(p.grad + 0)),
        ]
        x = draw(5, 6).requires_grad_()
        out = net(x)
        out.register_hook(lambda g, s=seen: s.append(g))
        net.weight.grad = net.bias.grad = None
        (out**2).sum().backward()
        seen += [x.grad, net.weight.grad, net.bias.grad]
        for handle in handles:
            handle.remove()
        found.append(sorted(seen, key=lambda t: (t.shape, t.flatten()[0].item())))
    assert len(found[0]) == 9
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_give_the_same_gradients(reentrant):
    layers = [pair("gelu")[0], pair("tanh", shape=(4, 3))[0]]
    x = draw(5, 6).requires_grad_()
    net = torch.nn.Sequential(*layers)
    wanted = torch.autograd.grad(net(x).sum(), (x, layers[0].weight))
    checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close((x.grad, layers[0].weight.grad), wanted)


def test_saved_tensors_may_be_kept_elsewhere():
    layer, x = pair("gelu")[0], draw(5, 6).requires_grad_()
    wanted = torch.autograd.grad(layer(x).sum(), (x, layer.weight))
    with torch.autograd.graph.save_on_cpu():
        out = layer(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (x, layer.weight)), wanted)


def test_autocast_with_a_scaler_trains_as_torch():
    found = []
    for net in pair("gelu", torch.float32):
        x, y = draw(64, 6, dtype=torch.float32), draw(64, 4, dtype=torch.float32, seed=1)
        net.weight.grad = net.bias.grad = None
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
            loss = ((out - y) ** 2).mean()
        assert out.dtype == torch.bfloat16
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert net.weight.grad.dtype == torch.float32
        found.append((net.weight.grad.clone(), net.bias.grad.clone()))
    torch.testing.assert_close(*found, rtol=5e-2, atol=5e-3)


def test_cotangents_may_be_batched_and_modes_see_a_backward():
    from torch.utils.flop_counter import FlopCounterMode

    layer, x = pair("gelu")[0], draw(5, 6).requires_grad_()
    out = layer(x)
    rows = torch.eye(20, dtype=torch.float64).reshape(20, 5, 4)
    (batched,) = torch.autograd.grad(out, x, rows, is_grads_batched=True, retain_graph=True)
    for row, found in zip(rows, batched, strict=True):
        torch.testing.assert_close(torch.autograd.grad(out, x, row, retain_graph=True)[0], found)
    (wanted,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_types_train_and_differentiate_twice(dtype):
    found = []
    fused, peer = pair("gelu", torch.float32)
    narrow = copy.deepcopy(fused).to(dtype)
    for net, kind in ((narrow, dtype), (peer, torch.float32)):
        x = draw(5, 6, dtype=torch.float32).to(kind).requires_grad_()
        (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        second = torch.autograd.grad((first**2).sum(), (x, net.weight))
        assert first.dtype == kind and all(y.dtype == kind for y in second)
        found.append([y.float() for y in (first, *second)])
    torch.testing.assert_close(*found, rtol=6e-2, atol=6e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_take_the_derivative_at_the_pre_activation_as_it_is_kept(dtype, compiled):
    """To first order, u max|f''| |pre| |f grad| more than of the sum itself; max|gelu''| is 0.8."""
    fused, _ = pair("gelu", dtype, (40, 24))
    call = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    x = (4 * draw(30, 40, dtype=torch.float32)).to(dtype).requires_grad_()
    g = draw(30, 24, dtype=torch.float32, seed=1).to(dtype)
    found = torch.autograd.grad(call(x), (x, fused.weight, fused.bias), g)
    left, weight, bias, g = (y.detach().double() for y in (x, fused.weight, fused.bias, g))
    pre = (left @ weight.t() + bias).requires_grad_()
    (slope,) = torch.autograd.grad(FUNCTIONS["gelu"](pre).sum(), pre)
    pre = pre.detach().abs()
    unit = torch.finfo(dtype).eps / 2
    once = unit * (0.8 * pre + slope.abs()) * g.abs()  # kept, and rounded before the products
    exact, error = slope * g, 1.02 * once + 1e-5 * g.abs()
    for got, wanted, bound in (
        (found[0], exact @ weight, error @ weight.abs()),
        (found[1], exact.t() @ left, error.t() @ left.abs()),
        (found[2], exact.sum(0), error.sum(0)),
    ):
        assert ((got.double() - wanted).abs() <= bound + unit * wanted.abs() + 1e-7).all()


def test_a_gated_layer_has_two_orders_of_derivatives():
    layer = adapter.GatedLinear(6, 4, dtype=torch.float64)
    x = draw(5, 6).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,)) and torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_forward_over_reverse_leaves_tangents_beside_gradients(activation):
    from torch.autograd import forward_ad

    if activation == "silu":
        pytest.skip("PyTorch has no forward mode of silu's backward")
    x, x_dot, found = draw(5, 6), draw(5, 6, seed=1), []
    for net in pair(activation):
        net.weight.grad = net.bias.grad = None
        with forward_ad.dual_level():
            (net(forward_ad.make_dual(x, x_dot)) ** 2).sum().backward()
            parts = [forward_ad.unpack_dual(p.grad) for p in (net.weight, net.bias)]
        found.append([x for part in parts for x in part])
    torch.testing.assert_close(*found)


def test_a_mapped_axis_goes_into_the_rows(monkeypatch):
    """Guards: torch.func over rows makes one product, not one of a row for each."""
    from numfuse.adapters.torch import operators

    shapes = []
    run = operators.CORE.matmul_bias_activation

    def watched(a, b, *rest, **options):
        shapes.append((a.shape, b.shape))
        return run(a, b, *rest, **options)

    monkeypatch.setattr(operators.CORE, "matmul_bias_activation", watched)
    x, w, bias, r = draw(7, 6), draw(6, 4, seed=1), draw(4, seed=2), draw(7, 4, seed=3)
    func, layer = torch.func, lambda x: nf.matmul_bias_activation(x, w, bias, "tanh")
    torch.testing.assert_close(torch.vmap(layer)(x), torch.tanh(x @ w + bias))
    assert shapes == [((7, 6), (6, 4))]
    shapes.clear()

    def loss(f):
        def squared(w):
            second = func.grad(lambda x: func.grad(lambda x: f(x, w).sum())(x)[0])
            return (torch.vmap(second)(x) ** 2).sum()

        return func.grad(squared)(w)

    ours = loss(lambda x, w: nf.matmul_bias_activation(x, w, bias, "tanh"))
    torch.testing.assert_close(ours, loss(lambda x, w: torch.tanh(x @ w + bias)))
    assert shapes and all(len(a) == 2 for a, _ in shapes)
    # residuals of the members; a column; members that are matrices; a bias of each member's own
    torch.testing.assert_close(
        torch.vmap(lambda x, r: nf.matmul_bias_residual(x, w, None, r))(x, r), x @ w + r
    )
    deep = torch.stack([x, x + 1])
    torch.testing.assert_close(
        torch.vmap(lambda x, r: nf.matmul_bias_residual(x, w, None, r))(deep, r[:2]),
        deep @ w + r[:2, None],
    )
    torch.testing.assert_close(
        torch.vmap(lambda x: nf.matmul_bias_activation(x, w[:, 0], None, "tanh"), 2)(
            deep.movedim(0, 2)
        ),
        torch.tanh(deep @ w[:, 0]),
    )
    torch.testing.assert_close(
        torch.vmap(lambda x, r: nf.matmul_bias_activation(x, w, r, "tanh"))(deep, r[:2]),
        torch.tanh(deep @ w + r[:2, None]),
    )


def test_a_gate_and_its_gradients_are_one_call_each_at_two_orders(calls):
    a, b, u, v = (draw(5, 6, seed=i).requires_grad_() for i in range(4))
    first = torch.autograd.grad(
        nf.activation_mul(a, b, "tanh"), (a, b), draw(5, 6), create_graph=True
    )
    torch.autograd.grad(first, (a, b), (u, v))
    assert [(name, needs) for name, _, needs in calls] == [
        ("activation_mul", ()),
        ("activation_mul_bwd", ("a", "b")),
        ("activation_mul_double_bwd", ("a", "b")),
    ]


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("activation", ["tanh", "gelu"])
def test_a_gate_has_derivatives_of_the_third_order(activation, which):
    operands = [draw(3, 4, seed=i).requires_grad_(i in which) for i in range(2)]
    asked, found = [operands[i] for i in which], []
    act = FUNCTIONS[activation]
    for call in (lambda a, b: nf.activation_mul(a, b, activation), lambda a, b: act(a) * b):
        total = (call(*operands) ** 2).sum()
        for order in range(3):
            parts = torch.autograd.grad(total, asked, create_graph=True)
            found.append(parts)
            total = sum((draw(3, 4, seed=order + i) * x**2).sum() for i, x in enumerate(parts))
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("order", [2, 3])
def test_a_gate_at_the_end_of_the_table_has_the_derivatives_by_what_it_multiplies(order):
    slope = nf.activations()["tanh"].derived(order)
    a, b, g, v = (draw(3, 4, seed=i).requires_grad_(i in (1, 2)) for i in range(4))
    (first,) = torch.autograd.grad(nf.activation_mul(a, b, slope), b, g, create_graph=True)
    (second,) = torch.autograd.grad(first, g, v)
    torch.testing.assert_close(second, nf.activation_mul(a, v, slope))


# --- torch.compile ------------------------------------------------------------------------------
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_is_one_graph_with_the_eager_gradients(dtype, recompute, calls):
    torch._dynamo.reset()
    net = torch.nn.Sequential(
        adapter.Linear(6, 40, activation="gelu", dtype=dtype, recompute=recompute),
        adapter.GatedLinear(40, 8, dtype=dtype, recompute=recompute),
        adapter.Linear(8, 3, activation="tanh", dtype=dtype, recompute=recompute),
    )
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = draw(5, 6, dtype=torch.float32).to(dtype)
    found = []
    for call in (net, compiled):
        net.zero_grad()
        calls.clear()
        out = call(x)
        out.sum().backward()
        made = [name for name, *_ in calls]
        found.append([out.detach(), *(p.grad for p in net.parameters())])
        for name in ("matmul_bias_activation", "matmul_activation_mul", "matmul_bias_activation"):
            assert made.pop(0) == name
        assert made == [
            "matmul_bias_activation_bwd",
            "matmul_activation_mul_bwd",
            "matmul_bias_activation_bwd",
        ]
    for ours, eagers in zip(*found, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=0, atol=0)


def test_a_program_is_compiled_again_only_where_torchs_own_is():
    from torch._dynamo.utils import counters

    found = []
    for net in pair("gelu", torch.float32):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        for rows in (8, 16, 24, 32):
            x = draw(rows, 6, dtype=torch.float32)
            compiled(x).sum().backward()
            with torch.no_grad():
                compiled(x)
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1]
