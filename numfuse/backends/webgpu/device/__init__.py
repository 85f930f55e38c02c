"""A WebGPU device.

- `adapters`: the adapters of this machine
- `device`: a device with its pipelines, bind groups and programs
- `modules`: shader modules, with run-time checks or without
- `memory`: its buffers
- `submits`: calls that wait for each other, and go to it together
- `commands`: what a call gives it to do
- `waits`: how a caller waits for it
- `trials`: what WGSL leaves open, found by trying
- `forks`: what a forked process may do with it
"""
