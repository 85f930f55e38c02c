"""Passes over elements, printed from an epilogue without accumulators: gates, what is beside
products in second order, and formulas of a user's own.

Arrays are runs of memory in one order (`rows` has passes over others). `text` reads and writes one
element at a time, of any alignment; `wide_text` 16 bytes, where all arrays begin at 16 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import accesses, elements, intrinsics
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda, kernel, types
from numfuse.backends.cuda.kernels.ampere import registers
from numfuse.backends.cuda.kernels.elementwise import formula
from numfuse.backends.cuda.kernels.passes import grid_of, threads_of
from numfuse.backends.cuda.plan.product import NUMBER, WIDE_SINCE, DeviceInfo, Launch, Slot
from numfuse.epilogues import Epilogue


class Source(NamedTuple):
    """Where an epilogue's input is read."""

    name: str
    #: The slot of the launch.
    slot: str
    #: That of an array, or `NUMBER`.
    dtype: str
    #: Whether it is one element for all.
    once: bool = False


class Result(NamedTuple):
    """Where an epilogue's result is written."""

    name: str
    slot: str
    dtype: str


def call_of(
    sources: Sequence[Source], results: Sequence[Result], argument: Callable[[str], str]
) -> str:
    """Return the line that computes an element; `argument`: a value, by its source's name."""
    values = ", ".join(f"in_{x.name}" if x.once else argument(x.name) for x in sources)
    return f"{', '.join(f'new_{name}' for name in names_of(results))} = FORMULA({values})"


def names_of(results: Sequence[Result]) -> tuple[str, ...]:
    """Return the names of the formula's results, of which one may be written twice."""
    return tuple(dict.fromkeys(result.name for result in results))


def once(sources: Sequence[Source], load: str = "") -> list[str]:
    """Return the lines that read what is one element for all."""
    how = {True: "REAL(from_{0})", False: load}
    return [f"    in_{x.name} = {how[x.dtype == NUMBER]}".format(x.name) for x in sources]


def text(sources: Sequence[Source], results: Sequence[Result]) -> str:
    """Return the kernel that a thread goes through element by element."""
    ones = [x for x in sources if x.once]
    lines = [
        *(once(ones, "LOAD_{0}(from_{0}, 0)") if ones else ()),
        "    for i in range(cuda.grid(1), size, cuda.gridsize(1)):",
        f"        {call_of(sources, results, 'LOAD_{0}(from_{0}, i)'.format)}",
    ]
    lines += [f"        STORE_{slot}(to_{slot}, i, new_{name})" for name, slot, _ in results]
    return _function(sources, results, lines)


def wide_text(
    sources: Sequence[Source], results: Sequence[Result], vectors: int, values: int
) -> str:
    """Return the kernel of which a thread has `vectors` times so many `values` in flight.

    They are 16 bytes of the arrays with the smallest elements, and several accesses of others.
    Nothing is read twice, yet the caches are asked for nothing (``.cs`` cost 5 to 7%): what was
    stored last stays there for whoever reads it next.
    """
    threads, every = tiling.PASS_THREADS, sources
    sources, ones = [x for x in every if not x.once], [x for x in every if x.once]
    lines = [
        *(once(ones, "LOAD_{0}(from_{0}, 0)") if ones else ()),
        f"    first = cuda.blockIdx.x * {threads * vectors} + cuda.threadIdx.x",
        f"    vectors = size // {values}",
    ]
    # (array, its first value) of each access of 16 bytes
    loaded = [(x, v) for x in sources for v in range(0, values, _held(x.dtype))]
    stored = [(y, v) for y in results for v in range(0, values, _held(y.dtype))]
    for x, v in loaded:
        lines.append(f"    words_{x.name}_{v} = cuda.local.array({4 * vectors}, types.int32)")
    for y, v in stored:
        lines.append(f"    made_{y.slot}_{v} = cuda.local.array({_held(y.dtype)}, REAL)")

    def place(x: Source | Result, v: int) -> str:
        """Return which access has value `v`, and where in it."""
        within = v % _held(x.dtype)
        return f"{v - within}[{within}]"

    def at(array: str, u: int, x: Source | Result, v: int) -> str:
        """Return the address of the access that begins with value `v`."""
        size = intrinsics.itemsize(x.dtype)
        return f"{array} + (first + {u * threads}) * {values * size} + {v * size}"

    for u in range(vectors if sources else 0):
        lines.append(f"    if first + {u * threads} < vectors:")
        for x, v in loaded:
            word = ", ".join(f"words_{x.name}_{v}[{4 * u + w}]" for w in range(4))
            lines.append(f"        {word} = LOAD_WORDS({at(f'from_{x.name}', u, x, v)})")
    for u in range(vectors):
        lines.append(f"    if first + {u * threads} < vectors:")
        for x, v in loaded:
            word = ", ".join(f"words_{x.name}_{v}[{4 * u + w}]" for w in range(4))
            lines.append(f"        in_{x.name}_{v} = AS_VALUES_{x.name}({word})")
        for v in range(values):
            given = {x.name: f"in_{x.name}_{place(x, v)}" for x in sources}
            lines.append(f"        {call_of(every, results, given.__getitem__)}")
            lines += [f"        made_{y.slot}_{place(y, v)} = new_{y.name}" for y in results]
        for y, v in stored:
            lines.append(f"        w0, w1, w2, w3 = AS_WORDS_{y.slot}(made_{y.slot}_{v})")
            lines.append(f"        STORE_WORDS({at(f'to_{y.slot}', u, y, v)}, w0, w1, w2, w3)")
    lines += [
        "    # what is left of a vector",
        f"    i = vectors * {values} + cuda.threadIdx.x",
        "    if cuda.blockIdx.x == 0 and i < size:",
        f"        {call_of(every, results, 'LOAD_{0}(from_{0}, i)'.format)}",
        *(f"        STORE_{slot}(to_{slot}, i, new_{name})" for name, slot, _ in results),
    ]
    return _function(every, results, lines)


def _held(dtype: str) -> int:
    """Return the values of 16 bytes."""
    return 16 // intrinsics.itemsize(dtype)


def _function(sources: Sequence[Source], results: Sequence[Result], lines: list[str]) -> str:
    arguments = [f"from_{name}" for name, *_ in sources] + [f"to_{slot}" for _, slot, _ in results]
    return "\n".join([f"def pointwise({', '.join([*arguments, 'size'])}):", *lines, ""])


def template_of(printed: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"cuda": cuda, "types": types, "__name__": __name__}
    exec(compile(printed, "<numfuse pointwise>", "exec"), scope)
    template: Any = scope["pointwise"]
    template.numfuse_key = f"pointwise {hashlib.sha256(printed.encode()).hexdigest()}"
    return template


def launch(
    info: DeviceInfo,
    epilogue: Epilogue,
    accumulator: str,
    sources: Sequence[Source],
    results: Sequence[Result],
    size: int,
    alignment: int,
    short: bool,
) -> Launch:
    """Return the launch of an epilogue over `size` elements, all computed in `accumulator`.

    There is at least one source for each input that the results depend on, in any order; `results`
    are those that are stored. `alignment` is the power of two that divides all addresses; `short`:
    the short form is good enough.
    """
    chosen = epilogue.select(*names_of(results))
    sources = [source for source in sources if source.name in chosen.inputs]
    names = tuple(source.name for source in sources)
    bindings: dict[str, Any] = {"FORMULA": formula(chosen, names, accumulator, short=short)}
    dtypes = {x.dtype for x in sources} | {x.dtype for x in results}
    bindings |= {"REAL": getattr(types, accumulator)} if any(x.once for x in sources) else {}
    dtypes.discard(NUMBER)
    words = " ".join(f"from_{x.name}" for x in sources if x.dtype == NUMBER)
    threads, grid = threads_of(info), grid_of(size, info)
    arrays = [x for x in sources if x.dtype != NUMBER]
    bindings |= {f"LOAD_{x.name}": elements.loads(x.dtype) for x in arrays}
    bindings |= {f"STORE_{x.slot}": elements.stores(x.dtype) for x in results}
    wide = alignment >= 16 and (len(dtypes) == 1 or accumulator == "float32")
    if wide and info.capability >= max(WIDE_SINCE[x] for x in dtypes):
        itemsize = min(map(intrinsics.itemsize, dtypes))
        vectors = tiling.GATE_VECTORS[itemsize][len(sources) + len(results) > 3]
        template = template_of(wide_text(sources, results, vectors, 16 // itemsize))
        schema = Schema(template, f64=words)
        grid = -(-size * itemsize // (threads * vectors * 16)), 1, 1
        bindings |= {
            "REAL": getattr(types, accumulator),
            "LOAD_WORDS": accesses.load_words,
            "STORE_WORDS": accesses.store_words,
        }
        for x in (x for x in arrays if not x.once):
            bindings[f"AS_VALUES_{x.name}"] = registers.words_as(x.dtype, accumulator)
        for y in results:
            bindings[f"AS_WORDS_{y.slot}"] = registers.as_words(y.dtype, accumulator)
    else:
        template = template_of(text(sources, results))
        schema = Schema(template, "u64", i64="size", f64=words)
    made = kernel(template, schema.signature, threads=threads, name=epilogue.name, **bindings)
    places = {f"from_{x.name}": Slot(x.slot) for x in sources}
    places |= {f"to_{x.slot}": Slot(x.slot) for x in results}
    return Launch(made, grid, schema(size=size, **places))
