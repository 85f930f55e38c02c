"""The WebGPU backend, in the order of the data.

- `face`: the backend
- `arrays`, `stores`: device arrays, and where the arrays of a problem are found
- `split`, `lower`: a problem in pieces where it is too large, and as dispatches
- `program`, `host`: a call that was made before, and one on NumPy arrays
- `network_calls`: whole networks of NumPy arrays
- `shaders`, `tiling`: the shaders and their block sizes
- `device`: adapters, pipelines, buffers
- `contract`: the WGSL modules of others
"""

from numfuse.backends.webgpu.arrays import DeviceArray
from numfuse.backends.webgpu.contract.backend import ContractBackend
from numfuse.backends.webgpu.device.adapters import adapters
from numfuse.backends.webgpu.face import BACKEND, WebGpuBackend

__all__ = ["BACKEND", "ContractBackend", "DeviceArray", "WebGpuBackend", "adapters"]
