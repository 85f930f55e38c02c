"""The CPU backend, in the order of the data.

- `face`: the backend, and each operation as steps of a launch
- `second_order`: the double backward and forward mode
- `schedule`: blocks of rows or of batch elements
- `descriptors`: from arrays to the words of a launch
- `tiling`, `host`: block sizes, and the processor's features
- `launch`: cells on threads
- `kernels`, `llvm`: what runs in a cell
- `peak`: the measured limit of the micro-kernel
"""

from numfuse.backends.cpu.face import BACKEND, CpuBackend
from numfuse.runtime import specialise

__all__ = ["BACKEND", "CpuBackend"]

specialise.register(__name__, __file__)
