"""The texts that templates of CUDA kernels are written out as."""

import ast
import dis

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from numfuse.backends.cuda.compile import unroll


def given(*values):
    return values


def many(first):
    both = given(
        first, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
        24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46,
        47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, first,
    )  # fmt: skip
    just = given(
        first, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
        24, 25, 26, 27, 28, 29,
    )  # fmt: skip
    more = (
        first, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
        24, 25, 26, 27, 28, 29, given(first),
    )  # fmt: skip
    return both, just, more, given(*both)


def test_many_arguments_and_long_tuples_are_put_together_at_once():
    """Guards the time of compilations: Numba makes a sum of tuples for each element appended."""
    text = unroll.text(many, {})
    scope = {"given": given}
    exec(compile(text, "<many>", "exec"), scope)
    assert scope["many"](0) == many(0)
    steps = {step.opname for step in dis.get_instructions(scope["many"])}
    assert "LIST_APPEND" not in steps
    assert "LIST_APPEND" in {step.opname for step in dis.get_instructions(many)}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert [len(call.args) for call in calls if call.args] == [1, 30, 1, 1]
