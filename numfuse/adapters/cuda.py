"""numfuse's functions on arrays that live on a CUDA device: nothing moves.

Numba device arrays, CuPy, PyTorch and JAX arrays, numfuse's own (`numfuse.to_device`), and whatever
has DLPack or ``__cuda_array_interface__``. Results are of the caller's kind (numfuse's own for the
last two), on the caller's device and current stream.

CUDA graphs. A call that was made before (with these shapes, dtypes and alignments) can be captured:
it launches, and takes memory from the pool of the capture. The first one compiles and loads, which
a capture may forbid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.adapters.signatures import (
    NAMES,
    SIGNATURES,
    FusedSignature,
    JetSignature,
    PublicFunctions,
    Signature,
    arguments_of,
)
from numfuse.backends import load

# numba-cuda may be missing, or have no GPU: the reason is a BackendUnavailable, not this import's.
load("cuda")

import numfuse.adapters.cuda_arrays  # noqa: E402, F401  (adds its libraries)
from numfuse.adapters import cuda_networks, cuda_values, stacks  # noqa: E402
from numfuse.backends.cuda.call.arrays import (  # noqa: E402
    DeviceArray,
    download,
    ghost,
    upload,
)
from numfuse.backends.cuda.call.entry import run  # noqa: E402
from numfuse.backends.cuda.call.foreign import Kind, kind_of  # noqa: E402
from numfuse.backends.cuda.driver.devices import device  # noqa: E402
from numfuse.operations import OPERATIONS, Operation  # noqa: E402
from numfuse.runtime.dispatch import AGAIN  # noqa: E402
from numfuse.runtime.views import dtype_of  # noqa: E402

if TYPE_CHECKING:
    from numfuse.fused_operations import FusedOperation
    from numfuse.jets import JetOperation

__all__ = [
    *NAMES,
    "call_again",
    "checked",
    "epilogue_jet",
    "fused",
    "jet",
    "jet_again",
    "network",
    "network_once",
    "perceptron_along",
    "perceptron_at_once",
    "perceptron_is_whole",
    "repeated",
    "run",
    "switches",
    "synchronize",
    "to_numpy",
]


class _Cuda(PublicFunctions):
    def call(self, signature: Signature, x: dict[str, Any]) -> Any:
        operation = OPERATIONS[signature.name]
        operands = tuple([x[name] for name in operation.operands])
        flags = tuple([x[name] for name in operation.flags])
        options = x.get("needs", ()), x.get("out"), x["backend"]
        return run(operation, operands, x["activation"], flags, *options, (signature, x))


def checked(
    operation: Operation,
    operands: tuple[Any, ...],
    activation: Any,
    flags: tuple[bool | str, ...],
    needs: tuple[str, ...],
    out: None,
    backend: Any,
    flipped: int,
) -> tuple[Signature, dict[str, Any]]:
    """Return the signature and the checked arguments of a call whose b is given transposed."""
    x: dict[str, Any] = dict(zip(operation.operands, operands, strict=True))
    x["b"] = operands[flipped].T
    x |= zip(operation.flags, flags, strict=True)
    x |= {"activation": activation, "backend": backend, "out": out}
    if operation.needs:
        x["needs"] = needs
    return (signature := SIGNATURES[operation.name]), signature.checked(x)


def _called(made: Callable[[Any], FusedSignature | JetSignature]) -> Callable[..., Any]:
    """Return what is called as :meth:`Operation.other` is, by the signature of an operation."""
    arguments = arguments_of(made)

    def called(
        operation: FusedOperation | JetOperation,
        operands: tuple[Any, ...],
        activation: Any,
        flags: tuple[Any, ...],
        needs: Any,
        out: Any,
        backend: Any,
    ) -> Any:
        return run(operation, operands, activation, flags, needs, out, backend, arguments)

    return called


#: A fused operation, and a layer's jet.
fused, jet = _called(FusedSignature), _called(JetSignature)


def _put(x: ndarray, owner: Any) -> DeviceArray:
    return upload(owner, x)


epilogue_jet = jet
AGAIN[DeviceArray] = run
globals().update(_Cuda().functions())
_arrays_of = cuda_networks.arrays_of(sys.modules[__name__], _put)
repeated, call_again = cuda_networks.chain_again, cuda_networks.call_again
jet_again, switches = cuda_networks.jet_again, cuda_networks.switches
network_once = stacks.network(_arrays_of)
network = cuda_networks.again(network_once)
_values = cuda_values.Values(_arrays_of)
perceptron_at_once, perceptron_is_whole = _values.at_once, _values.is_whole
perceptron_along = _values.along


def _read(x: Any) -> tuple[Kind, Any, int]:
    """Return the kind of an array, what is read of it and its device's number; else a TypeError."""
    kind = kind_of(x)
    if kind is None:
        raise TypeError(f"x must be an array on a CUDA device, got {type(x).__qualname__}")
    argument, ordinal, _ = kind.read("x", x)
    return kind, argument, ordinal


def to_numpy(x: Any) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    kind, argument, ordinal = _read(x)
    dtype = dtype_of(argument.dtype)
    strides = [s * dtype.itemsize for s in argument.strides]
    out = np.empty(argument.shape, dtype)
    source = ghost(argument.address, argument.shape, strides, dtype, False)
    download(device(ordinal), source, out, kind.stream(ordinal) if kind.stream else 0)
    return out


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`."""
    device(_read(x)[2]).synchronize()


def pace(x: Any) -> None:
    """The end of a task that made something of `x`: one task runs ahead of the device, not all."""
    if kind_of(x) is not None:
        kind, _, ordinal = _read(x)
        device(ordinal).pace(kind.stream(ordinal) if kind.stream else 0)
