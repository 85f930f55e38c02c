"""What a gated layer launches on GPUs that are not here, where both weights are views of one array.

Guards: docs/cuda.md, which views of one array are read where they lie.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf
from numfuse.backends import OneRun, Traits
from numfuse.runtime.replay import Replay
from numfuse.runtime.views import dtype_of

try:
    from cuda_devices import AMPERE, HOPPER

    from numfuse.backends.cuda.call.arrays import ghost
    from numfuse.backends.cuda.call.record import alignment_of, beside
    from numfuse.backends.cuda.kernels.ampere import copies
    from numfuse.backends.cuda.plan.fused import fused
    from numfuse.backends.cuda.plan.program import Recorder, View, strides_of
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has one tier", allow_module_level=True)

M, K, N = 2048, 1024, 1408
CALLS = ["forward", "saved", "recomputed"]
#: Both weights as views of one array of twice the columns.
VIEWS = {"halves": (np.s_[:, :N], np.s_[:, N:]), "alternate": (np.s_[:, ::2], np.s_[:, 1::2])}
ADDRESSES = itertools.count(1 << 44, 1 << 40)


class Recording(OneRun):
    """A backend that records calls and runs nothing."""

    name = "cuda"

    def __init__(self, info):
        self.info, self.kept_products = info, Replay(100, 0)
        self.names = []

    @property
    def traits(self):
        return Traits(grad_pre=("float16", "bfloat16"), order=("tier", "axes", "saved"))

    def prepare(self, launch):
        self.names.append(launch.kernel.name)
        return types.SimpleNamespace(name=launch.kernel.name, table=launch.table)

    def run(self, kind, p):
        device: Any = self
        rec = Recorder(device)

        places = {name: x.__array_interface__["data"][0] for name, x in p.arrays.items()}
        names = [*places]
        first = {names[j]: (names[i], at) for j, i, at in beside([*places.values()])}

        def bind(name):
            x = p.arrays[name]
            base, distance = first.get(name, (name, 0))
            aligned, number = alignment_of(places[base]), rec.number(base)
            how = x.shape, strides_of(x), x.dtype.name, x.itemsize, aligned
            return View(number, distance // x.itemsize, *how)

        fused(rec, p, bind)


def absent(dtype, rows, columns, turned=False):
    """A matrix, or a transposed one, of memory that is not there."""
    kind = dtype_of(dtype)
    strides = (1, rows) if turned else (columns, 1)
    steps = [kind.itemsize * step for step in strides]
    return ghost(next(ADDRESSES), (rows, columns), steps, kind, True)


def weights(dtype, view, turned):
    """Both weights of a layer, "apart" or as views of one array."""
    if view == "apart":
        return tuple(absent(dtype, K, N, turned) for _ in range(2))
    both = absent(dtype, K, 2 * N, turned)
    return tuple(both[part] for part in VIEWS[view])


def launched(info, dtype, call, view, turned, step=1):
    """The names of the kernels that a call launches; by a step of -1 odd columns come first."""
    backend = Recording(info)
    given = absent(dtype, M, K), *weights(dtype, view, turned)[::step]
    if call == "forward":
        nf.matmul_activation_mul(*given, backend=backend)
    elif call == "second":
        more = absent(dtype, M, K), *weights(dtype, view, turned)[::step], None, None
        nf.matmul_activation_mul_double_bwd(*more, absent(dtype, M, N), *given, backend=backend)
    else:
        saved = tuple(absent(dtype, M, N) for _ in range(2)) if call == "saved" else None
        grad = absent(dtype, M, N)
        nf.matmul_activation_mul_bwd(grad, *given, pre_activation=saved, backend=backend)
    return backend.names


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("view, turned", [("halves", False), ("halves", True), ("alternate", True)])
def test_the_copy_engine_reads_halves_and_alternate_rows_where_they_lie(view, turned, dtype, call):
    found = launched(HOPPER, dtype, call, view, turned)
    assert found == launched(HOPPER, dtype, call, "apart", turned)
    assert len(found) == (1 if call == "forward" else 3)
    assert not any("copy" in name for name in found)


@pytest.mark.parametrize("step", [1, -1], ids=["even first", "odd first"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_copy_engine_reads_alternate_columns_where_they_lie(dtype, call, step):
    found = launched(HOPPER, dtype, call, "alternate", False, step)
    assert not any("copy" in name for name in found)
    # the two sums that a launch makes are those of neighbouring columns
    assert [name.replace(" woven", "") for name in found] == launched(
        HOPPER, dtype, call, "apart", False
    )
    assert sum("woven" in name for name in found) == {"saved": 1, "recomputed": 2}.get(call, 1)


@pytest.mark.parametrize("step", [1, -1], ids=["even first", "odd first"])
def test_second_order_reads_alternate_columns_where_they_lie(step):
    """Three pairs of sums, the pass, d_a as one sum over both arrays, d_b as one of all columns."""
    found = launched(HOPPER, "bfloat16", "second", "alternate", False, step)
    assert sum("woven" in name for name in found) == 3
    assert sum("wgmma" in name for name in found) == 5
    # (each weight's gradient goes from the columns of both to an array of its own)
    assert [name for name in found if "copy" in name] == ["copy bfloat16 bfloat16"] * 2


def test_many_rows_are_cut_for_both_gradients_of_alternate_weights():
    """A product that is cut makes no two sums: it has all columns, and both results are copied."""
    backend, (m, n) = Recording(HOPPER), (16384, 1024)
    both = absent("bfloat16", K, 2 * n)
    given = absent("bfloat16", m, K), both[:, ::2], both[:, 1::2]
    saved = tuple(absent("bfloat16", m, n) for _ in range(2))
    grad = absent("bfloat16", m, n)
    nf.matmul_activation_mul_bwd(grad, *given, pre_activation=saved, backend=backend)
    assert sum("wgmma" in name for name in backend.names) == 2
    assert [x for x in backend.names if "copy" in x] == ["copy bfloat16 bfloat16"] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("call", ["biases", "tangent"])
def test_sums_that_a_pass_reads_are_made_of_alternate_columns_too(monkeypatch, dtype, call):
    """With gradients of biases, and in the forward mode, no product ends in the results."""
    monkeypatch.setattr(
        copies, "pays", lambda *sizes: True
    )  # whatever the model says of such sizes
    backend = Recording(HOPPER)
    a, both = absent(dtype, M, K), weights(dtype, "alternate", False)
    if call == "biases":
        biases = [absent(dtype, 1, N)[0] for _ in range(2)]
        nf.matmul_activation_mul_bwd(absent(dtype, M, N), a, *both, *biases, backend=backend)
    else:
        rest = absent(dtype, M, K), None, None
        nf.matmul_activation_mul_jvp(a, *both, None, None, *rest, backend=backend)
    # (float32 lies along K in `a`, and in the pre-gradients)
    along_k = {"turned copy"} if dtype == "float32" else set()
    assert {name for name in backend.names if "copy" in name} == along_k


@pytest.mark.parametrize("turned", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "info, dtype",
    [(AMPERE, "bfloat16"), (AMPERE, "float16"), (AMPERE, "float64"), (HOPPER, "float64")],
    ids=lambda x: x if isinstance(x, str) else f"{x.capability[0]}.{x.capability[1]}",
)
def test_other_tensor_cores_read_alternate_columns_where_they_lie(info, dtype, call, turned):
    found = launched(info, dtype, call, "alternate", turned)
    assert not any("copy" in name for name in found)
    assert len(found) == len(launched(info, dtype, call, "apart", turned))


@pytest.mark.parametrize("turned", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("info", [AMPERE, HOPPER], ids=["8.0", "9.0"])
def test_alternate_views_of_float32_are_laid_out_where_weights_of_their_own_are(info, call, turned):
    """A factor that lies along K is laid out in either case."""
    found = launched(info, "float32", call, "alternate", turned)
    assert found == launched(info, "float32", call, "apart", turned)
