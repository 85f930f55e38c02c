"""A WebGPU device.

- `device`: adapters, pipelines, buffers and commands
- `forks`: what a forked process may do with it
"""
