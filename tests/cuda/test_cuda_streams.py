"""Networks whose weights are copied to shared memory, in GPUs' own tiles, run by `cuda_machine`.

Guards: what comes through a ring of slices is multiplied after its copies have arrived, and a slice
is filled after it was read; so too weights that come whole; what lies outside of them is zero,
whatever their widths and strides; two rounds of threads make the whole gradient of a layer's
weights. (The simulator runs the text: `test_cuda_networks`.)
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf
from numfuse.backends.cuda import network_tiling
from numfuse.problem.networks import NetworkProblem

try:
    from cuda_devices import ADA, AMPERE, HOPPER, TURING
    from cuda_machine import Machine

    from numfuse.backends.cuda.plan import network_sizes, networks
    from numfuse.backends.cuda.plan.program import View
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

KINDS = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}


def forward_row(given, i, weights, made, j):
    made[j] = np.tanh(given[i])


def backward_row(given, i, weights, made, j):
    made[j] = given[i + 1] * (1 - np.tanh(given[i]) ** 2)


class Case:
    """A network of values, and what its kernels make of it on a device of one multiprocessor."""

    def __init__(self, dtype, widths, points, *, turned=False, aligned=True):
        rng = np.random.default_rng([points, *widths])
        self.dtype, self.name = KINDS[dtype], dtype
        self.widths, self.points = widths, points
        self.streamed = max(widths) > 96

        def normal(m, n, scale=1.0):
            made = (scale * rng.standard_normal((m, n))).astype(self.dtype)
            memory = np.full(m * n + 32, np.nan, self.dtype)
            start = -(memory.ctypes.data // self.dtype.itemsize) % 4 + (not aligned)
            found = memory[start : start + m * n].reshape((n, m) if turned else (m, n))
            found = found.T if turned else found
            found[...] = made
            return found

        pairs = list(itertools.pairwise(widths))
        self.x, self.grad = (
            rng.standard_normal((points, n)).astype(self.dtype) for n in (widths[0], widths[-1])
        )
        self.weights = [normal(k, n, k**-0.5) for k, n in pairs]
        self.biases = [rng.standard_normal(n).astype(self.dtype) for n in widths[1:]]
        self.info = replace(HOPPER, multiprocessors=1)

    def sizes(self, backward):
        return network_sizes.sizes_of(self.info, self.name, self.widths, 0, 0, backward)

    def run(self, backward):
        """Return the results by name."""
        s = self.sizes(backward)
        assert (s.tile.slice > 0) == self.streamed
        arrays = {"points": self.x}
        arrays |= {f"weights_{i}": w for i, w in enumerate(self.weights)}
        arrays |= {f"biases_{i}": y for i, y in enumerate(self.biases)}
        made = {"u": np.full((self.points, self.widths[-1]), np.nan, self.dtype)}
        if backward:
            arrays["grad"] = self.grad
            made = {"flat": np.full(s.flat, np.nan, self.dtype), "d_points": np.empty_like(self.x)}
        arrays |= made
        names, launches = [], []

        def bind(name):
            x = arrays.get(name)
            if x is None:
                return None
            if name not in names:
                names.append(name)
            steps = tuple(step // x.itemsize for step in x.strides)
            at = x.ctypes.data & -x.ctypes.data & 15 or 16
            return View(names.index(name), 0, x.shape, steps, x.dtype.name, x.itemsize, at)

        def kept(name, x):
            arrays[name] = x
            return bind(name)

        def constant(x):
            view = kept(f"constant {len(arrays)}", np.array(x))
            return arrays[names[view.buffer]].ctypes.data

        recorder = SimpleNamespace(
            device=SimpleNamespace(info=self.info),
            precision="ieee",
            fresh=lambda shape, dtype: kept(f"fresh {len(arrays)}", np.full(shape, np.nan, dtype)),
            launches=lambda found, at, work=0: launches.append((found, at)),
            constant=constant,
        )
        act = nf.activations()
        every = (*[act["tanh"]] * (len(self.widths) - 2), act["none"])
        form = np.zeros((0, self.widths[0]), self.dtype), None, b"", 0
        how = every, self.widths, self.points, self.dtype, *form
        networks.network(
            recorder, NetworkProblem(*how, True, backward, False, False, arrays, ()), bind
        )
        work = np.full(1 << 22, 255, np.uint8)
        owners = [x if x.base is None else x.base for x in arrays.values()]
        rows = {"FIRST_ROW": forward_row, "ROW": forward_row}
        rows |= {"FIRST_ROW_BACK": backward_row, "ROW_BACK": backward_row}
        machine = Machine([*owners, work], **rows)
        for found, at in launches:
            places = {slot: arrays[names[b]].ctypes.data + o for slot, (b, o) in at.items()}
            for launch in found:
                machine.run(launch, work=work.ctypes.data, **places)
        return made

    def check(self):
        """Value and gradients are those of float64 to the roundings of sums of these lengths."""
        h, behind = self.x.astype(float), []
        for i, (w, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            behind.append(h)
            h = h @ w.astype(float) + bias
            h = np.tanh(h) if i < len(self.weights) - 1 else h
        self.close(self.run(False)["u"], h)
        made, s = self.run(True), self.sizes(True)
        flat, width = made["flat"], s.tile.width
        g = self.grad.astype(float)
        hidden = len(self.weights) - 1
        for i in reversed(range(hidden + 1)):
            n = self.widths[i + 1]
            if 0 < i < hidden:
                square = flat[(i - 1) * width**2 : i * width**2].reshape(width, width)
                self.close(square[: self.widths[i], :n], behind[i].T @ g)
                rest = square.copy()
                rest[: self.widths[i], :n] = 0
                assert not rest.any()
            if i < hidden:
                bias = flat[s.squares + i * width :][:n]
                self.close(bias, g.sum(0))
            g = g @ self.weights[i].astype(float).T
            g = g * (1 - behind[i] ** 2) if i else g
        self.close(made["d_points"], g)

    def close(self, found, wanted):
        terms = 16 * max(self.points, *self.widths)
        bound = terms * np.finfo(self.dtype).eps * max(1.0, np.abs(wanted).max())
        assert np.abs(found - wanted).max() <= bound


@pytest.mark.long
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("aligned", [True, False], ids=["16 bytes", "values"])
def test_float64_on_tensor_cores(turned, aligned):
    Case("float64", (2, 100, 72, 1), 19, turned=turned, aligned=aligned).check()


@pytest.mark.long
def test_float64_of_widths_that_fill_a_tile_and_points_that_fill_several():
    Case("float64", (1, 128, 128, 1), 70).check()


@pytest.fixture
def in_slices(monkeypatch):
    """A tile whose weights come in slices goes before that which has them whole."""
    tiles = [tile for tile in network_tiling.TILES["float32"] if tile.width != 128 or tile.slice]
    monkeypatch.setitem(network_tiling.TILES, "float32", tuple(tiles))
    network_sizes.sizes_of.cache_clear()
    yield
    network_sizes.sizes_of.cache_clear()


@pytest.mark.long
@pytest.mark.usefixtures("in_slices")
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_float32(turned):
    Case("float32", (2, 100, 37, 1), 3, turned=turned).check()


@pytest.mark.long
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("dtype", "widths"), [
    ("float64", (2, 64, 64, 1)), ("float64", (1, 50, 33, 2)), ("float32", (2, 64, 64, 1)),
    ("float32", (3, 21, 30, 1)),
], ids=str)  # fmt: skip
def test_weights_that_come_whole(dtype, widths, turned):
    case = Case(dtype, widths, 19, turned=turned, aligned=not turned)
    assert not case.sizes(True).tile.slice
    case.check()


@pytest.mark.long
def test_threads_beyond_the_last_team_touch_no_plane():
    """Guards: 12 warps have 9 warps' parts of a gradient of 96 x 96; the others add to nothing."""
    case = Case("float32", (2, 96, 80, 1), 3)
    s = case.sizes(True)
    assert s.threads > s.team and s.threads % s.team
    case.check()


@pytest.mark.parametrize("info", [TURING, ADA, AMPERE, HOPPER], ids=lambda info: info.name)
def test_what_is_planned_fits_the_device(info):
    """Guards: what a kernel trusts of its tile, and that a forward keeps rows of its backward's."""
    for dtype, width, (directions, seconds) in itertools.product(
        KINDS, (8, 64, 96, 128, 192, 256), ((0, 0), (2, 1), (3, 3), (1, 6))
    ):
        found = []
        for widths, backward in itertools.product(
            ((2, width, width, 1), (8, *[width] * 7, 8)), (False, True)
        ):
            s = network_sizes.sizes_of(info, dtype, widths, directions, seconds, backward)
            if s is None:
                continue
            found.append(s.tile.width)
            size, t = KINDS[dtype].itemsize, s.tile
            taken = s.places(backward)[1] * size
            assert taken <= info.shared_per_block
            whole = s.resident == 1
            assert whole or (taken + 1024) * s.resident <= info.shared_per_multiprocessor
            assert s.threads % t.width == 0 and s.points * s.members <= s.rows
            assert s.rounds * s.threads >= s.teams * s.team >= s.team
            if t.slice:
                assert info is HOPPER and t.stages > 1
                assert t.width % t.slice == 0 and s.threads % t.slice == 0
                assert t.slice * t.width % (t.few * s.threads) == 0
                assert s.threads % (t.width // t.few) == s.threads % (t.slice // t.few) == 0
                assert t.back_pitch * size % 32 == 16 or dtype == "float64"
        assert len(set(found)) <= 1
        if info is HOPPER:
            assert bool(found) == (width <= (256 if dtype == "float32" else 128))


def test_a_tile_that_leaves_no_room_for_its_blocks_gives_way():
    """Guards: whole weights, else two blocks with a ring that fits, and none where they do not."""
    found = [
        network_sizes.sizes_of(HOPPER, "float32", widths, 2, 1, True)
        for widths in ((2, *[128] * 5, 1), (8, *[128] * 4, 8), (8, *[128] * 7, 8))
    ]
    rings = [s and (s.resident, s.threads, s.tile.slice, s.tile.stages) for s in found]
    assert rings == [(1, 256, 0, 0), (2, 128, 16, 2), None]
