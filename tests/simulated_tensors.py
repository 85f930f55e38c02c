"""PyTorch's tensors of the CPU as those of a GPU, for kernels that run in Numba's simulator.

The simulator's device has the host's memory. So tensors that say that they are on a GPU go the way
of a GPU's: the adapter's nodes, the calls that come again, the programs. All of a process's tensors
do, so that a file that asks for it runs in a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from numfuse.adapters.torch import on_cuda


def install() -> None:
    """Let every tensor of this process be one of the simulated device."""
    on_cuda()
    from numfuse.adapters.cuda_arrays import Torch

    made = Torch.__init__

    def init(self: Any) -> None:
        made(self)
        self.device = lambda ordinal: "cpu"
        self.stream = lambda ordinal: 0
        self.capturing = lambda: False

    Torch.__init__ = init  # type: ignore[method-assign]
    for name, value in {"is_cuda": True, "is_cpu": False}.items():
        setattr(torch.Tensor, name, property(lambda _, value=value: value))
    torch.Tensor.get_device = lambda _: 0  # type: ignore[method-assign]
    moved = torch.Tensor.to
    torch.Tensor.cuda = lambda x, *_: x  # type: ignore[method-assign]
    torch.Tensor.to = lambda x, *how, **more: moved(  # type: ignore[method-assign]
        x, *[y for y in how if y != "cuda"], **more
    )
