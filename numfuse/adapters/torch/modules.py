"""Layers of numfuse's functions as modules of PyTorch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from numfuse.activations import Activation, get
from numfuse.adapters.torch.functions import NONE, gated, gated_linear, linear


class Linear(nn.Linear):
    """torch.nn.Linear with its activation fused: activation(x @ weight.T + bias).

    Parameters
    ----------
    in_features, out_features : int
    bias : bool, default True
    activation : str or numfuse.Activation, default "none"
    device, dtype : optional
        As those of torch.nn.Linear, whose parameters and state these are.
    recompute : bool, default False
        Make the pre-activation again in the backward: see :func:`recompute`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: Any = "none",
        device: Any = None,
        dtype: Any = None,
        recompute: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation: Activation = get(activation)
        self.recompute = recompute

    @classmethod
    def from_torch(cls, linear: nn.Linear, activation: Any = "none") -> Linear:
        """A layer with the parameters of `linear`: the same ones, not copies."""
        made = cls(1, 1, linear.bias is not None, activation, device="meta")
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made.weight, made.bias = linear.weight, linear.bias
        made.train(linear.training)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.activation, self.recompute)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation.name!r}"


def _is_plain(layer: Any) -> bool:
    """Whether a call of a layer is a product and no more: no hook has a say, and no subclass."""
    return (
        type(layer) is Linear
        and layer.activation is NONE
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks or _has_any_global_hook())
        and "forward" not in layer.__dict__
    )


class GatedLinear(nn.Module):
    """A gated layer: activation(gate(x)) * up(x), `gate` and `up` linear.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool, default False
    activation : str or numfuse.Activation, default "silu"
        SwiGLU's; "gelu" and "sigmoid" are those of GeGLU and GLU.
    device, dtype : optional
    recompute : bool, default False
        Make the two pre-activations again in the backward: see :func:`recompute`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        activation: Any = "silu",
        device: Any = None,
        dtype: Any = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.gate = Linear(in_features, out_features, bias, "none", device, dtype)
        self.up = Linear(in_features, out_features, bias, "none", device, dtype)
        self.activation: Activation = get(activation)
        self.recompute = recompute

    @classmethod
    def from_torch(cls, gate: nn.Linear, up: nn.Linear, activation: Any = "silu") -> GatedLinear:
        """A layer with the parameters of `gate` and `up`: the same ones, not copies."""
        made = cls(1, 1, activation=activation, device="meta")
        made.gate, made.up = Linear.from_torch(gate), Linear.from_torch(up)
        return made

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate, self.up
        if _is_plain(gate) and _is_plain(up):
            return gated_linear(x, gate, up, self.activation, self.recompute)
        return gated(gate(x), up(x), self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation.name!r}"
