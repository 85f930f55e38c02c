"""Hop 1 on CUDA: a call, from the caller's arrays to a program that is launched.

- `entry`: a call with device arrays: its fingerprint, and the program that was recorded for it
- `series`: calls that came one after another as one program
- `foreign`: the arrays of other libraries, read and made without a copy
- `arrays`, `memory`: numfuse's own device arrays, and the memory that they and the kernels take
- `record`: a call as a program, over arrays that are not looked at
- `host`: a call with NumPy arrays
- `tuner`: calls recorded in many ways, and the fastest one kept
"""
