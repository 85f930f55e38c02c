"""Tensors as the adapter looks at them: their memory, and who watches what is done with them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from numfuse.fused_operations import NUMBERS
from numfuse.runtime.threads import Team, share

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# --- memory -------------------------------------------------------------------------------------
@cache
def dtypes() -> dict[Any, np.dtype[Any]]:
    """Return NumPy's dtypes by PyTorch's."""
    import ml_dtypes

    kinds = np.float64, np.float32, np.float16, ml_dtypes.bfloat16
    return dict(zip(_DTYPES, map(np.dtype, kinds), strict=True))


def to_numpy(x: Any) -> Any:
    """As :func:`numfuse.to_numpy`: the same memory where that is the CPU's."""
    if x.dtype is torch.bfloat16:
        return own_values(x).cpu().view(torch.int16).numpy().view(dtypes()[x.dtype])
    # In one step: detached, on the CPU, and what a negative bit or a tensor of zeros stands for.
    return x.numpy(force=True)


#: All memory, but what an address of NULL means.
_MEMORY: Any = (ctypes.c_byte * (sys.maxsize - mmap.PAGESIZE)).from_address(mmap.PAGESIZE)


def array_over(x: Any) -> Any:
    """As :func:`to_numpy`, of a tensor on the CPU that outlives the array."""
    # `Tensor.numpy` forbids for ever that a storage is resized, which FSDP does with parameters,
    # and takes an array of bfloat16 in three steps.
    if type(x) is nn.Parameter or x.dtype is torch.bfloat16:
        at = x.data_ptr()
        if at and not x.is_neg():  # (else empty, or zeros without memory)
            dtype = dtypes()[x.dtype]
            strides = [step * dtype.itemsize for step in x.stride()]
            return ndarray(x.shape, dtype, _MEMORY, at - mmap.PAGESIZE, strides)
    return to_numpy(x)


def arrays_over(x: Sequence[Any]) -> list[Any]:
    """Return :func:`array_over` of each tensor, None of None."""
    return [None if y is None else array_over(y) for y in x]


def is_lazy(x: Tensor) -> bool:
    """Whether the memory holds the negative of the values, or a tensor of zeros has none."""
    return x.is_neg() or x._is_zerotensor()


def own_values(x: Tensor) -> Tensor:
    """The tensor over memory that holds its values."""
    x = x.detach()
    return torch.zeros_like(x) if x._is_zerotensor() else x.resolve_neg()


def own_values_of(x: Sequence[Any]) -> list[Any]:
    """Return :func:`own_values` of each tensor, None of None."""
    return [None if y is None else own_values(y) for y in x]


def to_tensor(x: ndarray) -> Tensor:
    if x.dtype.kind == "f":
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def to_tensors(x: Sequence[Any]) -> list[Any]:
    """Return :func:`to_tensor` of each array, None of None."""
    return [None if y is None else to_tensor(y) for y in x]


def with_tensors(operands: Sequence[Any]) -> list[Any]:
    """Return the operands with Python numbers as tensors of the others' dtype and device."""
    for x in operands:
        if type(x) in NUMBERS:
            break
    else:
        return list(operands)
    like = next(x for x in operands if isinstance(x, Tensor))
    if torch.compiler.is_dynamo_compiling():
        # (of a product alone, a program has the number as an input)
        return [like.new_ones(()) * x if type(x) in NUMBERS else x for x in operands]
    return [like.new_full((), x) if type(x) in NUMBERS else x for x in operands]


def checked(**operands: Any) -> None:
    """TypeError for operands that no operator takes.

    A saved pre-activation alone may have a dtype of its own (see `Functions.saved_dtypes`).
    """
    dtypes, devices = {}, {}
    for name, x in operands.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"{name} must be a torch.Tensor as the other operands, got {kind}")
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must have dtype float64, float32, float16 or bfloat16, got {x.dtype}"
            )
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a strided tensor, got the layout {x.layout}")
        devices[name] = x.device
        if name != "pre_activation":
            dtypes[name] = x.dtype
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} {str(d).removeprefix('torch.')}" for name, d in dtypes.items())
        raise TypeError(f"all operands must have the same dtype, got {found}")
    for name, device in devices.items():
        if device.type not in ("cpu", "cuda", "meta"):
            raise TypeError(
                f"{name} must be on the CPU or on a CUDA device: numfuse has no kernels for "
                f"PyTorch tensors on {device.type!r}; {name}.cpu() copies it"
            )
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} {device}" for name, device in devices.items())
        raise TypeError(f"all operands must be on one device, got {found}")


def autocasts(x: Any) -> bool:
    """Whether a tensor is in an autocast region."""
    # CUDA's is PyTorch's default, in a fifth of the time that a name takes.
    if getattr(x, "is_cuda", False):
        return torch.is_autocast_enabled()
    return torch.is_autocast_enabled("cpu")


def autocast(*operands: Any) -> tuple[Any, ...]:
    """Operands in the dtype of an autocast region, as torch.nn.functional.linear takes them."""
    if not autocasts(operands[0]):
        return operands
    dtype = torch.get_autocast_dtype("cuda" if operands[0].is_cuda else "cpu")
    return tuple(
        x if x is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(dtype)
        for x in operands
    )


# --- threads ------------------------------------------------------------------------------------
def _team() -> Team | None:
    """PyTorch's threads on the CPU, where they are those of an OpenMP with GNU's entry."""
    if "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        own = ctypes.CDLL(torch._C.__file__)
        functions = own.GOMP_parallel, own.omp_get_num_threads
    except (AttributeError, OSError):
        return None
    parallel, count = (ctypes.cast(x, ctypes.c_void_p).value for x in functions)
    return Team(parallel, count, torch.get_num_threads) if parallel and count else None


TEAM = _team()


def run_beside(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a call of the core on PyTorch's threads, which its operations before have kept awake."""
    share.team = TEAM
    try:
        return call(*args, **options)
    finally:
        share.team = None


# --- who watches --------------------------------------------------------------------------------
#: Whether torch.func is at work.
in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def in_dual_level() -> bool:
    """Whether forward mode is at work, outside of torch.func."""
    return forward_ad._current_level >= 0 and not in_functorch()


def transformed() -> bool:
    """Whether torch.func or forward mode is at work."""
    return in_functorch() or forward_ad._current_level >= 0


def moves(x: Tensor) -> bool:
    """Whether a derivative may go through a tensor."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():
        return False
    if in_functorch():
        return torch._C._functorch.is_functorch_wrapped_tensor(x)
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def watched() -> bool:
    """Whether something beside the call and its gradients has a say: a transformation, forward
    mode, a mode of the user's or of PyTorch's own tracers.
    """
    # Each question is a call into C of some 30 ns, made here without another function around it.
    return bool(
        in_functorch()
        or forward_ad._current_level >= 0
        or _modes()
        or (_function_modes() and _functions_watched())
        or _is_tracing()
        or _dispatches(_VMAP)
    )


_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_is_tracing: Callable[[], bool] = torch._C._is_tracing
#: Batches of cotangents (`is_grads_batched`) are older than torch.func.
_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
_dispatches: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included


def _functions_watched() -> bool:
    """Whether a mode has a say in functions that make no tensor out of nothing."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
