"""LLVM vectors, for the loops that Numba cannot express.

- `microkernel`: the rank-1 updates of a register tile, and loads, stores and conversions of vectors
- `amx`: the same update on AMX tiles
- `primitives`: the elementary operations of formulas as branch-free functions
"""
