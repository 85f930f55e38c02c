"""A pass whose two results are the even and the odd columns of one array, run by `cuda_machine`.

Guards: docs/cuda.md, pre-gradients of weights that alternate are stored as one array: every value
where it belongs, nothing beside, and sums of columns as of results that lie apart.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from conftest import SIMULATED, unavailable

try:
    from cuda_devices import HOPPER
    from cuda_machine import Machine

    from numfuse.backends.cuda.kernels import rows
    from numfuse.backends.cuda.kernels.pointwise import Result, Source
    from numfuse.backends.cuda.plan.product import Operand
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.epilogues import Epilogue
from numfuse.language.curves import leaf

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

GATE = Epilogue(
    "gate", (), ("g", "z", "z1"),
    (("d0", leaf("g") * leaf("z1")), ("d1", leaf("g") * leaf("z") + leaf("z1"))),
)  # fmt: skip
KINDS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


def run(dtype, m, n, pitch, woven, summed):
    """Run the pass; return the array of both results, and the table of sums."""
    kind, acc = KINDS[dtype], "float64" if dtype == "float64" else "float32"
    rng = np.random.default_rng(m + n)
    given = {x: rng.integers(-4, 5, (m, n)).astype(kind) for x in ("g", "z", "z1")}
    whole = np.full((m, pitch), np.nan, kind)
    operands = {x: Operand(dtype, (0, n, 1), 16) for x in given}
    operands |= {x: Operand(dtype, (0, pitch, 2), 16) for x in ("d0", "d1")}
    sources = [Source(x, x, dtype) for x in given]
    results = [Result(x, x, dtype) for x in ("d0", "d1")]
    how = sources, results, operands, rows.Sums(summed), (m, n, 1), False
    launch, chunks, _ = rows.launch(HOPPER, GATE, acc, *how, {"d1": "d0"} if woven else {})
    tables = {f"sums_{x}": np.full((chunks, n), np.nan, acc) for x in summed}
    arrays = given | {"whole": whole} | tables
    at = {x: y.ctypes.data for x, y in arrays.items()}
    machine = Machine([*arrays.values()])
    machine.run(launch, **at, d0=at["whole"], d1=at["whole"] + whole.itemsize)
    g, z, z1 = (given[x].astype(float) for x in ("g", "z", "z1"))
    return whole, [*tables.values()], (g * z1, g * z + z1)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("m, n, more", [(3, 16, 0), (5, 40, 8), (2, 13, 6)])
@pytest.mark.parametrize("summed", [(), ("d0", "d1")], ids=["stored", "summed"])
def test_results_of_alternate_columns_are_stored_as_one_array(dtype, m, n, more, summed):
    whole, tables, exact = run(dtype, m, n, 2 * n + more, True, summed)
    for first, wanted in enumerate(exact):
        assert np.array_equal(whole[:, first : 2 * n : 2].astype(float), wanted)
    assert np.isnan(whole[:, 2 * n :].astype(float)).all()
    for table, wanted in zip(tables, exact, strict=False):
        assert np.array_equal(table.sum(0), wanted.sum(0))
    apart, _, _ = run(dtype, m, n, 2 * n + more, False, summed)
    assert np.array_equal(whole[:, : 2 * n], apart[:, : 2 * n])
