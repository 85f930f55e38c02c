"""PyTorch: eager, compiled, vmap, autocast, modules, two processes; derivatives to third order."""

from __future__ import annotations

import copy
import inspect
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
from numfuse.adapters import signatures  # noqa: E402
from numfuse.adapters import torch as adapter  # noqa: E402
from numfuse.adapters.signatures import NAMES  # noqa: E402
from numfuse.adapters.torch.functions import FUNCTIONS  # noqa: E402
from numfuse.adapters.torch.keys import key_of  # noqa: E402

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


# --- every argument -----------------------------------------------------------------------------

ROLES = {
    "a": (3, 2), "b": (2, 4), "bias": (4,), "residual": (4,), "grad": (3, 4),
    "u": (3, 2), "v": (2, 4), "w": (4,), "z": (4,), "pre_activation": (3, 4),
    "a_dot": (3, 2), "b_dot": (2, 4), "bias_dot": (4,), "residual_dot": (4,),
}  # fmt: skip
OTHER = {"activation", "needs", "guard", "backend", "sum_batch", "return_pre_activation", "out"}
SIGNATURES = {
    name: [x for x in inspect.signature(getattr(nf, name)).parameters if x not in OTHER]
    for name in NAMES
    if name in signatures.SIGNATURES
}


def operands_of(name, seed=30):
    """One tensor for each argument of a public function, and its own options."""
    roles = SIGNATURES[name]
    shapes = [(5,) if name.startswith("activation_mul") else ROLES[role] for role in roles]
    given = dict(zip(roles, draw(*shapes, seed=seed, needs=False), strict=True))
    if "pre_activation" in given:
        given["pre_activation"] = given["a"] @ given["b"] + given["bias"]
    bent = {} if "residual" in name else {"activation": "gelu"}
    return given, bent


def several(found):
    return [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]


@pytest.mark.parametrize("name,role", [(n, r) for n, roles in SIGNATURES.items() for r in roles])
def test_no_argument_loses_its_gradient(name, role):
    given, bent = operands_of(name)
    x = given[role]

    def call(x):
        return tuple(several(getattr(nf, name)(**{**given, role: x}, **bent)))

    x.requires_grad_()
    found = call(x)
    moves = [i for i, y in enumerate(found) if y.requires_grad]
    if moves:
        assert gradcheck(lambda x: tuple(call(x)[i] for i in moves), (x,), fast_mode=True)
    for y, other in zip(found, call(x.detach() + 1), strict=True):
        if not y.requires_grad:  # then it does not depend on the argument
            torch.testing.assert_close(y, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name", [n for n, roles in SIGNATURES.items() if "pre_activation" in roles]
)
def test_a_saved_pre_activation_is_checked_whether_or_not_something_is_differentiated(name):
    given, bent = operands_of(name)
    pre = given.pop("pre_activation")
    wanted = several(getattr(nf, name)(**given, **bent))
    for needs in (False, True):
        given["a"].requires_grad_(needs)
        for wrong, error, message in (
            (pre[:1], ValueError, r"pre_activation must have the result's shape \(3, 4\)"),
            (pre.float(), TypeError, "pre_activation must have dtype float64, got float32"),
            (pre.numpy(), TypeError, "pre_activation must be a torch.Tensor"),
        ):
            with pytest.raises(error, match=message):
                getattr(nf, name)(**given, **bent, pre_activation=wrong)
        found = several(getattr(nf, name)(**given, **bent, pre_activation=pre))
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match=r"grad must be a torch.Tensor|u must be a torch.Tensor"):
        arrays = {key: x.detach().numpy() for key, x in given.items()}
        getattr(nf, name)(**arrays, **bent, pre_activation=pre.requires_grad_())


def _layer(a, b, bias):
    return torch.nn.functional.gelu(a @ b + bias, approximate="tanh")


def _gate(a, b):
    return torch.nn.functional.silu(a) * b


def _of_gradients(function):
    return lambda grad, *x: torch.func.vjp(function, *x)[1](grad)


#: Functions of tensors, and PyTorch's own formulas of them.
NESTED = {
    "layer": (lambda *x: nf.matmul_bias_activation(*x, "gelu"), _layer),
    "gate": (nf.silu_mul, _gate),
    "layer_bwd": (
        lambda *x: tuple(nf.matmul_bias_activation_bwd(*x, "gelu")),
        _of_gradients(_layer),
    ),
    "linear_bwd": (
        lambda *x: tuple(nf.matmul_bias_activation_bwd(*x)),
        _of_gradients(lambda a, b, bias: a @ b + bias),
    ),
    "gate_bwd": (lambda *x: tuple(nf.silu_mul_bwd(*x)), _of_gradients(_gate)),
}


@pytest.mark.parametrize("outer", ["jvp", "vjp"])
@pytest.mark.parametrize("inner", ["jvp", "vjp"])
@pytest.mark.parametrize("name", NESTED)
def test_transformations_nest_in_any_order(name, inner, outer):
    """Also where vjp hands out its function, which is called when its transformation is over."""
    shapes = [(2, 4), (2, 3), (3, 4), (4,)] if "gate" not in name else [(5,)] * 3
    shapes = shapes if name.endswith("_bwd") else shapes[1:]
    random = torch.Generator().manual_seed(3)
    x, first, second = (
        tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
        for _ in range(3)
    )

    def derived(function, mode, directions):
        def call(*x):
            if mode == "jvp":
                return torch.func.jvp(function, x, directions)[1]
            out, back = torch.func.vjp(function, *x)
            return back(torch.utils._pytree.tree_map(torch.ones_like, out))

        return call

    ours, theirs = (
        derived(derived(function, inner, first), outer, second)(*x) for function in NESTED[name]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_saved_pre_activation_has_the_derivatives_of_one_that_is_made_again():
    a, b, bias, grad = draw((3, 2), (2, 4), (4,), (3, 4), seed=31, needs=False)

    def again(a):
        return tuple(nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"))

    def saved(a):
        _, pre = nf.matmul_bias_activation(a, b, bias, "gelu", return_pre_activation=True)
        found = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", pre_activation=pre)
        return tuple(found)

    leaf = a.clone().requires_grad_()
    assert gradcheck(saved, (leaf,)) and gradgradcheck(saved, (leaf,))
    first = torch.func.jacrev, torch.func.jacfwd
    for outer, inner in itertools.product(first, first):
        ours, theirs = (outer(inner(lambda x, f=f: f(x)[0]))(a) for f in (saved, again))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_saved_pre_activation_may_be_wider_than_the_operands():
    a, b, bias, grad = draw((3, 2), (2, 4), (4,), (3, 4), seed=32, dtype=torch.bfloat16)
    _, pre = nf.matmul_bias_activation(a, b, bias, "gelu", return_pre_activation=True)
    assert pre.dtype == torch.float32 and pre.requires_grad
    found = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", pre_activation=pre)
    ours = torch.autograd.grad(sum(x.float().sum() for x in found), (a, b, bias, grad))
    again = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
    theirs = torch.autograd.grad(sum(x.float().sum() for x in again), (a, b, bias, grad))
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x, y, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name,role", [
    ("matmul_bias_residual_jvp", "a_dot"), ("matmul_bias_residual_jvp", "residual_dot"),
    ("matmul_bias_residual_double_bwd", "z"), ("matmul_bias_activation_jvp", "bias_dot"),
    ("matmul_bias_activation_double_bwd", "v"), ("activation_mul_jvp", "b_dot"),
])  # fmt: skip
def test_a_tangent_of_another_shape_is_refused(name, role):
    given, bent = operands_of(name)
    given["a"].requires_grad_()
    given[role] = given[role][:1]
    with pytest.raises(ValueError, match=f"{role} must have the shape of"):
        getattr(nf, name)(**given, **bent)


def test_zero_is_zero_beside_infinities():
    a, b, bias, residual, grad = draw((3, 2), (2, 4), (4,), (4,), (3, 4), seed=33)
    with torch.no_grad():
        residual[0] = a[0, 0] = bias[1] = grad[0, 0] = torch.inf
    double = nf.matmul_bias_residual_double_bwd
    found = double(None, None, None, None, grad, a, b, bias, residual)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in found)
    moved = torch.ones_like(bias).requires_grad_()
    dots = nf.matmul_bias_residual_jvp(a, b, bias, residual, None, None, moved, None)
    assert torch.equal(dots.out_dot, torch.ones_like(grad))
    x, y = draw((2,), (2,), seed=34)
    with torch.no_grad():
        x[0] = torch.inf
    assert torch.equal(
        nf.activation_mul_jvp(x, y, None, None, "relu").out_dot, torch.zeros(2, dtype=x.dtype)
    )


# --- PyTorch's own gates ------------------------------------------------------------------------


def cases():
    a, b, bias, grad, residual = draw((3, 2), (2, 4), (4,), (3, 4), (4,), seed=12)
    x, y = draw((5,), (5,), seed=13)
    key, gate = key_of("gelu"), key_of("silu")
    rest, gate_rest = (key, True, None), (gate, True, None)
    operators: dict = {}
    for (name, _), op in FUNCTIONS.operators.items():
        operators.setdefault(name, []).append(op)
    yield operators["product"][0].op, (a, b, bias, *rest)
    yield operators["product"][0].op, (a, b, None, *rest)
    yield operators["residual"][0].op, (a, b, bias, residual, key_of("none"), True, None)
    for op in operators["product_bwd"]:
        yield op.op, (grad, a, b, bias, None, *rest)
    yield op.op, (grad, a, b, bias, (a @ b + bias).detach().requires_grad_(), *rest)
    for op in operators["product_double"]:
        yield op.op, (a.detach(), None, bias.detach(), grad, a, b, bias, None, *rest)
    yield operators["product_tangent"][0].op, (a, b, bias, a.detach(), None, None, *rest)
    yield operators["gate"][0].op, (x, y, *gate_rest)
    for op in operators["gate_bwd"]:
        yield op.op, (x.detach(), x, y, *gate_rest)
    for op in operators["gate_double"]:
        yield op.op, (x.detach(), y.detach(), x.detach(), x, y, *gate_rest)
    yield operators["gate_tangent"][0].op, (x, y, None, y.detach(), *gate_rest)


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


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_over_reverse_with_dual_tensors(activation):
    from torch.autograd import forward_ad

    given = draw((3, 2), (2, 4), (4,), seed=40, needs=False)
    moves = draw((3, 2), (2, 4), (4,), seed=41, needs=False)
    residual, residual_dot = draw((4,), (4,), seed=42, needs=False)

    def found(layer, order):
        with forward_ad.dual_level():
            leaves = [x.clone().requires_grad_() for x in given]
            duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, moves, strict=True)]
            out = layer(*duals, forward_ad.make_dual(residual, residual_dot))
            gradients = torch.autograd.grad((out**2).sum(), leaves, create_graph=True)
            if order == 2:
                total = sum((g**2).sum() for g in gradients)
                gradients = torch.autograd.grad(total, leaves, create_graph=True)
            parts = [forward_ad.unpack_dual(g) for g in gradients]
        tangents = [part.tangent for part in parts]
        if order == 2:  # a tangent's gradient would be a fourth derivative
            return *(part.primal for part in parts), *tangents
        return *tangents, *torch.autograd.grad(sum(t.sum() for t in tangents), leaves)

    def ours(a, b, c, r):
        h = nf.matmul_bias_activation(a, b, c, activation)
        h = nf.activation_mul(h, h + 1, activation)
        return nf.matmul_bias_residual(h, b.T @ b, None, r)

    def theirs(a, b, c, r):
        f = reference(activation)
        h = f(a @ b + c)
        h = f(h) * (h + 1)
        return h @ (b.T @ b) + r

    for order in (1, 2):
        for left, right in zip(found(ours, order), found(theirs, order), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_torch_func_inside_of_forward_mode():
    from torch.autograd import forward_ad

    a, b, a_dot = draw((3, 2), (2, 4), (3, 2), seed=43, needs=False)
    ours = lambda x: nf.matmul_bias_activation(x, b, None, "tanh")  # noqa: E731
    theirs = lambda x: torch.tanh(x @ b)  # noqa: E731
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, a_dot)
        for transform in (lambda f: torch.func.grad(lambda x: f(x).sum()), torch.vmap):
            left, right = (forward_ad.unpack_dual(transform(f)(dual)) for f in (ours, theirs))
            torch.testing.assert_close(left.primal, right.primal)
            torch.testing.assert_close(left.tangent, right.tangent)


def test_an_activation_of_a_tensor_is_a_tensor_with_derivatives():
    (x,) = draw((5,), seed=44)
    for name, act in nf.activations().items():
        if name not in ACTIVATIONS:  # of another test
            continue
        assert gradcheck(act, (x,)) and gradcheck(act.second_derivative, (x,))
        torch.testing.assert_close(act(x), reference(name)(x))
        torch.testing.assert_close(
            act.derivative(x.detach()), torch.autograd.grad(reference(name)(x).sum(), x)[0]
        )
    gelu = nf.activations()["gelu"]
    half = gelu(torch.ones((), dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16 and half.shape == ()
    assert type(gelu(np.ones(2))) is np.ndarray
    torch.testing.assert_close(torch.vmap(gelu)(x), gelu(x))
    assert gelu(torch.ones(3, device="meta")).is_meta
    with pytest.raises(TypeError, match="must have dtype float64"):
        gelu(torch.ones(3, dtype=torch.int32))


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


def test_what_is_written_through_out_is_noticed_by_a_backward():
    a, b, grad = draw((3, 3), (3, 3), (3, 3), seed=50, needs=False)
    for write in (
        lambda y: nf.matmul_bias_activation(a, b, out=y),
        lambda y: nf.matmul_bias_residual(a, b, None, grad, out=y),
        lambda y: nf.silu_mul(y, a, out=y),
        lambda y: nf.matmul_bias_activation_bwd(grad, a, b, out=(None, y, None)),
        lambda y: nf.matmul_bias_residual_bwd(grad, a, b, None, a, out=(y, None, None, None)),
        lambda y: nf.silu_mul_bwd(grad, a, b, out=[y, None]),
    ):
        x = torch.ones(3, 3, dtype=torch.float64).requires_grad_()
        y = torch.ones(3, 3, dtype=torch.float64)
        kept = (x * y[:]).sum()  # the backward reads y
        write(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
        version = y._version
        with torch.inference_mode():  # as PyTorch does, where y itself is none of its tensors
            write(y)
        assert y._version > version


def test_what_may_not_be_written_to_is_refused():
    a, b = draw((3, 2), (2, 4), seed=51, needs=False)
    call = lambda out: nf.matmul_bias_activation(a, b, out=out)  # noqa: E731
    leaf = torch.zeros(3, 4, dtype=torch.float64).requires_grad_()
    with pytest.raises(ValueError, match="out must be None under PyTorch's autograd"):
        call(leaf)
    with torch.inference_mode():
        inference = torch.zeros(3, 4, dtype=torch.float64)
        assert call(inference) is inference and call(None).is_inference()
        torch.testing.assert_close(inference, a @ b)
        inference.zero_()
    with pytest.raises(RuntimeError, match="out must be no inference tensor"):
        call(inference)
    with pytest.raises(ValueError, match="a negative bit"):
        call(torch._neg_view(torch.zeros_like(leaf)))
    with pytest.raises(TypeError, match=r"out must be a torch\.Tensor as the operands"):
        call(np.zeros((3, 4)))
    with pytest.raises(ValueError, match="out must be None under"):
        torch.func.functionalize(call)(torch.zeros(3, 4, dtype=torch.float64))
    assert not leaf.any() and not inference.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_operands_that_their_memory_does_not_hold(dtype):
    a, b = draw((3, 2), (2, 4), seed=52, dtype=dtype, needs=False)
    negative, zeros = torch._neg_view(-a), torch._efficientzerotensor(3, 2, dtype=dtype)
    out = torch.empty(3, 4, dtype=dtype)
    wanted = nf.matmul_bias_activation(a, b, None, "gelu")
    assert negative.is_neg() and torch.equal(negative, a)
    assert nf.matmul_bias_activation(negative, b, None, "gelu", out=out) is out
    assert torch.equal(out, wanted)
    assert torch.equal(nf.matmul_bias_activation(negative, b, None, "gelu"), wanted)
    assert not nf.matmul_bias_activation(zeros, b).any()
    assert not nf.matmul_bias_activation(zeros, b, out=out).any()


# --- tracers and modes --------------------------------------------------------------------------
#: What is traced: an operation of each kind, and an activation.
def traced(x, w, y):
    h = nf.matmul_bias_activation(x, w, None, "gelu")
    h = nf.silu_mul(h, nf.activations()["tanh"](h))
    return nf.matmul_bias_residual(h, w.t(), None, y)


OPERATORS = {"numfuse::product", "numfuse::gate", "numfuse::residual"}


def data(seed):
    return draw((3, 2), (2, 4), (3, 2), seed=seed, needs=False)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic", "pre_dispatch"])
def test_make_fx_records_the_operators(mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    how = {"pre_dispatch": True} if mode == "pre_dispatch" else {"tracing_mode": mode}
    graph = make_fx(traced, **how)(*data(60))
    found = {str(n.target).rpartition(".")[0].replace(".", "::") for n in graph.graph.nodes}
    assert OPERATORS <= found
    for operands in (data(60), data(61)):
        torch.testing.assert_close(graph(*operands), traced(*operands), rtol=0, atol=0)


def test_jit_trace_records_the_operators(tmp_path):
    graph = torch.jit.trace(traced, tuple(data(62)))
    assert {n.kind() for n in graph.graph.nodes()} >= OPERATORS
    graph.save(str(tmp_path / "traced.pt"))
    loaded = torch.jit.load(str(tmp_path / "traced.pt"))
    for made in (graph, loaded):
        torch.testing.assert_close(made(*data(63)), traced(*data(63)), rtol=0, atol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operators(strict):
    class Network(torch.nn.Module):
        def forward(self, x, w, y):
            return traced(x, w, y)

    made = torch.export.export(Network(), tuple(data(64)), strict=strict)
    found = {str(n.target).rpartition(".")[0].replace(".", "::") for n in made.graph.nodes}
    assert OPERATORS <= found
    torch.testing.assert_close(made.module()(*data(65)), traced(*data(65)), rtol=0, atol=0)


def test_modes_see_every_operation():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function).rpartition(".")[0].replace(".", "::"))
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function).rpartition(".")[0].replace(".", "::"))
            return function(*args, **(kwargs or {}))

    operands = data(66)
    wanted = traced(*operands)
    for mode in (Dispatch, Function):
        seen.clear()
        with mode():
            found = traced(*operands)
        assert set(seen) >= OPERATORS
        assert torch.equal(found, wanted)
    with Dispatch(), pytest.raises(ValueError, match="out must be None under PyTorch's"):
        nf.silu_mul(operands[0], operands[0], out=torch.empty(3, 2, dtype=torch.float64))


def test_fake_tensors_and_a_default_device_are_served():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in data(67)]
        found = traced(*fakes)
    assert found.shape == (3, 2) and type(found) is type(fakes[0])
    operands = data(67)
    out = torch.empty(3, 2, dtype=torch.float64)
    with torch.device("meta"):  # a mode for what makes tensors out of nothing
        assert nf.silu_mul(operands[0], operands[2], out=out) is out
    assert torch.equal(out, nf.silu_mul(operands[0], operands[2]))


def test_inference_mode_and_subclasses():
    operands = data(68)
    wanted = traced(*operands)
    with torch.inference_mode():
        found = traced(*operands)
        assert found.is_inference() and torch.equal(found, wanted)
    assert torch.equal(traced(*(x.clone() for x in operands)), wanted)

    class Own(torch.Tensor):
        pass

    own = traced(operands[0].as_subclass(Own), *operands[1:])
    assert type(own) is Own and torch.equal(own.as_subclass(torch.Tensor), wanted)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        nf.silu_mul(found, operands[0].clone().requires_grad_())


def test_an_activation_of_the_users_own_compiles_before_any_other_call():
    @nf.activation(name="only compiled")
    def only_compiled(x):
        return x * x + 1.0

    torch._dynamo.reset()
    a, b = draw((3, 2), (2, 4), seed=69, needs=False)
    compiled = torch.compile(
        lambda a, b: nf.activations()["tanh"](nf.matmul_bias_activation(a, b, None, only_compiled)),
        fullgraph=True,
        backend="aot_eager",
    )
    assert only_compiled.key is None
    torch.testing.assert_close(compiled(a, b), torch.tanh((a @ b) ** 2 + 1))
    only_compiled.derivative(lambda x: 3.0 * x)  # another formula: another program
    leaf = a.clone().requires_grad_()
    compiled(leaf, b).sum().backward()
    z = a @ b
    slope = (1 - torch.tanh(z**2 + 1) ** 2) * 3 * z
    torch.testing.assert_close(leaf.grad, slope @ b.T)


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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from numfuse.adapters.torch import GatedLinear, Linear

def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(Linear(6, 8, activation="gelu"), GatedLinear(8, 4))

def copied(model, world):
    return DistributedDataParallel(model)

def sharded(model, world):
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model

def work(rank, world, where, how):
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    model = globals()[how](network(), world)
    model(x[rank::world]).square().mean().backward()
    alone = network()
    alone(x).square().mean().backward()
    for left, right in zip(model.parameters(), alone.parameters(), strict=True):
        found = left.grad.full_tensor() if how == "sharded" else left.grad
        torch.testing.assert_close(found, right.grad)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (2, *sys.argv[1:]), nprocs=2)
    print("the same gradients")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.skipif(sys.platform == "win32", reason="a file as the meeting point")
@pytest.mark.parametrize("how", ["copied", "sharded"])
@pytest.mark.long
def test_two_processes_give_the_gradients_of_one(how, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(DISTRIBUTED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "meeting"), how],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("the same gradients\n")


def test_redefined_activations_are_held_within_a_bound_and_still_known_by_graphs():
    from torch.fx.experimental.proxy_tensor import make_fx

    from numfuse.adapters.torch import keys

    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    w = torch.eye(4, dtype=torch.float64)

    def define(factor):
        return nf.activation(lambda x: factor * x * x, name="redefined")

    act = define(2.0)
    graph = make_fx(lambda x: nf.matmul_bias_activation(x, w, None, act))(x)
    before = len(keys._ACTIVATIONS._texts)
    for step in range(keys._HELD + 5):
        act = define(3.0 + step)
        found = torch.vmap(lambda x, act=act: nf.matmul_bias_activation(x, w, None, act))(x)
        torch.testing.assert_close(found, (3.0 + step) * x**2)
    assert len(keys._ACTIVATIONS) <= keys._HELD
    assert len(keys._ACTIVATIONS._texts) > before
    torch.testing.assert_close(graph(x), 2.0 * x**2)  # made from its text
