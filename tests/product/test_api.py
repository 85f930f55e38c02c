"""The public interface: the names, their documentation, and where a call runs.

Guards: what docs/api.md lists is there, and a backend that was asked for is the one that runs.
"""

from __future__ import annotations

import asyncio
import doctest
import inspect
import threading

import numpy as np
import pytest

import numfuse as nf
from numfuse import backends as _backends_function
from numfuse import definitions, devices, differentials, functional, fusion, gated
from numfuse.backends import resolve

X = np.ones((3, 3), np.float32)


class Recorder:
    """A backend that counts what it is given."""

    def __init__(self, name="recorder"):
        self.name, self.calls, self.configured = name, [], None

    def forward(self, p):
        self.calls.append("forward")

    def backward(self, p):
        self.calls.append("backward")

    def gated(self, p):
        self.calls.append("gated")

    def gated_backward(self, p):
        self.calls.append("gated_backward")

    def fused(self, p):
        self.calls.append("fused")

    def configure(self, device, precision):
        if precision not in (None, "ieee"):
            raise ValueError(f"precision must be 'ieee', got {precision!r}")
        self.configured = device, precision
        return self

    def warmup(self, activations, dtypes, progress=None):
        self.calls.append(([a.name for a in activations], list(map(str, dtypes))))

    def to_device(self, x):
        return "moved", x


def test_every_public_name_is_there():
    for name in nf.__all__:
        assert getattr(nf, name) is not None
        assert name in dir(nf)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        nf.no_such_name  # noqa: B018


FUNCTIONS = {
    name for x in (functional, differentials, fusion, gated, devices) for name in x.__all__
}


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, "epilogue", "use_backend"}))
def test_every_public_function_is_documented_and_typed(name):
    function = getattr(nf, name)
    assert inspect.getdoc(function)
    target = function.__init__ if inspect.isclass(function) else function
    for parameter in list(inspect.signature(target).parameters.values()):
        if parameter.name != "self":
            assert parameter.annotation is not inspect.Parameter.empty, parameter.name


def test_the_examples_in_the_docstrings_are_true():
    with nf.use_backend("reference"):
        for module in (functional, fusion, gated, definitions, devices):
            assert doctest.testmod(module).failed == 0
        finder = doctest.DocTestFinder()
        runner = doctest.DocTestRunner()
        for test in finder.find(nf.use_backend, "use_backend"):
            runner.run(test)
        assert runner.failures == 0 and runner.tries > 0


def test_names_shared_with_a_module_are_the_functions():
    import numfuse.backends.reference  # noqa: F401  (sets no attribute in place of the function)

    assert callable(nf.backends) and callable(nf.activations)
    assert nf.backends is _backends_function


@pytest.mark.parametrize(
    "call,kind",
    [
        (lambda b: nf.matmul_bias_activation(X, X, backend=b), "forward"),
        (lambda b: nf.matmul_bias_residual(X, X, None, X, backend=b), "forward"),
        (lambda b: nf.matmul_bias_activation_bwd(X, X, X, backend=b), "backward"),
        (lambda b: nf.matmul_bias_residual_bwd(X, X, X, None, X, backend=b), "backward"),
        (lambda b: nf.gelu_mul(X, X, backend=b), "gated"),
        (lambda b: nf.gelu_mul_bwd(X, X, X, backend=b), "gated_backward"),
        (lambda b: nf.matmul_activation_mul(X, X, X, backend=b), "fused"),
        (lambda b: nf.elementwise(lambda x: x + x, X, backend=b), "fused"),
    ],
)
def test_a_backend_object_runs_the_call(call, kind):
    recorder = Recorder()
    call(recorder)
    assert recorder.calls == [kind]
    with nf.use_backend(recorder):
        call(None)
    assert recorder.calls == [kind, kind]


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_the_gradient_of_a_residual_alone_needs_no_product(name):
    given = []

    class Mine(Recorder):
        def backward(self, p):
            given.append(p)
            resolve(name).backward(p)

    grad = np.arange(9, dtype=np.float32).reshape(3, 3)
    result = nf.matmul_bias_residual_bwd(
        grad, X, X, None, np.ones(3, np.float32), needs=("residual",), backend=Mine()
    )
    (p,) = given
    assert p.d_a is p.d_b is p.d_bias is None
    if name == "cpu":
        assert nf.last_call().kernel == "nothing"
    assert (result.d_residual == grad.sum(axis=0)).all()
    assert result.d_a is result.d_b is result.d_bias is None


def test_use_backend_nests_and_ends():
    outer, inner = Recorder("outer"), Recorder("inner")
    with nf.use_backend(outer) as entered:
        assert entered is outer
        with pytest.raises(KeyError), nf.use_backend(inner):
            nf.silu_mul(X, X)
            raise KeyError
        nf.silu_mul(X, X)
        nf.silu_mul(X, X, backend=inner)  # the argument goes before the block
    assert (len(outer.calls), len(inner.calls)) == (1, 2)


def test_one_use_backend_may_be_entered_again():
    recorder = Recorder()
    chosen = nf.use_backend(recorder)
    with chosen, chosen:
        nf.silu_mul(X, X)
    with chosen:
        nf.silu_mul(X, X)
    assert len(recorder.calls) == 2


def test_use_backend_decorates_a_function():
    recorder = Recorder()

    @nf.use_backend(recorder)
    def run():
        nf.silu_mul(X, X)

    run()
    run()
    assert len(recorder.calls) == 2


def test_use_backend_belongs_to_its_thread():
    recorder, elsewhere = Recorder(), Recorder("elsewhere")

    def run():
        with nf.use_backend(elsewhere):
            nf.silu_mul(X, X)

    with nf.use_backend(recorder):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        nf.silu_mul(X, X)
    assert (len(recorder.calls), len(elsewhere.calls)) == (1, 1)


def test_use_backend_belongs_to_its_task():
    one, two = Recorder("one"), Recorder("two")

    async def run(recorder):
        with nf.use_backend(recorder):
            await asyncio.sleep(0)
            nf.silu_mul(X, X)
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(run(one), run(two))

    asyncio.run(both())
    assert (len(one.calls), len(two.calls)) == (1, 1)


def test_device_and_precision_are_checked_by_the_backend():
    recorder = Recorder()
    nf.use_backend(recorder, device=1, precision="ieee")
    assert recorder.configured == (1, "ieee")
    with pytest.raises(ValueError, match="precision must be 'ieee', got 'tf32'"):
        nf.use_backend(recorder, precision="tf32")


def test_last_call_says_what_ran(backend):
    nf.matmul_bias_activation(X, X, backend=backend)
    call = nf.last_call()
    assert call.backend == backend
    assert call._fields == ("backend", "device", "tier", "kernel", "tiling")
    assert all(isinstance(text, str) and text for text in call[:4])


def test_last_call_belongs_to_its_thread():
    nf.matmul_bias_activation(X, X, backend="reference")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(nf.last_call()))
    thread.start()
    thread.join()
    assert seen == [None]
    assert nf.last_call() is not None


def test_backends_tells_each_or_why_not():
    found = nf.backends()
    assert set(found) >= {"cpu", "cuda", "webgpu"}
    for name, status in found.items():
        assert bool(status) == status.available
        assert str(status) == "available" if status else f"numfuse[{name}]" in str(status)
    assert found["reference"]


def test_a_backend_describes_itself(backend):
    from numfuse.backends import resolve

    chosen = resolve(backend)
    assert chosen.name == backend
    assert chosen.describe()
    assert chosen.empty((2, 3), np.dtype(np.float32)).shape == (2, 3)


def test_warmup_takes_names_objects_and_dtypes():
    recorder = Recorder()
    nf.warmup(["gelu", nf.activations()["relu"]], ["float32", np.float16], recorder)
    assert recorder.calls == [(["gelu", "relu"], ["float32", "float16"])]
    nf.warmup(backend=recorder)
    assert recorder.calls[1] == (
        ["none", "relu", "gelu", "silu", "sigmoid", "tanh"],
        ["float32", "float64"],
    )


def test_numpy_arrays_are_where_they_belong():
    for name in ("reference", "cpu"):
        assert nf.to_device(X, name) is X
    assert nf.to_numpy(X) is X
    assert nf.synchronize() is None and nf.synchronize(X) is None
    assert nf.to_device(X, Recorder()) == ("moved", X)


def test_the_results_of_a_backward_are_named():
    result = nf.matmul_bias_residual_bwd(X, X, X, None, X, backend="reference")
    assert result._fields == ("d_a", "d_b", "d_bias", "d_residual")
    assert nf.matmul_bias_activation_bwd(X, X, X, backend="reference")._fields == (
        "d_a",
        "d_b",
        "d_bias",
    )
    assert nf.silu_mul_bwd(X, X, X, backend="reference")._fields == ("d_a", "d_b")


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("trace", [True, False])
def test_a_users_own_activation_runs_both_ways(backend, trace):
    from numfuse import expr

    name = f"test_api_cube_{trace}"

    @nf.activation(source="a test", name=name)
    def cube(x):
        return x * x * x + expr.tanh(x)

    if not trace:

        @cube.derivative
        def cube_prime(x):
            t = expr.tanh(x)
            return 3.0 * x * x + (1.0 - t * t)

    rng = np.random.default_rng(3)
    a, b, grad = rng.standard_normal((5, 4)), rng.standard_normal((4, 6)), np.ones((5, 6))
    pre = a @ b
    slope = 3 * pre**2 + 1 / np.cosh(pre) ** 2
    for activation in (name, cube):
        out = nf.matmul_bias_activation(a, b, None, activation, backend=backend)
        np.testing.assert_allclose(out, pre**3 + np.tanh(pre), rtol=1e-12, atol=1e-12)
        result = nf.matmul_bias_activation_bwd(grad, a, b, None, activation, backend=backend)
        np.testing.assert_allclose(result.d_a, slope @ b.T, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(result.d_b, a.T @ slope, rtol=1e-12, atol=1e-12)
        got = nf.activation_mul_bwd(grad, pre, grad, activation, backend=backend)
        np.testing.assert_allclose(got.d_a, slope, rtol=1e-12, atol=1e-12)
