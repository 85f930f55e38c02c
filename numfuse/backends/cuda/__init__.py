"""The CUDA backend: kernels in numba-cuda for NVIDIA GPUs.

The files are in the order of the work: `run` makes products of a problem, a tier (`mirror`, `simt`,
`tensor_core`, `hopper`) makes launches of a product (`product` has what they hand over),
`toolchain` compiles kernels and `driver` starts them. `elementwise` prints an activation, `scalars`
has what its arithmetic needs.
"""
