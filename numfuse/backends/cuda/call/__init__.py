"""Hop 1 on CUDA: a call with device arrays, from the caller's arrays to a recorded program.

- `entry`: whose arrays they are, and which device they are on
- `foreign`, `dlpack`: the arrays of other libraries, read and made without a copy
- `arrays`, `memory`: numfuse's own device arrays, and the memory that they and the kernels take
- `calls`: a call, recorded once and launched again when it comes again
"""
