"""The CPU backend, in the order of the data.

- `face`: the backend; each operation finds its recorded program by a fingerprint of its operands
- `layers`, `fused`, `jets`: each operation as products, epilogues and places
- `network_calls`, `networks`: whole networks in one launch, by blocks of points; `second_calls`,
  `second_networks`: their tangents and double backwards
- `schedule`: these in blocks of rows or of batch elements
- `sums`: partial sums of rows, columns and totals, and what joins them
- `residues`: which float64 products are made of integers, and the plans of one
- `descriptors`: from operands to the words of a plan
- `launch`: plans as a program, whose cells run on threads
- `kernels`, `llvm`: what runs in a cell
- `tiling`, `host`: block sizes, and the processor's features
- `peak`: the measured limit of the micro-kernel
"""

from numfuse.backends.cpu.face import BACKEND, CpuBackend
from numfuse.runtime import specialise

__all__ = ["BACKEND", "CpuBackend"]

specialise.register(__name__, __file__)
