"""The simulated schedule of docs/schedule.py: a launch's cells, and possible times.

Guards: docs/schedule.md tells of the launches that the library makes.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numfuse.backends.cpu import tiling

PATH = Path(__file__).parents[2] / "docs" / "schedule.py"


@pytest.fixture(scope="module")
def schedule():
    spec = importlib.util.spec_from_file_location("numfuse_docs_schedule", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


sizes = st.one_of(st.integers(1, 300), st.integers(1, 9000))


@given(
    m=sizes, n=sizes, k=sizes, itemsize=st.sampled_from((4, 8)), threads=st.integers(1, 128),
    noise=st.sampled_from((0.0, 0.3)), shared=st.sampled_from(("", "b", "ab")),
    vectors=st.sampled_from((16, 32, 64)),
)  # fmt: skip
def test_cells_cover_the_output_once_and_no_time_is_gained(
    schedule, m, n, k, itemsize, threads, noise, shared, vectors
):
    problem = schedule.Problem(m, n, k, itemsize)
    p = schedule.Processor(noise=noise, vector_bytes=vectors)
    result = schedule.simulate(problem, threads, p, shared)
    # The rectangles are disjoint, as they stand in a grid, and their areas add up to the output.
    assert len({(cell.band, cell.column) for cell in result.cells}) == len(result.cells)
    assert all(cell.rows > 0 and cell.columns > 0 for cell in result.cells)
    assert sum(cell.rows * cell.columns for cell in result.cells) == m * n
    assert sum(cell.rows for cell in result.cells if cell.column == 0) == m
    assert sum(cell.columns for cell in result.cells if cell.band == 0) == n
    assert 0 < result.efficiency <= 1
    assert result.balance >= 1 - 1e-12
    assert 0 <= result.packing < 1
    assert len(result.busy) == threads
    # Every operand and the output cross the memory bus exactly once.
    assert result.memory == itemsize * (m * k + k * n + m * n)
    # What is not arithmetic at the peak is accounted for, but for the noise.
    lost = threads * (result.seconds - result.ideal)
    if noise == 0:
        assert sum(result.losses.values()) == pytest.approx(lost, rel=1e-6, abs=1e-12)
    # Rounding alone may make a loss of nothing negative.
    assert all(loss >= -1e-9 * threads * result.seconds for loss in result.losses.values())
    if threads == 1:
        assert result.balance == pytest.approx(1) and len(result.busy) == 1


@given(m=sizes, n=sizes, k=sizes, threads=st.integers(1, 128))
def test_the_tiling_is_the_one_of_the_launch(schedule, m, n, k, threads):
    p = schedule.Processor(level2=tiling.level2_bytes())
    r = tiling.registers(64, 4)
    count = 1 if m * n * k < tiling.parallel_fmas(r) else threads
    assert schedule.simulate(schedule.Problem(m, n, k), threads, p).tiling == tiling.gemm(
        m, n, k, 1, 1, count, r, r.mr, (n * 4, 4)
    )


def test_another_level_2_is_simulated_and_forgotten(schedule):
    problem = schedule.Problem(4096, 4096, 4096)
    r = tiling.registers(64, 4)
    before = tiling.gemm(*problem[:3], 1, 1, 16, r, r.mr), tiling.level2_bytes()
    found = [
        schedule.simulate(problem, 16, schedule.Processor(level2=size)).tiling.nc
        for size in (1 << 19, 1 << 22)
    ]
    assert found[0] < found[1]
    assert (tiling.gemm(*problem[:3], 1, 1, 16, r, r.mr), tiling.level2_bytes()) == before


def test_what_the_model_charges_for_costs_time(schedule):
    problem = schedule.Problem(1024, 1024, 1024)

    def seconds(shared="", threads=64, **changes):
        p = schedule.Processor(**changes)
        return schedule.simulate(problem, threads, p, shared).seconds

    plain = seconds()
    assert seconds("ab") < seconds("b") < plain
    assert seconds(pack_a_cycles=2.0) > plain and seconds(launch=20e-6) > plain
    assert seconds(memory=20e9) > plain and seconds(level3_core=2e9) > plain
    assert seconds(noise=0.2) > plain
    assert seconds(threads=1) > 8 * plain


def test_the_page_has_a_line_for_every_shape_and_number_of_cores(schedule):
    page = (PATH.parent / "schedule.md").read_text(encoding="utf-8")
    table = page.partition(schedule.BEGIN)[2].partition(schedule.END)[0]
    found = [line.split("|")[1:3] for line in table.strip().splitlines()[2:]]
    shapes = [schedule.Problem(*schedule.size(text)).name for text in schedule.SHAPES]
    assert [[cell.strip() for cell in line] for line in found] == [
        [shape, str(threads)] for shape in shapes for threads in schedule.THREADS
    ]
