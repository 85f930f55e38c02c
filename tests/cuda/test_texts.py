"""The texts that templates of CUDA kernels are written out as."""

import ast
import dis

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from numfuse.backends.cuda.compile import assembler, unroll


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


# --- PTX -----------------------------------------------------------------------------------------
PTX = """\
.version 9.0
.visible .entry first(
	.param .u64 first_param_0
)
{
	.reg .f64 	%fd<4>;

	fma.rn.f64 	%fd1, %fd2, 0d3FF71547652B82FE, 0d3FF0000000000000;
	@%p1 add.rn.f64 	%fd3, %fd1, 0d3ff71547652b82fe;
	selp.f64 	%fd1, 0d3FD5555555555555, 0d3FF71547652B82FE, %p2;
	// begin inline asm
	{ mov.f64 %fd2, 0d3FD5555555555555; }
	// end inline asm
	ret;
}
"""


def test_constants_of_float64_that_an_instruction_has_no_room_for_come_from_a_table():
    """Guards: float64 has the constants that its text says, whatever else is in a line."""
    found = assembler.with_constants(PTX)
    table = (
        ".const .align 8 .b64 numfuse_constants[2] = {0x3FF71547652B82FE, 0x3FD5555555555555};\n"
    )
    assert table + ".visible .entry" in found
    load = "\tld.const.f64 \t%constant{}, [numfuse_constants+{}];\n"
    for lines in (
        "{\n\t.reg .f64 \t%constant<4>;\n",
        load.format(0, 0) + "\tfma.rn.f64 \t%fd1, %fd2, %constant0, 0d3FF0000000000000;\n",
        load.format(1, 0) + "\t@%p1 add.rn.f64 \t%fd3, %fd1, %constant1;\n",
        load.format(2, 8) + load.format(3, 0) + "\tselp.f64 \t%fd1, %constant2, %constant3, %p2;\n",
        "{ mov.f64 %fd2, 0d3FD5555555555555; }\n",  # (a text of its own stays)
    ):
        assert lines in found
    assert found.count("ld.const") == 4
    assert assembler.with_constants(found) == found
    plain = PTX.upper().replace("0D3FF71547652B82FE", "0D4000000000000000").lower()
    plain = plain.replace("\tselp.f64 \t%fd1, 0d3fd5555555555555", "\tselp.f64 \t%fd1, %fd2")
    assert assembler.with_constants(plain) == plain
