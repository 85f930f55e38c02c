"""Networks in float32 that one kernel runs on tensor cores, run by `cuda_machine`.

Guards: "bf16x6" adds up all six products of parts and keeps the error of docs/numerics.md, for any
widths, members and numbers of points, by warps and by warp groups, in blocks that take several
tiles; an infinity is what it is in float32; "tf32" rounds factors and nothing else. Numba's
simulator runs IEEE's text of these products, so none of it is seen there.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf

try:
    from cuda_devices import ADA, AMPERE, HOPPER, TURING
    from cuda_machine import Machine

    from numfuse.backends.cuda import network_tiling
    from numfuse.backends.cuda.network_tiling import NetworkTile
    from numfuse.backends.cuda.plan.network_sizes import on_tensor_cores, sizes_of
    from numfuse.backends.cuda.plan.networks import network
    from numfuse.backends.cuda.plan.program import View
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.problem.networks import NetworkProblem

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

F32 = np.float32
#: Of a factor, by precision: what parts, or roundings, leave out of a product, relatively.
LOST = {"bf16x6": 2.0**-23, "tf32": 2.0**-10}


def hidden_error(k, precision):
    """The error of a sum of products, relatively to the sum of magnitudes (docs/numerics.md).

    Tensor cores cut off 2^-22 of a sum for each 16 values of K (tf32: 8).
    """
    return LOST[precision] + (k // (16 if precision == "bf16x6" else 8) + 4) * 2.0**-22


def tanh(z):
    """The value and three derivatives of an activation."""
    f = np.tanh(z)
    s = 1 - f * f
    return f, s, -2 * f * s, s * (6 * f * f - 2)


def same(z):
    """Those of no activation."""
    return z, z * 0 + 1, z * 0, z * 0


def rows_of(function, d, s):
    """The formulas of a point as kernels call them: first, others, and both of the backward.

    They are right to float32's rounding, of a table of weights that are 1.
    """

    def row(moved, backward, given, at, weights, made, to):
        kept = 1 + d + s * moved
        members = 1 + d + s
        sums = [float(x) for x in given[at : at + kept]] + [0.0] * (members - kept)
        f, f1, f2, f3 = function(np.float64(sums[0]))
        dots, ddots = sums[1 : 1 + d], sums[1 + d :]
        square = sum(x * x for x in dots)
        if not backward:
            found = [f, *(f1 * x for x in dots), *(f1 * x + f2 * square for x in ddots)]
        else:
            g = [float(x) for x in given[at + kept : at + kept + members]]
            g_dot, g_ddot = g[1 : 1 + d], g[1 + d :]
            d_z = f1 * g[0] + f2 * sum(map(float.__mul__, g_dot, dots))
            d_z += sum(y * (f2 * x + f3 * square) for x, y in zip(ddots, g_ddot, strict=True))
            found = [d_z, *(f1 * y + 2 * f2 * x * sum(g_ddot)
                            for x, y in zip(dots, g_dot, strict=True))]  # fmt: skip
            found += [f1 * y for y in g_ddot] if moved else []
        for i, x in enumerate(found):
            made[to + i] = F32(x)

    names = ("FIRST_ROW", "ROW", "FIRST_ROW_BACK", "ROW_BACK")
    forms = ((False, False), (s > 0, False), (False, True), (s > 0, True))
    return {
        name: (lambda *call, form=form: row(*form, *call))
        for name, form in zip(names, forms, strict=True)
    }


class Case:
    """A network, its arrays, and what its kernels make of them on a device of a few processors."""

    def __init__(self, widths, points, d=0, s=0, precision="bf16x6", info=HOPPER, processors=2):
        rng = np.random.default_rng([points, *widths])
        self.widths, self.points, self.counts, self.precision = widths, points, (d, s), precision

        def normal(*shape, scale=1.0):
            return (scale * rng.standard_normal(shape)).astype(F32)

        pairs = list(itertools.pairwise(widths))
        self.x, self.units = normal(points, widths[0]), normal(d, widths[0])
        self.weights = [normal(k, n, scale=k**-0.5) for k, n in pairs]
        self.biases = [normal(n) for n in widths[1:]]
        leads = (), (d,), (s,)
        self.grads = [normal(*lead, points, widths[-1]) for lead in leads]
        self.info = replace(info, multiprocessors=processors)

    @property
    def members(self):
        return 1 + sum(self.counts)

    def sizes(self, backward):
        s = sizes_of(self.info, "float32", self.widths, *self.counts, backward)
        return on_tensor_cores(s, self.info, self.precision, backward)

    def run(self, backward, function=tanh, kept=None):
        """The results by name; those of a forward have the hidden layers' sums, too.

        `kept` are such sums, which a backward takes.
        """
        d, s = self.counts
        arrays = {"points": self.x}
        arrays |= {f"weights_{i}": w for i, w in enumerate(self.weights)}
        arrays |= {f"biases_{i}": y for i, y in enumerate(self.biases) if y is not None}
        made = self._results(backward)
        if backward:
            arrays |= zip(("grad", "grad_dot", "grad_ddot"), self.grads, strict=True)
            arrays |= {} if kept is None else {"kept": kept}
        arrays |= made
        names, launches = [], []

        def bind(name):
            x = arrays.get(name)
            if x is None or not x.size:
                return None
            if name not in names:
                names.append(name)
            strides = tuple(step // x.itemsize for step in x.strides)
            return View(names.index(name), 0, x.shape, strides, x.dtype.name, 4, 4)

        def fresh(shape, dtype):
            arrays[f"fresh {len(arrays)}"] = np.full(shape, np.nan, dtype)
            return bind(f"fresh {len(arrays) - 1}")

        def constant(x):
            arrays["constant"] = x
            return x.ctypes.data

        recorder = SimpleNamespace(
            device=SimpleNamespace(info=self.info), fresh=fresh, constant=constant,
            launches=lambda found, at, work=0, **_: launches.append((found, at)),
            precision=self.precision,
        )  # fmt: skip
        every = (*[nf.activations()["tanh"]] * (len(self.widths) - 2), nf.activations()["none"])
        table = np.ones((s, d), F32) if s else None
        form = (
            self.units,
            table,
            bytes([1] * (d * s)),
            s,
            True,
            backward,
            not backward,
            kept is not None,
        )
        problem = NetworkProblem(every, self.widths, self.points, self.x.dtype, *form, arrays, ())
        network(recorder, problem, bind)
        self.kernels = [launch.kernel.name for found, _ in launches for launch in found]
        work = np.full(1 << 16, 255, np.uint8)
        machine = Machine(
            [*arrays.values(), work], WINDOW=lambda array: 0, **rows_of(function, d, s)
        )
        for found, at in launches:
            places = {slot: arrays[names[b]].ctypes.data + o for slot, (b, o) in at.items()}
            for launch in found:
                machine.run(launch, work=work.ctypes.data, **places)
        return made

    def _results(self, backward):
        d, s = self.counts
        found = self.sizes(backward)
        if backward:
            shapes = {"flat": (found.flat,)}
            shapes |= {} if self.members > 1 else {"d_points": self.x.shape}
        else:
            value = self.points, self.widths[-1]
            shapes = {"u": value, "u_dot": (d, *value), "u_ddot": (s, *value)}
            shapes["kept"] = found.count - 2, self.points, self.members, found.tile.width
        return {name: np.full(shape, np.nan, F32) for name, shape in shapes.items()}

    def gradients(self, flat):
        """The gradients by weights and by biases."""
        s, widths = self.sizes(True), self.widths
        rows = flat[s.squares :].reshape(s.slots, s.tile.width)
        squares = flat[: s.squares].reshape(-1, s.tile.width, s.tile.width)
        last = s.count - 1
        tail = rows[last + widths[0] + self.counts[0] :][: widths[-1]]
        tail = tail.reshape(s.tile.width, widths[-1])
        weights = [rows[last : last + widths[0], : widths[1]]]
        weights += [y[:k, :n] for y, (k, n) in zip(squares, itertools.pairwise(widths[1:-1]),
                                                   strict=True)]  # fmt: skip
        biases = [rows[i, :n] for i, n in enumerate(widths[1:-1])] + [rows[-1, : widths[-1]]]
        return [*weights, tail[: widths[-2]], *biases]

    def check(self):
        """Values and gradients are those of float64 to the error of their products.

        Weights are drawn so that a layer hands on what its inputs err by about once: an error in
        the norm is the sum of those of the products, twice (value and gradient) and some more for
        derivatives, of which each member multiplies two more factors.
        """
        made = self.run(False)
        flat = self.run(True)["flat"]
        back = self.gradients(flat)
        assert any("backward" in name and self.precision in name for name in self.kernels)
        grouped = self.sizes(True).tile.grouped
        assert grouped == any(name.startswith("network weights") for name in self.kernels)
        wide = [self.x, self.weights, self.biases]
        wide = [[y.astype(float) for y in z] if type(z) is list else z.astype(float) for z in wide]
        d, s = self.counts
        second = np.ones((s, d)) if s else np.zeros((0, d))
        how = {"directions": self.units.astype(float), "second": second}
        exact = nf.mlp_jet(*wide, **how, backend="reference")
        grads = [y.astype(float) for y in self.grads]
        found = nf.mlp_jet_bwd(*grads, *wide, **how, backend="reference")
        error = hidden_error(max(self.widths), self.precision)
        bound = 4 * self.members * (len(self.widths) - 1) * error
        values = [made[name] for name in ("u", "u_dot", "u_ddot")]
        pairs = [*zip(values, exact, strict=True)]
        pairs += zip(back, [*found.d_weights, *found.d_biases], strict=True)
        for got, y in pairs:
            assert got.shape == y.shape
            assert np.linalg.norm(got - y) <= bound * np.linalg.norm(y)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16x6", "tf32"])
@pytest.mark.parametrize(
    ("widths", "points", "d", "s"),
    [((2, 32, 32, 1), 37, 0, 0), ((3, 20, 31, 7, 3), 11, 2, 1), ((2, 64, 50, 1), 9, 1, 0)],
)
def test_any_networks(widths, points, d, s, precision):
    Case(widths, points, d, s, precision, AMPERE).check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("widths", "points", "d", "s"),
    [
        ((2, 128, 128, 1), 33, 2, 1),  # (a second tile)
        ((2, 110, 100, 1), 13, 2, 0),  # (three members: rows of a thread are no whole eights)
        ((3, 64, 50, 64, 3), 137, 0, 0),
        ((2, 64, 64, 64, 2), 41, 1, 1),
    ],
)
def test_any_networks_by_warp_groups(widths, points, d, s):
    case = Case(widths, points, d, s, processors=1)
    assert case.sizes(False).tile.grouped and case.sizes(True).tile.grouped
    assert points == 13 or points > case.sizes(True).resident * case.sizes(True).points
    case.check()


@pytest.mark.long
def test_kept_sums_change_no_bit():
    case = Case((2, 64, 50, 64, 1), 37, 2, 1, processors=1)
    kept = case.run(False)["kept"].copy()
    again, saved = (case.run(True, kept=y)["flat"] for y in (None, kept))
    assert np.array_equal(again, saved, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 3])
def test_slices_of_16_by_warp_groups(stages, monkeypatch):
    """Guards: a slice that threads do not copy in whole rounds, and rings of any stages."""
    tile = NetworkTile(64, 4, 256, 1, 16, stages)
    monkeypatch.setattr(network_tiling, "GROUPED", {False: (tile,), True: (tile,)})
    Case((2, 64, 64, 1), 40, 2, 1, processors=1).check()


@pytest.mark.long
def test_a_block_of_two_tiles_before_9_0():
    case = Case((2, 32, 32, 1), 258, info=AMPERE)
    case.info = replace(case.info, multiprocessors=1)
    case.check()


def parted(rng, shape):
    """Values of 1 to 2 whose parts have the largest sizes: x, 2^-8 x, -2^-17 x; of any sign."""
    x = 1 + 2.0**-8 - 2.0**-17 + 2.0**-23
    return (x * rng.choice([1.0, 2.0], shape)).astype(F32)


@pytest.mark.long
@pytest.mark.parametrize("width", [32, 64])
def test_no_product_of_parts_is_missing(width):
    """All terms of a sum have one sign, and so have the smallest of the six products.

    Without one of these, 2^-17 of a sum at least is missing. Of sums of 32 values the bound is
    2^-19.4, of 64 2^-19.
    """
    case, rng = Case((1, width, width, 1), 16), np.random.default_rng(0)
    assert case.sizes(True).tile.grouped == (width == 64)
    case.x[:], case.biases = 1, [None] * 3
    for w in case.weights:
        w[...] = parted(rng, w.shape)
    case.grads[0][:] = 1
    kept = case.run(False, same)["kept"][0, :, 0]
    made = case.run(True, same)
    d_weights = case.gradients(made["flat"])[1]
    one, two, three = (w.astype(float) for w in case.weights)
    error = hidden_error(width, "bf16x6")
    assert error < 2.0**-18
    ones = np.ones((16, 1))
    for got, exact in (
        (kept, ones @ one @ two),
        (d_weights, (ones @ one).T @ (ones @ three.T)),
    ):
        assert (np.abs(got - exact) <= error * exact).all()
    # (its two last sums are IEEE's, in chains of 32 terms, and the last but one has three factors)
    exact = ones @ three.T @ two.T @ one.T
    bound = error + 2 * 32 * 2.0**-24
    assert bound < 2.0**-17
    assert (np.abs(made["d_points"] - exact) <= bound * exact).all()


@pytest.mark.long
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_infinity_stays_one_in_its_own_row(width):
    case = Case((1, width, width, 1), 5)
    case.weights[0][:], case.biases = 0, [None] * 3
    case.weights[0][0, 3] = 1
    case.weights[1][3], case.weights[1][3, ::2], case.weights[1][3, 7] = 0.3, -1, 0
    case.x[2] = np.inf

    def numbers(z):  # (infinity times 0 is none)
        return (np.nan_to_num(z, posinf=np.inf),) * 4

    found = case.run(False, numbers)["kept"][0, :, 0]
    with np.errstate(invalid="ignore"):
        assert np.array_equal(found[2], np.inf * case.weights[1][3], equal_nan=True)
    case.x[2] = 1
    others = case.run(False, numbers)["kept"][0, :, 0]
    assert (np.delete(found, 2, 0) == np.delete(others, 2, 0)).all()


@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_devices_without_these_tensor_cores_multiply_as_ieee(width):
    """Guards: "bf16x6" is never less than it says, fits, and leaves results where IEEE's do."""
    for info, there in ((TURING, False), (AMPERE, True), (ADA, True), (HOPPER, True)):
        for back in (False, True):
            s = sizes_of(info, "float32", (2, width, width, 1), 2, 1, back)
            if s is None:
                continue
            made = on_tensor_cores(s, info, "bf16x6", back)
            assert (made.tile.tensor == "bf16x6") == there
            assert (made.flat, made.tile.width) == (s.flat, s.tile.width)
            taken = made.places(back)[1] * 4
            assert taken <= info.shared_per_block and made.rows % 32 == 0
            assert (taken + 1024) * made.resident <= info.shared_per_multiprocessor
    s = sizes_of(HOPPER, "float64", (2, 32, 32, 1), 0, 0, True)
    assert on_tensor_cores(s, HOPPER, "bf16x6", True) is s


@pytest.mark.parametrize("info", [AMPERE, HOPPER], ids=lambda info: info.name)
def test_both_directions_have_the_same_products(info):
    """Guards: a backward that makes its forward again has the bits of what that would keep."""
    kinds = set()
    for width, hidden, ends, counts in itertools.product(
        (32, 64, 96, 128), (1, 2, 3, 5, 6), ((1, 1), (8, 8), (3, 5)), ((0, 0), (2, 1), (5, 2))
    ):
        widths = ends[0], *[width] * hidden, ends[1]
        found = []
        for back in (False, True):
            s = sizes_of(info, "float32", widths, *counts, back)
            if s is not None:
                tile = on_tensor_cores(s, info, "bf16x6", back).tile
                found.append((tile.tensor, tile.grouped))
        if len(found) == 2:
            assert found[0] == found[1], (widths, counts)
            kinds.add(found[0])
    split = {("bf16x6", False)}
    assert kinds == (split | {("bf16x6", True), ("", False)} if info is HOPPER else split)
