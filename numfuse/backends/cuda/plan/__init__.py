"""Hop 4 on CUDA: a problem becomes a program of launches.

- `lower`, `second_order`, `fused`, `jets`: the products and passes of each operation
- `sums`: the products that follow an epilogue, with the factors that it has made
- `jet_stacks`, `members`: a jet's stacks and its pass over points; products that end in that pass
- `networks`, `network_sizes`, `network_slots`, `network_images`: all layers of a network as one
  launch, its tiles, its arrays, and its weights in parts; `half_networks`, `half_sizes`: in 16
  bits; `group_networks`, `group_sizes`: these by warp groups on Hopper
- `batches`, `places`: a product over batch axes as launches; the elements that one launch has
- `product`: the description of one product that a tier is given, and the launch that it returns
- `tiers`, `tuned`: which family of kernels runs a product, and the ways that were measured
- `program`: the recorded launches of a call, with the addresses to be filled in
"""
