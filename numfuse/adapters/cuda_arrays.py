"""The arrays of PyTorch, CuPy, Numba and JAX on a CUDA device, as `foreign` reads and makes them.

Streams. PyTorch's and CuPy's current one; the default stream for the others, with the waits that
their protocols ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from math import prod
from typing import Any

from numfuse.backends.cuda.call.arrays import DeviceArray, dtype_of
from numfuse.backends.cuda.call.calls import Argument, Maker
from numfuse.backends.cuda.call.foreign import KINDS, LIBRARIES, DLPack, Interface, Kind

__all__ = ["CuPy", "Jax", "Numba", "Torch"]


class Torch(Kind):
    holds = False

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._names = {
            torch.float64: "float64",
            torch.float32: "float32",
            torch.float16: "float16",
            torch.bfloat16: "bfloat16",
        }
        self._dtypes = {name: dtype for dtype, name in self._names.items()}
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._stream = raw or (lambda i: torch.cuda.current_stream(i).cuda_stream)
        self._devices: dict[int, Any] = {}
        self._capturing = getattr(
            torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
        )
        self._tensors = {torch.Tensor, torch.nn.Parameter}
        self._grad = torch.is_grad_enabled
        #: A tensor of one element, by its device and dtype.
        self._ones: dict[tuple[int, str], Any] = {}

    def glance(
        self, values: Iterable[Any], made: list[Any], addresses: list[int], ordinal: int
    ) -> int:
        # as `Kind.glance`, in one loop: a training step spends its time here
        tensors = self._tensors
        try:
            for x in values:
                kind = type(x)
                if kind in tensors:
                    place = x.get_device()
                    if (place != ordinal and ordinal >= 0) or x.is_neg():
                        return -1
                    if x.requires_grad and self._grad():
                        return -1
                    ordinal = place
                    at = x.data_ptr()
                    if not at:  # empty, or of zeros without memory
                        return -1
                    made.append((x.shape, x.stride(), x.dtype, at & 15))
                    addresses.append(at)
                elif kind in KINDS:
                    return -1
                else:
                    made.append(x)
        except RuntimeError:  # it has no strides
            return -1
        return ordinal

    def maker_of(
        self, shape: tuple[int, ...], dtype: str, ordinal: int, stream: int
    ) -> Callable[[], tuple[Any, int]]:
        # A tensor like another one takes PyTorch half the time of one of a shape. The other one is
        # a single element in every place, of which PyTorch makes one in C order; it would keep the
        # strides of 0 where there is one place or none.
        if prod(shape) <= 1:
            return super().maker_of(shape, dtype, ordinal, stream)
        one = self._ones.get((ordinal, dtype))
        if one is None:
            one = self._ones[ordinal, dtype] = self.maker(ordinal, stream)((), dtype)[0]
        like, model = self._torch.empty_like, one.expand(shape)

        def make() -> tuple[Any, int]:
            made = like(model)
            return made, made.data_ptr()

        return make

    def capture(self, ordinal: int) -> int | None:
        return None if self._capturing() else 0

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

    def stream(self, ordinal: int) -> int:
        found: int = self._stream(ordinal)
        return found

    def maker(self, ordinal: int, stream: int) -> Maker:
        empty, dtypes = self._torch.empty, self._dtypes
        where = self._devices.get(ordinal)
        if where is None:
            where = self._devices[ordinal] = self._torch.device("cuda", ordinal)

        def make(shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
            made = empty(shape, dtype=dtypes[dtype], device=where)
            return made, made.data_ptr()

        return make


class CuPy(Kind):
    holds = False

    def __init__(self) -> None:
        cupy: Any = import_module("cupy")
        self._cupy = cupy

    def look(self, x: Any) -> tuple[Any, int, int] | None:
        at = x.data.ptr
        return (x.shape, x.strides, x.dtype, at & 15), at, x.device.id

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        if not isinstance(x, self._cupy.ndarray):
            raise TypeError(f"{name} must be a cupy.ndarray, got {type(x).__qualname__}")
        size = x.itemsize
        strides = tuple(s // size for s in x.strides)
        return Argument(x.data.ptr, x.shape, strides, x.dtype.name), x.device.id, None

    def stream(self, ordinal: int) -> int:
        return int(self._cupy.cuda.get_current_stream(ordinal).ptr)

    def maker(self, ordinal: int, stream: int) -> Maker:
        cupy = self._cupy

        def make(shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
            with cupy.cuda.Device(ordinal):
                made = cupy.empty(shape, dtype_of(dtype))
            return made, made.data.ptr

        return make


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
