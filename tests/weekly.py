"""Tests that CI runs every week, and a plain run leaves out: NUMFUSE_TEST_ALL runs them all.

Each takes 10 seconds and more of a core, and has most of its text in common with another set of
parameters of the same test, which every run has. `test_cuda_compile.SELDOM` names kernels likewise.
"""

from __future__ import annotations

import os

#: Whether this run leaves nothing out.
ALL = bool(os.environ.get("NUMFUSE_TEST_ALL"))
#: Parts of the names of tests, with the first of their parameters.
SELDOM = (
    "test_128_columns_go_back_through_shared_memory[widths0",
    "test_warp_groups_take_64_rows_through_all_layers[widths1",
    "test_warp_groups_take_64_rows_through_all_layers[widths4",
    "test_warp_groups_take_64_rows_through_all_layers[widths5",
    "test_tiles_that_are_not_full_add_nothing[515",
    "test_cuda_half_networks.py::test_several_networks_are_rows_of_the_grid[shared",
    "test_float64_on_tensor_cores[values-rows",
    "test_float64_on_tensor_cores[16 bytes-columns",
    "test_cuda_streams.py::test_float32[columns",
    "hosts_with_narrower_vectors[16-False",
    "processor_that_numba_is_told_of[generic",
    "processor_that_numba_is_told_of[without F16C",
    "test_any_number_of_threads_gives_the_same_bits[float16",
    "test_any_number_of_threads_gives_the_same_bits[float64",
    "test_residues.py::test_a_whole_product_runs[1048576",
    "test_a_factor_becomes_its_residues[y-18-columns",
    "test_a_factor_becomes_its_residues[y-18-strided",
    "test_a_factor_becomes_its_residues[y-18-reversed",
)


def is_left_out(name: str) -> bool:
    """Return whether this run leaves out a test of this name."""
    return not ALL and any(part in name for part in SELDOM)
