"""The CUDA driver, through ctypes.

- `libcuda`: its functions, and what can be asked without a device
- `device`, `devices`: contexts, memory and errors; the devices of this process
- `prepared`: launches with packed arguments
- `modules`: loaded kernels, and when they are unloaded
- `launcher`: all launches of a call in one native call
- `simulated`: the device of Numba's simulator
"""
