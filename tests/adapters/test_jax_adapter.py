"""JAX: jit, vmap, grad of grad of grad; one core, several devices; no deadlock."""

from __future__ import annotations

import itertools
import os
import sys

import numpy as np
import once
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from oracle import ACTIVATIONS  # noqa: E402

import numfuse as nf  # noqa: E402

SHAPES = {
    "plain": ((3, 2), (2, 4), (4,)),
    "shared b": ((2, 3, 2), (2, 4), (4,)),
    "shared a": ((3, 2), (2, 2, 4), (2, 1, 4)),
    "bias alone": ((3, 2), (2, 4), (2, 1, 4)),
    "ones": ((1, 3, 2), (2, 2, 4), (1, 1, 4)),
    "row": ((2,), (2, 4), (4,)),
    "column": ((3, 2), (2,), (1,)),
}


@pytest.fixture(autouse=True)
def double_precision():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]


def reference(activation):
    functions = {
        "none": lambda x: x, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh,
        "gelu": jax.nn.gelu, "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
        "silu": jax.nn.silu, "softplus": jax.nn.softplus,
    }  # fmt: skip
    return functions[activation]


def check(function, operands, order):
    check_grads(function, operands, order=order, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_have_three_orders_of_derivatives(shape, with_bias):
    a, b, bias = draw(*SHAPES[shape])
    operands = (a, b, bias) if with_bias else (a, b)

    def layer(a, b, bias=None):
        return nf.matmul_bias_activation(a, b, bias, "tanh")

    check(layer, operands, 3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_has_three_orders_of_derivatives(activation):
    a, b, bias, x, y = draw((3, 2), (2, 4), (4,), (5,), (5,), seed=1)
    check(lambda *z: nf.matmul_bias_activation(*z, activation), (a, b, bias), 3)
    check(lambda *z: nf.activation_mul(*z, activation), (x, y), 3)
    out = nf.matmul_bias_activation(a, b, bias, activation)
    assert isinstance(out, jax.Array)
    np.testing.assert_allclose(out, reference(activation)(a @ b + bias), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pattern", list(itertools.product((True, False), repeat=3)))
def test_the_backward_and_the_double_backward_are_differentiable(pattern):
    grad, a, b, bias = draw((3, 4), (3, 2), (2, 4), (4,), seed=2)
    moved = draw(a.shape, b.shape, bias.shape, seed=3)
    moved = [x if there else None for x, there in zip(moved, pattern, strict=True)]
    needs = tuple(n for n, there in zip(("a", "b", "bias"), pattern, strict=True) if there)
    if needs:
        check(
            lambda *x: [
                g for g in nf.matmul_bias_activation_bwd(*x, "gelu", needs=needs) if g is not None
            ],
            (grad, a, b, bias), 2,
        )  # fmt: skip
    check(
        lambda *x: list(nf.matmul_bias_activation_double_bwd(*moved, *x, "gelu")),
        (grad, a, b, bias), 1,
    )  # fmt: skip
    check(lambda *x: nf.matmul_bias_activation_jvp(*x, *moved, "gelu").out_dot, (a, b, bias), 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_residuals_have_derivatives(shape):
    a, b, bias = draw(*SHAPES[shape], seed=4)
    visible = nf.matmul_bias_activation(a, b, bias).shape
    for own in (visible, visible[-1:], ()):
        (residual,) = draw(own, seed=5)
        check(nf.matmul_bias_residual, (a, b, bias, residual), 2)


def test_gates_through_their_derivatives():
    u, v, grad, a, b = draw(*((6,),) * 5, seed=6)
    check(lambda *x: list(nf.activation_mul_bwd(*x, "gelu")), (grad, a, b), 2)
    check(lambda *x: list(nf.activation_mul_double_bwd(*x, "gelu")), (u, v, grad, a, b), 1)
    check(lambda *x: nf.activation_mul_jvp(*x, "gelu").out_dot, (a, b, u, v), 2)


def losses(activation):
    def ours(w, x, c):
        h = nf.matmul_bias_activation(x, w, c, activation)
        h = nf.activation_mul(h, h, activation)
        return jnp.sum(nf.matmul_bias_residual(h, w.T, None, x) ** 2)

    def theirs(w, x, c):
        f = reference(activation)
        h = f(x @ w + c)
        return jnp.sum(((f(h) * h) @ w.T + x) ** 2)

    return ours, theirs


@pytest.mark.parametrize("activation", ["tanh", "gelu", "none"])
@pytest.mark.long
def test_transformations_compose(activation):
    w, x, c, *more = draw((2, 4), (3, 2), (4,), (2, 4), (3, 2), seed=7)
    found = []
    for f in losses(activation):
        found.append(
            (
                *jax.jit(jax.grad(f, argnums=(0, 1, 2)))(w, x, c),
                jax.jacrev(jax.jacrev(f))(w, x, c),
                jax.jit(jax.jacrev(jax.jacrev(f)))(w, x, c),
                # the gradients of every sample; one vmap in another
                jax.vmap(jax.grad(f), (None, 0, None))(w, jnp.stack([x, more[1]]), c),
                jax.vmap(jax.vmap(f, (None, 0, None)), (0, None, None))(
                    jnp.stack([w, more[0]]), x[:, None], c
                ),
                # a Hessian-vector product, reverse over reverse
                jax.grad(lambda w, f=f: jnp.vdot(jax.grad(f)(w, x, c), more[0]))(w),
            )
        )
    for left, right in zip(*found, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_vmap_is_a_loop(shape):
    shapes = SHAPES[shape]
    for axes in itertools.product((0, None), repeat=3):
        if not any(axis == 0 for axis in axes):
            continue
        operands = [
            x for axis, s in zip(axes, shapes, strict=True)
            for x in draw((3, *s) if axis == 0 else s, seed=8)
        ]  # fmt: skip

        def gradients(a, b, bias):
            f = lambda *z: jnp.sum(nf.matmul_bias_activation(*z, "tanh") ** 2)  # noqa: E731
            return jax.grad(f, argnums=(0, 1, 2))(a, b, bias)

        got = jax.vmap(gradients, axes)(*operands)
        for i in range(3):
            member = [x[i] if axis == 0 else x for x, axis in zip(operands, axes, strict=True)]
            for left, right in zip(got, gradients(*member), strict=True):
                np.testing.assert_allclose(left[i], right, rtol=1e-12, atol=1e-13)


def test_zero_is_zero_beside_infinities():
    a, b, grad = jnp.ones((3, 2)), jnp.ones((2, 4)), jnp.ones((3, 4))
    residual = jnp.array([jnp.inf, 0.0, 1.0, 2.0])
    found = nf.matmul_bias_residual_double_bwd(
        None, None, None, None, grad, a, b, None, residual
    )  # fmt: skip
    assert not found.d_residual.any() and not found.d_grad.any()
    dots = nf.matmul_bias_residual_jvp(a, b, None, residual, None, None, None, None)
    assert not dots.out_dot.any()
    with pytest.raises(ValueError, match="pre_activation must have the result's shape"):
        nf.matmul_bias_activation_bwd(grad, a, b, None, "gelu", pre_activation=grad[:1])


def test_a_third_derivative_is_that_of_jax():
    """The weight gradient of a loss that holds a second derivative: a physics-informed network."""
    x, w1, b1, w2 = draw((7, 1), (1, 5), (5,), (5, 1), seed=9)

    def loss(layer):
        def of(w1, b1, w2):
            u = lambda x: jnp.sum(layer(x, w1, b1) @ w2)  # noqa: E731
            u_x = jax.grad(u)
            u_xx = jax.grad(lambda x: jnp.sum(u_x(x)))
            return jnp.mean((u_xx(x) + u_x(x)) ** 2)

        return jax.grad(of, argnums=(0, 1, 2))(w1, b1, w2)

    ours = loss(lambda *z: nf.matmul_bias_activation(*z, "tanh"))
    for left, right in zip(ours, loss(lambda x, w, b: jnp.tanh(x @ w + b)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-11)


def test_past_the_table_a_derivative_raises_and_never_stops_silently():
    f = lambda x: nf.activation_mul(x, jnp.ones(()), "gelu")  # noqa: E731
    for _ in range(3):
        f = jax.grad(f)
    exact = nf.activations()["gelu"].third_derivative(np.float64(0.3))
    np.testing.assert_allclose(f(jnp.float64(0.3)), exact, rtol=1e-12)
    with pytest.raises(ValueError, match="ends with third derivatives, got order 4 of 'gelu'"):
        jax.grad(f)(jnp.float64(0.3))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_keeps_its_kind(dtype):
    a, b = (x.astype(dtype) for x in draw((3, 2), (2, 4), seed=11))
    out = nf.matmul_bias_activation(a, b, None, "silu")
    assert out.dtype == dtype
    gradient = jax.grad(lambda a: jnp.sum(nf.matmul_bias_activation(a, b, None, "silu")))(a)
    assert gradient.dtype == dtype


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"b": np.ones((3, 4))}, ValueError, "b must have shape"),
        ({"b": np.ones((2, 4), np.float32)}, TypeError, "all operands must have the same dtype"),
        ({"b": [[1.0]]}, TypeError, "operands must be JAX arrays, got list"),
        ({"a": jnp.ones((3, 2), int)}, TypeError, "an operand must have dtype float64"),
        ({"out": np.ones((3, 4))}, ValueError, "out must be None under JAX"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(change, error, message):
    given = {"a": jnp.ones((3, 2)), "b": np.ones((2, 4)), **change}
    with pytest.raises(error, match=message):
        nf.matmul_bias_activation(**given)


_LARGE = """
import jax, jax.numpy as jnp, numfuse as nf
@jax.jit
def step(a, b):
    for _ in range(4):
        c = nf.matmul_bias_activation(a, b, None, "tanh")
        a = jnp.sin(c) @ b + c
    return a
a = jnp.full((700, 700), 1e-3, jnp.float32)
for _ in range(3):
    out = step(a, a)
out.block_until_ready()
print("done")
"""
LARGE = once.Process(lambda _: [sys.executable, "-c", _LARGE], timeout=240)


@pytest.mark.long
def test_large_callbacks_in_one_computation_do_not_wait_for_each_other():
    run = LARGE.result()
    assert run.stdout == "done\n", run.stderr[-2000:]


#: Operands of 2.5 MB, which XLA copies on its threads, of which one core has one. Many calls one
#: after the other, as it is the later ones that XLA gives to that thread.
_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numfuse as nf
jax.config.update("jax_enable_x64", True)
shapes = (5000, 64), (64, 64), (64,)
x, w, c = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes))
layer = lambda x, w, c: nf.matmul_bias_activation(x, w / 64, c, "tanh")
loss = lambda w, c: jnp.mean((layer(x, w, c) - x) ** 2)
for name, f in {"eager": layer, "jit": jax.jit(layer), "vmap": jax.jit(
    lambda x, w, c: jax.vmap(layer, (0, None, None))(x[None], w, c)[0])}.items():
    outs = [f(x, w, c) for _ in range(10)]
    outs = [f(jnp.sin(out), w, c) for out in outs]
    assert len(jax.block_until_ready(outs)) == 10
    print(name, flush=True)
for name, f in {"grad": jax.grad(loss, (0, 1)), "jit of grad": jax.jit(jax.grad(loss, (0, 1))),
                "forward": jax.jit(lambda w, c: jax.jvp(loss, (w, c), (w, c)))}.items():
    for _ in range(10):
        v, d = f(w, c)
        w = w - 0.1 * d if name == "grad" else w
    jax.block_until_ready((v, d, w))
    print(name, flush=True)
"""
ONE_CORE = once.Process(lambda _: [sys.executable, "-c", _ONE_CORE], timeout=180)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no processes")
@pytest.mark.long
def test_on_one_core_nothing_waits_for_ever():
    run = ONE_CORE.result()
    names = ["eager", "jit", "vmap", "grad", "jit of grad", "forward"]
    assert run.stdout.splitlines() == names, run.stderr[-2000:]


_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, numfuse as nf
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
mesh = Mesh(np.array(devices), ("i",))
rng = np.random.default_rng(0)
x, w, y = (rng.standard_normal(s).astype("float32") for s in ((8, 3), (3, 4), (3, 3)))
own = lambda x, w: nf.matmul_bias_activation(x, w, None, "tanh")
plain = lambda x, w: jnp.tanh(x @ w)
rows, whole = NamedSharding(mesh, P("i")), NamedSharding(mesh, P())
sharded = jax.device_put(x, rows), jax.device_put(w, whole)

def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)

# sharded operands: the results go on into what is sharded, too
for f in (own, jax.jit(own)):
    out = f(*sharded)
    close(out + jax.device_put(np.ones((8, 4), "float32"), rows), plain(x, w) + 1)
loss = lambda f: lambda x, w: jnp.sum(f(x, w) ** 2)
for form in (jax.grad, jax.jacfwd):
    close(jax.jit(form(loss(own), 1))(*sharded), form(loss(plain), 1)(x, w))
print("sharded", flush=True)

# each device its own rows
for checked in (True, False):
    def shards(f):
        return jax.shard_map(
            f, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"), check_vma=checked
        )
    close(shards(own)(*sharded), plain(x, w))
    out = jax.jit(shards(own))(*sharded)
    close(out, plain(x, w))
    assert out.sharding.spec == P("i"), out.sharding
    close(jax.jit(jax.grad(loss(shards(own)), 1))(*sharded), jax.grad(loss(plain), 1)(x, w))
    _, dot = jax.jit(lambda *z: jax.jvp(shards(own), z, z))(*sharded)
    close(dot, jax.jvp(plain, (x, w), (x, w))[1])
print("shard_map", flush=True)
close(jax.pmap(own, in_axes=(0, None))(x.reshape(4, 2, 3), w), plain(x, w).reshape(4, 2, 4))
print("pmap", flush=True)

# committed arrays stay on their device; two devices do not meet unasked
for f in (own, jax.jit(own)):
    z = jax.device_put(y, devices[2])
    assert f(z, z).devices() == {devices[2]} and f(z, y).devices() == {devices[2]}
    try:
        f(z, jax.device_put(y, devices[1]))
    except ValueError as error:
        assert "incompatible devices" in str(error)
    else:
        raise AssertionError("two devices met")
assert own(jnp.asarray(y), y).devices() == {devices[0]}
print("committed", flush=True)
"""
DEVICES = once.Process(
    lambda _: [sys.executable, "-c", _DEVICES],
    {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"},
    timeout=240,
)


@pytest.mark.long
def test_several_devices_of_the_host():
    run = DEVICES.result()
    wanted = ["sharded", "shard_map", "pmap", "committed"]
    assert run.stdout.splitlines() == wanted, run.stderr[-2000:]


def test_other_platforms_are_refused_when_compiled():
    x = jnp.ones((2, 2))
    traced = jax.jit(lambda x: nf.matmul_bias_activation(x, x)).trace(x)
    with pytest.raises(TypeError, match="JAX must run on the CPU for numfuse, got the platform"):
        traced.lower(lowering_platforms=("cuda",))


def test_donated_buffers_may_be_overwritten_by_nobody_else():
    x, w = draw((300, 40), (40, 40), seed=12)
    wanted = np.tanh(np.tanh(np.asarray(x) @ np.asarray(w)) @ np.asarray(w))
    first = nf.matmul_bias_activation(x + 0, w, None, "tanh")
    kept = np.array(first)
    step = jax.jit(lambda *z: nf.matmul_bias_activation(*z, None, "tanh"), donate_argnums=0)
    given = x + 0
    middle = step(given, w)
    assert given.is_deleted()
    out = step(middle, w)
    np.testing.assert_allclose(out, wanted, rtol=1e-12, atol=1e-14)
    step(first, w)  # a result of an eager call, donated
    np.testing.assert_array_equal(kept, step(x + 0, w))
    with pytest.raises(RuntimeError, match="deleted"):
        nf.matmul_bias_activation(given, w)


def test_weak_types_and_float0():
    weak = jnp.asarray(0.5)
    assert weak.weak_type
    out = nf.activation_mul(weak, weak, "tanh")
    assert not out.weak_type and out.dtype == weak.dtype
    f = lambda x: nf.activation_mul(x, x, "tanh")  # noqa: E731
    exact = lambda x: jnp.tanh(x) * x  # noqa: E731
    for order in (jax.grad, jax.jacfwd, lambda f: jax.grad(jax.grad(f))):
        np.testing.assert_allclose(order(f)(weak), order(exact)(weak), rtol=1e-12)
    # An integer beside the operands has a tangent without values.
    a, b = draw((3, 2), (2, 4), seed=13)
    total = lambda a, i: jnp.sum(nf.matmul_bias_activation(a, b, None, "tanh")[i])  # noqa: E731
    gradient, none = jax.grad(total, (0, 1), allow_int=True)(a, 1)
    assert none.dtype == jax.dtypes.float0 and gradient[1].any() and not gradient[0].any()


def test_without_64_bits_float32_is_served_and_float64_is_what_jax_makes_of_it():
    jax.config.update("jax_enable_x64", False)
    a, b = jnp.ones((3, 2)), jnp.ones((2, 4))
    f = lambda a: nf.matmul_bias_activation(a, b, None, "gelu", return_pre_activation=True)  # noqa: E731
    for out in (*f(a), *jax.jit(f)(a), jax.grad(lambda a: jnp.sum(f(a)[0]))(a)):
        assert out.dtype == np.float32
    with pytest.raises(TypeError, match="all operands must have the same dtype"):
        nf.matmul_bias_activation(a, np.ones((2, 4)))


def test_a_gradient_of_what_a_vmap_shares_is_summed_as_it_is_made():
    x, w = draw((50, 3), (3, 4), seed=14)

    def loss(w):
        return jnp.sum(jax.vmap(lambda x: nf.matmul_bias_activation(x, w, None, "tanh"))(x))

    made = jax.make_jaxpr(jax.grad(loss))(w)
    assert "numfuse_product_bwd" in str(made) and "[50,3,4]" not in str(made)


def test_an_infinite_residual_has_a_zero_second_derivative():
    x, v = jnp.ones((2, 2)), jnp.full((2, 2), 2.0)
    residual = jnp.asarray([[np.inf, 1.0], [np.nan, -np.inf]])
    found = nf.matmul_bias_residual_double_bwd(x, None, None, v, x, x, x, None, residual)
    assert (found.d_residual == 0).all() and (found.d_grad == 4).all()
    assert (nf.matmul_bias_residual_jvp(x, x, None, residual, *[None] * 3, v).out_dot == 2).all()
    f = lambda r: nf.matmul_bias_residual(x, x, None, r)  # noqa: E731
    assert (jax.jvp(f, (residual,), (v,))[1] == 2).all()
    assert (jax.hessian(lambda r: jnp.sum(f(r)))(residual) == 0).all()


@pytest.mark.parametrize("activation", ["tanh", "none"])
def test_a_saved_pre_activation_has_its_gradient(activation):
    rng = np.random.default_rng(5)
    grad, a, b, bias, pre = (
        jnp.asarray(rng.normal(size=shape)) for shape in ((5, 3), (5, 4), (4, 3), (3,), (5, 3))
    )

    def ours(pre):
        found = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, pre_activation=pre)
        return sum((x**2).sum() for x in found)

    def plain(pre):
        s = grad * (1 - jnp.tanh(pre) ** 2) if activation == "tanh" else grad + 0 * pre
        return sum((x**2).sum() for x in (s @ b.T, a.T @ s, s.sum(0)))

    wanted = jax.grad(plain)(pre)
    for found in (jax.grad(ours)(pre), jax.jit(jax.grad(ours))(pre)):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)


def test_a_traced_pre_activation_keeps_the_guard():
    a, b, grad = jnp.ones((2, 3)), jnp.ones((3, 2)), jnp.ones((2, 2))
    pre = jnp.ones((2, 2)).at[0, 0].set(jnp.nan)

    def d_a(pre, guard):
        how = {"pre_activation": pre, "guard": guard}
        return nf.matmul_bias_activation_bwd(grad, a, b, None, "tanh", **how).d_a

    guarded, bare = (jax.jit(d_a, static_argnums=1)(pre, guard) for guard in (True, False))
    assert np.isfinite(guarded).all()
    assert np.isnan(bare[0]).all() and np.isfinite(bare[1]).all()
