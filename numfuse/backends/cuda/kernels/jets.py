"""A jet's pass over points: all members of a point at once; `jet_lines` prints it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda, kernel, types
from numfuse.backends.cuda.kernels.elementwise import formula
from numfuse.backends.cuda.kernels.jet_lines import Pass, loop_of, text
from numfuse.backends.cuda.kernels.passes import chunk_of, threads_of
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Operand, Slot

#: Threads of a block: for 256 the assembler aims at 80 registers, and a backward spills.
_THREADS = 128
#: Places, and chunks of points, that a grid has at most; threads take more by turns.
_MOST_BLOCKS = (1 << 16) - 1


def _template(printed: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"cuda": cuda, "types": types, "__name__": __name__}
    exec(compile(printed, "<numfuse jet>", "exec"), scope)
    template: Any = scope["pointwise"]
    template.numfuse_key = f"jet {hashlib.sha256(printed.encode()).hexdigest()}"
    return template


def launch(
    info: DeviceInfo,
    made: Pass,
    accumulator: str,
    operands: Mapping[str, Operand],
    steps: Mapping[str, int],
    weights: int,
    sizes: tuple[int, int, int],
    short: bool,
    batch: int = 1,
    table: Any = None,
) -> tuple[Launch, int]:
    """Return the launch of a pass, and the chunks of points of its column sums.

    `operands` has the arrays by their slots, `steps` the bytes from a member to the next one of
    those that have several, `weights` is an address, `sizes` are M, N and the places. Column sums
    go to the slot "sums": (places, chunks, N) in the accumulator's dtype; those of directions lie
    behind them, each (batch, chunks, N). `table` is the device function of `Pass.table`.
    """
    m, n, places = sizes
    double = accumulator == "float64"
    threads = min(threads_of(info), _THREADS)
    bits = min((n - 1).bit_length(), threads.bit_length() - 1)
    template = _template(text(made, list(operands), accumulator == "float32"))
    bindings: dict[str, Any] = {
        part.upper(): formula(epilogue, epilogue.inputs, accumulator, short=short, straight=double)
        for part, epilogue in made.parts.items()
    }
    for name, x in operands.items():
        bindings[f"LOAD_{name}"] = elements.loads(x.dtype)
        bindings[f"STORE_{name}"] = elements.stores(x.dtype)
    bindings |= {
        "ZERO": np.dtype(accumulator).type(0),
        "RUN": tiling.RUN,
        "THREADS": threads,
        "COLUMNS": 1 << bits,
        "COLUMN_BITS": bits,
        "LOAD_WEIGHT": elements.loads(accumulator),
        "STORE_SUM": elements.stores(accumulator),
        "TABLE": table,
    }
    used = template.__code__.co_names
    bindings = {name: value for name, value in bindings.items() if name in used}
    words = (["weights"] if made.weighted else []) + (["sums"] if made.sums else [])
    schema = Schema(template, u64=" ".join(words))
    name = f"layer jet{' backward' if made.backward else ''}"
    # for more blocks than these the assembler spills some of float64 before 9.0, and the loop over
    # a table everywhere; where it may choose, some of a float64 backward
    some = double and (made.backward or info.capability < (9, 0))
    blocks = 4 if some or made.table else 0
    built = kernel(
        template, schema.signature, threads=threads, blocks=blocks, name=name, **bindings
    )
    length = chunk_of(m, n) if made.sums else 1
    given: dict[str, Any] = {}
    for name, x in operands.items():
        given[f"from_{name}"] = Slot(name)
        given |= zip((f"place_{name}", f"row_{name}", f"column_{name}"), x.steps, strict=True)
        given |= {f"member_{name}": steps[name]} if loop_of(name) else {}
    given |= {"weights": weights} if made.weighted else {}
    given |= {"sums": Slot("sums")} if made.sums else {}
    chunks = -(-m // length)
    given |= {"m": m, "n": n, "places": places, "chunks": chunks, "length": length}
    given |= {"directions": made.directions, "seconds": made.seconds}
    given |= {"plane": batch * chunks * n} if made.apart else {}
    down = -(-chunks // (threads >> bits))
    grid = (-(-n // (1 << bits)), min(down, _MOST_BLOCKS), min(places, _MOST_BLOCKS))
    if not info.capability[0]:  # the simulator: threads take more
        grid = (1, 1, 1)
    return Launch(built, grid, schema(**given)), chunks
