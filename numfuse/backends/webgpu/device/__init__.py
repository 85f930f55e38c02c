"""A WebGPU device.

- `adapters`: the adapters of this machine
- `device`: a device with its pipelines, bind groups and programs
- `memory`: its buffers
- `commands`: what a call gives it to do
- `trials`: what WGSL leaves open, found by trying
- `forks`: what a forked process may do with it
"""
