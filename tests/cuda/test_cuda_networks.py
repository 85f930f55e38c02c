"""Networks that one kernel runs whole on a CUDA device, beside NumPy arrays' layers.

Run on a GPU where there is one, and in the simulator by `test_cuda_simulator`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import SIMULATED, unavailable
from on_device import poisoned

import numfuse as nf
from numfuse import expr as ex

status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))

from cuda_devices import slices  # noqa: E402

from numfuse.backends.cuda.call.record import REPLAY  # noqa: E402

F64, F32 = np.dtype(np.float64), np.dtype(np.float32)


@pytest.fixture(autouse=True, params=["whole", "in slices"] if SIMULATED else [""])
def memory_holds_nan(monkeypatch, request):
    """Memory that nobody wrote is NaN; the simulator's weights come in both ways that GPUs have."""
    poisoned(monkeypatch, "cuda")
    if SIMULATED:
        slices(monkeypatch, 4 * (request.param == "in slices"))
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", True)
    yield
    if SIMULATED:
        slices(monkeypatch, 0)


class Case:
    """A network and its points on the host and on the device."""

    def __init__(self, widths, points, directions=2, seconds=None, dtype=F64, batch=(), **how):
        rng = np.random.default_rng([points, *widths, directions])

        def normal(*shape, scale=1.0):
            return (scale * rng.standard_normal(shape)).astype(dtype)

        pairs = list(itertools.pairwise(widths))
        self.weights = [normal(*batch, k, n, scale=k**-0.5) for k, n in pairs]
        self.biases = [normal(n) for n in widths[1:]]
        self.x = normal(points, widths[0])
        second = None if seconds is None else np.round(rng.standard_normal((seconds, directions)))
        units = rng.standard_normal((directions, widths[0]))
        self.how = {"directions": units, "second": second} | how
        self.dtype, self._normal = dtype, normal

    def there(self, given):
        """Arrays of the device, in lists too."""
        if isinstance(given, (list, tuple)):
            return [self.there(y) for y in given]
        return None if given is None else nf.to_device(given, "cuda")

    def forward(self, device, **more):
        given = self.x, self.weights, self.biases
        given = self.there(given) if device else given
        return nf.mlp_jet(*given, **self.how | more)

    def backward(self, device, grads, **more):
        given = self.x, self.weights, self.biases
        given, grads = (self.there(given), self.there(grads)) if device else (given, grads)
        found = nf.mlp_jet_bwd(*grads, *given, **self.how | more)
        return [*found.d_weights, *found.d_biases]

    def close(self, found, wanted):
        """Sums of these lengths, each rounded some dozen times on its way through the layers."""
        assert len(found) == len(wanted)
        for x, y in zip(found, wanted, strict=True):
            assert (x is None) == (y is None)
            if y is None:
                continue
            assert (tuple(x.shape), x.dtype) == (y.shape, y.dtype)
            if not y.size:
                continue
            terms = max(len(self.x), *y.shape) * 16
            bound = terms * np.finfo(self.dtype).eps * max(1.0, np.abs(y).max())
            assert np.abs(nf.to_numpy(x) - y).max() <= bound

    def check(self, whole=True):
        """The results and gradients are those of layers, whichever way they come."""
        wanted = self.forward(False)
        self.close(self.forward(True), wanted)
        assert ("network" in nf.last_call().kernel) == whole
        results, kept = self.forward(True, keep=True)
        self.close(results, wanted)
        grads = [self._normal(*y.shape) for y in wanted]
        exact = self.backward(False, grads)
        again = self.backward(True, grads)
        assert ("network backward" in nf.last_call().kernel.replace(" jet", "")) == whole
        saved = self.backward(True, grads, kept=kept)
        self.close(again, exact)
        self.close(saved, exact)
        return grads, again, saved


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("widths", [(2, 8, 8, 1), (1, 3, 1), (3, 16, 5, 16, 2), (2, 6, 6, 6, 6, 3)])
def test_networks_of_any_widths_run_in_one_kernel(widths, dtype):
    Case(widths, 7, dtype=dtype).check()


#: Tiles whose weights come in slices: whole, padded, of odd rows.
MANY = [(F64, (2, 128, 128, 128, 1)), (F64, (3, 101, 72, 3)), (F32, (2, 128, 128, 128, 1))]
MANY += [(F32, (3, 101, 72, 3)), (F32, (2, 192, 192, 1)), (F32, (2, 256, 256, 256, 2))]
MANY += [(F32, (1, 77, 201, 140, 1))]


@pytest.mark.skipif(SIMULATED, reason="the simulator runs a few columns")
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("points", [5, 5003])
@pytest.mark.parametrize(("dtype", "widths"), MANY)
def test_networks_of_many_columns_run_in_one_kernel(dtype, widths, points, turned):
    """Guards: the tiles of a GPU alone; bits are the same again, and a point's alone."""
    _is_as_layers(Case(widths, points, seconds=1, dtype=dtype), turned)


@pytest.mark.skipif(SIMULATED, reason="the simulator has no tensor cores")
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("points", [5, 50003])
@pytest.mark.parametrize("seconds", [1, 0])
@pytest.mark.parametrize(
    ("widths", "batch"),
    [
        ((2, 64, 64, 64, 1), ()), ((3, 50, 64, 33, 2), ()), ((2, 128, 128, 128, 1), ()),
        ((1, 101, 113, 72, 3), ()), ((2, 64, 64, 1), (3,)), ((2, 128, 128, 1), (2,)),
    ],
)  # fmt: skip
def test_networks_in_parts_run_in_one_kernel(widths, batch, seconds, points, turned):
    """Guards: products of bfloat16 parts by warps and by warp groups, on a GPU that has them."""
    with nf.use_backend("cuda", precision="bf16x6"):
        case = Case(widths, points, seconds=seconds, dtype=F32, batch=batch)
        if batch:  # (gradients by what networks share are sums, and the layers' to make)
            case.biases = [np.stack([y] * len(case.weights[0]))[:, None] for y in case.biases]
        _is_as_layers(case, turned)
        assert nf.last_call().kernel.endswith("bf16x6")


def _is_as_layers(case, turned):
    if turned:
        case.weights = [np.ascontiguousarray(w.mT).mT for w in case.weights]
    grads, again, saved = case.check()
    for other in (saved, case.backward(True, grads)):
        for x, y in zip(again, other, strict=True):
            assert np.array_equal(nf.to_numpy(x), nf.to_numpy(y))
    every = case.forward(True)
    case.x = case.x[2:5]
    for x, y in zip(case.forward(True), every, strict=True):
        assert np.array_equal(nf.to_numpy(x), nf.to_numpy(y)[..., 2:5, :])


@pytest.mark.parametrize("points", [1, 4, 5, 13])
def test_blocks_and_tiles_that_are_not_full_add_nothing(points):
    Case((2, 8, 8, 1), points, seconds=1).check()


@pytest.mark.parametrize(
    ("directions", "seconds"), [(0, 0), (1, 0), (1, None), (3, 1), (2, 3), (1, 6)]
)
def test_any_members_of_a_point_fit(directions, seconds):
    Case((3, 8, 8, 1), 5, directions, seconds).check()


def test_more_members_than_registers_hold_go_by_layers():
    Case((2, 8, 1), 3, 4).check(whole=False)


@pytest.mark.parametrize("activation", ["relu", "silu", "none"])
@pytest.mark.parametrize("guard", [True, False])
def test_any_activation(activation, guard):
    Case((2, 8, 8, 1), 5, activation=activation, guard=guard).check()


def test_an_activation_of_the_users_own():
    @nf.activation
    def wave(x):
        return ex.tanh(x) * x + x

    Case((2, 5, 8, 1), 5, activation=wave).check()


def test_the_guard_counts_what_is_not_finite_as_zero():
    @nf.activation
    def root(x):
        return ex.sqrt(x)

    case = Case((1, 8, 1), 3, 1, activation=root)
    case.x[:], case.weights[0][:], case.biases[0][:] = 0, 1, 0
    for y in case.forward(True)[1:]:
        assert (nf.to_numpy(y) == 0).all()
    with np.errstate(all="ignore"):
        case.close(case.forward(True), case.forward(False))


def test_biases_that_are_not_there_have_no_gradient():
    case = Case((2, 8, 8, 1), 5)
    case.biases[0] = case.biases[2] = None
    _, again, _ = case.check()
    assert [y is None for y in again] == [False] * 3 + [True, False, True]
    case.biases = None
    case.close(case.forward(True), case.forward(False))


def test_cotangents_that_are_not_there_are_zero():
    case = Case((2, 8, 8, 1), 5, seconds=1)
    grads = [None, None, np.ones((1, 5, 1))]
    case.close(case.backward(True, grads), case.backward(False, grads))
    grads = [np.ones((5, 1)), None, None]
    case.close(case.backward(True, grads), case.backward(False, grads))


def test_what_is_kept_changes_no_bit_nor_does_a_call_that_comes_again():
    grads, again, saved = (case := Case((2, 8, 8, 8, 1), 9, dtype=F32)).check()
    for other in (saved, case.backward(True, grads)):
        for x, y in zip(again, other, strict=True):
            assert np.array_equal(nf.to_numpy(x), nf.to_numpy(y))


def test_any_strides_and_the_callers_own_results():
    case = Case((2, 8, 8, 1), 5)
    wanted = case.forward(False)
    x, weights, biases = case.there((case.x, [w.T.copy() for w in case.weights], case.biases))
    out = tuple(case.there([np.full((*y.shape[:-1], 2), np.nan) for y in wanted]))
    out = tuple(y[..., ::2] for y in out)
    found = nf.mlp_jet(x, [w.T for w in weights], biases, **case.how, out=out)
    assert all(a is b for a, b in zip(found, out, strict=True))
    case.close(found, wanted)


@pytest.mark.parametrize(
    "more",
    [
        {"final": "tanh"},
        {"activation": ("tanh", "silu")},
        {"dtype": np.dtype(np.float16)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_other_networks_go_by_layers(more):
    case = Case((2, 4, 4, 1), 3, **more)
    found = case.forward(True)
    assert "network" not in nf.last_call().kernel
    if case.dtype.itemsize > 2:
        case.close(found, case.forward(False))


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("own", [False, True], ids=["shared points", "own points"])
def test_several_networks_are_rows_of_the_grid(own, dtype):
    case = Case((2, 8, 5, 8, 3), 9, 2, 1, dtype, batch=(3,))
    case.biases = [np.stack([y, -y, y / 2])[:, None] for y in case.biases]
    case.biases[2] = None
    if own:
        case.x = np.stack([case.x, -case.x, case.x[::-1]])
    _, again, saved = case.check()
    for x, y in zip(again, saved, strict=True):
        assert x is y is None or np.array_equal(nf.to_numpy(x), nf.to_numpy(y))


@pytest.mark.parametrize("shared", ["weights", "biases"])
def test_a_gradient_that_is_a_sum_over_networks_goes_by_layers(shared):
    case = Case((2, 4, 4, 1), 3, batch=(2,))
    if shared == "weights":
        case.biases = [np.stack([y, y])[:, None] for y in case.biases]
        case.weights[1] = case.weights[1][0]
    wanted = case.forward(False)
    case.close(case.forward(True), wanted)
    assert "network" in nf.last_call().kernel
    grads = [np.ones(y.shape) for y in wanted]
    case.close(case.backward(True, grads), case.backward(False, grads))
    assert "network" not in nf.last_call().kernel


def test_gradients_of_points_go_by_layers_whatever_was_kept():
    case = Case((2, 4, 4, 1), 3)
    wanted, kept = case.forward(True, keep=True)
    grads = [np.ones(y.shape) for y in wanted]
    given = case.there((case.x, case.weights, case.biases))
    needs = ("x", "weights")
    found = nf.mlp_jet_bwd(*case.there(grads), *given, **case.how, needs=needs, kept=kept)
    host = case.x, case.weights, case.biases
    exact = nf.mlp_jet_bwd(*grads, *host, **case.how, needs=needs)
    case.close([found.d_x, *found.d_weights], [exact.d_x, *exact.d_weights])


def test_a_network_that_comes_again_is_found_and_other_constants_are_another():
    """Guards: a repeated network is one look-up and one launch, with its own constants."""
    case = Case((2, 4, 1), 3, seconds=1)
    given = case.there((case.x, case.weights, case.biases))
    nf.mlp_jet(*given, **case.how)
    before = len(REPLAY.programs())
    nf.mlp_jet(*given, **case.how)
    assert len(REPLAY.programs()) == before
    case.how["second"] = case.how["second"] + 1
    found = nf.mlp_jet(*given, **case.how)
    assert len(REPLAY.programs()) == before + 2  # the kernel's, and the call's
    case.close(found, case.forward(False))
