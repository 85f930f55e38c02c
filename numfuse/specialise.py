"""Specialising a kernel: binding the free names of a template, once per set of bindings.

A template is an ordinary function of an ordinary file whose UPPER-case names are bound to
nothing.  `kernel` clones it with those names as globals, under a name that carries a digest of
everything bound, and compiles it to a C function that is called by its address.  The clone still
belongs to the template's file, so Numba's disk cache keeps it, and the next process finds it:
measured 0.01 s instead of 0.3-3 s.  Numba itself looks only at the template's own file and
bytecode; the digest is what keeps it from running a stale kernel after a change elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import pathlib
import re
import threading
import types as pytypes
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.core.ccallback import CFunc

from numfuse import machine_code
from numfuse.expr import FASTMATH, Expr

#: Compiler options of every kernel: division by zero gives inf (an exception would need the
#: interpreter lock), and products may be contracted to fma.  Never `nnan` or `ninf`.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": FASTMATH}

# Numba's compiler takes one global lock, but a cfunc that two threads ask for at the same time
# would be compiled twice.
_LOCK = threading.RLock()
_WARNED = False


def _after_fork_in_child() -> None:
    global _LOCK
    _LOCK = threading.RLock()  # a thread that held it may not have survived the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@functools.cache
def source_digest() -> str:
    """Digest of every source text from which kernel code is made, and of how it is compiled."""
    here = pathlib.Path(__file__).resolve().parent
    digest = hashlib.sha256(repr(sorted(FASTMATH)).encode())
    kernel_texts = [
        here / "specialise.py",
        here / "machine_code.py",
        *(here / "backends" / "cpu").glob("*.py"),
    ]
    for path in sorted(kernel_texts):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def identity(value: Any) -> str:
    """What a binding contributes to the digest; TypeError where a value has no identity."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return repr(value)
    if isinstance(value, np.generic):
        return f"{value.dtype}({value!r})"
    if value is prange:
        return "numba.prange"
    key = getattr(value, "numfuse_key", None)
    if key is None:
        raise TypeError(f"cannot bind {value!r}: expected a number or an object with numfuse_key")
    return str(key)


def bound(template: Callable[..., Any], bindings: dict[str, Any]) -> Callable[..., Any]:
    """A clone of `template` whose globals are `bindings`, named after their digest."""
    text = "\n".join(f"{name}={identity(value)}" for name, value in sorted(bindings.items()))
    material = f"{template.__module__}.{template.__qualname__}\n{text}\n{source_digest()}"
    digest = hashlib.sha256(material.encode()).hexdigest()[:20]
    name = f"{template.__name__}_{digest}"
    scope = {"__builtins__": __builtins__, "__name__": template.__module__, **bindings}
    code = template.__code__.replace(co_name=name, co_qualname=name)
    clone = pytypes.FunctionType(code, scope, name, template.__defaults__)
    clone.__qualname__ = name
    clone.__module__ = template.__module__
    clone.numfuse_key = name  # type: ignore[attr-defined]
    return clone


def device(template: Callable[..., Any], **bindings: Any) -> Any:
    """`template` as a function that is inlined into kernels (never compiled on its own)."""
    clone = bound(template, bindings)
    made = machine_code.inlined(clone, forceinline=True, **OPTIONS)
    made.numfuse_key = clone.numfuse_key  # type: ignore[attr-defined]
    return made


def _cached(decorate: Callable[..., Any]) -> Any:
    """Apply ``decorate(cache)``; where no directory is writable, warn once and go uncached."""
    global _WARNED
    try:
        return decorate(True)
    except RuntimeError as error:
        if "cannot cache function" not in str(error):
            raise
        if not _WARNED:
            _WARNED = True
            warnings.warn(
                "numfuse: no directory for compiled kernels is writable, every process compiles "
                "them anew (seconds); set NUMBA_CACHE_DIR to a writable directory",
                RuntimeWarning,
                stacklevel=2,
            )
        return decorate(False)


class Kernel:
    """A specialised kernel: its address, and what Numba's cache did for it.

    Its machine code goes with it: who calls the address holds the kernel.
    """

    __slots__ = ("__weakref__", "_cfunc", "_code", "address", "formulas", "name")

    def __init__(self, name: str, compiled: CFunc) -> None:
        self.name = name
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


def kernel(template: Callable[..., Any], **bindings: Any) -> Kernel:
    """Compile (or find in the disk cache) ``void template(int64, ...)``."""
    clone = bound(template, bindings)
    with _LOCK:
        known = _KERNELS.get(clone.__name__)
        if known is None:
            signature = types.void(*[types.int64] * len(inspect.signature(template).parameters))
            compiled = _cached(
                lambda cache: machine_code.compiled(clone, signature, cache, **OPTIONS)
            )
            known = _KERNELS[clone.__name__] = Kernel(clone.__name__, compiled)
    return known


def entry(
    template: Callable[..., Any], signature: Any, parallel: bool = False, **bindings: Any
) -> Any:
    """A function called from Python: releases the interpreter lock, compiled for `signature`."""
    clone = bound(template, bindings)
    with _LOCK:
        options = {"nogil": True, "parallel": parallel, **OPTIONS}
        return _cached(lambda cache: njit(signature, cache=cache, **options)(clone))


def cache_directory() -> str:
    """Where compiled kernels are kept, or why they are not."""
    from numba.core.caching import FunctionCache

    def probe() -> None:
        """A function of this file: Numba picks a directory by file."""

    try:
        return str(FunctionCache(probe).cache_path)
    except RuntimeError as error:
        return f"none: {error}"


def kernels() -> list[Kernel]:
    """Every kernel of this process, for `python -m numfuse info` and for tests."""
    return list(_KERNELS.values())


def readable_name(name: str) -> str:
    """A kernel's name without its digest."""
    return re.sub(r"_[0-9a-f]{20}$", "", name)
