"""Who joins: the names of the backends' and the adapters' modules.

This is the one place that names them; `numfuse` hands the names over when it is imported. A module
is imported when it is first needed, and never before. A new backend, or a new kind of array, joins
with one line here.
"""

from __future__ import annotations

from numfuse.activations.row import COMPILERS
from numfuse.backends import SOURCES
from numfuse.runtime.dispatch import ADAPTERS, DEVICES

# The order is that of `info`.
_BACKENDS = {
    "cpu": ("numfuse.backends.cpu", None),
    "cuda": ("numfuse.backends.cuda", "cuda"),
    "webgpu": ("numfuse.backends.webgpu", "webgpu"),
    "reference": ("numfuse.backends.reference", None),
}
_COMPILERS = {
    "cpu": ("numfuse.backends.cpu.llvm.primitives", None),
    "cuda": ("numfuse.backends.cuda.kernels.elementwise", "cuda"),
}
_LIBRARIES = {
    "autograd": "numfuse.adapters.autograd",
    "torch": "numfuse.adapters.torch",
    "jax": "numfuse.adapters.jax",
    "jaxlib": "numfuse.adapters.jax",
    "dask": "numfuse.adapters.dask",
    "cupy": "numfuse.adapters.cuda",
    "numba": "numfuse.adapters.cuda",
    "numfuse.backends.webgpu": "numfuse.adapters.webgpu",
    "numfuse.backends.cuda": "numfuse.adapters.cuda",
}
# Libraries that differentiate, and hand over an array by DLPack without a word of its gradient: no
# adapter of theirs is written, and a call says so.
_LIBRARIES |= {name: f"numfuse.adapters.{name}" for name in ("mlx", "tensorflow")}
#: Device types in dlpack.h: CUDA and its managed memory; the host, and what CUDA or ROCm pinned.
_DLPACK_CUDA, _DLPACK_HOST = (2, 13), (1, 3, 11)


def compose() -> None:
    """Hand every name to the module that looks it up."""
    SOURCES.update(_BACKENDS)
    COMPILERS.update(_COMPILERS)
    ADAPTERS.update(_LIBRARIES)
    DEVICES.append(("__cuda_array_interface__", _DLPACK_CUDA, "numfuse.adapters.cuda"))
    DEVICES.append(("", _DLPACK_HOST, "numfuse.adapters.standard"))
