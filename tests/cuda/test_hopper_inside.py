"""Products of float32 by parts that Hopper's kernel makes itself, run in Python.

Guards: docs/cuda.md, a left factor that is split inside has the bits of one that a launch before
splits, infinities, NaN and subnormals among them; and no thread waits for ever.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

try:
    from cuda_devices import HOPPER
    from cuda_hopper import Hopper

    from numfuse.backends.cuda.compile.schema import Schema
    from numfuse.backends.cuda.kernels.hopper import gemm
    from numfuse.backends.cuda.kernels.hopper.tiling import HopperTile, hopper_inside
    from numfuse.backends.cuda.plan.product import Operand, Product

    tier = importlib.import_module("numfuse.backends.cuda.kernels.hopper.tier")
    factors = importlib.import_module("numfuse.backends.cuda.kernels.hopper.factors")
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.epilogues import sum_of_terms

if SIMULATED:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

SMALL = replace(HOPPER, multiprocessors=2)
#: What the first part of a number is not simply its nearest, and what has less than three parts.
SPECIAL = np.array(
    [np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 3.39e38, 1e-45, -3e-40, 1e-38, -0.0, 0.0, 2.0**-134],
    np.float32,
)


def memory(x):
    """A matrix at a multiple of 256 bytes, the rest of its rows NaN, whole 16 bytes each."""
    rows, columns = x.shape
    pitch = -(-columns // 4) * 4
    raw = np.full(rows * pitch + 64, np.nan, np.float32)
    at = -raw.ctypes.data % 256 // 4
    whole = raw[at : at + rows * pitch].reshape(rows, pitch)
    whole[:, :columns] = x
    return whole


def product(x, y, m, n, k, kind, turned):
    out = memory(np.full((m, n), np.nan, np.float32))
    strides = (0, 1, x.shape[1]) if turned else (0, x.shape[1], 1)
    factor = Operand("float32", strides, 16), Operand("float32", (0, y.shape[1], 1), 16)
    result = Operand("float32", (0, out.shape[1], 1), 16)
    made = Product(m, n, k, 1, *factor, result, "float32", epilogue=sum_of_terms(0))
    return replace(made, precision=kind, free=True), out


def run(plan, arrays):
    for launch in plan.launches:
        if launch.makes:
            name, nbytes = launch.makes
            arrays[name] = memory(np.full((1, nbytes // 4), np.nan, np.float32))
    arrays["work"] = memory(np.full((1, plan.workspace // 4 + 1), np.nan, np.float32))
    machine = Hopper([*arrays.values()])
    for launch in plan.launches:
        machine.run(launch, **{name: x.ctypes.data for name, x in arrays.items()})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # (of NumPy, which is the arithmetic here)
@pytest.mark.parametrize(
    ("kind", "tile", "sizes", "turned", "parts"),
    [
        ("bf16x6", HopperTile(64, 64, 1, False), (66, 70, 136), False, 1),
        ("bf16x6", HopperTile(128, 64, 2, False), (66, 20, 136), True, 1),
        ("bf16x3", HopperTile(64, 128, 2, True), (132, 34, 70), True, 1),
        ("bf16x3", HopperTile(64, 32, 1, False), (3, 5, 200), False, 2),
    ],
)
def test_parts_made_inside_have_the_bits_of_a_launch_before(
    kind, tile, sizes, turned, parts, monkeypatch
):
    m, n, k = sizes
    rng = np.random.default_rng(k)
    a = rng.standard_normal((m, k)).astype(np.float32)
    a[1, : len(SPECIAL)] = rng.permutation(SPECIAL)
    a[2, -len(SPECIAL) :] = np.where(np.isfinite(SPECIAL), SPECIAL, 1) * np.float32(1e-3)
    x, y = memory(a.T if turned else a), memory(rng.standard_normal((k, n)).astype(np.float32))
    results = []
    for inside in (True, False):
        monkeypatch.setattr(factors, "splits_inside", lambda *_, inside=inside: inside)
        made, out = product(x, y, m, n, k, kind, turned)
        plan = tier.plan_with(made, kind, SMALL, tile, parts)
        copied = [x.makes[0] for x in plan.launches if x.makes]
        assert copied == (["y copy"] if inside else ["x copy", "y copy"])
        run(plan, {"x": x, "y": y, "out": out})
        results.append(out[:, :n])
    assert np.array_equal(*results, equal_nan=True)
    ordinary = np.r_[0, 3:m] if m > 3 else [0]
    exact = a[ordinary].astype(float) @ y[:, :n].astype(float)
    size = abs(a[ordinary].astype(float)) @ abs(y[:, :n].astype(float))
    lost = 2.0**-23 if kind == "bf16x6" else 2.0**-15
    assert (abs(results[0][ordinary] - exact) <= (lost + (k + 80) * 2.0**-24) * size).all()


def test_a_stage_is_promised_what_the_copy_engine_brings(monkeypatch):
    monkeypatch.setattr(factors, "splits_inside", lambda *_: True)
    x, y = np.empty((512, 128), np.float32), np.empty((128, 128), np.float32)
    made, _ = product(x, y, 512, 128, 128, "bf16x6", False)
    (_, launch) = tier.plan_with(made, "bf16x6", HOPPER, HopperTile(128, 128, 2, False), 1).launches
    at = Schema(gemm.gemm).names.index("slice_bytes")
    assert launch.arguments[at] == 3 * 128 * 64 * 2  # Y's planes; X's are written by threads


@pytest.mark.parametrize("split", [6, 3])
def test_long_factors_of_few_columns_are_split_inside(split):
    assert hopper_inside(65536, 512, 512, 1, 1, split)
    assert not hopper_inside(4096, 8192, 4096, 1, 1, split)  # the product is all of the time
    assert not hopper_inside(128, 512, 65536, 1, 1, split)  # few rows: a launch is as good


def test_only_what_has_room_for_two_stages_is_split_inside(monkeypatch):
    monkeypatch.setattr(factors, "INSIDE", True)
    factor = Operand("float32", (0, 512, 1), 16)
    made = Product(
        65536, 512, 512, 1, factor, factor, factor, "float32", epilogue=sum_of_terms(0),
        precision="bf16x6",
    )  # fmt: skip
    assert factors.splits_inside(made, "bf16x6")
    assert not factors.splits_inside(replace(made, sums=True), "bf16x6")
    assert not factors.splits_inside(made, "tf32")
    for tile in (HopperTile(128, 128, 2, False), HopperTile(64, 128, 2, True)):
        plan = tier.plan_with(made, "bf16x6", HOPPER, tile, 1)
        launch = plan.launches[-1]
        assert "split inside" in launch.kernel.name and launch.shared_bytes <= 232448
        assert "2 stages" in str(plan.tiling)
