"""Kernels: texts with their names bound, compiled (`assembler`) and kept on disk.

The one place that imports numba.cuda. Nothing here needs a GPU or its driver: a kernel is compiled
for a compute capability, and the result is kept in a directory of its own, so that the next process
only reads a file. Loading and starting it is `driver`'s part.

A kernel's text is an ordinary function whose UPPER-case names are bound by :func:`kernel`; its
other names are those of its module. The key in the cache is a digest of everything bound, of every
file of this directory from which kernel code is made, and of the versions of the tools.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import re
import sys
import tempfile
import threading
import types as pytypes
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from llvmlite import ir as ir
from numba.core import config as numba_config

from numfuse.backends.cuda.compile import assembler
from numfuse.expr import Expr
from numfuse.language.scalar import SOURCES
from numfuse.runtime import binaries
from numfuse.runtime.compilation import compiled
from numfuse.runtime.lifetimes import Ties, formulas_of

#: numba-cuda 0.30 overloads this function of NumPy for kernels, and NumPy 2.5 dropped it.
_DROPPED = "row_stack"


@contextlib.contextmanager
def _dropped() -> Iterator[None]:
    """Let NumPy have the name while numba-cuda is imported, where it has it no more."""
    if hasattr(np, _DROPPED):
        yield
        return
    # A function of its own: under NumPy's vstack there would be two overloads of that.
    setattr(np, _DROPPED, lambda arrays: np.vstack(arrays))
    try:
        yield
    finally:
        delattr(np, _DROPPED)


def _import() -> Any:
    # Numba itself has a module of this name, without a compiler for the newer GPUs; the package
    # numba-cuda takes its place.
    package = import_module("numba_cuda")
    version = importlib.metadata.version("numba-cuda")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (0, 30):
        raise ImportError(f"numba-cuda must be version 0.30 or newer, got {version}")
    with _dropped():
        module: Any = import_module("numba.cuda")
        if not import_module("numba.cuda.core.config").ENABLE_CUDASIM:
            # (which names the function; its import could wait for the first compilation)
            import_module("numba.cuda.np.arrayobj")
    home = pathlib.Path(str(package.__file__)).resolve().parent
    if home not in pathlib.Path(module.__file__).resolve().parents:
        raise ImportError(
            f"numba.cuda must be that of the package numba-cuda, got {module.__file__}: Numba was "
            f"imported before numba-cuda was installed, or its redirection is switched off"
        )
    return module


cuda = _import()
_config: Any = import_module("numba.cuda.core.config")

#: Whether kernels run in Numba's simulator (NUMBA_ENABLE_CUDASIM=1): plain Python, host memory.
SIMULATED = bool(_config.ENABLE_CUDASIM)
#: The types of kernels' values. The simulator has none, but the texts name them.
types: Any = import_module("numba.core.types" if SIMULATED else "numba.cuda.types")


#: Makes a function of kernels of what emits its code; in the simulator, of functions of the host.
intrinsic: Any = import_module(
    "numba.core.extending" if SIMULATED else "numba.cuda.extending"
).intrinsic


#: Of the kernels' arguments; a map arrives as its address.
_TYPES = {
    "u64": types.uint64,
    "i64": types.int64,
    "u32": types.uint32,
    "i32": types.int32,
    "f32": types.float32,
    "f64": types.float64,
    "map": types.uint64,
}
#: The simulator runs one kernel at a time.
_SIMULATING = threading.RLock()


def device_function(function: Callable[..., Any]) -> Any:
    """A function that is inlined into kernels."""
    if SIMULATED:
        return function
    return cuda.jit(device=True, forceinline=True)(function)


@functools.cache
def source_digest() -> str:
    """Digest of every text from which kernel code is made."""
    room = pathlib.Path(__file__).resolve().parent
    files = [*sorted(room.glob("*.py")), *sorted((room.parent / "kernels").rglob("*.py"))]
    digest = hashlib.sha256()
    for path in [*SOURCES, *files]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """The installed packages that make machine code."""
    found = {}
    for name in (
        "numba",
        "numba-cuda",
        "llvmlite",
        "nvidia-nvvm",
        "nvidia-cuda-nvcc-cu12",
        "nvidia-nvjitlink",
        "nvidia-nvjitlink-cu12",
        "cuda-bindings",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def identity(value: Any) -> str:
    """Return what a binding contributes to the key; raise TypeError if a value has no identity."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(identity, value))})"
    if isinstance(value, np.generic):
        return f"{value.dtype}({value!r})"
    if isinstance(value, np.dtype):
        return f"dtype({value})"
    key = getattr(value, "numfuse_key", None)
    if key is None and isinstance(value, types.Type):
        key = f"type({value})"
    if key is None:
        # A function of a file here is in the digest of the sources; what it is, its name says.
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if module is None or name is None or "<locals>" in name:
            raise TypeError(
                f"cannot bind {value!r}: expected a number, or an object with numfuse_key"
            )
        key = f"{module}.{name}"
    return str(key)


def with_names(function: Any, bindings: Mapping[str, Any]) -> pytypes.FunctionType:
    """Return a function of which names are bound; what has ``build()`` is built."""
    code, scope = function.__code__, dict(function.__globals__)
    for name, value in bindings.items():
        if name in code.co_names:  # and not only in what a constant condition left out
            build = getattr(value, "build", None)
            scope[name] = value if build is None else build()
    return pytypes.FunctionType(code, scope, code.co_name)


@dataclass(eq=False, repr=False)
class Kernel:
    """A kernel's text with its names bound; equal ones are one object. Made by :func:`kernel`."""

    #: For messages and `last_call`.
    name: str
    #: "u64", "i64", "u32", "i32", "f32", "f64" or "map".
    signature: tuple[str, ...]
    #: Threads of a block along x, y, z.
    block: tuple[int, int, int]
    _template: Any
    _bindings: Mapping[str, Any]
    _material: str
    _blocks: int
    _feature: str
    #: The formulas in it, with which it goes; none are held by it.
    formulas: tuple[weakref.ref[Expr], ...] = ()
    #: "memory", "disk" or "compiled": where the latest binary came from.
    origin: str = "memory"
    _simulated: Any = None
    _binaries: dict[tuple[int, int], tuple[bytes, str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    def text(self) -> Any:
        """The function to compile, its names bound."""
        function = getattr(self._template, "function", self._template)  # (of an `unroll.Template`)
        return with_names(function, self._bindings)

    def architecture(self, capability: tuple[int, int]) -> tuple[Any, ...]:
        """(major, minor), with the letter of features that only this one has."""
        return (*capability, self._feature) if self._feature else capability

    def ptx(self, capability: tuple[int, int]) -> str:
        """The PTX text; compiled anew."""
        if SIMULATED:
            raise RuntimeError("a process that simulates (NUMBA_ENABLE_CUDASIM=1) has no compiler")
        threads = self.block[0] * self.block[1] * self.block[2]
        signature = types.void(*[_TYPES[kind] for kind in self.signature])
        bounds = (threads, self._blocks) if self._blocks else (threads,)

        def make() -> str:
            with assembler.compiling_for(capability):
                return assembler.ptx(self.text(), signature, self.architecture(capability), bounds)

        return assembler.with_constants(assembler.with_maps(compiled(make), self.signature))

    def binary(self, capability: tuple[int, int]) -> tuple[bytes, str]:
        """Machine code for this capability, and the name of its entry; compiled, or from disk."""

        def make() -> tuple[bytes, str]:
            found = self._binaries.get(capability)
            if found is not None:  # (another thread has made it)
                return found
            path = cache_directory() / f"{self.key(capability)}.bin"
            raw, self.origin = binaries.read(path), "disk"
            if raw is None:
                self.origin = "compiled"
                text = self.ptx(capability)
                match = re.search(r"\.entry\s+([\w$]+)", text)
                assert match is not None, "numba-cuda made PTX without an entry"
                code = assembler.machine_code(text, self.architecture(capability), self.name)
                raw = match[1].encode() + b"\n" + code
                binaries.write(path, raw)
            entry, _, code = raw.partition(b"\n")
            found = self._binaries[capability] = code, entry.decode()
            return found

        return self._binaries.get(capability) or compiled(make)

    def linked(self, capability: tuple[int, int]) -> bytes:
        """Machine code of a kernel whose `binary` is text, where the driver cannot assemble it."""
        text = self.binary(capability)[0].rstrip(b"\0").decode()
        return compiled(lambda: assembler.link(text, self.architecture(capability), self.name))

    def key(self, capability: tuple[int, int]) -> str:
        """Its name on disk."""
        material = (self._material, self.architecture(capability), source_digest(), versions())
        return hashlib.sha256(repr(material).encode()).hexdigest()[:40]

    def simulate(
        self, grid: tuple[int, int, int], shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        """Run it in Numba's simulator."""
        with _SIMULATING, warnings.catch_warnings():
            # NumPy's scalars warn where a GPU's arithmetic follows IEEE 754 silently.
            warnings.simplefilter("ignore", RuntimeWarning)
            if self._simulated is None:
                self._simulated = cuda.jit(self.text())
            self._simulated[grid, self.block, 0, shared_bytes](*arguments)


_KERNELS: dict[str, Kernel] = {}
#: (what it needs is bound: when a process ends, formulas go after the names of this module)
_TIES = Ties(functools.partial(lambda known, material: known.pop(material, None), _KERNELS))


def kernel(
    template: Any,
    signature: str,
    *,
    threads: int | tuple[int, ...],
    blocks: int = 0,
    feature: str = "",
    name: str | None = None,
    **bindings: Any,
) -> Kernel:
    """The kernel of a text, compiled when it is first used.

    Parameters
    ----------
    template : callable
        A function of a module, or one that was made from text (then it has ``numfuse_key``, a
        digest of that). Its parameters are those of `signature`; ``cuda``, intrinsics and types are
        names of its module.
    signature : str
        The types of its arguments, separated by blanks: "u64 u64 i32". A "map" is 128 bytes of the
        launch's arguments, of which the kernel gets the (generic) address as a uint64.
    threads : int or tuple
        Threads of a block: the compiler counts registers for exactly that.
    blocks : int, optional
        Blocks that shall fit on a multiprocessor, for the same purpose.
    feature : str, optional
        "a" for the instructions that one architecture alone has (wgmma: "sm_90a").
    name : str, optional
        For messages; default: the function's.
    **bindings
        The UPPER-case names: numbers, types, tuples, functions, or objects with ``numfuse_key`` and
        ``build()`` (as `elementwise.Formula`), which are built only where a compiler needs them.
    """
    x, y, z, *_ = (threads, 1, 1) if isinstance(threads, int) else (*threads, 1, 1)
    kinds = tuple(signature.split())
    text = "\n".join(f"{key}={identity(value)}" for key, value in sorted(bindings.items()))
    own = getattr(template, "numfuse_key", f"{template.__module__}.{template.__qualname__}")
    material = f"{own}\n{kinds} {x, y, z} {blocks} {feature}\n{text}"
    found = _KERNELS.get(material)
    if found is None:
        shown, formulas = name or template.__name__, formulas_of(tuple(bindings.values()))
        made = Kernel(shown, kinds, (x, y, z), template, bindings, material, blocks, feature)
        made.formulas = tuple(map(weakref.ref, formulas))
        found = _KERNELS.setdefault(material, made)
        _TIES.tie(material, formulas)
    return found


def kernels() -> list[Kernel]:
    """Every kernel of this process whose formulas live."""
    return list(_KERNELS.values())


@functools.cache
def cache_directory() -> pathlib.Path:
    """Return where compiled kernels are kept."""
    chosen = getattr(numba_config, "CACHE_DIR", "")
    if chosen:
        base = pathlib.Path(chosen)
    elif sys.platform == "win32":
        base = pathlib.Path(os.environ.get("LOCALAPPDATA", tempfile.gettempdir()))
    else:
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return base / "numfuse" / "cuda"
