"""Networks' jets of many directions on a CUDA device, whose passes go into tall products.

Run on a GPU where there is one, and in the simulator by `test_cuda_simulator`. Guards: this way,
which only large networks take, gives what the layers' own formulas do.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import unavailable
from on_device import poisoned

import numfuse as nf

status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))

from numfuse.backends.cuda import tiling  # noqa: E402
from numfuse.backends.cuda.call.record import REPLAY  # noqa: E402
from numfuse.backends.cuda.plan import members  # noqa: E402

F64, F32 = np.dtype(np.float64), np.dtype(np.float32)
DIRECTIONS = 8


@pytest.fixture(autouse=True)
def memory_holds_nan(monkeypatch):
    poisoned(monkeypatch, "cuda")
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", False)


@pytest.fixture
def ways(monkeypatch):
    """What goes this way: small networks too; [(its function, whether it did)]."""
    monkeypatch.setattr(tiling, "MEMBERS_LEAST", DIRECTIONS)
    monkeypatch.setattr(tiling, "MEMBERS_BYTES", 0)
    REPLAY.clear()
    found = []

    def noted(name):
        own = getattr(members, name)

        def run(*arguments):
            found.append((name, own(*arguments)))
            return found[-1][1]

        monkeypatch.setattr(members, name, run)

    noted("forward")
    noted("backward")
    yield found
    REPLAY.clear()


def there(x):
    """Arrays of the device, in lists too."""
    if isinstance(x, (list, tuple)):
        return [there(y) for y in x]
    return None if x is None else nf.to_device(x, "cuda")


def flat(x):
    if x is None:
        return []
    return [z for y in x for z in flat(y)] if isinstance(x, (list, tuple)) else [x]


def network(widths, points, dtype=F64, bias=True):
    rng = np.random.default_rng([points, *widths])
    pairs = list(itertools.pairwise(widths))
    weights = [(rng.standard_normal(pair) / pair[0] ** 0.5).astype(dtype) for pair in pairs]
    biases = [rng.standard_normal(n).astype(dtype) for n in widths[1:]] if bias else None
    return rng.standard_normal((points, widths[0])).astype(dtype), weights, biases


def some(count=DIRECTIONS, seconds=1):
    """Weights of second derivatives, of which one is zero."""
    made = np.random.default_rng(count).standard_normal((seconds, count))
    made[:, 3] = 0
    return made


def check(found, wanted, dtype):
    """A network of this depth is within some units of its largest result."""
    unit = 2.0**-53 if dtype == F64 else 2.0**-24
    assert len(flat(found)) == len(flat(wanted))
    for x, y in zip(flat(found), flat(wanted), strict=True):
        x = nf.to_numpy(x)
        assert x.shape == y.shape and x.dtype == y.dtype
        if y.size:
            np.testing.assert_allclose(x, y, rtol=0, atol=200 * unit * np.abs(y).max())


def run(widths, points, *, dtype=F64, activation="tanh", keep=True, needs=("weights", "biases"),
        bias=True, **how):  # fmt: skip
    """A forward and a backward on the device beside those of float64 NumPy."""
    host = network(widths, points, dtype, bias)
    exact = nf.mlp_jet(*host, activation, backend="reference", **how)
    rng = np.random.default_rng(points)
    grads = [rng.standard_normal(y.shape).astype(dtype) for y in exact]
    device = there(host)
    found = nf.mlp_jet(*device, activation, keep=keep, **how)
    found, kept = found if keep else (found, None)
    check(found, exact, dtype)
    how |= {"needs": needs}
    exact = nf.mlp_jet_bwd(*grads, *host, activation, backend="reference", **how)
    found = nf.mlp_jet_bwd(*there(grads), *device, activation, kept=kept, **how)
    check(found, exact, dtype)


CASES = {
    "keeps": {},
    "is made again": {"keep": False},
    "float32": {"dtype": F32, "needs": ("x", "weights", "biases")},
    "no plain last layer": {"final": "tanh", "needs": ("x", "weights", "biases")},
    "no second derivatives": {"second": np.zeros((0, DIRECTIONS))},
    "weights of zero": {"second": np.zeros((1, DIRECTIONS))},
    "a curve without a bend": {"activation": "relu", "bias": False},
    "a line": {"activation": "none"},
    "the gradient of x alone": {"activation": "silu", "needs": ("x",)},
    "the biases' alone": {"needs": ("biases",), "keep": False},
    "more directions": {
        "second": some(12), "directions": np.random.default_rng(1).standard_normal((12, 6)),
    },
}  # fmt: skip


@pytest.mark.parametrize("shared", [False, True], ids=["own tangents", "one row of tangents"])
def test_passes_go_into_the_products(shared, ways, monkeypatch):
    """Every hidden layer's but that of a first one whose tangents are a row for all points.

    (All cases are one test: the simulator runs two sets of a test's parameters.)
    """
    monkeypatch.setattr("numfuse.adapters.stacks.SHARED_BYTES", 0 if shared else 1 << 30)
    for number, (case, own) in enumerate(CASES.items()):
        REPLAY.clear()
        ways.clear()
        how = {"second": some(), "needs": ("x", "weights", "biases")} | own
        first = 6 if case == "more directions" else DIRECTIONS
        run((first, 8, 4, 2), 3 + number % 3, **how)
        layers = 3 if how.get("final") == "tanh" else 2
        forwards = [went for name, went in ways if name == "forward"]
        plain = [True] * (layers - shared)
        assert forwards[:layers] == [False] * shared + plain, case
        # a last layer with an activation begins with gradients by its results, and the sums of a
        # bias alone are no stack
        backwards = [went for name, went in ways if name == "backward"]
        wanted = [layer < 2 for layer in reversed(range(layers))]
        wanted[-1] &= how["needs"] != ("biases",)
        assert backwards == wanted, case


def test_small_stacks_go_the_plain_way(ways, monkeypatch):
    monkeypatch.setattr(tiling, "MEMBERS_BYTES", 1 << 40)
    run((DIRECTIONS, 8, 4, 2), 4, second=some())
    assert ways and not any(went for _, went in ways)


@pytest.mark.parametrize(
    "how",
    [
        {"second": None},  # one of each direction
        {"second": some(seconds=2)},
        {"second": some(DIRECTIONS - 1), "directions": np.eye(DIRECTIONS)[1:]},
    ],
    ids=["pure", "two", "few directions"],
)
def test_what_has_no_such_end_goes_the_plain_way(ways, how):
    run((DIRECTIONS, 5, 2), 3, **how)
    assert not any(went for _, went in ways)
