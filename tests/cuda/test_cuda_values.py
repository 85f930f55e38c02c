"""Networks' values that one kernel makes on a CUDA device, beside NumPy arrays' layers.

Run on a GPU where there is one, and in the simulator by `test_cuda_simulator`.
"""

from __future__ import annotations

import itertools

import ml_dtypes
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
HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
EVERY = ("x", "weights", "biases")


@pytest.fixture(autouse=True, params=["whole", "in slices"] if SIMULATED else [""])
def memory_holds_nan(monkeypatch, request):
    """Memory that nobody wrote is NaN; the simulator's weights come in both ways that GPUs have."""
    poisoned(monkeypatch, "cuda")
    if SIMULATED:
        slices(monkeypatch, 4 * (request.param == "in slices"))
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", True)
    monkeypatch.setattr("numfuse.adapters.cuda_whole.HALF", True)
    yield
    if SIMULATED:
        slices(monkeypatch, 0)


class Case:
    """A network and its points on the host and on the device."""

    def __init__(self, widths, points, dtype=F64, batch=(), **how):
        rng = np.random.default_rng([points, *widths])

        def normal(*shape, scale=1.0):
            return (scale * rng.standard_normal(shape)).astype(dtype)

        pairs = list(itertools.pairwise(widths))
        self.weights = [normal(*batch, k, n, scale=k**-0.5) for k, n in pairs]
        self.biases = [normal(n) for n in widths[1:]]
        self.x, self.grad = normal(points, widths[0]), normal(*batch, points, widths[-1])
        self.how, self.dtype = how, dtype

    def there(self, given):
        """Arrays of the device, in lists too."""
        if isinstance(given, (list, tuple)):
            return [self.there(y) for y in given]
        return None if given is None else nf.to_device(given, "cuda")

    def forward(self, device, **more):
        given = self.x, self.weights, self.biases
        how = {name: y for name, y in self.how.items() if name != "guard"}
        return nf.mlp(*(self.there(given) if device else given), **how | more)

    def backward(self, device, **more):
        given = self.grad, self.x, self.weights, self.biases
        given = self.there(given) if device else given
        found = nf.mlp_bwd(*given, **{"needs": EVERY} | self.how | more)
        return [found.d_x, *(found.d_weights or ()), *(found.d_biases or ())]

    def close(self, found, wanted):
        """Sums of these lengths, each rounded some dozen times on its way through the layers."""
        assert len(found) == len(wanted)
        for x, y in zip(found, wanted, strict=True):
            assert (x is None) == (y is None)
            if y is None:
                continue
            assert (tuple(x.shape), x.dtype) == (y.shape, y.dtype)
            terms = max(len(self.x), *y.shape) * 16
            bound = terms * np.finfo(self.dtype).eps * max(1.0, np.abs(y).max())
            assert np.abs(nf.to_numpy(x) - y).max() <= bound

    def check(self, whole=True):
        """The value and the gradients are those of layers, whichever way they come."""
        wanted = self.forward(False)
        found, kept = self.forward(True, keep=True)
        assert ("network" in nf.last_call().kernel) == whole
        self.close([found, self.forward(True)], [wanted, wanted])
        exact = self.backward(False)
        again = self.backward(True)
        assert ("network backward" in nf.last_call().kernel) == whole
        self.close(again, exact)
        self.close(self.backward(True, kept=kept), exact)
        return again


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("widths", [(2, 8, 8, 1), (1, 3, 1), (3, 16, 5, 16, 2), (8, 6, 6, 6, 6, 3)])
def test_networks_of_any_widths_run_in_one_kernel(widths, dtype):
    Case(widths, 7, dtype=dtype).check()


@pytest.mark.skipif(SIMULATED, reason="the simulator runs a few columns")
@pytest.mark.parametrize(
    ("dtype", "widths"),
    [(F64, (8, 128, 128, 1)), (F32, (4, 128, 120, 128, 3)), (F32, (5, 250, 192, 2))],
)
def test_networks_of_many_columns_run_in_one_kernel(dtype, widths):
    Case(widths, 7001, dtype=dtype).check()


@pytest.mark.parametrize("points", [1, 4, 5, 29])
def test_blocks_and_tiles_that_are_not_full_add_nothing(points):
    Case((2, 8, 8, 1), points).check()


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

    case = Case((1, 8, 1), 3, activation=root)
    case.x[:], case.weights[0][:], case.biases[0][:] = 0, 1, 0
    with np.errstate(all="ignore"):
        case.close(case.backward(True), case.backward(False))


def test_biases_that_are_not_there_have_no_gradient():
    case = Case((2, 8, 8, 1), 5)
    case.biases[0] = case.biases[2] = None
    assert [y is None for y in case.check()] == [False] * 4 + [True, False, True]
    case.biases = None
    case.close([case.forward(True)], [case.forward(False)])


@pytest.mark.parametrize("needs", [("x",), ("weights",), ("biases", "x"), ("weights", "biases")])
def test_gradients_that_are_not_needed_are_none(needs):
    case = Case((2, 8, 8, 1), 5)
    case.close(case.backward(True, needs=needs), case.backward(False, needs=needs))


def test_a_call_that_comes_again_changes_no_bit_and_is_one_program():
    """Guards: sums over points have one order, and a repeated network is one look-up."""
    case = Case((2, 8, 8, 8, 1), 9, dtype=F32)
    first = case.backward(True)
    before = len(REPLAY.programs())
    for x, y in zip(first, case.backward(True), strict=True):
        assert np.array_equal(nf.to_numpy(x), nf.to_numpy(y))
    assert len(REPLAY.programs()) == before


def test_any_strides_and_the_callers_own_result():
    case = Case((2, 8, 8, 1), 5)
    x, grad = np.repeat(case.x, 2, 1), np.repeat(case.grad, 3, 0)
    x, grad, biases, weights = case.there((x, grad, case.biases, [w.T for w in case.weights]))
    given = x[:, ::2], [w.T for w in weights], biases
    out = case.there(np.full((5, 2), np.nan))[:, 1:]
    assert nf.mlp(*given, out=out) is out
    case.close([out], [case.forward(False)])
    found = nf.mlp_bwd(grad[::3], *given, needs=EVERY)
    case.close([found.d_x, *found.d_weights, *found.d_biases], case.backward(False))


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (3, 1, 2)])
def test_leading_axes_of_x_are_rows_of_one_network(shape):
    case = Case((2, 8, 8, 1), int(np.prod(shape)))
    case.x, case.grad = case.x.reshape(*shape, 2), case.grad.reshape(*shape, 1)
    case.check()


def test_leading_axes_that_do_not_lie_as_rows_go_by_layers():
    case = Case((2, 4, 1), 6)
    x, weights, biases = case.there((case.x.reshape(3, 2, 2), case.weights, case.biases))
    found = nf.mlp(x.transpose((1, 0, 2)), weights, biases)
    assert "network" not in nf.last_call().kernel
    wanted = case.forward(False).reshape(3, 2, 1).transpose(1, 0, 2)
    case.close([found], [wanted])


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"shape": (5, 2)}, ValueError, "must have shape"),
        ({"dtype": np.float32}, TypeError, "must have dtype"),
    ],
    ids=["shape", "dtype"],
)
def test_a_result_that_does_not_fit_is_refused(more, error, words):
    case = Case((2, 4, 1), 5)
    out = case.there(np.zeros(**{"shape": (5, 1), "dtype": F64} | more))
    with pytest.raises(error, match=words):
        case.forward(True, out=out)


def test_a_result_that_is_an_operand_is_refused():
    case = Case((1, 4, 1), 5)
    x, weights, biases = case.there((case.x, case.weights, case.biases))
    with pytest.raises(ValueError, match="overlap"):
        nf.mlp(x, weights, biases, out=x)


@pytest.mark.parametrize(
    "more",
    [{"final": "tanh"}, {"activation": ("tanh", "silu")}],
    ids=lambda more: next(iter(more)),
)
def test_other_networks_go_by_layers(more):
    Case((2, 4, 4, 1), 3, **more).check(whole=False)


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("points", [1, 13])
def test_several_networks_are_rows_of_the_grid(points, dtype):
    case = Case((2, 8, 5, 8, 3), points, dtype, batch=(3,))
    case.biases = [np.stack([y, -y, y / 2])[:, None] for y in case.biases]
    case.biases[2] = None
    case.close([case.forward(True)], [case.forward(False)])  # (points of all of them)
    case.x = np.stack([case.x, -case.x, case.x[::-1]])
    several = case.check()
    # each has the bits that it has alone, on blocks of as many points
    found, (d_x, *made) = nf.to_numpy(case.forward(True)), several
    for i in range(3):
        alone = Case((2, 8, 5, 8, 3), points, dtype)
        alone.x, alone.grad = case.x[i], case.grad[i]
        alone.weights = [w[i] for w in case.weights]
        alone.biases = [None if y is None else y[i] for y in case.biases]
        assert np.array_equal(nf.to_numpy(alone.forward(True)), found[i])
        alone.close([d_x[i], *[None if y is None else y[i] for y in made]], alone.backward(False))


def test_a_gradient_that_is_a_sum_over_networks_goes_by_layers():
    case = Case((2, 4, 4, 1), 3, batch=(2,))
    wanted = case.backward(False)
    case.close(case.backward(True), wanted)
    assert "network" not in nf.last_call().kernel
    case.biases = [np.stack([y, y])[:, None] for y in case.biases]
    needs = EVERY[1:]
    wanted = case.backward(False, needs=needs)
    case.close(case.backward(True, needs=needs), wanted)
    assert "network backward" in nf.last_call().kernel
    case.weights[1] = case.weights[1][0]
    case.close(case.backward(True, needs=needs), case.backward(False, needs=needs))
    assert "network" not in nf.last_call().kernel


def test_several_networks_of_any_strides_and_the_callers_own_result():
    case = Case((2, 8, 8, 1), 5, F32, batch=(2,))
    wanted = case.forward(False)
    turned = [w.swapaxes(-1, -2).copy() for w in case.weights]
    x, weights, biases = case.there((case.x, turned, case.biases))
    out = case.there(np.full((2, 5, 2), np.nan, F32))[..., :1]
    found = nf.mlp(x, [w.transpose((0, 2, 1)) for w in weights], biases, out=out)
    assert found is out and "network" in nf.last_call().kernel
    case.close([found], [wanted])


def test_operands_that_do_not_fit_are_refused_as_by_layers():
    case = Case((2, 4, 4, 1), 3)
    case.weights[1] = case.weights[1][:3]
    with pytest.raises(ValueError, match="K"):
        case.forward(True)


@pytest.mark.skipif(SIMULATED, reason="the simulator has no tensor cores")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("points", [5, 4099])
@pytest.mark.parametrize(
    "widths",
    [(64, 64, 64, 64), (3, 64, 64, 64, 64, 1), (20, 17, 33, 3), (32, 128, 16), (96, 32, 32)],
)
@pytest.mark.parametrize("activation", ["tanh", "silu", "relu"])
def test_networks_in_16_bits_are_those_of_float64_to_the_roundings_of_layers(
    activation, widths, points, dtype
):
    """`test_cuda_half_networks` has the bounds; here each result is held to its whole size.

    A rounding of a part `unit` of a sum changes the sign of about as large a part of the sums.
    There relu's derivative jumps, so the gradients' squared error is that part of their square: the
    error grows as its root.
    """
    case = Case(widths, points, HALVES[dtype], activation=activation)
    found, made = case.forward(True), case.backward(True)
    assert "network" in nf.last_call().kernel
    exact = Case(widths, points, F64, activation=activation)
    for name in ("x", "grad", "weights", "biases"):
        y = getattr(case, name)
        wide = [x.astype(float) for x in y] if isinstance(y, list) else y.astype(float)
        setattr(exact, name, wide)
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    smooth = 2 * len(widths) * unit
    jumps = np.sqrt(len(widths) * unit) if activation == "relu" else 0
    wanted = [exact.forward(False), *exact.backward(False)]
    for i, (x, y) in enumerate(zip([found, *made], wanted, strict=True)):
        error = np.linalg.norm(nf.to_numpy(x).astype(float) - y)
        assert error <= (smooth + jumps * (i > 0)) * np.linalg.norm(y)
    for x, y in zip(made, case.backward(True), strict=True):
        assert (nf.to_numpy(x).view("i2") == nf.to_numpy(y).view("i2")).all()


@pytest.mark.skipif(SIMULATED, reason="the simulator has no tensor cores")
@pytest.mark.parametrize("needs", [EVERY, EVERY[1:]])
@pytest.mark.parametrize("own", [False, True], ids=["shared points", "own points"])
def test_several_networks_in_16_bits_are_one_launch(own, needs):
    case = Case((32, 64, 64, 8), 700, HALVES["bfloat16"], batch=(3,))
    case.biases = [np.stack([bias, -bias, bias / 2])[:, None] for bias in case.biases]
    if own:
        case.x = np.stack([case.x, -case.x, case.x[::-1]])
    found, made = case.forward(True), case.backward(True, needs=needs)
    whole = own or "x" not in needs  # (else its gradient is a sum over networks)
    assert ("network backward" in nf.last_call().kernel) == whole
    wide = Case((32, 64, 64, 8), 700, batch=(3,))
    for name in ("x", "grad", "weights", "biases"):
        y = getattr(case, name)
        wide.__dict__[name] = [x.astype(float) for x in y] if name[-1] == "s" else y.astype(float)
    wanted = [wide.forward(False), *wide.backward(False, needs=needs)]
    for x, y in zip([found, *made], wanted, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert tuple(x.shape) == y.shape
            error = np.linalg.norm(nf.to_numpy(x).astype(float) - y)
            assert error <= 8 * 2.0**-8 * np.linalg.norm(y)


@pytest.mark.skipif(SIMULATED, reason="the simulator has no tensor cores")
def test_a_forward_whose_backward_goes_by_layers_keeps_what_that_takes():
    case = Case((128,) * 5, 40, HALVES["bfloat16"])
    assert "network" in (case.forward(True), nf.last_call().kernel)[1]
    _, kept = case.forward(True, keep=True)
    assert kept.inputs and "network" not in nf.last_call().kernel
