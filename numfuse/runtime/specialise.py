"""Specialising a kernel: binding the free names of a template, once per set of bindings.

A template is an ordinary function of an ordinary file whose UPPER-case names are bound to
nothing.  `kernel` clones it with those names as globals, under a name that carries a digest of
everything bound, and compiles it to a C function that is called by its address.  The clone still
belongs to the template's file, so it is kept where Numba keeps what it makes of that file, and the
next process finds it: measured 0.01 s instead of 0.3-3 s.  Numba itself looks only at the
template's own file and bytecode; the digest is what keeps it from running a stale kernel after a
change elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import pathlib
import pickle
import re
import types as pytypes
import weakref
from collections.abc import Callable
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from numfuse.expr import FASTMATH, Expr
from numfuse.runtime import binaries, machine_code
from numfuse.runtime.compilation import compiled

#: Compiler options of every kernel: division by zero gives inf (an exception would need the
#: interpreter lock), and products may be contracted to fma.  Never `nnan` or `ninf`.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": FASTMATH}


#: {package or module that has templates: its folder or file}
_ROOMS: dict[str, pathlib.Path] = {}


def register(room: str, place: str) -> None:
    """Let the kernels of a package's or a module's templates depend on all of its source texts.

    `room` is its name, `place` its ``__file__``.
    """
    path = pathlib.Path(place).resolve()
    _ROOMS[room] = path.parent if path.name == "__init__.py" else path


def source_digest(module: str) -> str:
    """Digest of every source text from which a module's kernels are made, and of how.

    For a module of no registered room (a test), of the texts of all rooms.
    """
    own = [room for room in _ROOMS if f"{module}.".startswith(f"{room}.")]
    return _digest(tuple(sorted(own or _ROOMS)))


@functools.cache
def _digest(rooms: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr(sorted(FASTMATH)).encode())
    texts = [pathlib.Path(__file__).resolve(), pathlib.Path(machine_code.__file__).resolve()]
    for room in rooms:
        place = _ROOMS[room]
        texts += place.rglob("*.py") if place.is_dir() else [place]
    for path in sorted(texts):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def identity(value: Any) -> str:
    """Return a binding's part of the digested text; TypeError where a value has no identity."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return repr(value)
    if isinstance(value, np.generic):
        return f"{value.dtype}({value!r})"
    key = getattr(value, "numfuse_key", None)
    if key is None:
        raise TypeError(f"cannot bind {value!r}: expected a number or an object with numfuse_key")
    return str(key)


def bound(template: Callable[..., Any], bindings: dict[str, Any]) -> Callable[..., Any]:
    """A clone of `template` whose globals are `bindings`, named after their digest."""
    text = "\n".join(f"{name}={identity(value)}" for name, value in sorted(bindings.items()))
    module = template.__module__
    material = f"{module}.{template.__qualname__}\n{text}\n{source_digest(module)}"
    digest = hashlib.sha256(material.encode()).hexdigest()[:20]
    name = f"{template.__name__}_{digest}"
    scope = {"__builtins__": __builtins__, "__name__": module, **bindings}
    code = template.__code__.replace(co_name=name, co_qualname=name)
    clone = pytypes.FunctionType(code, scope, name, template.__defaults__)
    clone.__qualname__ = name
    clone.__module__ = module
    clone.numfuse_key = name  # type: ignore[attr-defined]
    return clone


def device(template: Callable[..., Any], **bindings: Any) -> Any:
    """`template` as a function that is inlined into kernels (never compiled on its own)."""
    clone = bound(template, bindings)
    made = machine_code.inlined(clone, forceinline=True, **OPTIONS)
    made.numfuse_key = clone.numfuse_key  # type: ignore[attr-defined]
    return made


class _Cache(FunctionCache):
    """Numba's cache of a function, with one file for each kernel in place of two: an index and what
    it names may belong to different processes, and Numba fails where one of them is damaged.
    """

    def _path(self, signature: Any, codegen: Any) -> pathlib.Path:
        key = (
            self._index_key(signature, codegen),
            self._impl.locator.get_source_stamp(),
            numba.__version__,
            llvmlite.__version__,
        )
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:20]
        return pathlib.Path(self.cache_path) / f"{self._impl.filename_base}.{digest}.nbc"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function, or None.

        Numba would have its target refreshed first: load all that it can compile, half of the time
        of a process's first call. What is compiled already needs the symbols of Numba's runtime
        alone (a kernel's object names some, whether or not it calls them), and the compiler
        refreshes the target for what is not.
        """
        rtsys.initialize(cpu_target.target_context)
        path = self._path(sig, target_context.codegen())
        body = binaries.read(path)
        if body is None:
            return None
        try:
            return self._impl.rebuild(target_context, pickle.loads(body))
        except Exception as error:
            binaries.damaged(path, repr(error))
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it."""
        if self._impl.check_cachable(data):
            binaries.write(self._path(sig, data.codegen), dumps(self._impl.reduce(data)))


def _with_cache(made: Any, clone: Callable[..., Any]) -> Any:
    """Return `made` for Numba, with its cache on disk if a directory for it can be written to."""
    try:
        made._cache = _Cache(clone)
    except RuntimeError as error:
        if "cannot cache function" not in str(error):
            raise
        binaries.tell(
            "write",
            "no directory for compiled kernels is writable, every process compiles them anew "
            "(seconds); set NUMBA_CACHE_DIR to a writable directory",
        )
    return made


class Kernel:
    """A specialised kernel: its address, and what Numba's cache did for it.

    Its machine code goes with it: who calls the address holds the kernel.
    """

    __slots__ = ("__weakref__", "_cfunc", "_code", "address", "formulas", "label", "name")

    def __init__(self, name: str, compiled: CFunc) -> None:
        self.name, self.label = name, readable_name(name)
        self._cfunc = compiled
        library: Any = compiled._library  # type: ignore[attr-defined]
        image, symbol = library._get_compiled_object(), str(compiled.native_name)
        self._code = machine_code.Code(image, symbol)  # owns what is behind the address
        self.address = self._code.address
        #: The formulas that are compiled into it, as long as they live.
        self.formulas: tuple[weakref.ref[Expr], ...] = ()

    @property
    def cache_hits(self) -> int:
        """1 if the machine code came from the disk cache, else 0."""
        return self._cfunc.cache_hits

    def assembly(self) -> str:
        """The machine code as text; only of a kernel compiled by this process."""
        library: Any = self._cfunc._library  # type: ignore[attr-defined]
        return str(library.get_asm_str())


#: Those that somebody has: a formula's go with it (`lifetimes`).
_KERNELS: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()


def kernel(template: Callable[..., Any], returns: Any = types.void, **bindings: Any) -> Kernel:
    """Compile (or find in the disk cache) the C function ``returns template(int64, ...)``."""
    clone = bound(template, bindings)

    def make() -> Kernel:
        known = _KERNELS.get(clone.__name__)
        if known is None:  # (another thread may have made it)
            signature = returns(*[types.int64] * len(inspect.signature(template).parameters))
            made = _with_cache(machine_code.function(clone, signature, **OPTIONS), clone)
            made.compile()
            known = _KERNELS[clone.__name__] = Kernel(clone.__name__, made)
        return known

    return _KERNELS.get(clone.__name__) or compiled(make)


def entry(
    template: Callable[..., Any], signature: Any, *, nogil: bool = True, **bindings: Any
) -> Any:
    """A function called from Python, compiled for `signature`; `nogil`: without its lock."""
    clone = bound(template, bindings)

    def make() -> Any:
        made = _with_cache(njit(nogil=nogil, **OPTIONS)(clone), clone)
        made.compile(signature)
        made.disable_compile()
        return made

    return compiled(make)


def cache_directory(template: Callable[..., Any]) -> str:
    """Where kernels of a template are kept, or why they are not; Numba chooses by its file."""
    try:
        return str(FunctionCache(template).cache_path)
    except RuntimeError as error:
        return f"none: {error}"


def kernels() -> list[Kernel]:
    """Every kernel of this process, for `python -m numfuse info` and for tests."""
    return list(_KERNELS.values())


def readable_name(name: str) -> str:
    """A kernel's name without its digest."""
    return re.sub(r"_[0-9a-f]{20}$", "", name)
