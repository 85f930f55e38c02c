"""Products whose slices cp.async brings to shared memory.

- `blocks`: the kernel of a block of the product, by an engine
- `simt`, `tensor_core`: the engines, on CUDA cores and on tensor cores
- `slices`, `registers`: how slices come to shared memory, and what a thread keeps in registers
- `thin`, `outer`: products of few rows, and products with a short K
"""
