"""Kernels in WGSL and what they bind. Start with `gemm.wgsl`: one tiled loop, as on the CPU.

- `gemm.wgsl`, `gated.wgsl`, `pointwise.wgsl`, `join.wgsl`, `copy.wgsl`: the kernels
- `reference_gemm.wgsl`, `reference_gated.wgsl`: the modules of the shader contract's own check
- `template`: loops and names in a .wgsl file, expanded
- `kernels`: what each kernel binds, and its text
"""
