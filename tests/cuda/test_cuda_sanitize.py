"""What `tests/sanitize_cuda.py` runs under compute-sanitizer, planned without a GPU.

Guards: the script, which no other test runs, still calls what there is, and reaches every tier and
every block of Hopper.
"""

from __future__ import annotations

import types

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf
from numfuse.problem import product
from numfuse.runtime.replay import Replay

try:
    from cuda_devices import AMPERE, HOPPER

    from numfuse.backends.cuda.plan import lower
    from numfuse.backends.cuda.plan.program import Recorder, View, strides_of
    from numfuse.backends.cuda.plan.tiers import TIERS
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has one tier", allow_module_level=True)

import sanitize_cuda as script

GELU = nf.activations()["gelu"]


class Recording:
    """A device on which calls are recorded and never run."""

    def __init__(self, info):
        self.info, self.kept_products = info, Replay(100, 0)

    def prepare(self, launch):
        return types.SimpleNamespace(name=launch.kernel.name, table=launch.table)


def recorders(info, precision, name, *sizes):
    """The recorded forward and backward of a case."""
    a, b, bias, grad = script.random_operands(np.random.default_rng(0), name, *sizes)
    forward = product.gemm(a, b, bias, GELU)
    backward = product.gemm_backward(grad, a, b, bias, GELU)
    for record, problem in ((lower.forward, forward), (lower.backward, backward)):
        rec = Recorder(Recording(info), precision)

        def bind(field, problem=problem, rec=rec):
            x = getattr(problem, field, None)
            if x is None:
                return None
            number, dtype = rec.number(field), x.dtype.name
            return View(number, 0, x.shape, strides_of(x), dtype, x.itemsize, 16)

        record(rec, problem, bind)
        yield rec


def test_its_cases_reach_every_tier():
    found = set()
    with script.as_large_products():
        for info in (HOPPER, AMPERE):
            for case in script.CASES:
                precisions = [precision for precision, _ in script.PRECISIONS.get(case[0], ())]
                for precision in ["ieee", *precisions]:
                    for rec in recorders(info, precision, *case):
                        assert rec._steps, case
                        found |= set(rec._tiers)
    assert found == {tier.name for tier in TIERS}, found


@pytest.mark.parametrize("case", script.FORCED, ids=lambda case: f"{case[1]} {case[0]}")
def test_a_forced_block_is_taken(case):
    tile, precision, *sizes = case
    with script.as_large_products(), script.in_blocks_of(tile):
        for rec in recorders(HOPPER, precision, *sizes):
            assert str(tile) in str(rec._chief[2])


def test_what_it_calls_and_compares_is_there():
    operands = script.random_operands(np.random.default_rng(0), "float32", 5, 4, 3)
    tiers = set()
    found = script.results("reference", *operands, tiers)
    assert tiers and all(isinstance(x, np.ndarray) for x in found)
    script.compare(found, found, 0.0)
    with pytest.raises(AssertionError):
        script.compare([found[0] + 1], found[:1], 1e-3)
