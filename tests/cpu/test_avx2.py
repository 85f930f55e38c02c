"""The loops that multiply, as a processor with 256-bit vectors runs them: assembly is inspected.

Sixteen registers are just enough for a tile's sums, a row of B and one value of A. LLVM has mixed
the updates of several rows and filled more: products took twice as long, with the same bits.

Guards: on x86 without AVX-512 the sums of a tile stay in registers.
"""

from __future__ import annotations

import re

import pytest
import weekly
from listings import listings_of, loops, operations

from numfuse.backends.cpu import host, tiling
from numfuse.backends.cpu.kernels import protocol

#: It compiles for half a minute.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not host.is_x86(), reason="these are processors of x86"),
]
EMIT = """
from numfuse.backends.cpu import host
from numfuse.backends.cpu.kernels import library, network
assert host.vector_bytes() == 32
made = {
    "gemm": library.gemm_cell,
    "network along": lambda acc: network.products(acc, False),
    "network down": lambda acc: network.products(acc, True),
    "thin": lambda acc: library.thin_cell(acc, True, False),
    "streamed": lambda acc: library.thin_cell(acc, True, True),
}
listings = {f"{kind} {acc}": made[kind](acc) for kind, acc in CASES}
"""
KINDS = "network along", "network down", "thin", "streamed"
ACCUMULATORS = "float32", "float64"
CASES = [("gemm", acc) for acc in ACCUMULATORS]
# (of what is compiled for seconds each, but for the tile of a product, by turns)
CASES += [
    (kind, acc)
    for turn, kind in enumerate(KINDS)
    for acc in (ACCUMULATORS if weekly.ALL else [ACCUMULATORS[(turn + turn // 2) % 2]])
]


@pytest.fixture(scope="module")
def listings(tmp_path_factory):
    environment = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
    code = f"CASES = {CASES}\n{EMIT}"
    return listings_of(code, environment, tmp_path_factory.mktemp("cache"))


def multiplying(text: str, acc: str) -> list[str]:
    """Return the loops with products of whole vectors; an edge's mask may be anywhere."""
    last = {"float32": "ps", "float64": "pd"}[acc]
    found = [x for x in loops(text, "j") if re.search(rf"\tvfn?madd\d+{last}\t.*%ymm", x)]
    return [x for x in found if "maskmov" not in x]


@pytest.mark.parametrize(("kind", "acc"), CASES)
def test_no_sum_leaves_the_registers(listings, kind, acc):
    found = multiplying(listings[f"{kind} {acc}"], acc)
    assert len(found) >= (4 if kind == "thin" else 6)
    for loop in found:
        assert not re.search(r"\tvmov\w+\t%ymm\d+, (\d*\(%rsp\)|-\d+\(%rbp\))", loop), loop


@pytest.mark.parametrize("acc", ACCUMULATORS)
def test_a_rank_1_update_loads_what_its_tile_needs(listings, acc):
    r = tiling.registers(32, {"float32": 4, "float64": 8}[acc])
    whole = max(multiplying(listings[f"gemm {acc}"], acc), key=lambda x: x.count("\tvfmadd"))
    updates = protocol.STREAM_COUNT
    count = operations(whole)
    assert sum(n for x, n in count.items() if "fmadd" in x) == (
        updates * r.held_rows * r.held_vectors
    )
    assert sum(n for x, n in count.items() if "broadcast" in x) == updates * r.held_rows
    assert sum(n for x, n in count.items() if x.startswith("vmov")) == updates * r.held_vectors
    assert sum(n for x, n in count.items() if x.startswith("prefetch")) == updates
