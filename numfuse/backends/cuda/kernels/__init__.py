"""Kernels of the CUDA backend. Start with `mirror`: the tiled loop that the CPU and WGSL have too.

- `mirror`: the product that runs on every device
- `small`: batches of products smaller than a tile
- `ampere`, `hopper`: the products of newer devices, by cp.async and by TMA with wgmma
- `residues`: products of float64 by integers of 8 bits
- `elementwise`, `epilogue`: an epilogue as a device function, and what a product does with its sums
- `pointwise`, `rows`: passes over elements, printed from an epilogue
- `jets`, `jet_lines`: the pass of a jet over points, and its text
- `members`: that pass as the end of a product, where directions are many
- `network`, `network_backward`, `network_layers`, `network_passes`: a network's jet in one kernel,
  and its gradients
- `network_tiles`, `network_warps`, `network_split`, `network_rows`: its products in registers, by
  threads and by warps on tensor cores in float64 and float32, and its formulas there
- `network_stream`, `network_copies`: its weights in slices, through a ring, and the copies of these
- `network_parts`, `network_part_sums`: its products in float32 by warp groups with wgmma, of three
  bfloat16 parts, and what these texts are bound to
- `network_half`, `network_half_backward`, `network_fragments`: a network's value in 16 bits, its
  gradients, and the products of warps whose rows stay in registers
- `network_groups`, `network_groups_backward`, `network_wide_backward`, `network_panels`: these by
  warp groups with wgmma, and its factors in shared memory
- `network_apart_backward`: these gradients, where one warp group has all of their sums
- `planes`: the parts of a sum over K that is cut, and the epilogue behind them
- `joins`, `passes`, `layouts`: sums of partial results, passes over memory, copies
"""
