"""Jets on WebGPU.

Guards: one product and one pass for each layer of a network, and for its backward one pass and two
products; one meaning in pieces and with the bindings of a smaller device; arrays of the device that
stay there. The bounds of errors are held by the conformance suite.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from arrays import normal
from conftest import unavailable

import numfuse as nf

if not nf.backends()["webgpu"]:
    unavailable("webgpu", str(nf.backends()["webgpu"]))

from numfuse.backends.webgpu import split
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.face import WebGpuBackend

F32 = np.dtype(np.float32)
rng = np.random.default_rng(11)


def array(*shape, scale=1.0):
    return normal(rng, shape, F32, scale)


def moved(x):
    """Return an argument with arrays of the device for NumPy's."""
    if isinstance(x, (list, tuple)):
        return [moved(y) for y in x]
    return nf.to_device(x, "webgpu") if isinstance(x, np.ndarray) else x


def assert_close(got, wanted, close=3e-5):
    for x, y in zip(got, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y.size:
            x = x if isinstance(x, np.ndarray) else nf.to_numpy(x)
            assert x.shape == y.shape
            assert np.abs(x - y).max() <= close * max(1, np.abs(y).max())


def layer(m, k, n, d, s, batch=()):
    """Return the operands of a layer's jet, and weights of which some are zero."""
    x = array(*batch, m, k), array(k, n, scale=k**-0.5), array(n), "tanh"
    dots = array(d, *batch, m, k), array(s, *batch, m, k)
    weights = array(s, d)
    weights[:, ::3] = 0
    return (*x, *dots), weights


def both(operands, weights, backend, grads=None, kept=False):
    """Return the results and the gradients of a layer."""
    how = {"weights": weights, "backend": backend}
    results, saved = nf.matmul_bias_activation_jet(*operands, keep=True, **how)
    grads = [np.ones_like(x) for x in results] if grads is None else grads
    saved = saved if kept else None
    return *results, *nf.matmul_bias_activation_jet_bwd(*grads, *operands, kept=saved, **how)


def network(points=70, sizes=(2, 70, 16, 1)):
    """Return the arrays of a network that goes layer by layer: x, weights, biases."""
    pairs = list(itertools.pairwise(sizes))
    weights = [array(*pair, scale=pair[0] ** -0.5) for pair in pairs]
    return [array(points, sizes[0]), weights, [array(n) for n in sizes[1:]]]


def test_a_layer_of_a_network_is_a_product_and_a_pass(submits, monkeypatch):
    host = network()
    given, how = moved(host), {"second": np.ones((1, 2))}
    wanted = nf.mlp_jet(*host, **how, backend="reference")
    grads = [array(*x.shape) for x in wanted]
    gradients = nf.mlp_jet_bwd(*grads, *host, **how, needs=("weights",), backend="reference")
    on_device = moved(grads)
    for repeated in range(3):
        submits.clear()
        results, kept = nf.mlp_jet(*given, keep=True, **how)
        layers = [x for x in submits if "jet" in x]
        assert layers == [["gemm", "jet"]] * 2
        submits.clear()
        got = nf.mlp_jet_bwd(*on_device, *given, **how, kept=kept, needs=("weights",))
        layers = [sorted(x) for x in submits if "jet" in x]
        assert layers == [["gemm", "gemm", "jet"], ["gemm", "jet"]]
        assert_close(results, wanted)
        assert_close(got.d_weights, gradients.d_weights)
        if not repeated:  # from here on calls are found again
            monkeypatch.setattr(split, "run", None)


@pytest.mark.parametrize("directions", [1, 3, 4, 5])
@pytest.mark.parametrize("batch", [((), ()), ((2,), ()), ((), (2,)), ((2, 1), (3,))])
def test_the_first_layers_tangents_are_a_row_each(submits, monkeypatch, directions, batch):
    """Guards: where there are many points, no product has a row for each of their tangents."""
    monkeypatch.setattr("numfuse.adapters.stacks.SHARED_BYTES", 0)
    points, (of_x, of_net) = 19 + directions, batch
    x = array(*of_x, points, 3)
    pairs = list(itertools.pairwise((3, 65, 7, 2)))  # (too wide to go at once)
    weights = [array(*of_net, *pair, scale=pair[0] ** -0.5) for pair in pairs]
    biases = [array(*of_net, 1, n) if of_net else array(n) for _, n in pairs]
    how = {"directions": rng.standard_normal((directions, 3)), "second": np.ones((1, directions))}
    wanted = nf.mlp_jet(x, weights, biases, **how, backend="reference")
    grads = [array(*y.shape) for y in wanted]
    needs = {"needs": ("x", "weights", "biases")}
    call = x, weights, biases
    gradients = nf.mlp_jet_bwd(*grads, *call, **how, **needs, backend="reference")
    given, on_device = moved(list(call)), moved(grads)
    submits.clear()
    results, kept = nf.mlp_jet(*given, **how, keep=True)
    first = next(y for y in submits if "jet" in y)
    assert first.count("gemm") == 1 + (directions <= 4)
    assert_close(results, wanted)
    for saved in (kept, None):
        got = nf.mlp_jet_bwd(*on_device, *given, **how, **needs, kept=saved)
        flat = [got.d_x, *got.d_weights, *got.d_biases]
        assert_close(flat, [gradients.d_x, *gradients.d_weights, *gradients.d_biases], 1e-4)


def test_other_weights_are_another_program():
    operands, _ = layer(5, 3, 4, 2, 1)
    given = moved(operands)
    for weights in ([[1.0, 0.0]], [[1.0, 2.0]], [[1.0, 0.0]]):
        got = nf.matmul_bias_activation_jet(*given, weights=weights)
        how = {"weights": weights, "backend": "reference"}
        assert_close(got, nf.matmul_bias_activation_jet(*operands, **how))


def test_an_array_elsewhere_is_a_type_error_that_names_it():
    x, weights, biases = network(5)
    given = nf.to_device(x, "webgpu"), moved(weights), biases
    with pytest.raises(TypeError, match=r"biases\[0\] must be an array on .* as x, got ndarray"):
        nf.mlp_jet(*given)
    operands, table = layer(5, 3, 4, 2, 1)
    with pytest.raises(TypeError, match="b must be on"):
        nf.matmul_bias_activation_jet(moved(operands[0]), *operands[1:4], moved(operands[4]), None,
                                      weights=table)  # fmt: skip


def test_results_are_written_where_they_are_asked_for():
    host = network(9, (3, 5, 2))
    given = moved(host)
    wanted = nf.mlp_jet(*host, backend="reference")
    out = tuple(nf.to_device(np.full(x.shape, np.nan, F32), "webgpu") for x in wanted)
    got = nf.mlp_jet(*given, out=out)
    assert all(x is y for x, y in zip(got, out, strict=True))
    assert_close(got, wanted)


@pytest.mark.parametrize(
    "limits",
    [{"max-storage-buffer-binding-size": 4096}, {"max-storage-buffers-per-shader-stage": 8}],
    ids=["4 KiB", "8 bindings"],
)  # fmt: skip
@pytest.mark.parametrize("batch", [(), (3,)], ids=["rows", "batch"])
def test_a_smaller_device_gives_the_same(limits, batch):
    """Guards: pieces by points and columns, saved sums in one stack where bindings are short."""
    small = WebGpuBackend(limits=limits)
    operands, weights = layer(60 // (1 + len(batch)), 7, 9, 3, 2, batch)
    wanted = both(operands, weights, "reference")
    for kept in (False, True):
        assert_close(both(operands, weights, small, kept=kept), wanted)


def test_many_directions_are_no_other_shader(monkeypatch):
    """Guards: numbers of directions and of second derivatives are run-time values."""
    made, compiled = [], Device.compiled

    def compile_one(self, label, *how):
        made.append(label)
        return compiled(self, label, *how)

    monkeypatch.setattr(Device, "compiled", compile_one)
    for d, s in ((2, 1), (50, 3)):
        made.clear()
        operands, weights = layer(6, 4, 5, d, s)
        assert_close(both(operands, weights, "webgpu"), both(operands, weights, "reference"))
    assert not any("jet" in label for label in made)
