"""Layers of few rows and of few columns, for `cuda_sweep.py --thin`, and the bytes that they move.

They read a matrix once, and write one in a backward, so memory's speed is their limit. Beside them
are the shapes of a sweep that were behind for another reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from sweep_cases import BYTES, Case

#: (M, K, N, whether the weight is (out, in)); in every dtype, forward and backward.
SHAPES = (
    (17574, 1670, 1, True),
    (1, 2606, 12466, True),
    (1, 4096, 11008, False),
    (4, 5003, 3001, False),
    (16384, 2048, 8, False),
)
#: Those of single dtypes: few lines and a long sum, a short sum, rows of odd lengths.
OTHERS = (
    ("f16", 53026, 1, 3, False, "backward"),
    ("f16", 3385, 28, 1, True, "forward"),
    ("bf16", 3, 69, 18538, True, "forward"),
    ("f32", 1370, 12051, 7, True, "forward"),
    ("f32", 4, 1536, 160, True, "forward"),
    ("f32", 52, 484, 4375, True, "forward"),
    ("f64", 2, 30000, 24, False, "backward"),
    ("bf16", 100000, 96, 1, True, "backward"),
)


def cases() -> Iterator[Case]:
    """Return all of them, those of one dtype after those of another."""
    for dtype in BYTES:
        for m, k, n, turned in SHAPES:
            for operation in ("forward", "backward"):
                yield _case(operation, dtype, m, k, n, turned)
    for dtype, m, k, n, turned, operation in OTHERS:
        yield _case(operation, dtype, m, k, n, turned)
    # one weight of two members: blocks of d_a are 1.5 to a multiprocessor
    yield _case("backward, saved", "f32", 256, 3200, 4096, False, batch=2)
    yield _case("forward", "f64", 196, 1664, 2816, True, batch=4)


def _case(operation: str, dtype: str, m: int, k: int, n: int, turned: bool, batch: int = 0) -> Case:
    sizes = m, k, n, batch, batch > 0
    return Case(operation, dtype, *sizes, turned, True, "gelu", False, m + n, False, False)


def moved(case: Case) -> int:
    """Return the bytes that a layer's call has to read and to write, each array once."""
    size, members = BYTES[case.dtype], max(1, case.batch)
    a, out = case.m * case.k * members, case.m * case.n * members
    b = case.k * case.n * (1 if case.shared else members)
    if case.operation == "forward":
        return (a + b + out) * size
    saved = out * max(4, size) if case.operation.endswith("saved") else 0
    return (2 * a + 2 * b + out) * size + saved
