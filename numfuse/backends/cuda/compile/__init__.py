"""The compiler of CUDA kernels, the one room that knows numba-cuda.

- `toolchain`: kernels, each compiled once, and their disk cache
- `assembler`: Python to PTX, and PTX to machine code
- `unroll`: a template's constant loops written out
- `schema`: a kernel's arguments, by their names
- `intrinsics`, `accesses`, `engines`: PTX instructions as Python functions
- `scalars`, `elements`, `integers`: what a formula needs, elements of memory, and residues of 8
  bits, in the simulator too
"""
