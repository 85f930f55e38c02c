"""The CUDA driver, through ctypes.

- `libcuda`: its functions, and what can be asked without a device
- `device`: contexts, modules, launches and errors
- `launcher`: all launches of a call in one native call
- `simulated`: the device of Numba's simulator
"""
