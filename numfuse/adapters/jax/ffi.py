"""Operations as XLA's custom calls, which run recorded programs of the CPU backend without Python.

When JAX lowers an operation, its shapes, dtype and options are known: the program is recorded then,
and the call names it by a key, which is the digest of a text that says all of it. Another process
may find the call in JAX's compilation cache, and this one may have dropped the program: what a key
does not lead to is recorded again from the text, which the call has beside it.
Where this version of XLA is not known, or the C library lacks a function, `refusal` says so, and
`numfuse.adapters.jax.calls` calls back to Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import re
import threading
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from numfuse.adapters.jax import table
from numfuse.adapters.jax.epilogues import EpilogueCall
from numfuse.adapters.jax.operations import Call, ghosts
from numfuse.backends import LOADED, resolve
from numfuse.problem.operands import address
from numfuse.runtime.threads import at_most

#: The name of the custom call.
TARGET = "numfuse_cpu"
#: The versions of XLA's interface in which the structs of `numfuse.adapters.jax.frame` are so.
VERSIONS = ((0, 1), (0, 2), (0, 3), (0, 4), (0, 5))


# --- whether XLA can call it ----------------------------------------------------------------------
_lock = threading.Lock()
_started: list[str | None] = []
#: What comes of a library, or of a function in it, that is not here.
_MISSING = AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError


def refusal() -> str | None:
    """Return why XLA cannot call numfuse here, or None: it can, from now on."""
    if not _started:
        with _lock:
            if not _started:
                try:
                    _started.append(_start())
                except _MISSING as error:
                    _started.append(f"{type(error).__name__}: {error}")
    return _started[0]


def serves(form: Any) -> bool:
    """Return whether XLA may call machine code: such calls are the CPU backend's."""
    if getattr(form, "calls_back", False):
        return False
    return resolve(form.how.backend) is LOADED.get("cpu") and refusal() is None


def describe() -> str:
    """Return by which way XLA calls numfuse, for `python -m numfuse info`."""
    reason = refusal()
    if reason is not None:
        return f"callbacks to Python ({reason})"
    return "machine code (XLA's FFI {}.{})".format(*_version())


def _version() -> tuple[int, int]:
    """Return the version of XLA's interface, from the headers that jaxlib has."""
    place = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = place.read_text(encoding="utf-8")
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR)\s+(\d+)", text))
    return int(found["MAJOR"]), int(found["MINOR"])


def _start() -> str | None:
    import_module("jax.ffi")
    version = _version()
    if version not in VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        return f"XLA's FFI must have version {known}, got {version[0]}.{version[1]}"
    library = ctypes.CDLL(None)
    functions = {
        "R_ALLOCATE": library.posix_memalign,
        "R_FREE": library.free,
        "R_FILL": library.memset,
        "R_ADVISE": getattr(library, "madvise", None),
        "R_YIELD": library.sched_yield,
        "R_RESOLVE": _RESOLVE,
    }
    from numfuse.adapters.jax import frame
    from numfuse.backends.cpu import tiling

    words = {x: (f and ctypes.cast(f, ctypes.c_void_p).value) or 0 for x, f in functions.items()}
    words["R_NO_MEMORY"] = table.message("numfuse: the system gives no memory for a call")
    words["R_MOST"] = tiling.KEPT_BYTES
    words["R_VERSION"] = version[0] | version[1] << 32
    words["R_HELP"] = frame.helper().address
    table.register(TARGET, frame.handler(), "cpu", **words)
    return None


# --- problems of buffers --------------------------------------------------------------------------
class Traced(NamedTuple):
    """The problem of an operation on buffers of XLA, none of which is there yet."""

    kind: str
    problem: Any
    #: The problem's arrays, by the fields of its public function; None: there is none.
    arrays: dict[str, np.ndarray | None]
    #: Of each, what a record says of its source; None: memory of the call's own.
    sources: list[int | None]

    def sizes(self) -> list[int]:
        """Return the bytes of each array."""
        return [0 if x is None else x.nbytes for x in self.arrays.values()]

    def placed(self, nbytes: int, more: Sequence[int] = ()) -> list[int]:
        """Return the bytes of memory in all, then sources: what has none lies behind `nbytes`.

        `more` are the bytes of arrays of the call's own that follow.
        """
        from numfuse.adapters.jax.frame import ALIGNED, SOURCE

        made = [nbytes]
        for source, size in zip_longest(self.sources, [*self.sizes(), *more]):
            if source is None:
                at = -(-made[0] // ALIGNED) * ALIGNED
                source, made[0] = at << 2 | SOURCE["MEMORY"], at + size
            made.append(source)
        return made


def traced(call: Any) -> Traced | None:
    """Return the problem of a call, or None where an operand would have to be copied."""
    from numfuse.adapters.jax.frame import SOURCE

    operands = ghosts(call.shapes, call.dtypes)
    kind, p, names, made, results = call.taken(operands)
    known: dict[int, int] = {}
    for what, those in (("OPERAND", operands), ("RESULT", results)):
        known |= {address(x): i << 2 | SOURCE[what] for i, x in enumerate(those) if x.size}
    found = Traced(kind, p, {}, [])
    for number, name in enumerate((*names, *made)):
        x = getattr(p, name, None)
        x = found.arrays[name] = x if isinstance(x, np.ndarray) else None
        source = SOURCE["NOWHERE"] if x is None or not x.size else known.get(address(x))
        if source is None and number < len(names):
            return None
        found.sources.append(source)
    return found


def _record(threads: str, key: int, call: Any, held: Any = None, where: int = -1) -> Any:
    """Record a program and let the key lead to it; return None where that needs Python."""
    from numfuse.adapters.jax import frame
    from numfuse.backends.cpu import BACKEND

    found = traced(call)
    if found is None:
        return None
    with at_most(int(threads)):
        made = BACKEND.record(found.kind, found.problem, tuple(found.arrays))
    program = made.program
    if program.sums or made.formulas is None or made.nbytes > BACKEND.replay.limits[1]:
        return None
    sizes = found.sizes()
    zeroed = [word for n in program.zeroed for word in (n, sizes[n])]
    totals = [math.prod(shape) * item.itemsize for shape, item in program.totals]
    size, *sources = found.placed(program.size, totals)
    head = {
        "N_SIZE": size,
        "N_ARRAYS": len(sources),
        "N_ZEROED": len(program.zeroed),
        "N_SEQUENCES": len(program.sequences),
    }
    words = array("q", [*frame.RECORD.words(head), *sources, *zeroed])
    for x in program.sequences:
        words.extend([x.address, x.steps, x.threads, x.stride, x.table])
    return table.keep(key, words, made.formulas, made.nbytes, program, held)


# --- keys and descriptions ------------------------------------------------------------------------
#: By platform, what records a call; the way is what else the record depends on.
RECORDERS: dict[str, Callable[..., Any]] = {"cpu": _record}
#: What reads the description of a call, by the name of its class.
KINDS: dict[str, Any] = {"Call": Call, "EpilogueCall": EpilogueCall}


def described(way: tuple[str, str], call: Any) -> tuple[int, str]:
    """Return a key, and all that its record depends on as text, which another process can read."""
    table.sweep()
    what = json.dumps([way, type(call).__name__, call.described()])
    return _key(what), what


def _key(what: str) -> int:
    return int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "little") >> 1 | 1


def _resolve(key: int, at: int, length: int, where: int) -> None:
    """Record what a call says beside its key; XLA's thread is here, and an error is a text."""
    try:
        what = ctypes.string_at(at, length).decode()
        (platform, how), kind, described = json.loads(what)
        call = KINDS[kind].read(described)
        if _key(what) != key or not RECORDERS[platform](how, key, call, call.held, where):
            raise ValueError("it needs Python")
    except BaseException as error:
        text = f"numfuse: a call cannot be made again from its description: {error!r}"
        table.root({"R_MISSING": table.message(text)})


_RESOLVE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(_resolve)


# --- lowering -------------------------------------------------------------------------------------
def prepared(call: Any) -> tuple[int, str] | None:
    """Return key and description of a call that XLA makes, or None where it has to call back."""
    if not serves(call.form) or not all(type(n) is int for shape in call.shapes for n in shape):
        return None  # (sizes that are known when it runs)
    from numfuse.backends.cpu.launch.threads import number

    threads = str(number())
    key, what = described(("cpu", threads), call)
    record = table.records().find(key) or _record(threads, key, call)
    return None if record is None else (key, what)


def lowered(target: str, ctx: Any, operands: Any, key: int, what: str) -> Any:
    """Return the results of a custom call."""
    return jax.ffi.ffi_lowering(target)(ctx, *operands, key=np.int64(key), what=what)
