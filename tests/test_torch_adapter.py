"""PyTorch: eager, compiled, vmap, autocast, modules, two processes; derivatives to third order."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from oracle import ACTIVATIONS  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse.adapters import torch as adapter  # noqa: E402
from numfuse.adapters.torch_operators import key_of  # noqa: E402

# a, b, bias: plain, broadcast batches, a bias per member, 1-D operands
SHAPES = {
    "plain": ((3, 2), (2, 4), (4,)),
    "shared b": ((2, 3, 2), (2, 4), (4,)),
    "shared a": ((3, 2), (2, 2, 4), (2, 1, 4)),
    "bias alone": ((3, 2), (2, 4), (2, 1, 4)),
    "ones": ((1, 3, 2), (2, 2, 4), (1, 1, 4)),
    "row": ((2,), (2, 4), (4,)),
    "column": ((3, 2), (2,), (1,)),
    "empty": ((0, 2), (2, 4), (4,)),
}


@pytest.fixture(autouse=True)
def quiet():
    """PyTorch's own compiler warns of its own doings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def draw(*shapes, seed=0, dtype=torch.float64, needs=True):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_(needs) for x in made]


def reference(activation):
    functions = {
        "none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
        "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu_erf": torch.nn.functional.gelu, "silu": torch.nn.functional.silu,
        "softplus": torch.nn.functional.softplus,
    }  # fmt: skip
    return functions[activation]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["tanh", "none"])
def test_products_have_two_orders_of_derivatives(activation, shape, with_bias):
    a, b, bias = draw(*SHAPES[shape])
    operands = (a, b, bias) if with_bias else (a, b)

    def layer(a, b, bias=None):
        return nf.matmul_bias_activation(a, b, bias, activation)

    assert gradcheck(layer, operands)
    assert gradgradcheck(layer, operands)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_has_two_orders_of_derivatives(activation):
    a, b, bias, x, y = draw((3, 2), (2, 4), (4,), (5,), (5,), seed=1)
    for function, operands in (
        (lambda *z: nf.matmul_bias_activation(*z, activation), (a, b, bias)),
        (lambda *z: nf.activation_mul(*z, activation), (x, y)),
    ):
        assert gradcheck(function, operands)
        assert gradgradcheck(function, operands)
    out = nf.matmul_bias_activation(a, b, bias, activation)
    torch.testing.assert_close(out, reference(activation)(a @ b + bias))


@pytest.mark.parametrize("needs", [n for r in (1, 2, 3) for n in itertools.combinations("abc", r)])
def test_any_operand_may_be_a_constant(needs):
    a, b, bias = draw((3, 2), (2, 4), (4,), seed=2)
    for name, x in zip("abc", (a, b, bias), strict=True):
        x.requires_grad_(name in needs)
    assert gradgradcheck(lambda *x: nf.matmul_bias_activation(*x, "silu"), (a, b, bias))


@pytest.mark.parametrize("activation", ["gelu", "none", "relu"])
@pytest.mark.parametrize("pattern", list(itertools.product((True, False), repeat=3)))
def test_the_backward_and_the_double_backward_are_differentiable(activation, pattern):
    grad, a, b, bias = draw((3, 4), (3, 2), (2, 4), (4,), seed=3)
    moved = draw(a.shape, b.shape, bias.shape, seed=4)
    moved = [x if there else None for x, there in zip(moved, pattern, strict=True)]
    needs = tuple(n for n, there in zip(("a", "b", "bias"), pattern, strict=True) if there)

    def backward(*x):
        found = nf.matmul_bias_activation_bwd(*x, activation, needs=needs)
        return tuple(g for g in found if g is not None)

    def double(*x):
        it = iter(x)
        u, v, w = (next(it) if there else None for there in pattern)
        return tuple(nf.matmul_bias_activation_double_bwd(u, v, w, *it, activation))

    def tangent(*x):
        it = iter(x[3:])
        dots = (next(it) if there else None for there in pattern)
        return nf.matmul_bias_activation_jvp(*x[:3], *dots, activation).out_dot

    there = [x for x in moved if x is not None]
    if needs:
        assert gradcheck(backward, (grad, a, b, bias))
        assert gradgradcheck(backward, (grad, a, b, bias))
    assert gradcheck(double, (*there, grad, a, b, bias))
    assert gradcheck(tangent, (a, b, bias, *there))


@pytest.mark.parametrize("pattern", [(True, True), (True, False), (False, True)])
def test_gates_through_their_derivatives(pattern):
    grad, a, b, *moved = draw(*((6,),) * 5, seed=5)
    moved = [x if there else None for x, there in zip(moved, pattern, strict=True)]
    there = [x for x in moved if x is not None]
    needs = tuple(n for n, there in zip(("a", "b"), pattern, strict=True) if there)

    def backward(*x):
        return tuple(g for g in nf.activation_mul_bwd(*x, "gelu", needs=needs) if g is not None)

    def double(*x):
        it = iter(x)
        u, v = (next(it) if given else None for given in pattern)
        return tuple(nf.activation_mul_double_bwd(u, v, *it, "gelu"))

    def tangent(*x):
        it = iter(x[2:])
        dots = (next(it) if given else None for given in pattern)
        return nf.activation_mul_jvp(*x[:2], *dots, "gelu").out_dot

    assert gradcheck(backward, (grad, a, b)) and gradgradcheck(backward, (grad, a, b))
    assert gradcheck(double, (*there, grad, a, b))
    assert gradcheck(tangent, (a, b, *there)) and gradgradcheck(tangent, (a, b, *there))


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "empty"])
@pytest.mark.parametrize("residual_shape", ["full", "row", "scalar"])
def test_residuals_have_two_orders_of_derivatives(shape, residual_shape):
    a, b, bias = draw(*SHAPES[shape], seed=6)
    visible = nf.matmul_bias_activation(a, b, bias).shape
    own = {"full": visible, "row": visible[-1:], "scalar": ()}[residual_shape]
    grad, residual = draw(visible, own, seed=7)
    assert gradcheck(nf.matmul_bias_residual, (a, b, bias, residual))
    assert gradgradcheck(nf.matmul_bias_residual, (a, b, bias, residual))
    moved = draw(a.shape, b.shape, bias.shape, own, seed=8)
    assert gradcheck(nf.matmul_bias_residual_bwd, (grad, a, b, bias, residual))
    assert gradcheck(
        lambda *x: nf.matmul_bias_residual_double_bwd(*moved, *x)[:3], (grad, a, b, bias, residual)
    )
    assert gradcheck(
        lambda *x: nf.matmul_bias_residual_jvp(*x, *moved).out_dot, (a, b, bias, residual)
    )


def test_a_third_derivative_is_that_of_torch():
    """The weight gradient of a loss that holds a second derivative: a physics-informed network."""
    x, w1, b1, w2 = draw((7, 1), (1, 5), (5,), (5, 1), seed=9)

    def loss(layer):
        u = layer(x, w1, b1) @ w2
        (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return ((u_xx + u * u_x) ** 2).mean()

    ours = torch.autograd.grad(loss(lambda *z: nf.matmul_bias_activation(*z, "tanh")), (w1, b1, w2))
    theirs = torch.autograd.grad(loss(lambda x, w, b: torch.tanh(x @ w + b)), (w1, b1, w2))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_an_operand_made_of_another_is_counted_once():
    (a,) = draw((3, 3), seed=10)

    def f(layer):
        b = a * a  # the double backward sees both a and what was made of it
        out = layer(a, b)
        (first,) = torch.autograd.grad((out**2).sum(), a, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), a, create_graph=True)
        return torch.autograd.grad((second**2).sum(), a)[0]

    ours = f(lambda a, b: nf.matmul_bias_activation(a, b, None, "tanh"))
    torch.testing.assert_close(ours, f(lambda a, b: torch.tanh(a @ b)), rtol=1e-9, atol=1e-9)


def test_past_the_table_a_derivative_raises_and_never_stops_silently():
    (x,) = draw((3,), seed=11)
    value = nf.activation_mul(x, torch.ones_like(x), "gelu")
    for _ in range(3):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    exact = nf.activations()["gelu"].third_derivative(x.detach().numpy())
    np.testing.assert_allclose(value.detach(), exact, rtol=1e-12)
    with pytest.raises(ValueError, match="ends with third derivatives, got order 4 of 'gelu'"):
        torch.autograd.grad(value.sum(), x)


# --- PyTorch's own gates ------------------------------------------------------------------------


def cases():
    a, b, bias, grad, residual = draw((3, 2), (2, 4), (4,), (3, 4), (4,), seed=12)
    x, y = draw((5,), (5,), seed=13)
    key, gate = key_of("gelu"), key_of("silu")
    rest, gate_rest = (key, True, None), (gate, True, None)
    yield adapter._PRODUCT.op, (a, b, bias, *rest)
    yield adapter._PRODUCT.op, (a, b, None, *rest)
    yield adapter._RESIDUAL.op, (a, b, bias, residual, key_of("none"), True, None)
    for op in adapter._PRODUCT_BWD.values():
        yield op.op, (grad, a, b, bias, *rest)
    for op in adapter._PRODUCT_DOUBLE.values():
        yield op.op, (a.detach(), None, bias.detach(), grad, a, b, bias, *rest)
    yield adapter._PRODUCT_TANGENT.op, (a, b, bias, a.detach(), None, None, *rest)
    yield adapter._GATE.op, (x, y, *gate_rest)
    for op in adapter._GATE_BWD.values():
        yield op.op, (x.detach(), x, y, *gate_rest)
    for op in adapter._GATE_DOUBLE.values():
        yield op.op, (x.detach(), y.detach(), x.detach(), x, y, *gate_rest)
    yield adapter._GATE_TANGENT.op, (x, y, None, y.detach(), *gate_rest)


CASES = list(cases())


@pytest.mark.parametrize("op,args", CASES, ids=[op._name for op, _ in CASES])
def test_opcheck_of_every_operator(op, args):
    # The pieces of a double backward take gradients inside a backward, which AOT does not trace.
    leaf = "double" in op._name or "tangent" in op._name
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        op, args, test_utils=utils if leaf else (*utils, "test_aot_dispatch_dynamic")
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_network_has_no_graph_break(dynamic):
    x, w, b, up = draw((6, 4), (4, 5), (5,), (6, 5), seed=14, dtype=torch.float32)

    def network(x, w, b, up):
        h = nf.matmul_bias_activation(x, w, b, "gelu")
        h = nf.silu_mul(h, up)
        return nf.matmul_bias_residual(h, w.t(), None, x).sum()

    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    wanted = torch.autograd.grad(network(x, w, b, up), (x, w, b, up))
    got = torch.autograd.grad(compiled(x, w, b, up), (x, w, b, up))
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right)


def test_vmap_is_a_batch():
    a, b, bias, grad = draw((3, 5, 2), (2, 4), (3, 4), (3, 5, 4), seed=15, needs=False)
    got = torch.vmap(lambda a, c: nf.matmul_bias_activation(a, b, c, "gelu"))(a, bias)
    wanted = nf.matmul_bias_activation(a, b, bias[:, None], "gelu")
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    d_a, d_b, d_c = torch.vmap(
        lambda g, a, c: tuple(nf.matmul_bias_activation_bwd(g, a, b, c, "gelu"))
    )(grad, a, bias)
    for i in range(3):
        one = nf.matmul_bias_activation_bwd(grad[i], a[i], b, bias[i], "gelu")
        for left, right in zip((d_a[i], d_b[i], d_c[i]), one, strict=True):
            torch.testing.assert_close(left, right)
    # 1-D members, a moved axis, one vmap in another
    rows = torch.vmap(lambda x: nf.matmul_bias_activation(x, b, bias[0], "tanh"), in_dims=1)(a[0].T)
    torch.testing.assert_close(rows, torch.tanh(a[0] @ b + bias[0]))
    nested = torch.vmap(torch.vmap(lambda x: nf.matmul_bias_activation(x, b[:, 0], None, "tanh")))
    torch.testing.assert_close(nested(a), torch.tanh(a @ b[:, 0]))
    gates = torch.vmap(lambda x, y: nf.silu_mul(x, y), in_dims=(0, None))(grad, grad[0])
    torch.testing.assert_close(gates, torch.nn.functional.silu(grad) * grad[0])
    residual = torch.vmap(lambda a, r: nf.matmul_bias_residual(a, b, None, r))(a, bias)
    torch.testing.assert_close(residual, a @ b + bias[:, None])


def layers(activation):
    def ours(a, b, c, r):
        h = nf.matmul_bias_activation(a, b, c, activation)
        h = nf.activation_mul(h, h, activation)
        return (nf.matmul_bias_residual(h, b.T, None, r) ** 2).sum()

    def theirs(a, b, c, r):
        f = reference(activation)
        h = f(a @ b + c)
        return ((f(h) * h @ b.T + r) ** 2).sum()

    return ours, theirs


@pytest.mark.parametrize("activation", ["tanh", "gelu", "none"])
def test_torch_func_gives_every_derivative(activation):
    func = torch.func
    given = draw((3, 2), (2, 4), (4,), (2,), seed=16, needs=False)
    moves = draw((3, 2), (2, 4), (4,), (2,), seed=23, needs=False)
    found = []
    for f in layers(activation):

        def loss(b, f=f):
            return f(given[0], b, *given[2:])

        found.append(
            (
                *func.grad(f, argnums=(0, 1, 2, 3))(*given),
                func.jvp(f, tuple(given), tuple(moves))[1],
                func.jacrev(func.jacrev(loss))(given[1]),
                func.jacfwd(func.jacrev(loss))(given[1]),
                func.jacrev(func.jacfwd(loss))(given[1]),
                func.jvp(func.grad(f, argnums=1), tuple(given), tuple(moves))[1],
                # the gradients of every sample
                torch.vmap(func.grad(f, argnums=1), (0, None, None, None))(
                    torch.stack([given[0], moves[0]]), *given[1:]
                ),
            )
        )
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_forward_mode_outside_of_torch_func():
    from torch.autograd import forward_ad

    a, b, a_dot = draw((3, 2), (2, 4), (3, 2), seed=24, needs=False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, a_dot)
        out = forward_ad.unpack_dual(nf.matmul_bias_activation(dual, b, None, "tanh")).tangent
        wanted = forward_ad.unpack_dual(torch.tanh(dual @ b)).tangent
    torch.testing.assert_close(out, wanted)


def test_autocast_takes_its_dtype():
    a, b, bias = draw((3, 2), (2, 4), (4,), seed=17, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = nf.matmul_bias_activation(a, b, bias, "gelu")
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert a.grad.dtype == b.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_keeps_its_kind(dtype):
    a, b, bias = draw((5, 3), (3, 4), (4,), seed=18, dtype=dtype)
    out = nf.matmul_bias_activation(a, b, bias, "silu")
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.nn.functional.silu(a @ b + bias), rtol=2e-2, atol=2e-2)
    out.sum().backward()
    assert b.grad.dtype == dtype


def test_what_is_changed_in_place_is_noticed():
    a, b = draw((3, 2), (2, 4), seed=19)
    out = nf.matmul_bias_activation(a, b, None, "tanh")
    with torch.no_grad():
        b.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_views_are_taken_as_they_are_and_nothing_is_written_to():
    base, b = draw((4, 9), (3, 5), seed=20, needs=False)
    a = base[:, ::3]
    before = base.clone()
    out = nf.matmul_bias_activation(a, b, None, "gelu")
    torch.testing.assert_close(out, nf.matmul_bias_activation(a.contiguous(), b, None, "gelu"))
    assert torch.equal(base, before) and out.is_contiguous()


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"b": torch.ones(3, 4).double()}, ValueError, "b must have shape"),
        ({"b": torch.ones(2, 4, dtype=torch.float32)}, TypeError, "a float64, b float32"),
        ({"b": np.ones((2, 4))}, TypeError, "b must be a torch.Tensor as the other operands"),
        ({"a": torch.ones(3, 2, dtype=torch.int64)}, TypeError, "a must have dtype float64"),
        ({"a": torch.ones(3, 2).double().to("meta")}, TypeError, "must be on one device"),
        ({"out": torch.ones(3, 4)}, TypeError, "out must have dtype float64, got float32"),
        ({"activation": "geluu"}, ValueError, "did you mean 'gelu'"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    given = {"a": torch.ones(3, 2, dtype=torch.float64), "b": torch.ones(2, 4).double(), **change}
    with pytest.raises(error, match=message):
        nf.matmul_bias_activation(**given)


def test_results_may_be_given_where_nothing_is_differentiated():
    a, b, bias, grad = draw((3, 2), (2, 4), (4,), (3, 4), seed=25, needs=False)
    out = torch.full((3, 4), torch.nan, dtype=torch.float64)
    assert nf.matmul_bias_activation(a, b, bias, "gelu", out=out) is out
    torch.testing.assert_close(out, reference("gelu")(a @ b + bias))
    d_b = torch.full((2, 4), torch.nan, dtype=torch.float64)
    found = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", out=(None, d_b, None))
    assert found.d_b is d_b and isinstance(found.d_a, torch.Tensor)
    half = out.bfloat16()
    assert nf.silu_mul(half, half, out=half) is half
    with pytest.raises(ValueError, match="out must be None under PyTorch's autograd"):
        nf.matmul_bias_activation(a.requires_grad_(), b, bias, out=out)
    with torch.no_grad():
        assert nf.matmul_bias_activation(a, b, bias, out=out) is out


# --- modules ------------------------------------------------------------------------------------


def test_linear_is_torchs_with_its_activation():
    plain = torch.nn.Linear(6, 4, dtype=torch.float64)
    fused = adapter.Linear.from_torch(plain, "gelu")
    assert fused.weight is plain.weight and fused.bias is plain.bias
    assert (fused.in_features, fused.out_features) == (6, 4)
    (x,) = draw((2, 3, 6), seed=21)
    torch.testing.assert_close(fused(x), reference("gelu")(plain(x)))
    assert gradcheck(fused, (x,))
    other = adapter.Linear(6, 4, activation="gelu", dtype=torch.float64)
    other.load_state_dict(plain.state_dict())
    torch.testing.assert_close(other(x), fused(x))
    assert "activation='gelu'" in repr(fused)
    torch.testing.assert_close(copy.deepcopy(fused)(x), fused(x))


def test_gated_linear_is_two_layers_and_a_gate():
    gate, up = (torch.nn.Linear(6, 4, bias=False, dtype=torch.float64) for _ in range(2))
    fused = adapter.GatedLinear.from_torch(gate, up, "silu")
    (x,) = draw((3, 6), seed=22)
    torch.testing.assert_close(fused(x), torch.nn.functional.silu(gate(x)) * up(x))
    loss = fused(x).sum()
    loss.backward()
    assert gate.weight.grad is not None and up.weight.grad is not None
    assert len(list(adapter.GatedLinear(6, 4, bias=True).parameters())) == 4


DISTRIBUTED = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from numfuse.adapters.torch import GatedLinear, Linear

def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(Linear(6, 8, activation="gelu"), GatedLinear(8, 4))

def work(rank, world, where):
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    model = DistributedDataParallel(network())
    model(x[rank::world]).square().mean().backward()
    alone = network()
    alone(x).square().mean().backward()
    for left, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (2, sys.argv[1]), nprocs=2)
    print("the same gradients")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.skipif(sys.platform == "win32", reason="a file as the meeting point")
def test_two_processes_give_the_gradients_of_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(DISTRIBUTED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "meeting")], capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("the same gradients\n")
