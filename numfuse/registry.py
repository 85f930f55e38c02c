"""Who joins: the names of the backends' and the adapters' modules.

This is the one place that names them; `numfuse` hands the names over when it is imported. A module
is imported when it is first needed, and never before. A new backend, or a new kind of array, joins
with one line here.
"""

from __future__ import annotations

from typing import NamedTuple

from numfuse.activations import register_compiler
from numfuse.backends import register
from numfuse.runtime.dispatch import serve_device, serve_library


class _Backend(NamedTuple):
    """A backend by name.

    Parameters
    ----------
    name : str
    module : str
        Has the object ``BACKEND``.
    extra : str, optional
        Of ``pip install numfuse[extra]``, which the backend needs.
    compiler : str, optional
        The module that makes device functions of activations.
    """

    name: str
    module: str
    extra: str | None = None
    compiler: str | None = None


# The order is that of `info`.
_BACKENDS = (
    _Backend("cpu", "numfuse.backends.cpu", None, "numfuse.backends.cpu.llvm.primitives"),
    _Backend("cuda", "numfuse.backends.cuda", "cuda", "numfuse.backends.cuda.kernels.elementwise"),
    _Backend("webgpu", "numfuse.backends.webgpu", "webgpu"),
    _Backend("reference", "numfuse.backends.reference"),
)
#: {root of the module that defines an array's class: the adapter that serves it}
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
#: The device types of CUDA and of its managed memory in dlpack.h.
_DLPACK_CUDA = (2, 13)


def compose() -> None:
    """Hand every name to the module that looks it up."""
    for backend in _BACKENDS:
        register(backend.name, backend.module, backend.extra)
        if backend.compiler is not None:
            register_compiler(backend.name, backend.compiler, backend.extra)
    for root, adapter in _LIBRARIES.items():
        serve_library(root, adapter)
    serve_device("__cuda_array_interface__", _DLPACK_CUDA, "numfuse.adapters.cuda")
