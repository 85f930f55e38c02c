"""numfuse's functions for PyTorch tensors: eager, compiled, under vmap and autocast, twice and more
often differentiable, and as modules.

- `functions`: the public functions, at once or over operators
- `epilogues`: nodes of epilogues and gated layers, and what their derivatives are made of;
  `formulas`: derived formulas; `pieces`: calls that are no nodes
- `eager`: a call at once, and nodes of PyTorch's graph for its gradients; `kept`: what nodes keep,
  `saved`: what PyTorch saves of it
- `jets`: jets of layers and networks, `compiled_jets` in programs of torch.compile
- `perceptrons`: networks' values, `device_perceptrons` on a GPU, `chained_perceptrons` there of
  many layers as one node, `layered_perceptrons` layer by layer
- `replayed`, `replayed_networks`: calls on the CPU that come again; `forms`: records by the forms
  of tensors
- `compiled`: a layer that is trained in a program of torch.compile
- `operators`: a primitive as an operator of PyTorch; `rules`: its derivatives
- `tensors`: memory, and who watches; `keys`: strings for what a schema cannot name
- `modules`: layers
"""

from __future__ import annotations

import sys
from typing import Any

from numfuse import epilogue_jets, fusion, gated, multilayer, networks
from numfuse import jets as layers
from numfuse.adapters.surface import NAMES
from numfuse.adapters.torch import compiled_jets as compiled_jets
from numfuse.adapters.torch.device_perceptrons import (
    perceptron_along,
    perceptron_at_once,
    perceptron_is_whole,
    repeated,
)
from numfuse.adapters.torch.eager import TENSORS
from numfuse.adapters.torch.functions import activation, again, public
from numfuse.adapters.torch.functions import fused as fused
from numfuse.adapters.torch.jets import layer as epilogue_jet
from numfuse.adapters.torch.jets import layer as jet
from numfuse.adapters.torch.jets import network
from numfuse.adapters.torch.kept import recompute
from numfuse.adapters.torch.modules import GatedLinear, Linear
from numfuse.adapters.torch.operators import on_cuda
from numfuse.adapters.torch.perceptrons import perceptron, perceptron_again
from numfuse.adapters.torch.tensors import to_numpy
from numfuse.runtime.dispatch import AGAIN, NETWORKS, serve

_HOMES = fusion, gated, layers, epilogue_jets, networks, multilayer
#: The functions of epilogues and jets, which come here by their tensors.
FUSED = tuple([name for home in _HOMES for name in home.__all__])

__all__ = [
    *NAMES,
    *FUSED,
    "GatedLinear",
    "Linear",
    "activation",
    "epilogue_jet",
    "jet",
    "network",
    "perceptron",
    "perceptron_along",
    "perceptron_at_once",
    "perceptron_is_whole",
    "repeated",
    "recompute",
    "synchronize",
    "to_numpy",
]

globals().update({name: public(name) for name in NAMES})
globals().update({x: getattr(home, x) for home in _HOMES for x in home.__all__})


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`; the CPU's results are there at the return."""
    if x.is_cuda:
        on_cuda().synchronize(x)


# Imported in advance, the adapter is found where torch.compile follows a call.
serve(sys.modules[__name__], TENSORS)
AGAIN.update(dict.fromkeys(TENSORS, again))
NETWORKS.update(dict.fromkeys(TENSORS, perceptron_again))
