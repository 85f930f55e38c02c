"""JAX: epilogues, elementwise formulas and the gated layer, under every transformation."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse import expr as ex  # noqa: E402
from numfuse.adapters import jax as adapter  # noqa: E402
from numfuse.adapters.jax import calls, ffi, formulas, table  # noqa: E402
from numfuse.language.curves import leaf  # noqa: E402
from numfuse.language.operations import OPERATIONS  # noqa: E402

GELU = nf.activations()["gelu"]


def scaled(z, bias, scale):
    return ex.tanh(z + bias) * scale


def two(z, w, s):
    return GELU(z) * w + s


def pair(x, y):
    return x * ex.exp(y), x * x + y


def ours_pair(x, y):
    p, q = nf.elementwise(pair, x, y)
    return p + q * q


#: By name: ours, JAX's own, and the operands' shapes.
USES = {
    "epilogue": (
        lambda a, b, bias, scale: nf.matmul_epilogue(a, b, scaled, bias, scale),
        lambda a, b, bias, scale: jnp.tanh(a @ b + bias) * scale,
        ((3, 2), (2, 4), (4,), (3, 1)),
    ),
    "two factors": (
        lambda a, b, c, s: nf.matmul_epilogue(a, (b, c), two, s),
        lambda a, b, c, s: jax.nn.gelu(a @ b) * (a @ c) + s,
        ((3, 2), (2, 4), (2, 4), ()),
    ),
    "gated layer": (
        nf.matmul_activation_mul,
        lambda a, b, c, x, y: jax.nn.silu(a @ b + x) * (a @ c + y),
        ((3, 2), (2, 4), (2, 4), (4,), (3, 4)),
    ),
    "elementwise": (
        ours_pair,
        lambda x, y: x * jnp.exp(y) + (x * x + y) ** 2,
        ((3, 4), (4,)),
    ),
}


@pytest.fixture(autouse=True)
def double_precision():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def draw(shapes, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def close(found, wanted, tol=1e-9):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        np.testing.assert_allclose(left, right, rtol=tol, atol=tol)


def loss(f):
    return lambda *x: jnp.sum(jnp.sin(f(*x)))


def places(x):
    return tuple(range(len(x)))


def along(f, x, dots):
    """A directional derivative in reverse mode."""

    def of(*z):
        return sum(jnp.vdot(g, d) for g, d in zip(jax.grad(f, places(x))(*z), dots, strict=True))

    return of


#: From a loss, its operands and directions to a function of the operands.
ORDERS = {
    "grad": lambda f, x, d: jax.grad(f, places(x)),
    "jvp": lambda f, x, d: lambda *z: jax.jvp(f, z, d),
    "grad of jvp": lambda f, x, d: jax.grad(lambda *z: jax.jvp(f, z, d)[1], places(x)),
    "jvp of grad": lambda f, x, d: lambda *z: jax.jvp(jax.grad(f, places(x)), z, d)[1],
    "grad of grad": lambda f, x, d: jax.grad(along(f, x, d), places(x)),
    "jvp of jvp": lambda f, x, d: lambda *z: jax.jvp(lambda *y: jax.jvp(f, y, d)[1], z, d)[1],
    "third, reverse": lambda f, x, d: jax.grad(along(along(f, x, d), x, d), places(x)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("use", USES)
def test_every_order_of_derivative_is_that_of_jax(use, order):
    ours, theirs, shapes = USES[use]
    x, dots = tuple(draw(shapes)), tuple(draw(shapes, 1))
    found = (jax.jit(ORDERS[order](loss(f), x, dots))(*x) for f in (ours, theirs))
    close(*found)


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_every_order_of_arrays_that_are_there(use):
    ours, theirs, shapes = USES[use]
    x, dots = tuple(draw(shapes, 2)), tuple(draw(shapes, 3))
    for order in ORDERS.values():
        for _ in range(2):  # at once, then what was compiled for it
            found = order(loss(ours), x, dots)(*x)
        close(found, order(loss(theirs), x, dots)(*x))


@pytest.mark.parametrize("axes", [(0, None, None, 0), (None, 0, 0, None), (None, None, 0, None)])
@pytest.mark.parametrize("use", [name for name in USES if name != "elementwise"])
def test_vmap_around_and_within_derivatives(use, axes):
    ours, theirs, shapes = USES[use]
    axes = (*axes, None)[: len(shapes)]
    x = draw([(5, *s) if axis == 0 else s for s, axis in zip(shapes, axes, strict=True)], 4)
    found = []
    for f in (ours, theirs):
        n = places(x)
        inner = jax.vmap(jax.grad(loss(f), n), axes)
        outer = jax.grad(loss(jax.vmap(f, axes)), n)
        twice = jax.vmap(
            jax.grad(lambda *z, f=f, n=n: jnp.sum(jax.grad(loss(f), n[0])(*z) ** 2), n), axes
        )
        found.append([jax.jit(g)(*x) for g in (jax.vmap(f, axes), inner, outer, twice)])
        if f is ours:
            assert "callback" not in jax.jit(inner).lower(*x).as_text()
            assert "callback" not in jax.jit(outer).lower(*x).as_text()
    close(*found)


def test_vmap_of_an_elementwise_formula_in_another():
    ours, theirs, _ = USES["elementwise"]
    x, y = draw(((2, 5, 3, 4), (5, 4)), 5)
    found = []
    for f in (ours, theirs):
        g = jax.vmap(jax.vmap(jax.grad(loss(f), (0, 1)), (0, None)), (1, 0))
        found.append(jax.jit(g)(x, y))
    close(*found)


@given(st.data())
def test_broadcast_operands_have_gradients_of_their_shapes(data):
    lead = data.draw(st.sampled_from([(), (2,), (3, 2)]))
    m, k, n = (data.draw(st.integers(1, 4)) for _ in range(3))
    own = data.draw(st.sampled_from([(), lead, lead[1:]]))
    full = (*lead, m, n)
    shape = full[data.draw(st.integers(0, len(full))) :]
    shape = tuple(length if data.draw(st.booleans()) else 1 for length in shape)
    a, b, bias, scale, grad = draw(((*lead, m, k), (*own, k, n), (n,), shape, full), m + 7 * n)
    found = adapter.matmul_epilogue_bwd(grad, a, b, scaled, bias, scale)
    wanted = nf.matmul_epilogue_bwd(
        *map(np.asarray, (grad, a, b)), scaled, np.asarray(bias), np.asarray(scale),
        backend="reference",
    )  # fmt: skip
    close(jax.tree.leaves(found), [jnp.asarray(x) for x in jax.tree.leaves(wanted)])


def test_the_functions_are_those_of_the_reference():
    a, b, c, x, y, grad = draw(((5, 3), (3, 4), (3, 4), (4,), (5, 1), (5, 4)), 6)
    layer, dots = (a, b, c, x, y), draw(((5, 3), (3, 4), (3, 4), (4,), (5, 1)), 7)
    pre = nf.matmul_activation_mul(*layer, return_pre_activation=True)[1]
    sums = nf.matmul_epilogue(a, b, scaled, x, y, return_pre_activation=True)[1]
    cases = [
        ("matmul_activation_mul", (*layer, "gelu"), {"return_pre_activation": True}),
        ("matmul_activation_mul_bwd", (grad, *layer), {"pre_activation": pre}),
        ("matmul_activation_mul_bwd", (grad, *layer[:4]), {"needs": ("b_up", "a")}),
        ("matmul_activation_mul_double_bwd", (*dots, grad, *layer), {"pre_activation": pre}),
        ("matmul_activation_mul_double_bwd", (a, None, c, None, None, grad, *layer), {}),
        ("matmul_activation_mul_jvp", (*layer, *dots[:2], None, None, None), {}),
        ("matmul_activation_mul_jvp", (*layer, *[None] * 5), {}),
        ("matmul_epilogue", (a, b, scaled, x, 2.0), {"return_pre_activation": True}),
        ("matmul_epilogue_bwd", (grad, a, (b, c), two, 0.5), {}),
        ("matmul_epilogue_bwd", (grad, a, b, scaled, x, y), {"pre_activation": sums}),
        ("matmul_epilogue_bwd", (grad, a, b, scaled, x, y), {"needs": (1, "b")}),
        ("matmul_epilogue_jvp", (a, b, scaled, (x, 2.0), a, None, (x, 1.0)), {}),
        ("elementwise", (pair, a, a[0]), {}),
        ("elementwise_bwd", ((a, None), pair, a, a[0]), {}),
    ]
    host = lambda tree: jax.tree.map(lambda v: np.asarray(v) if v is not None else v, tree)  # noqa: E731
    for name, args, options in cases:
        kept = {k: host(v) if k == "pre_activation" else v for k, v in options.items()}
        plain = [
            host(v) if not callable(v) and not isinstance(v, (str, float)) else v for v in args
        ]
        if name == "matmul_epilogue_jvp":
            plain[3], plain[6] = (np.asarray(x), 2.0), (np.asarray(x), 1.0)
        wanted = getattr(nf, name)(*plain, **kept, backend="reference")
        for functions in (nf, adapter):
            found = getattr(functions, name)(*args, **options)
            assert type(found) is type(wanted) or isinstance(found, jax.Array)
            assert all(isinstance(v, jax.Array) for v in jax.tree.leaves(found))
            close(jax.tree.leaves(found), [jnp.asarray(v) for v in jax.tree.leaves(wanted)], 1e-11)


def test_a_batch_of_weights_can_be_summed_over():
    a, b, c, grad = draw(((6, 3, 2), (6, 2, 4), (6, 2, 4), (6, 3, 4)), 8)
    whole = nf.matmul_activation_mul_bwd(grad, a, b, c)
    found = nf.matmul_activation_mul_bwd(grad, a, b, c, sum_batch=True)
    close(found.d_b_up, whole.d_b_up.sum(0))
    close(found.d_a, whole.d_a)


def test_what_a_forward_kept_is_differentiable():
    a, b, c = draw(((3, 2), (2, 4), (2, 4)), 9)

    def kept(of):
        def f(a, b, c):
            out, (p, q) = of(a, b, c)
            return jnp.sum(out * p * q**2)

        return jax.grad(f, (0, 1, 2))(a, b, c)

    def plain(a, b, c):
        return jax.nn.silu(a @ b) * (a @ c), (a @ b, a @ c)

    close(kept(lambda *x: nf.matmul_activation_mul(*x, return_pre_activation=True)), kept(plain))
    own = lambda z, w: z / (1 + ex.exp(-z)) * w  # noqa: E731
    close(
        kept(lambda a, b, c: nf.matmul_epilogue(a, (b, c), own, return_pre_activation=True)),
        kept(plain),
    )


def test_a_call_is_one_custom_call_without_python():
    for ours, theirs, shapes in USES.values():
        x = draw(shapes, 10)
        text = jax.jit(ours).lower(*x).as_text()
        assert text.count(ffi.TARGET) == 1 and "callback" not in text
        text = jax.jit(jax.grad(loss(ours), places(x))).lower(*x).as_text()
        assert text.count(ffi.TARGET) == 2 and "callback" not in text
        close(jax.jit(ours)(*x), theirs(*x))
    x = draw(USES["epilogue"][2], 10)
    f = lambda *x: nf.matmul_epilogue(*x[:2], scaled, *x[2:], backend="reference")  # noqa: E731
    assert "callback" in jax.jit(f).lower(*x).as_text()
    close(jax.jit(f)(*x), USES["epilogue"][1](*x))


def test_in_a_scan_with_donation():
    w, h, bias = draw(((4, 4), (3, 4), (4,)), 11)
    found = []
    for f in (USES["epilogue"][0], USES["epilogue"][1]):

        def run(w, h, f=f):
            step = lambda h, _: (f(h, w, bias, jnp.float64(0.5)), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(step, h, length=3)[0] ** 2)

        found.append(jax.jit(jax.grad(run, (0, 1)))(w, h))
    close(*found)
    step = jax.jit(lambda x, g: nf.elementwise(lambda x, g: x - 0.1 * g, x, g), donate_argnums=0)
    given = h + 0
    close(step(given, h), 0.9 * h)
    assert given.is_deleted()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_half_types_are_computed_in_float32(dtype):
    shapes = USES["gated layer"][2]
    x = draw(shapes, 12, dtype)
    wide = [v.astype("float64") for v in x]
    ours, theirs, _ = USES["gated layer"]
    n = places(x)
    found = jax.jit(jax.grad(lambda *z: jnp.sum(ours(*z).astype("float32")), n))(*x)
    wanted = jax.grad(lambda *z: jnp.sum(theirs(*z)), n)(*wide)
    tol = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 1e-5}[dtype]
    for left, right in zip(found, wanted, strict=True):
        assert left.dtype == dtype
        np.testing.assert_allclose(left.astype("float64"), right, rtol=tol, atol=4 * tol)
    number = adapter.elementwise_bwd(x[0], lambda x, c: x * c, x[0], 2.0)[1]
    assert number.dtype == "float32" and number.shape == ()


def test_another_number_compiles_nothing():
    """Guards: a number is a run-time value of a call on arrays that are there."""
    (x,) = draw(((3, 4),), 13)
    f = lambda x, c: x * c + 1  # noqa: E731
    for c in (1.0, 2.0):
        nf.elementwise(f, x, c)
    before = calls._compiled._cache_size()
    for c in (3.0, 4.0):
        close(nf.elementwise(f, x, c), x * c + 1)
    assert calls._compiled._cache_size() == before


def test_a_dropped_program_is_recorded_again_from_its_description():
    for ours, _, shapes in USES.values():
        x = draw(shapes, 14)
        f = jax.jit(ours)
        wanted = np.asarray(f(*x))
        table.records().clear()
        gc.collect()
        np.testing.assert_array_equal(f(*x), wanted)
        assert table.records().statistics().entries == 1


def test_errors_say_what_to_do():
    a, b, bias, scale = draw(USES["epilogue"][2], 15)
    f = nf.matmul_epilogue
    with pytest.raises(ValueError, match="scale must broadcast to the result's shape"):
        f(a, b, scaled, bias, scale[:2])
    with pytest.raises(ValueError, match="bias must broadcast"):
        jax.jit(lambda a: f(a, b, scaled, bias[:3], scale))(a)
    with pytest.raises(TypeError, match="must have the same dtype, got a float64, b float32"):
        f(a, b.astype("float32"), scaled, bias, scale)
    with pytest.raises(TypeError, match="float64, float32, float16 or"):
        nf.elementwise(lambda x: x + 1, jnp.arange(3))
    with pytest.raises(ValueError, match="out must be None under JAX"):
        f(a, b, scaled, bias, scale, out=np.empty((3, 4)))
    with pytest.raises(TypeError, match="takes 3 arguments"):
        f(a, b, scaled, bias)
    with pytest.raises(TypeError, match="bias must be a JAX array where another is"):
        f(a, b, scaled, [1.0], scale)


def test_formulas_have_every_operation_and_derivative():
    """Guards: what is beyond the fused kinds evaluates any graph, as the reference does."""
    assert formulas.MEANINGS.keys() == OPERATIONS.keys()
    x = np.concatenate([np.linspace(-40, 40, 81), [0.3, -0.3, 1e-9]])
    for act in nf.activations().values():
        for order in range(4):
            exprs = (act.derived(order)(leaf("x")),)
            (found,) = formulas.values(formulas.Graphs(exprs, ("x",), False), jnp.asarray(x))
            wanted = act.derived(order)(x)
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12, err_msg=act.name)
