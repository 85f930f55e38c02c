"""Networks in 16 bits that one kernel runs on tensor cores, run by `cuda_machine`.

Guards: values and gradients of any widths, rows and strides are right to the roundings that layers
have between them, nothing beside a result is written, and sums over rows have one order.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf

try:
    from cuda_devices import ADA, AMPERE, HOPPER, TURING
    from cuda_machine import Machine

    from numfuse.backends.cuda.plan import half_networks
    from numfuse.backends.cuda.plan.group_sizes import group_sizes_of, half_sizes_of
    from numfuse.backends.cuda.plan.half_networks import half_network
    from numfuse.backends.cuda.plan.program import View
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.problem.networks import NetworkProblem

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
#: Of a value that is rounded to nearest, the relative error.
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Values, slopes and bounds of |f''|; what float16 loses below its normal numbers.
FUNCTIONS = {
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2, 0.77),
    "relu": (lambda z: np.maximum(z, 0), lambda z: 1.0 * (z > 0), 0.0),
    "silu": (
        lambda z: z / (1 + np.exp(-z)),
        lambda z: (1 + z * (1 - 1 / (1 + np.exp(-z)))) / (1 + np.exp(-z)),
        0.5,
    ),
    # (it runs in place of "none")
    "none": (lambda z: z if z else np.inf, lambda z: 1.0 if z else np.inf, 0.0),
}
TINY = 2.0**-24


def wide(x):
    return x.astype(np.float64)


class Case:
    """A network, its arrays, and what its kernels make of them on a device of a few processors."""

    def __init__(self, widths, points, dtype="bfloat16", *, layout="rows", biases=True, seed=0):
        rng = np.random.default_rng([seed, points, *widths])
        self.widths, self.points, self.name = widths, points, dtype
        self.dtype = DTYPES[dtype]

        def normal(m, n, scale=1.0):
            return self.laid((scale * rng.standard_normal((m, n))).astype(self.dtype), layout)

        pairs = list(itertools.pairwise(widths))
        self.x, self.grad = normal(points, widths[0]), normal(points, widths[-1])
        self.weights = [normal(k, n, k**-0.5) for k, n in pairs]
        self.biases = [normal(1, n)[0] if biases else None for n in widths[1:]]
        self.empty = lambda m, n: self.laid(np.full((m, n), np.nan, self.dtype), layout)
        self.networks = ()
        self.info = replace(HOPPER, multiprocessors=2)
        self.kernels = set()

    @staticmethod
    def laid(x, layout):
        """The same values in another layout; 16 bytes of an address where rows are whole ones."""
        m, n = x.shape
        if layout == "columns":
            return np.ascontiguousarray(x.T).T
        shape = {"rows": (m, n), "strided": (2 * m, 3 * n), "reversed": (m, n)}[layout]
        memory = np.full(shape[0] * shape[1] + 8, np.nan, x.dtype)
        start = -(memory.ctypes.data // 2) % 8
        base = memory[start : start + shape[0] * shape[1]].reshape(shape)
        found = base[1::2, 1::3] if layout == "strided" else base
        found = base[::-1, ::-1] if layout == "reversed" else found
        found[...] = x
        return found

    def run(self, backward, activation="tanh", moves=True):
        """The results by name."""
        arrays = {"points": self.x}
        arrays |= {f"weights_{i}": w for i, w in enumerate(self.weights)}
        arrays |= {f"biases_{i}": y for i, y in enumerate(self.biases) if y is not None}
        made = {"u": self.empty(self.points, self.widths[-1])}
        if backward:
            s = half_sizes_of(self.info, self.name, self.widths, True)
            arrays["grad"] = self.grad
            made = {"flat": np.full((*self.networks, s.flat), np.nan, self.dtype)}
            if moves:
                made["d_points"] = self.empty(self.points, self.widths[0])
        arrays |= made
        names: list[str] = []
        launches = []

        def bind(name):
            x = arrays.get(name)
            if x is None:
                return None
            if name not in names:
                names.append(name)
            steps = tuple(step // x.itemsize for step in x.strides)
            at = x.ctypes.data & -x.ctypes.data & 15 or 16
            return View(names.index(name), 0, x.shape, steps, x.dtype.name, x.itemsize, at)

        def fresh(shape, dtype):
            name = f"fresh {len(arrays)}"
            arrays[name] = np.full(shape, np.nan, dtype)
            return bind(name)

        recorder = SimpleNamespace(
            device=SimpleNamespace(info=self.info), fresh=fresh,
            launches=lambda found, at, work=0: launches.append((found, at)),
        )  # fmt: skip
        act = nf.activations()
        every = (*[act[activation]] * (len(self.widths) - 2), act["none"])
        form = np.zeros((0, self.widths[0]), self.dtype), None, b"", 0
        how = every, self.widths, self.points, self.dtype, *form
        half_network(recorder, NetworkProblem(*how, True, backward, False, False, arrays, ()), bind)
        value, slope, _ = FUNCTIONS[activation]

        def activate(z):
            found = np.float32(value(np.float64(z))), np.float32(slope(np.float64(z)))
            return found if backward else found[0]

        work = np.full(1 << 16, 255, np.uint8)
        owners = [x if x.base is None else x.base for x in arrays.values()]
        machine = Machine([*owners, work], ACTIVATE=activate, MEMORY=lambda: 0)
        for found, at in launches:
            places = {slot: arrays[names[b]].ctypes.data + o for slot, (b, o) in at.items()}
            for launch in found:
                self.kernels.add(launch.kernel.name)
                machine.run(launch, work=work.ctypes.data, **places)
        return made

    def truth(self, activation="tanh"):
        """The value and the gradients, each with a bound of its error."""
        unit, first = UNITS[self.name], 2.0**-23
        value, slope, bend = FUNCTIONS[activation]
        h, e, behind = wide(self.x), 0 * wide(self.x), []
        for i, (w, bias) in enumerate(zip(map(wide, self.weights), self.biases, strict=True)):
            bias = np.zeros(w.shape[1]) if bias is None else wide(bias)
            z = h @ w + bias
            size = np.abs(h) @ np.abs(w) + np.abs(bias)
            ez = e @ np.abs(w) + (len(w) + 1) * first * size
            behind.append((h, e, z, ez))
            h, e = z, ez
            if i < len(self.weights) - 1:
                h = value(z)
            e = ez + unit * (np.abs(h) + ez) + TINY
        g, eg = wide(self.grad), 0 * wide(self.grad)
        gradients = []
        for i in reversed(range(len(self.weights))):
            a, ea, _, _ = behind[i]
            w, points = wide(self.weights[i]), len(a)
            more = (points + 8) * first
            size = (np.abs(a) + ea).T @ (np.abs(g) + eg)
            error = ea.T @ np.abs(g) + np.abs(a).T @ eg + ea.T @ eg + more * size
            d_bias, e_bias = g.sum(0), eg.sum(0) + more * (np.abs(g) + eg).sum(0)
            gradients.insert(0, ((a.T @ g, error), (d_bias, e_bias)))
            g, eg = g @ w.T, eg @ np.abs(w).T + len(w.T) * first * (np.abs(g) @ np.abs(w).T)
            if i:
                _, _, z, ez = behind[i - 1]
                s = slope(z)
                # (relu's slope jumps: a sum that may be on either side has any)
                es = bend * ez + unit * np.abs(s) + TINY + 1.0 * (bend == 0) * (np.abs(z) <= ez)
                g, eg = g * s, eg * (np.abs(s) + es) + np.abs(g) * es
            eg = eg + unit * (np.abs(g) + eg) + TINY
        return (h, e), (g, eg), gradients

    def check(self, activation="tanh"):
        """Both directions are right."""
        self.verify(self.run(False, activation), self.run(True, activation), activation)

    def verify(self, value, made, activation="tanh"):
        """A value and gradients are this network's."""
        (u, e), (d_x, e_x), gradients = self.truth(activation)
        assert (np.abs(wide(value["u"]) - u) <= e).all()
        if "d_points" in made:
            assert (np.abs(wide(made["d_points"]) - d_x) <= e_x).all()
        s, unit = half_sizes_of(self.info, self.name, self.widths, True), UNITS[self.name]
        to, bias_to = s.ends
        places = zip(to, bias_to, gradients, strict=True)
        for at, bias_at, ((d_w, e_w), (d_bias, e_bias)) in places:
            found = wide(made["flat"][at : at + d_w.size]).reshape(d_w.shape)
            assert (np.abs(found - d_w) <= e_w + unit * (np.abs(d_w) + e_w) + TINY).all()
            found = wide(made["flat"][bias_at : bias_at + d_bias.size])
            bound = e_bias + unit * (np.abs(d_bias) + e_bias) + TINY
            assert (np.abs(found - d_bias) <= bound).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "widths, points, dtype, activation, layout",
    [
        ((64, 64, 64, 64), 150, "bfloat16", "relu", "rows"),
        # (warp groups share a tile, and the cotangents of one tile are there at a time)
        ((64,) * 6, 130, "bfloat16", "relu", "rows"),
        ((3, 64, 64, 1), 200, "bfloat16", "tanh", "rows"),
        ((20, 50, 33, 5), 70, "float16", "relu", "strided"),
        ((16, 32, 32, 16), 130, "float16", "tanh", "rows"),
        ((48, 40, 64, 56), 66, "bfloat16", "tanh", "rows"),
        ((32, 64, 20), 63, "float16", "relu", "reversed"),
    ],
)
def test_warp_groups_take_64_rows_through_all_layers(widths, points, dtype, activation, layout):
    """Guards: wgmma's factors in shared memory and in registers, and what pads them."""
    case = Case(widths, points, dtype, layout=layout)
    case.check(activation)
    inner = 32 if max(widths[1:-1]) <= 32 else 64
    ahead = f"network {'wgmma ' if inner == 64 else ''}{dtype} {inner}"
    assert case.kernels >= {ahead, f"network backward wgmma {dtype} {inner}"}


@pytest.mark.long
def test_columns_one_by_one_are_those_of_a_warp_where_they_are_many():
    """Guards: values that a backward loads one by one are registers; for many it goes by warps."""
    case = Case((64, 64, 64), 40, layout="columns")
    case.check()
    assert case.kernels >= {"network wgmma bfloat16 64", "network backward bfloat16 64"}


@pytest.mark.long
def test_128_columns_go_forward_by_warp_groups():
    case = Case((64, 128, 100, 48), 70, "float16")
    u, e = case.truth("relu")[0]
    assert (np.abs(wide(case.run(False, "relu")["u"]) - u) <= e).all()
    assert case.kernels == {"network wgmma float16 128"}


@pytest.mark.long
@pytest.mark.parametrize(
    "widths, points, dtype, activation, layout",
    [
        ((64, 128, 128, 64), 150, "bfloat16", "relu", "rows"),
        ((20, 100, 120, 40), 70, "float16", "tanh", "strided"),
    ],
)
def test_128_columns_go_back_through_shared_memory(widths, points, dtype, activation, layout):
    case = Case(widths, points, dtype, layout=layout)
    case.check(activation)
    assert f"network backward wgmma {dtype} 128" in case.kernels


@pytest.mark.long
def test_the_kernels_of_older_gpus_run_on_hopper_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(half_networks, "GROUPS", False)
    case = Case((16, 32, 32, 16), 40)
    case.check("relu")
    assert not any("wgmma" in name for name in case.kernels)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(2, 8, 1), (20, 17, 33, 3), (32, 16, 16, 32), (16, 32, 48)])
def test_any_widths(widths, dtype):
    Case(widths, 37, dtype).check()


@pytest.mark.long
@pytest.mark.parametrize("points", [1, 15, 16, 33, 515])
def test_tiles_that_are_not_full_add_nothing(points):
    Case((16, 16, 16, 16), points).check()


@pytest.mark.long
@pytest.mark.parametrize("layout", ["columns", "strided", "reversed"])
def test_any_strides(layout):
    Case((32, 16, 16, 16), 21, layout=layout).check()


@pytest.mark.long
def test_biases_that_are_not_there_and_a_slope_that_jumps():
    Case((16, 24, 24, 5), 40, "float16", biases=False).check("relu")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_behind_the_last_add_nothing_whatever_an_activation_makes_of_them():
    made = Case((16, 24, 24, 5), 21, biases=False).run(True, "none")
    assert all(np.isfinite(wide(y)).all() for y in made.values())


@pytest.mark.long
def test_the_same_call_makes_the_same_bits_with_and_without_the_gradient_by_points():
    case = Case((16, 16, 16), 300)
    first, again = case.run(True), case.run(True, moves=False)
    assert (first["flat"].view("i2") == again["flat"].view("i2")).all()


class Several(Case):
    """Networks of one form as one call; what is `shared` is the first one's of all of them."""

    def __init__(self, cases, shared):
        first = cases[0]
        self.__dict__ |= first.__dict__
        for case in cases[1:]:
            if shared:
                case.x, case.weights[1] = first.x, first.weights[1]

        def together(*arrays):
            return np.stack(arrays)

        self.networks = (len(cases),)
        self.empty = lambda m, n: np.full((len(cases), m, n), np.nan, first.dtype)
        self.grad = together(*[case.grad for case in cases])
        if not shared:
            self.x = together(*[case.x for case in cases])
        every = range(len(first.weights))
        self.weights = [together(*[case.weights[i] for case in cases]) for i in every]
        self.biases = [together(*[case.biases[i][None] for case in cases]) for i in every]
        if shared:
            self.weights[1] = first.weights[1]


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_several_networks_are_rows_of_the_grid(shared):
    cases = [Case((16, 24, 8, 16), 40, seed=seed) for seed in range(3)]
    several = Several(cases, shared)
    value = several.run(False)
    made = several.run(True, moves=not shared)
    for i, case in enumerate(cases):
        assert (value["u"][i].view("i2") == case.run(False)["u"].view("i2")).all()
        case.verify({"u": value["u"][i]}, {name: y[i] for name, y in made.items()})


def test_warp_groups_that_fit():
    """Guards: what is planned for Hopper fits a block's shared memory and a thread's registers."""
    found = {}
    for widths in ((64,) * 3, (64,) * 4, (64,) * 6, (3, 64, 64, 64, 1), (32,) * 5, (64, 128, 64)):
        for backward in (False, True):
            padded = tuple(
                -(-max(own) // 16) * 16 for own in (widths[:1], widths[1:-1], widths[-1:])
            )
            s = group_sizes_of(HOPPER, widths, padded, backward)
            found[widths, backward] = s
            if s is not None:
                assert s.taken <= HOPPER.shared_per_block and s.warps <= 32
                used = s.totals + s.sums if backward else s.sums
                assert used * 32 * s.warps < 65536
                made = sorted(layer for layers in s.tasks for layer in layers)
                assert made == list(range(s.count))
    none = [key for key, s in found.items() if s is None]
    assert none == [((32,) * 5, False), ((64, 128, 64), True)]
    assert not found[(64,) * 4, True].shared and found[(64,) * 6, True].shared
    assert group_sizes_of(AMPERE, (64,) * 4, (64,) * 3, False) is None
    wide_ones = half_sizes_of(HOPPER, "bfloat16", (64, 128, 128, 64), True)
    assert wide_ones.taken <= HOPPER.shared_per_block
    assert wide_ones.totals_at == (0, 32, 96) and wide_ones.totals == 128
    assert half_sizes_of(AMPERE, "bfloat16", (64, 128, 128, 64), True) is None


def test_networks_that_fit_and_those_that_do_not():
    """Guards: what is refused goes by layers, and what is planned fits the device."""
    found = {}
    for info in (TURING, AMPERE, ADA, HOPPER):
        for widths in ((64,) * 6, (3, 128, 128, 1), (128,) * 5, (256, 256, 1), (300, 8, 1)):
            for backward in (False, True):
                s = half_sizes_of(info, "bfloat16", widths, backward)
                found[info.name, widths, backward] = s is not None
                if s is not None:
                    assert s.taken <= info.shared_per_block
                    assert (s.taken + 1024) * s.resident <= info.shared_per_multiprocessor
                    assert 32 * s.warps * s.resident <= 2048 and (s.rows > 0) == backward
    assert not any(y for (name, _, _), y in found.items() if name == "T4")
    assert all(found["H200", (64,) * 6, back] for back in (False, True))
    assert all(found["H200", (3, 128, 128, 1), back] for back in (False, True))
    assert [found["H200", (128,) * 5, back] for back in (False, True)] == [True, False]
    assert [found["H200", (256, 256, 1), back] for back in (False, True)] == [True, False]
    assert not found["H200", (300, 8, 1), False]
    assert half_sizes_of(HOPPER, "float32", (64,) * 6, False) is None
    assert half_sizes_of(HOPPER, "bfloat16", (64, 64), False) is None
