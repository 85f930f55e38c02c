"""Products by Hopper's copy engine (TMA) and its matrix instruction (wgmma).

- `tier`, `factors`: which products run here, and the launches of one; how X and Y are fetched, and
  the copies before that
- `kernel`: what is bound in the kernel's templates
- `gemm`: the kernel: its `producer`, and its consumers, which multiply (`mainloop`) and finish
  blocks (`epilogue` and `sideways`, or of integers `residues.store`); `records` are its arguments
- `parts`: those of a float32, made by a copy or by the producer
- `maps`: tensor maps, which tell the copy engine of an array
- `tiling`: the tiles and their cost
"""
