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

#: Calls on tensors that are recalled, and the forms of their operands to each.
_CALLS, _FORMS = 512, 8


class Torch(Kind):
    holds = False

    def __init__(self) -> None:
        import torch

        self._torch = torch
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
        self._size, self._stride = torch.Tensor.size, torch.Tensor.stride
        #: Calls on tensors of known forms, the latest first, by what was asked.
        self._known: dict[Any, tuple[Any, ...]] = {}
        try:  # no public part of PyTorch
            self._guards: Any = import_module("torch._C._dynamo.guards").TensorGuards
        except (ImportError, AttributeError):
            self._guards = None
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
        # Forms of tensors one by one in Python take a quarter of a call. PyTorch's check of a
        # compiled graph's inputs compares classes, dtypes, devices, shapes, strides and dispatch
        # keys (negative bits, zeros without memory, transformations) of all in one call.
        tensors, key = self._asked(asked, operands)
        try:
            for fits, kept, program, ordinal in self._known.get(key, ()):
                if fits(*tensors):
                    found = [x.data_ptr() for x in tensors]
                    alive = program()
                    if 0 in found or any([at & 15 for at in found]) or alive is None:
                        break
                    addresses += found
                    return kept, alive, ordinal
        except TypeError:  # lists, and what is no tensor, have to be read with care
            pass
        return None, None, -1

    def _asked(self, asked: Any, operands: Any) -> tuple[list[Any], Any]:
        """Return the tensors of a call, and what else it depends on; a number is a str here."""
        given = [x if x is None or type(x) is str else 0 for x in operands]
        tensors = [x for x, found in zip(operands, given, strict=True) if found == 0]
        return tensors, (asked, self._grad(), *given)

    def keep(self, asked: Any, operands: Any, kept: Any, ordinal: int) -> None:
        """Let `recall` find a call on operands that have been looked at."""
        tensors, key = self._asked(asked, operands)
        if self._guards is None or any([x.data_ptr() & 15 for x in tensors]):
            return
        sizes, steps = ([list(f(x)) for x in tensors] for f in (self._size, self._stride))
        try:
            before = self._known.get(key, ())
            how = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": steps}
            fits = self._guards(*tensors, **how).check
            # (arrays that are given twice never fit; another version might look at less)
            if not fits(*tensors) or fits(tensors[0][None], *tensors[1:]):
                return
        except (TypeError, SystemError):  # lists, or another version
            return
        if len(self._known) > _CALLS:
            self._known.clear()
        made = fits, kept._replace(program=None), weakref.ref(kept.program), ordinal
        self._known[key] = (made, *before)[:_FORMS]

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
