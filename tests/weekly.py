"""Tests that CI runs every week, and a plain run leaves out: NUMFUSE_TEST_ALL runs them all.

Each takes seconds of a core (those of one file together a minute), and has most of its text in
common with another set of parameters of the same test, which every run has. Of a test of threads
that is one kind of Numba's threads, by turns. Of the tests in `COVERED`, whose sets of
parameters take that long together, every run has so many sets that each value is met; of the
kernels that `test_cuda_compile` compiles it has every kind.
"""

from __future__ import annotations

import os
from typing import Any

#: Whether this run leaves nothing out.
ALL = bool(os.environ.get("NUMFUSE_TEST_ALL"))
#: Parts of the names of tests, with the first of their parameters.
SELDOM = (
    "test_128_columns_go_back_through_shared_memory[widths0",
    "test_warp_groups_take_64_rows_through_all_layers[widths0",
    "test_warp_groups_take_64_rows_through_all_layers[widths1",
    "test_warp_groups_take_64_rows_through_all_layers[widths4",
    "test_warp_groups_take_64_rows_through_all_layers[widths5",
    "test_tiles_that_are_not_full_add_nothing[515",
    "test_one_group_adds_the_gradients_of_all_rows_up[how3",
    "test_one_group_adds_the_gradients_of_all_rows_up[how5",
    "test_bits_are_the_same_whichever_warps_are_late[how1-widths1-tanh",
    "test_cuda_apart_networks.py::test_several_networks_are_rows_of_the_grid[shared",
    "test_any_networks_by_warp_groups[widths2",
    "test_any_networks_by_warp_groups[widths3",
    "test_slices_of_16_by_warp_groups[2",
    "test_cuda_half_networks.py::test_several_networks_are_rows_of_the_grid[shared",
    "test_float64_on_tensor_cores[values-rows",
    "test_float64_on_tensor_cores[16 bytes-rows",
    "test_float64_on_tensor_cores[16 bytes-columns",
    "test_cuda_streams.py::test_float32[columns",
    "hosts_with_narrower_vectors[16-False",
    "hosts_with_narrower_vectors[16-True",
    "processor_that_numba_is_told_of[generic",
    "processor_that_numba_is_told_of[without F16C",
    "test_all_of_this_and_whole_products_with_each_kind[dot",
    "test_cache.py::test_a_read_only_install_caches_in_the_users_own_directory",
    "test_cache.py::test_a_read_only_install_without_a_cache",
    "test_any_number_of_threads_gives_the_same_bits[float16",
    "test_any_number_of_threads_gives_the_same_bits[float64",
    "test_any_number_of_threads_gives_a_network_the_same_bits[float64",
    "test_a_rank_1_update_is_fmas_by_lanes_and_as_few_loads_as_the_tile_needs[neoverse-v1",
    "test_packing_is_vector_code_without_calls[neoverse-v1",
    "test_residues.py::test_a_whole_product_runs[1048576",
    "test_a_left_factor_is_read_as_it_lies_and_multiplied_in_parts[bf16x6-tile1",
    "test_a_left_factor_is_read_as_it_lies_and_multiplied_in_parts[bf16x3-tile3",
    "test_a_factor_becomes_its_residues[y-18-columns",
    "test_a_factor_becomes_its_residues[y-18-strided",
    "test_a_factor_becomes_its_residues[y-18-reversed",
    "test_fast_math_around_a_call_changes_no_bit[float64",
    "test_dask_cluster.py::test_the_training_example_learns",
    "test_autograd_fused.py::test_every_use_to_third_order[two factors",
    "test_autograd_fused.py::test_every_use_to_third_order[elementwise",
    "test_autograd_adapter.py::test_every_activation_to_third_order[sigmoid",
    "test_autograd_adapter.py::test_every_activation_to_third_order[gelu_erf",
    "test_autograd_adapter.py::test_every_activation_to_third_order[softplus",
    "test_a_gradient_of_an_epilogue_has_its_bits_alone_and_in_company[float64",
    "test_views_are_taken_as_they_are[float64",
    "test_njit_functions_serve_a_users_own_kernel[silu",
    "test_njit_functions_serve_a_users_own_kernel[sigmoid",
    "test_a_pool_of_threads_with_different_shapes[omp",
    "test_a_backward_by_blocks_has_the_same_bits_on_any_number_of_threads[workqueue",
    "test_set_num_threads_belongs_to_the_thread_that_calls_it[omp",
    "test_a_small_call_stays_in_its_thread[workqueue",
    "test_workers_of_a_forking_pool_may_call[workqueue",
    "test_a_parent_and_its_children_do_not_share_workspaces[omp",
    "test_a_fork_while_other_threads_are_in_a_call[workqueue",
    "test_an_interrupted_call_leaves_the_next_one_right[omp",
    "test_an_interrupt_at_any_step_of_a_launch_leaves_nothing_locked[workqueue",
    "test_an_exception_in_one_thread_leaves_the_others_right[omp",
    "test_a_call_while_the_interpreter_ends_still_runs[workqueue",
    "test_threads.py::test_a_row_has_the_same_bits_alone_and_in_a_larger_problem[float64",
    "test_all_of_this_with_emulated_tiles",
    "test_the_suite_passes_where_float64_is_made_of_integers",
    "test_cache.py::test_a_read_only_install_caches_where_it_may",
    "test_cache.py::test_another_process_with_another_formula_of_that_name_compiles_its_own",
    "processor_that_numba_is_told_of[without AVX",
    "test_a_rank_1_update_is_fmas_by_lanes_and_as_few_loads_as_the_tile_needs[neoverse-n1-float32",
    "test_row_functions_are_vector_code_without_calls[neoverse-v1",
    "test_cli.py::test_demo_on_another_backend_and_path",
    "test_any_number_of_threads_gives_the_same_bits[bfloat16",
    "test_gallery.py::test_an_example_runs[newton_from_scipy",
    "test_gallery.py::test_an_example_runs[own_epilogue",
    "test_every_half_is_rounded_once_from_float32[float16",
    "test_a_fit_finds_the_constants_that_measurements_were_made_by",
    "test_dask_cluster.py::test_a_cluster_gives_the_bits_of_threads",
    "test_autograd_fused.py::test_derivatives_of_the_derivatives_functions",
    "test_autograd_fused.py::test_every_use_to_third_order[a number",
    "test_scikit_learns_own_checks_pass[MLPRegressor-lbfgs",
    "test_scikit_learns_own_checks_pass[MLPClassifier-lbfgs",
    "test_cpu_networks.py::test_a_network_is_one_launch[sizes0",
    "test_cuda_streams.py::test_float32[rows",
    "test_a_left_factor_is_read_as_it_lies_and_multiplied_in_parts[bf16x3-tile2",
    "test_threads.py::test_a_member_of_a_batch_has_the_same_bits_alone[float32",
)
#: Names of tests.
COVERED = frozenset(
    """
    test_few_vectors_in_every_layout
    test_every_block_is_stored_once_and_no_role_waits_for_ever
    test_two_sums_of_a_block_are_loaded_and_stored_once
    test_each_sum_reaches_its_row_and_column_and_meets_its_bias_and_residual
    test_odd_lengths_and_alignments_are_masked
    test_a_factor_is_laid_out_for_access_by_16_bytes
    test_a_short_sum_is_written_by_16_bytes_or_less
    test_few_rows
    test_two_sums_are_those_of_two_products
    test_sums_of_alternate_columns_are_those_of_two_products
    test_any_widths
    test_any_networks
    test_warp_groups_take_64_rows_through_all_layers
    test_columns_by_a_launch_of_their_own_have_the_same_bits
    test_a_factor_becomes_its_residues
    test_directions_end_where_their_rows_are
    test_sums_of_wgmma_are_exact_and_where_they_belong
    test_a_second_order_beyond_the_limits_is_cut
    test_a_problem_beyond_the_limits_is_cut
    test_blocks_of_rows_are_exact_to_second_order
    test_compiled_and_reference_are_accurate_into_the_tails
    test_infinite_arguments_give_the_limits
    test_no_finite_or_infinite_argument_gives_nan
    test_a_plain_loop_becomes_vector_code_without_libm
    test_gates_through_their_derivatives
    test_gates_have_the_bits_of_the_core
    test_products_have_the_bits_of_the_core
    test_second_order_is_within_the_bound_of_one_machine
    test_a_slice_of_rows_has_the_bits_that_it_has_in_the_whole
    test_a_slice_of_rows_has_its_bits_in_an_epilogue_too
    test_an_element_has_the_same_bits_at_every_place_of_a_row
    test_a_batch_of_views_over_one_b_is_summed_as_its_copy
    test_a_batch_of_views_over_one_b_is_summed_as_its_copy_to_second_order
    test_results_have_the_same_bits_on_any_number_of_threads
    test_a_network_has_the_jets_and_gradients_of_its_layers
    test_d_bias_is_as_accurate_as_a_pairwise_sum
    test_every_activation_to_third_order
    test_results_are_those_of_scikit_learn
    test_sums_of_any_length_are_off_by_no_more_than_twice_the_cpus
    test_the_gated_layer_and_all_its_derivatives
    test_output_fence_is_untouched
    test_one_to_three_right_factors
    test_errors_are_within_the_bound
    test_wgsl_text_computes_the_activation
    test_a_split_product_loads_every_plane_of_a_slice_once_for_each_block
    test_a_forked_child_may_call_after_its_parent_has
    test_nan_stays_nan
    test_the_number_of_threads_in_the_environment_is_respected
    test_two_sums_meet_in_their_row_and_column
    test_one_row_for_all_gives_what_its_copies_give
    test_few_rows_or_columns_have_the_bits_of_many
    test_set_num_threads_is_respected
    test_left_out_derivatives_are_traced
    test_rows_that_lie_apart_are_gathered_block_by_block
    test_a_value_has_the_bits_of_the_forward
    test_the_bits_of_a_point_depend_on_it_alone
    test_a_small_call_has_the_bits_of_a_large_one
    test_extra_memory_of_a_backward_does_not_grow_with_m
    test_a_call_whose_d_b_is_strided_is_replayed_and_has_its_bits
    test_gradients_summed_over_batch_axes_grow_block_by_block
    test_packed_weights_give_the_bits_of_their_arrays
    test_products_are_as_accurate_as_those_of_blas
    test_sums_of_rows_have_the_order_that_is_promised
    test_njit_functions_serve_a_users_own_kernel
    test_every_slice_of_k_is_loaded_once_for_each_block
    test_the_slices_of_a_second_term_follow_those_of_the_first
    test_a_product_in_every_layout_by_16_bytes
    test_gates_by_16_bytes
    test_more_rows_are_parts_of_several_columns
    test_output_fences_are_untouched
    test_every_activation_in_every_dtype_to_second_order
    test_residual_and_its_gradient
    test_backward_is_within_the_bound_of_one_machine
    test_batches_and_sums_over_broadcast_axes
    test_gated_double_backward_is_the_derivative_of_gated_backward
    test_forward_mode_is_the_transpose_of_backward
    test_a_part_of_the_second_gated_gradients_is_the_same
    test_infinity_gives_the_limit_of_the_second_derivative
    test_the_guard_zeroes_both_derivatives
    test_double_backward_agrees_with_arbitrary_precision
    test_blocks_of_an_epilogue_are_exact_within_the_bound
    test_a_batch_gives_what_a_loop_gives
    test_thin_deep_and_shallow
    test_gated_output_fence_is_untouched
    test_tails_are_accurate_relatively
    test_sums_of_alternate_columns_have_the_bits_of_columns_by_themselves
    test_two_results_alternate_in_one_array
    test_sums_stay_float32_where_a_pass_reads_them
    """.split()
)


def is_left_out(name: str) -> bool:
    """Return whether this run leaves out a test of this name."""
    return not ALL and any(part in name for part in SELDOM)


def is_covered(name: str) -> bool:
    """Return whether this run has of a test of this name so many sets that each value is met."""
    return not ALL and name.partition("[")[0] in COVERED


def covering(sets: dict[Any, set[Any]], costs: dict[Any, float] | None = None) -> set[Any]:
    """Return keys whose values are all values: the one that adds most, again and again.

    With `costs`, the one that adds most for what it costs. None is kept that the others make
    needless.
    """
    costs = dict.fromkeys(sets, 1.0) if costs is None else costs
    found, missing = set(), set().union(*sets.values())
    left = dict(sets)
    while missing:
        best = max(left, key=lambda key: len(left[key] & missing) / costs[key])
        missing -= left.pop(best)
        found.add(best)
    # (in the order of `sets`, as each process of a run has to choose the same)
    for key in sorted((key for key in sets if key in found), key=lambda key: -costs[key]):
        if sets[key] <= set().union(*(sets[other] for other in found - {key})):
            found.remove(key)
    return found
