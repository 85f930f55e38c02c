"""torch.compile over layers and gates: what a program holds and asks, torch.func inside of it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numfuse as nf  # noqa: E402
from numfuse.adapters.torch import GatedLinear, Linear  # noqa: E402

func = torch.func


@pytest.fixture(autouse=True)
def alone():
    torch._dynamo.reset()
    torch.manual_seed(0)


def gelu(z):
    return torch.nn.functional.gelu(z, approximate="tanh")


def programs(call, *operands):
    """Return the names of the functions that the programs of a training step call."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found = []

    def keep(graph, _):
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        found.append([getattr(node.target, "__name__", str(node.target)) for node in nodes])
        return make_boxed_func(graph.forward)

    torch.compile(call, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(
        *operands
    ).sum().backward()
    return [[name.removesuffix(".default") for name in names] for names in found]


def test_a_program_has_an_operator_a_call_and_no_copies():
    """Guards: nothing is transposed, made contiguous or widened around a layer."""
    net = torch.nn.Sequential(Linear(6, 40, activation="gelu"), GatedLinear(40, 8), Linear(8, 3))
    forward, backward = programs(net, torch.randn(5, 6))
    made = [name for name in forward if name != "getitem"]
    assert made == ["layer_fwd", "fused_fwd", "layer_fwd"]
    made = [name for name in backward if name not in ("getitem", "expand")]
    assert made == ["layer_bwd", "fused_bwd", "layer_bwd"]


def test_operators_of_a_program_have_no_rules_of_autograd():
    """Guards: a call in a program is not led through Python twice."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in ("layer_fwd", "layer_bwd", "gated_fwd", "gated_bwd", "fused_fwd", "fused_bwd"):
        assert has(f"numfuse::{name}", "CompositeExplicitAutograd")
        assert not has(f"numfuse::{name}", "Autograd")
        assert not has(f"numfuse::{name}", "AutogradCPU")


@pytest.mark.parametrize("train", [False, True])
def test_a_program_asks_little_more_than_one_of_torch(train):
    """Guards: torch.compile follows a layer to its operator, a gate too (300 more before)."""
    counts = []

    def count(guards):
        counts.append(len(guards))
        return [True] * len(guards)

    def gated(gate, up, x):
        return torch.nn.functional.silu(gate(x)) * up(x)

    theirs = [torch.nn.Linear(8, 8) for _ in range(2)]
    ours = GatedLinear.from_torch(*theirs)
    x = torch.randn(8, 8)
    for call in (lambda x: gated(*theirs, x), ours):
        with torch.set_grad_enabled(train):
            torch.compile(call, options={"guard_filter_fn": count})(x)
    assert counts[1] <= counts[0] + 60


CASES = {
    "grad": lambda f, *x: func.grad(lambda *x: f(*x).sum(), argnums=(0, 1, 2))(*x),
    "grad of grad": lambda f, x, w, b: func.grad(
        lambda w: (func.grad(lambda x: f(x, w, b).sum())(x) ** 2).sum()
    )(w),
    "jvp": lambda f, *x: func.jvp(f, x, x),
    "jvp of jvp": lambda f, x, w, b: func.jvp(
        lambda x: func.jvp(lambda x: f(x, w, b), (x,), (x,))[1], (x,), (x,)
    ),
    "vmap": lambda f, *x: func.vmap(f, (0, None, None))(*x),
    "vmap of grad": lambda f, *x: func.vmap(
        func.grad(lambda *x: f(*x).sum(), argnums=(0, 1)), (0, None, None)
    )(*x),
    "jacfwd": lambda f, *x: func.jacfwd(f)(*x),
    "hessian": lambda f, x, w, b: func.hessian(lambda x: f(x, w, b).sum())(x),
}


@pytest.mark.parametrize("case", CASES)
def test_torch_func_in_a_program_gives_the_derivatives_of_torch(case):
    def ours(x, w, b):
        return nf.silu_mul(nf.matmul_bias_activation(x, w, b, "gelu"), x[..., :4])

    def theirs(x, w, b):
        return torch.nn.functional.silu(gelu(x @ w + b)) * x[..., :4]

    shapes = (5, 6), (6, 4), (4,)
    x = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    wanted = CASES[case](theirs, *x)
    run = torch.compile(lambda *x: CASES[case](ours, *x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(*x), wanted)
    again = run(*x)  # the levels of torch.func and of forward mode are left
    torch.testing.assert_close(again, wanted)
    torch.testing.assert_close(CASES[case](ours, *x), wanted)


def test_a_gradient_goes_through_a_tangent_that_a_program_makes():
    layer = Linear(6, 4, activation="tanh", dtype=torch.float64)
    x = torch.randn(5, 6, dtype=torch.float64)

    def moved(x):
        return func.jvp(layer, (x,), (x,))[1].square().sum()

    wanted = torch.autograd.grad(moved(x), list(layer.parameters()))
    run = torch.compile(moved, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(run(x), list(layer.parameters())), wanted)


def test_a_program_knows_a_derivative_that_is_defined_anew():
    square = nf.activation(lambda z: z * z, name="a square that is followed")
    layer, x = Linear(6, 4, activation=square), torch.randn(5, 6)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (before,) = torch.autograd.grad(run(x).sum(), layer.weight)
    square.derivative(lambda z: 3.0 * z)
    (after,) = torch.autograd.grad(run(x).sum(), layer.weight)
    torch.testing.assert_close(after, 1.5 * before)


def test_autocast_around_and_inside_of_a_program():
    net = torch.nn.Sequential(Linear(6, 40, activation="gelu"), GatedLinear(40, 8))
    x = torch.randn(5, 6)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    wanted = inside(x)
    with torch.autocast("cpu", torch.bfloat16):
        around = torch.compile(net, fullgraph=True, backend="aot_eager")(x)
    for got in (around, torch.compile(inside, fullgraph=True, backend="aot_eager")(x)):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        got.float().sum().backward()


@pytest.mark.parametrize(
    "call,message",
    [
        (Linear(7, 4), "K = 6, the last axis of a"),
        (Linear(6, 4, dtype=torch.float64), "all operands must have the same dtype"),
        (lambda x: nf.silu_mul(x, x[:1]), r"b must have the shape of a \(5, 6\), got \(1, 6\)"),
    ],
)
def test_bad_operands_are_named_when_a_program_is_made(call, message):
    with pytest.raises(Exception, match=message):
        torch.compile(call, backend="aot_eager")(torch.randn(5, 6))


@pytest.mark.long
def test_inductor_runs_a_step_as_it_is_eagerly():
    net = torch.nn.Sequential(Linear(6, 40, activation="gelu"), GatedLinear(40, 8))
    x = torch.randn(12, 5).t()[:, ::2]  # as PyTorch's own, a layer takes any strides
    run = torch.compile(net, fullgraph=True)
    found = []
    for call in (net, run):
        net.zero_grad()
        loss = call(x).square().sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*found)
