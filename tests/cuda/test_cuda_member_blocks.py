"""Products that end in the pass over points, run by `cuda_machine`: rows are members of points.

Guards: every direction becomes what its own sum, its point's slopes and its weight say, whatever
block its row is in; the sums over a point's directions have each of them once; and nothing else of
a stack is written, without a GPU to see it.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

try:
    from cuda_devices import HOPPER
    from cuda_machine import Machine

    from numfuse.backends.cuda.kernels import members
    from numfuse.backends.cuda.kernels.ampere import simt, tensor_core
    from numfuse.backends.cuda.plan.product import Members, Operand, Product, Slot
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.backends.cuda.block_tiling import CudaBlock
from numfuse.epilogues import Epilogue
from numfuse.language.curves import leaf

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

#: Minutes of kernels that run in Python.
pytestmark = pytest.mark.long

TILES = {
    "float64": CudaBlock(64, 32, 16, 32, 32, 3, 1, 8),
    "float32": CudaBlock(64, 64, 8, 8, 16, 3, 1),
}
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24}


def formula(backward, summed):
    """The formula of a direction as an epilogue, and as Python."""
    moving, kept, bent = (leaf(x) for x in ("moving", "kept", "bent"))
    s_0, s_1 = leaf("shared_0"), leaf("shared_1")
    if backward:
        stored, added = s_0 * moving + s_1 * (kept * bent), s_1 * (moving * kept)
    else:
        stored, added = s_0 * moving, s_1 * (moving * moving)
    results = (("stored", stored), ("added", added))[: 1 + summed]
    made = Epilogue("direction", (), ("moving", "kept", "bent", "shared_0", "shared_1"), results)

    def run(moving, kept, bent, s_0, s_1, s_2):
        if backward:
            stored, added = s_0 * moving + s_1 * (kept * bent), s_1 * (moving * kept)
        else:
            stored, added = s_0 * moving, s_1 * (moving * moving)
        return (stored, added) if summed else stored

    return made, run


@pytest.mark.parametrize(
    ("points", "directions", "seconds", "n", "backward", "keep", "summed"),
    [
        (6, 9, 1, 36, False, True, True),
        (6, 9, 1, 36, True, False, True),
        # a point in several blocks of rows, and several points in one
        (2, 40, 1, 8, False, False, True),
        (2, 40, 1, 8, True, False, True),
        (11, 3, 1, 40, True, False, True),
        # nothing that rides, and no sums
        (4, 10, 0, 12, False, True, False),
        (4, 10, 0, 12, True, False, True),
    ],
)
@pytest.mark.parametrize("dtype", TILES)
def test_directions_end_where_their_rows_are(
    dtype, points, directions, seconds, n, backward, keep, summed
):
    rng = np.random.default_rng(points * n)
    count, k, real = 1 + directions + seconds, 5, np.dtype(dtype)

    def array(*shape):
        return rng.standard_normal(shape).astype(real)

    a, b = array(points, count, k), array(k, n)
    kept, out = array(points, count, n), np.full((points, count, n), np.nan, real)
    bent = backward and seconds > 0
    planes, weights = array(2 + bent, points, n), array(directions)
    weights[1] = 0
    before = kept.copy()

    def operand(x, *steps):
        return Operand(dtype, tuple(s // x.itemsize for s in steps or x.strides), 16)

    epilogue, run = formula(backward, summed)
    stack = operand(kept)
    product = Product(
        points * count, n, k, 1, Operand(dtype, (0, k, 1), real.itemsize),
        Operand(dtype, (0, n, 1), 16), operand(out), dtype, epilogue=epilogue,
        bias=operand(planes), extra=stack if backward else None, pre=stack if keep else None,
        sums=summed, whole=True,
        members=Members(count, directions, backward, ("moving", "kept", "bent"), 2, bent),
    )  # fmt: skip
    tile = TILES[dtype]
    module = simt if dtype == "float32" else tensor_core
    plan = module.plan(product, HOPPER, tile, k, 1)
    blocks, slots = -(-points * count // tile.block_m), members.slots_of(tile.block_m, count)
    table = np.full((blocks, slots, n), np.nan, real)
    machine = Machine([a, b, kept, out, planes, weights, table], DIRECTION=run)
    places = {
        "x": a, "y": b, "bias": planes, "extra": kept, "pre": kept, "out": out,
        "weights": weights, "sums": table, "work": table,
    }  # fmt: skip
    (launch,) = plan.launches
    assert Slot("weights") in launch.arguments or not (summed and not backward)
    machine.run(launch, **{name: x.ctypes.data for name, x in places.items()})

    z = a.astype(float) @ b.astype(float)
    size = np.abs(a.astype(float)) @ np.abs(b.astype(float))
    unit = UNITS[dtype]
    rows, s_0, s_1 = slice(1, 1 + directions), planes[0][:, None], planes[1][:, None]
    turned = weights[:, None] * planes[2][:, None] if bent else 0.0
    both, given = formula(backward, True)[1], (before[:, rows].astype(float), turned, s_0, s_1)
    stored, added = both(z[:, rows], *given, 0)
    sizes = [np.abs(x) for x in given]
    bounds = both(size[:, rows], *sizes, 0)
    assert (np.abs(out[:, rows] - stored) <= unit * (2 * k + 8) * bounds[0]).all()
    if keep:
        assert (np.abs(kept[:, rows] - z[:, rows]) <= unit * k * size[:, rows]).all()
    else:
        assert (kept == before).all()
    rides, alone = (0, count - 1) if backward else (count - 1, 0)
    target = kept if keep else out
    if backward or seconds:
        found = target[:, rides]
        assert (np.abs(found - z[:, rides]) <= unit * k * size[:, rides]).all()
        assert not keep or np.isnan(out[:, rides]).all()
    if seconds:
        assert np.isnan(out[:, alone]).all() and (kept[:, alone] == before[:, alone]).all()
    if summed:
        w = np.ones(1) if backward else weights[:, None].astype(float)
        added, bounds = added * w, (0, bounds[1] * np.abs(w))
        bound = unit * (2 * k + directions + 16) * bounds[1].sum(1)
        assert (np.abs(joined(table, points, count, tile.block_m) - added.sum(1)) <= bound).all()


def joined(table, points, count, block_m):
    """The sums of points by those of the blocks, as `members.join` adds them up."""
    found = []
    for first in range(0, points * count, count):
        blocks = range(first // block_m, (first + count - 1) // block_m + 1)
        found.append(sum(table[i, first // count - i * block_m // count] for i in blocks))
    return np.array(found)
