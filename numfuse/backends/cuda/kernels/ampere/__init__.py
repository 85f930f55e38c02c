"""Products whose slices cp.async brings to shared memory.

- `blocks`, `block_product`: a block of the product, by an engine; its kernel
- `simt`, `tensor_core`: the engines, on CUDA cores and on tensor cores
- `slices`, `registers`: how slices come to shared memory, and what a thread keeps in registers
- `thin`, `thin_product`, `outer`: products of few rows, their kernel; products with a short K
"""
