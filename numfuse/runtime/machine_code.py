"""Machine code that is given back: each kernel in memory of its own.

Numba compiles all of a process into one execution engine of LLVM, which never gives anything back:
a kernel, and every function that is inlined into it, would stay for good, one set for each formula
that a notebook ever tried. So here Numba compiles for a target without an engine (`DRAFT`): inlined
functions are only intermediate code, and a kernel becomes an object file. That is loaded by an
engine of its own, which goes with the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.binding as llvm
from numba.core import codegen, types
from numba.core.ccallback import CFunc
from numba.core.registry import CPUDispatcher, CPUTarget, cpu_target

from numfuse.runtime.compilation import compiled


class _Library(codegen.CPUCodeLibrary):
    """Functions to be linked into others, and the object file of a kernel."""

    def _finalize_specific(self) -> None:
        pass  # no engine has them

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0  # nothing runs from here

    def _get_compiled_object(self) -> Any:
        if self._compiled_object is None:
            self._compiled_object = self._codegen._tm.emit_object(self._final_module)
        return self._compiled_object

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> Any:
        """From the disk cache: its object file is all that is needed."""
        name, _, (image, _) = state
        made = codegen.create_library(name)
        made.enable_object_caching()
        made._set_compiled_object(image)
        made._finalized = True
        return made


def _disposed(made: Any) -> Any:
    """Pass managers that are given back with their objects.

    In llvmlite the method that does it is hidden by one that does nothing (by the order of their
    bases), and a compilation loses a megabyte.
    """
    manager = made[0] if isinstance(made, tuple) else made
    known: Any = getattr(llvm, "newpassmanagers", None)
    if known is not None and isinstance(manager, known.NewPassManager):
        whole = isinstance(manager, known.ModulePassManager)
        name = f"LLVMPY_DisposeNew{'Module' if whole else 'Function'}PassManger"
        # (of the pointer: it must not hold the object that it belongs to)
        manager._dispose = partial(getattr(llvm.ffi.lib, name), manager._ptr)
    return made


class _Codegen(codegen.JITCPUCodegen):
    _library_class = _Library  # type: ignore[assignment]

    def _add_module(self, module: Any) -> None:
        pass

    def _module_pass_manager(self, **options: Any) -> Any:
        return _disposed(super()._module_pass_manager(**options))

    def _function_pass_manager(self, **options: Any) -> Any:
        return _disposed(super()._function_pass_manager(**options))

    def set_env(self, name: str, environment: Any) -> None:
        pass  # only code in Python's object mode has one


class _Draft(CPUTarget):
    """Numba's own target, of which it shares what is known of types and functions."""

    _context: Any = None

    @property
    def target_context(self) -> Any:
        """Numba's, with another end of the line."""
        if self._context is None:
            whole = cpu_target.target_context
            self._context = whole.subtarget(_internal_codegen=_Codegen("numfuse"))
        return self._context

    @property
    def typing_context(self) -> Any:
        return cpu_target.typing_context


DRAFT = _Draft("cpu")


class _Inlined(CPUDispatcher):
    targetdescr = DRAFT

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # Numba would compile one for each constant that it is called with; inlined, all are alike.
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


class _Function(CFunc):
    _targetdescr = DRAFT


def inlined(function: Callable[..., Any], **options: Any) -> Any:
    """A function for other compiled functions, as `numba.njit` makes it; Python cannot call it."""
    # (what Python and C would call it by takes an eighth of a compilation)
    unused = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    options = {"nopython": True, **unused, **options}
    # A process's first makes what Numba shares of a target, under a lock of its own, and takes that
    # of the compiler for it; a thread that compiles takes the two the other way round.
    return compiled(lambda: _Inlined(function, targetoptions=options))


def function(template: Callable[..., Any], signature: Any, **options: Any) -> Any:
    """A C function, as `numba.cfunc` makes it, to be compiled; `Code` loads what comes of it."""
    arguments = signature.args, signature.return_type
    return _Function(template, arguments, locals={}, options=options)


class Code:
    """The machine code of an object file, in memory that goes with this object.

    `address` is that of the function `symbol`.
    """

    __slots__ = ("_engine", "address")

    def __init__(self, image: bytes, symbol: str) -> None:
        own: Any = codegen.JITCPUCodegen("numfuse")  # a target machine and an engine
        engine = own._engine._ee
        engine.add_object_file(llvm.ObjectFileRef.from_data(image))
        engine.finalize_object()
        self._engine = engine
        self.address = int(engine.get_function_address(symbol))
