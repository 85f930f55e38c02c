"""Kernels of the CPU backend, as templates for Numba. Start with `gemm`: it holds the five loops.

- `protocol`: the words of a launch, which the plan fills in and the kernels read
- `packing`: a strided matrix to the panels that the micro-kernel reads; `parts`: to those of its
  bfloat16 parts
- `gemm`: the product of a cell, block by block, which ends in a row function
- `thin`: the product of few rows, of which nothing is packed
- `residues`: the cells of float64 products by integers: of a factor's panel, and of the output
- `ahead`: packing and requests to the caches between two of its tiles
- `elementwise`: the elementwise cell
- `rows`, `printer`: row functions, and their text, made of an epilogue
- `groups`: row functions that take all rows of a point, for jets
- `network`, `network_second`: the cells of networks, and of their tangents and double backwards
- `library`: the templates with their names bound, compiled on demand
"""
