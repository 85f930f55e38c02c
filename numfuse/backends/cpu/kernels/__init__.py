"""Kernels of the CPU backend, as templates for Numba. Start with `gemm`: it holds the five loops.

- `protocol`: the words of a launch, which the plan fills in and the kernels read
- `packing`, `pairs`: a strided matrix to the panels that the micro-kernel reads
- `gemm`: the product of a cell, block by block, which ends in a row function
- `elementwise`: the elementwise cell
- `rows`: row functions, printed from an epilogue
- `library`: the templates with their names bound, compiled on demand
"""
