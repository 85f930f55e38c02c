"""Products by Hopper's copy engine (TMA) and its matrix instruction (wgmma).

- `tier`, `factors`: which products run here, and the launches of one; how X and Y are fetched
- `kernel`: what is bound in the kernel's templates
- `gemm`, `finish`: the kernel, with its producer and its consumers; how these end a block
- `copies`: the copies before and after it
- `maps`: tensor maps, which tell the copy engine of an array
- `tiling`: the tiles and their cost
"""
