"""Operations as custom calls on CUDA: recorded launches on XLA's stream.

Which device a computation runs on is known when it runs: the first call of a key on a device comes
to Python, which records the program and loads its kernels; later ones do not.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from typing import Any

from numpy import ndarray

from numfuse.adapters.jax import ffi, table
from numfuse.backends import load, resolve

TARGET = "numfuse_cuda"


@functools.cache
def refusal() -> str | None:
    """Return why XLA cannot launch numfuse's kernels here, or None: it can, from now on."""
    reason = ffi.refusal()
    if reason is not None:
        return reason
    try:
        load("cuda")
        from numfuse.adapters.jax import frame
        from numfuse.backends.cuda.compile.toolchain import SIMULATED
        from numfuse.backends.cuda.driver import launcher, libcuda

        if SIMULATED:
            return "the simulator of CUDA has no streams"
        get_device = ctypes.cast(libcuda.library().cuCtxGetDevice, ctypes.c_void_p).value or 0
        failed = table.message("numfuse: CUDA refused a launch")
        handler = frame.handler(launcher.inlined())
        table.register(TARGET, handler, "CUDA", R_DEVICE=get_device, R_NOT_LAUNCHED=failed)
    except (AttributeError, ImportError, RuntimeError) as error:
        return str(error)
    ffi.RECORDERS["cuda"] = _record
    return None


def _record(precision: str, key: int, call: Any, held: Any, ordinal: int) -> Any:
    """Record the launches of a call on a device; return None where an operand has to be copied."""
    from numfuse.adapters.jax import frame
    from numfuse.backends.cuda.call.record import recorded
    from numfuse.backends.cuda.driver.devices import device
    from numfuse.backends.cuda.plan.program import Recorder, View, strides_of

    found = ffi.traced(call)
    if found is None:
        return None

    def bind(rec: Recorder, name: str, x: ndarray) -> View:
        number = rec.number(name)
        return View(number, 0, x.shape, strides_of(x), x.dtype.name, x.itemsize, 16)

    names = tuple(found.arrays)
    program, _ = recorded(device(ordinal), precision, found.kind, found.problem, bind, names)
    nbytes, work, plan, bases = program.native
    size, *sources = found.placed(nbytes)
    head = {
        "C_SIZE": size,
        "C_WORK": work,
        "C_PLAN": plan,
        "C_BASES": bases,
        "C_ARRAYS": len(sources),
    }
    words = array("q", [*frame.ON_STREAM.words(head), *sources])
    own = key ^ (ordinal + 1) << frame.DEVICE_BITS
    formulas = call.form.how.activation.formulas() if held is None else ()
    return table.keep(own, words, formulas, 0, program, held)


def prepared(call: Any) -> tuple[int, str]:
    """Return key and description of a call that XLA makes on a device.

    Raise TypeError if XLA cannot, or another backend is asked for: nothing moves unasked.
    """
    reason, precision = refusal(), "ieee"
    if reason is None:
        backend = call.form.how.backend
        chosen: Any = load("cuda") if backend is None else resolve(backend)
        if chosen.name != "cuda":
            reason = f"its arrays are on a CUDA device, and the backend is {chosen.name!r}"
        precision = getattr(chosen, "precision", precision)
    if reason is not None:
        raise TypeError(
            f"JAX must run on the CPU for numfuse, got the platform 'cuda': nothing moves between "
            f"devices unasked, and no kernel can be launched there ({reason})"
        )
    return ffi.described(("cuda", precision), call)
