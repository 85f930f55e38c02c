"""LLVM vectors, for the loops that Numba cannot express.

- `microkernel`: the rank-1 updates of a register tile
- `thin`: the micro-kernels of products of few rows
- `inplace`: those of a network's products, whose factors are in the caches
- `amx`: the same update on AMX tiles; `splits`: on the bfloat16 parts of float32
- `tiles`: the tile registers, or what stands for them where there are none
- `residues`: float64 to residues of 8 bits; `residue_sums`: their products by AMX tiles, and back
- `partition`: float32 to such parts, as packing stores them
- `moves`, `pairs`: the copies and transposes of packing, and stores past the caches
- `conversions`: storage formats to the accumulator's and back
- `vectors`, `intrinsics`: what these are made of, and what cells take beside them
- `primitives`: the elementary operations of formulas as branch-free functions
"""
