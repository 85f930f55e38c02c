"""Products of float32 by parts, of which Hopper's kernel makes those of X itself, run in Python.

Guards: docs/cuda.md, a left factor is read as it lies; infinities, NaN and subnormals in it give
what IEEE says and change nothing beside them; and no thread waits for ever.
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
    from numfuse.backends.cuda.kernels.hopper.tiling import HopperTile
    from numfuse.backends.cuda.plan.product import Operand, Product

    tier = importlib.import_module("numfuse.backends.cuda.kernels.hopper.tier")
    factors = importlib.import_module("numfuse.backends.cuda.kernels.hopper.factors")
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.epilogues import sum_of_terms

if SIMULATED:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

SMALL = replace(HOPPER, multiprocessors=2)
#: What has no nearest number for its first part, and what has less than three parts.
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
        ("bf16x6", HopperTile(64, 64, 1, False), (5, 70, 136), False, 1),
        ("bf16x6", HopperTile(128, 64, 2, False), (66, 20, 136), True, 1),
        ("bf16x3", HopperTile(64, 128, 2, True), (132, 34, 70), True, 1),
        ("bf16x3", HopperTile(64, 32, 1, False), (3, 5, 200), False, 2),
    ],
)
def test_a_left_factor_is_read_as_it_lies_and_multiplied_in_parts(
    kind, tile, sizes, turned, parts, monkeypatch
):
    m, n, k = sizes
    rng = np.random.default_rng(k)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    a, b = a.astype(np.float32), b.astype(np.float32)
    outs = []
    for special in (False, True):
        if special:
            a[1, : len(SPECIAL)] = rng.permutation(SPECIAL)
            a[2, -len(SPECIAL) :] = np.where(np.isfinite(SPECIAL), SPECIAL, 1) * np.float32(1e-3)
        x, y = memory(a.T if turned else a), memory(b)
        made, out = product(x, y, m, n, k, kind, turned)
        plan = tier.plan_with(made, kind, SMALL, tile, parts)
        assert [x.makes[0] for x in plan.launches if x.makes] == ["y copy"]
        run(plan, {"x": x, "y": y, "out": out})
        outs.append(out[:, :n])
    # an infinity changes nothing in the rows beside it
    others = np.r_[0, 3:m] if m > 3 else [0]
    assert np.array_equal(outs[0][others], outs[1][others])
    exact, size = a.astype(float) @ b.astype(float), abs(a.astype(float)) @ abs(b.astype(float))
    finite = np.isfinite(exact)
    assert finite[others].all() and not finite[1].any()
    assert np.array_equal(outs[1][~finite], exact[~finite].astype(np.float32), equal_nan=True)
    lost = 2.0**-23 if kind == "bf16x6" else 2.0**-15
    error, bound = abs(outs[1] - exact), (lost + (k + 80) * 2.0**-24) * size + 2.0**-126
    assert (error[finite] <= bound[finite]).all()


def test_a_left_factor_of_any_other_layout_is_copied_and_not_split():
    x, y = np.empty((512, 128), np.float32), np.empty((128, 128), np.float32)
    made, _ = product(x, y, 512, 127, 128, "bf16x6", False)
    made = replace(made, x=Operand("float32", (0, 127, 1), 4), k=127)
    launches = tier.plan_with(made, "bf16x6", HOPPER, HopperTile(128, 128, 2, False), 1).launches
    kept = {launch.makes[0]: launch.makes[1] for launch in launches if launch.makes}
    assert kept == {"x copy": 512 * 128 * 4, "y copy": 3 * 127 * 128 * 2}
    at = Schema(gemm.gemm).names.index("slice_bytes")
    assert launches[-1].arguments[at] == 128 * 64 * 4 + 3 * 128 * 64 * 2
