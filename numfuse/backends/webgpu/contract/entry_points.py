"""The shader contract as data: entry points, their workgroups and dispatches, what they bind.

`reference_source` is numfuse's own module for it (reference_*.wgsl), a module like any other.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from numfuse.activations import Activation, gelu, none, relu, sigmoid, silu, tanh
from numfuse.backends.webgpu.shaders.shader import Uniform
from numfuse.backends.webgpu.shaders.template import expand
from numfuse.language import wgsl

#: In the order of the numbers that the contract gives them: activation_type 0, 1, 2 ... As they are
#: defined: a user's own formula of one of these names has no number.
BUILT_IN: tuple[Activation, ...] = none, relu, gelu, silu, sigmoid, tanh
ACTIVATIONS = tuple(act.name for act in BUILT_IN)
#: The gates that numfuse's own module has; a module may have those of the other activations too.
GATES = ("relu", "gelu", "silu", "sigmoid")


class Interface(NamedTuple):
    """The bindings of the entry points of one kind, from binding 0 on: arrays, then a uniform."""

    arrays: tuple[str, ...]
    uniform: Uniform
    #: Whether every array is `read_write` in the module; else each is what the module says.
    read_write: bool = False


class EntryPoint(NamedTuple):
    """A row of the contract's table."""

    interface: Interface
    workgroup: tuple[int, int, int]
    #: What the workgroups of each axis cover: as many as it takes.
    covers: tuple[str, str, str]


_SIZES = ("M", "K", "N", "batch_size")
_PRODUCT = Uniform((*_SIZES, "activation_type", "padding_0", "padding_1", "padding_2"))
_GATE = Uniform(("numel",))

BACKWARD = Interface(
    ("a", "b", "bias", "grad", "grad_pre", "d_a", "d_b", "d_bias"), _PRODUCT, read_write=True
)
FORWARD = Interface(("a", "b", "bias", "c"), _PRODUCT)
RESIDUAL = Interface(("a", "b", "bias", "residual", "c"), Uniform(_SIZES))
GATE = Interface(("a", "b", "out"), _GATE)
GATE_BACKWARD = Interface(("grad", "a", "b", "d_a", "d_b"), _GATE)

#: The arguments of the entry points for products.
_IDS = "@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_id) at: vec3<u32>"
_TILE, _LINE = (16, 16, 1), (256, 1, 1)

ENTRY_POINTS: dict[str, EntryPoint] = {
    "gemm_bias_act_f32": EntryPoint(FORWARD, _TILE, ("N", "M", "1")),
    "gemm_bias_act_batched_f32": EntryPoint(FORWARD, _TILE, ("N", "M", "batch_size")),
    "gemm_bias_residual_f32": EntryPoint(RESIDUAL, _TILE, ("N", "M", "1")),
    "gemm_bias_residual_batched_f32": EntryPoint(RESIDUAL, _TILE, ("N", "M", "batch_size")),
    "gemm_bwd_grad_pre_f32": EntryPoint(BACKWARD, _TILE, ("N", "M", "batch_size")),
    "gemm_bwd_da_f32": EntryPoint(BACKWARD, _TILE, ("K", "M", "batch_size")),
    "gemm_bwd_db_f32": EntryPoint(BACKWARD, _TILE, ("N", "K", "1")),
    "gemm_bwd_dbias_f32": EntryPoint(BACKWARD, _LINE, ("N", "1", "1")),
    **{f"{name}_mul_f32": EntryPoint(GATE, _LINE, ("numel", "1", "1")) for name in ACTIVATIONS},
    **{
        f"{name}_mul_bwd_f32": EntryPoint(GATE_BACKWARD, _LINE, ("numel", "1", "1"))
        for name in ACTIVATIONS
    },
}


@cache
def reference_source() -> str:
    """numfuse's own module for the contract, as WGSL."""
    functions = []
    for act in BUILT_IN:
        functions.append(wgsl.function(act.trace(0), f"act_{act.name}"))
        functions.append(wgsl.function(act.trace(1), f"raw_slope_{act.name}"))
        functions.append(
            f"fn slope_{act.name}(x: f32) -> f32 {{ return nf_finite(raw_slope_{act.name}(x)); }}"
        )
    text = "\n\n".join(functions)
    products = expand("reference_gemm.wgsl", {"ACTIVATIONS": BUILT_IN, "IDS": _IDS})
    gates = expand("reference_gated.wgsl", {"GATES": GATES})
    return f"{wgsl.prelude(text)}\n\n{text}\n\n{products}{gates}"
