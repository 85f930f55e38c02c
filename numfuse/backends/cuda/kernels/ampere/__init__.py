"""Products whose slices cp.async brings to shared memory.

- `blocks`: a block of the product, by an engine: what is bound in its kernel, and its launches
- `gemm`, `epilogue`: the kernel: its mainloop, and how a block ends
- `members`: how a block ends whose rows are all members of points of a jet
- `simt`, `tensor_core`: the engines, on CUDA cores and on tensor cores
- `tails`: results whose last rows are made in parts of K
- `copies`: which factors are copied before
- `slices`, `registers`: how slices come to shared memory, and what a thread keeps in registers
- `thin`, `thin_gemm`: products of few rows, and their kernel
- `vectors`, `vectors_tiling`, `vectors_gemm`: products of at most 8 rows or columns, their blocks
  and their kernel
- `finish`: how one sum ends, in a thread of these two
- `outer`: products with a short K
"""
