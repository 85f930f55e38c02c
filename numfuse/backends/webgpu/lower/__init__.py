"""Hop 4: a problem becomes dispatches.

- `places`: the batch of a product, and how its sums are cut
- `products`: a product with an epilogue over all places
- `sums`: planes, rows and broadcast axes that are added up
- `elementwise`: an epilogue of arrays alone
- `layers`, `gates`: the operations
"""

from numfuse.backends.webgpu.lower.elementwise import zero
from numfuse.backends.webgpu.lower.gates import (
    gated,
    gated_backward,
    gated_double_backward,
    gated_tangent,
)
from numfuse.backends.webgpu.lower.layers import backward, double_backward, forward, tangent
from numfuse.backends.webgpu.lower.places import tile_of
from numfuse.backends.webgpu.lower.sums import sum_to

__all__ = [
    "backward",
    "double_backward",
    "forward",
    "gated",
    "gated_backward",
    "gated_double_backward",
    "gated_tangent",
    "sum_to",
    "tangent",
    "tile_of",
    "zero",
]
