"""The arrays of PyTorch, CuPy, Numba and JAX on a CUDA device, as `foreign` reads and makes them.

Streams. PyTorch's and CuPy's current one; the default stream for the others, with the waits that
their protocols ask for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import prod
from operator import attrgetter
from typing import Any

from numfuse.backends.cuda.call.arrays import DeviceArray
from numfuse.backends.cuda.call.entry import run
from numfuse.backends.cuda.call.foreign import LIBRARIES, DLPack, Interface, Kind
from numfuse.backends.cuda.call.record import Argument
from numfuse.runtime.dispatch import AGAIN
from numfuse.runtime.views import dtype_of


class Torch(Kind):
    holds = False

    def __init__(self) -> None:
        import torch

        from numfuse.adapters.torch.forms import Forms, places

        self._torch, self._places = torch, places
        served = "float64", "float32", "float16", "bfloat16"
        self._dtypes = {name: getattr(torch, name) for name in served}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}
        self.stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda i: torch.cuda.current_stream(i).cuda_stream
        )
        self.capturing = getattr(
            torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
        )
        self.address = torch.Tensor.data_ptr
        self.device = partial(torch.device, "cuda")
        self._tensors = {torch.Tensor, torch.nn.Parameter}
        self._grad = torch.is_grad_enabled
        #: Calls on tensors of known forms.
        self._known = Forms()
        #: A tensor of one element, by its device and dtype.
        self._ones: dict[tuple[int, str], Any] = {}

    def parts(self, x: Any) -> Any:
        if type(x) not in self._tensors or x.layout is not self._torch.strided or x.is_neg():
            return None
        at = x.data_ptr()  # 0: empty, or of zeros without memory
        if not at or (x.requires_grad and self._grad()):
            return None
        return x.shape, x.stride(), x.dtype, at, x.get_device()

    def recall(self, asked: Any, operands: Any, addresses: list[int]) -> tuple[Any, Any, int]:
        # (a number among the operands is a str here)
        known = self._known.find(asked, operands)
        if known is not None:
            kept, program, ordinal = known
            alive, found = program(), self._places(operands)
            if found is not None and alive is not None:
                addresses += found
                return kept, alive, ordinal
        return None, None, -1

    def keep(self, asked: Any, operands: Any, kept: Any, ordinal: int) -> None:
        """Let `recall` find a call on operands that have been looked at."""
        if self._places(operands) is not None:
            made = kept._replace(program=None), weakref.ref(kept.program), ordinal
            self._known.keep(asked, operands, lambda: made)

    def forget(self) -> None:
        self._known.clear()

    def maker(self, ordinal: int, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        empty, where = self._torch.empty, self.device(ordinal)
        # A tensor like another one takes PyTorch half the time of one of a shape. The other one is
        # a single element in every place, of which PyTorch makes one in C order; it would keep the
        # strides of 0 where there is one place or none.
        if prod(shape) <= 1:
            return partial(empty, shape, dtype=self._dtypes[dtype], device=where)
        one = self._ones.get((ordinal, dtype))
        if one is None:
            one = self._ones[ordinal, dtype] = empty((), dtype=self._dtypes[dtype], device=where)
        return partial(self._torch.empty_like, one.expand(shape))

    def part(self, made: Any, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return made.as_strided(shape, strides, at)

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        dtype = self._names.get(x.dtype)
        if dtype is None:
            raise TypeError(
                f"{name} must have dtype float64, float32, float16 or bfloat16, got {x.dtype}"
            )
        if not x.is_cuda:
            raise TypeError(f"{name} must be on a CUDA device, got a tensor on {x.device}")
        if x.requires_grad and self._torch.is_grad_enabled():
            raise TypeError(
                f"{name} requires a gradient, which this call would lose: call it in "
                f"torch.no_grad(), or on {name}.detach()"
            )
        if x.is_neg() or x._is_zerotensor():
            raise TypeError(
                f"{name} must hold its values in its memory, got a tensor with a negative bit or "
                f"one of zeros without memory; {name}.resolve_neg() and torch.zeros_like({name}) do"
            )
        return Argument(x.data_ptr(), x.shape, x.stride(), dtype), x.get_device(), None


class CuPy(Kind):
    holds = False
    parts = attrgetter("shape", "strides", "dtype", "data.ptr", "device.id")
    address = attrgetter("data.ptr")

    def __init__(self) -> None:
        cupy: Any = import_module("cupy")
        self._cupy = cupy
        AGAIN[cupy.ndarray] = run
        self.stream = lambda ordinal: int(cupy.cuda.get_current_stream(ordinal).ptr)

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        if not isinstance(x, self._cupy.ndarray):
            raise TypeError(f"{name} must be a cupy.ndarray, got {type(x).__qualname__}")
        strides = tuple(s // x.itemsize for s in x.strides)
        return Argument(x.data.ptr, x.shape, strides, x.dtype.name), x.device.id, None

    def maker(self, ordinal: int, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        def make() -> Any:
            with self._cupy.cuda.Device(ordinal):
                return self._cupy.empty(shape, dtype_of(dtype))

        return make

    def part(self, made: Any, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        steps = [s * made.itemsize for s in strides]
        return self._cupy.ndarray(shape, made.dtype, made.data + at * made.itemsize, steps)


class Numba(Interface):
    def wrap(self, made: DeviceArray) -> Any:
        from numfuse.backends.cuda.compile.toolchain import cuda

        if made.dtype.name == "bfloat16":
            return made
        return cuda.as_cuda_array(made, sync=False)


class Jax(DLPack):
    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        if not hasattr(x, "__dlpack__") or type(x).__name__.endswith("Tracer"):
            raise TypeError(
                f"{name} must be an array with values, got {type(x).__qualname__}: call it outside "
                f"of jax.jit and its transformations"
            )
        found, ordinal, held = super().read(name, x)
        return found._replace(writable=False), ordinal, held  # JAX arrays never change

    def wrap(self, made: DeviceArray) -> Any:
        import jax

        return jax.dlpack.from_dlpack(made)


LIBRARIES.update({"torch": Torch, "cupy": CuPy, "numba": Numba, "jax": Jax, "jaxlib": Jax})
