"""Shaders in WGSL and what they bind. Start with `gemm.wgsl`: one tiled loop, as on the CPU.

- `shader`: what every shader has; its uniform is one schema
- `formula`: an epilogue of `numfuse.epilogues` as a WGSL function
- `epilogues`: `gemm.wgsl` and `elementwise.wgsl`, which end in one
- `jets`: `jet.wgsl`, the pass of a jet over points, and `jet_point.wgsl`, its lines at one of them
- `networks`: `network.wgsl`, all layers of a network, and `pack.wgsl`, which brings their weights
- `plain`: `join.wgsl`, `copy.wgsl`, and `probe.wgsl`, which finds out what WGSL leaves open
- `template`: loops and names in a .wgsl file, expanded
- `reference_gemm.wgsl`, `reference_gated.wgsl`: the modules of the shader contract's own check
"""
