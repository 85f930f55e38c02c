"""numfuse's functions on arrays that live on a CUDA device: nothing moves.

Numba device arrays, CuPy, PyTorch and JAX arrays, numfuse's own (`numfuse.to_device`), and whatever
has DLPack or ``__cuda_array_interface__``. Results are of the caller's kind (numfuse's own for the
last two), on the caller's device and current stream.

CUDA graphs. A call that was made before (with these shapes, dtypes and alignments) can be captured:
it launches, and takes memory from the pool of the capture. The first one compiles and loads, which
a capture may forbid.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.adapters.signatures import NAMES, PublicFunctions, Signature, of_module
from numfuse.backends import load

# numba-cuda may be missing, or have no GPU: the reason is a BackendUnavailable, not this import's.
load("cuda")

import numfuse.adapters.cuda_arrays  # noqa: E402, F401  (adds its libraries)
from numfuse.backends.cuda.call.arrays import DeviceArray, download, dtype_of, ghost  # noqa: E402
from numfuse.backends.cuda.call.entry import DeviceCall, again, remembered  # noqa: E402
from numfuse.backends.cuda.call.foreign import kind_of  # noqa: E402
from numfuse.backends.cuda.driver.devices import device  # noqa: E402

__all__ = [*NAMES, "again", "synchronize", "to_numpy"]


#: What operands are called in the recorded programs (`numfuse.backends.cuda.plan`).
_PLACES = {
    "pre_activation": "pre",
    "a_dot": "u",
    "b_dot": "v",
    "bias_dot": "w",
    "residual_dot": "z",
}


class _Cuda(PublicFunctions):
    """The public functions as calls that are recorded once for each form of operands."""

    def call(self, signature: Signature, x: dict[str, Any]) -> Any:
        places = {name: _PLACES.get(name, name) for name in signature.arrays}
        made = DeviceCall(x["backend"], **{at: x[name] for name, at in places.items()})
        names = signature.result_names(x)
        for name, out in signature.outs(x).items():
            made.out(name, out)

        def make(ghosts: dict[str, ndarray]) -> Any:
            arrays = ghosts | {name: ghosts.get(at) for name, at in places.items()}
            return signature.problem(x, **arrays), names

        act = x["activation"]
        options = (x[name] for name in signature.options if name != "activation")
        return made.run(signature.kind, (signature.name, act.name, act.digest, *options), make)


globals().update(
    {name: of_module(remembered(x), __name__) for name, x in _Cuda().functions().items()}
)


def to_numpy(x: Any) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    kind = kind_of(x)
    if kind is None:
        raise TypeError(f"x must be an array on a CUDA device, got {type(x).__qualname__}")
    argument, ordinal, _ = kind.read("x", x)
    dtype = dtype_of(argument.dtype)
    strides = [s * dtype.itemsize for s in argument.strides]
    out = np.empty(argument.shape, dtype)
    stream = x.stream if isinstance(x, DeviceArray) else kind.stream(ordinal)
    source = ghost(argument.address, argument.shape, strides, dtype, False)
    download(device(ordinal), source, out, stream)
    return out


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`."""
    kind = kind_of(x)
    if kind is None:
        raise TypeError(f"x must be an array on a CUDA device, got {type(x).__qualname__}")
    device(kind.read("x", x)[1]).synchronize()


def pace(x: Any) -> None:
    """The end of a task that made something of `x`: one task runs ahead of the device, not all."""
    kind = kind_of(x)
    if kind is not None:
        ordinal = kind.read("x", x)[1]
        device(ordinal).pace(x.stream if isinstance(x, DeviceArray) else kind.stream(ordinal))
