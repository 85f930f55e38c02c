"""Activations: scalar functions with three derivatives, each written once for every target.

- `row`: the class of an activation
- `table`: the activations by name, and defining one
- `formulas`: the built-in ones
"""

from numfuse.activations.formulas import (
    gelu,
    none,
    relu,
    short_form,
    sigmoid,
    silu,
    tanh,
)
from numfuse.activations.row import Activation
from numfuse.activations.table import activation, activations, get

__all__ = [
    "Activation",
    "activation",
    "activations",
    "gelu",
    "get",
    "none",
    "relu",
    "short_form",
    "sigmoid",
    "silu",
    "tanh",
]
