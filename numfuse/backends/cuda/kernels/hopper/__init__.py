"""Products by Hopper's copy engine (TMA) and its matrix instruction (wgmma).

- `tier`: which products run here, and the launches of one
- `gemm`: the kernel, with its producer and its consumers
- `copies`: the copies before and after it
- `maps`: tensor maps, which tell the copy engine of an array
- `tiling`: the tiles and their cost
"""
