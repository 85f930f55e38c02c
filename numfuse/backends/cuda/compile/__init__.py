"""The compiler of CUDA kernels, the one room that knows numba-cuda.

- `toolchain`: Python to PTX, PTX to machine code, and the disk cache
- `unroll`: a template's constant loops written out
- `intrinsics`, `scalars`: PTX instructions as Python functions
"""
