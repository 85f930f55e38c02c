"""The CUDA backend, in the order of the data.

- `face`: the backend
- `call`: a call with device arrays
- `plan`: a problem as a program of launches
- `kernels`, `tiling`, `block_tiling`, `few_tiling`, `network_tiling`: the kernels and their block
  sizes
- `compile`: Python to machine code
- `driver`: devices, modules and launches
"""

from typing import Any

from numfuse.backends.cuda.face import PRECISIONS, CudaBackend, default

__all__ = ["PRECISIONS", "CudaBackend"]


def __getattr__(name: str) -> Any:
    # The rooms are of use without a GPU (the compiler needs none); the backend is not.
    if name == "BACKEND":
        return default()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
