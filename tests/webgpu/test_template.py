"""The expander of the WGSL files: loops, conditions, values, and its own mistakes.

Guards: every shader is valid WGSL that holds what its call needs and nothing else.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import unavailable

import numfuse as nf
from numfuse import epilogues
from numfuse.backends.webgpu.tiling import TILES, divided

if not nf.backends()["webgpu"]:  # the package cannot be imported without an adapter
    unavailable("webgpu", str(nf.backends()["webgpu"]))

from numfuse.backends.webgpu.shaders import plain, template
from numfuse.backends.webgpu.shaders.epilogues import Array, Elementwise, Gemm
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.shaders.shader import Access, Uniform


@pytest.fixture
def expanded(monkeypatch):
    """Expand a text in place of a file."""

    def of(text, **bindings):
        monkeypatch.setattr(template, "_lines", lambda name: text.splitlines())
        return template.expand("a text", bindings)

    return of


def test_text_without_directives_stays(expanded):
    text = "fn main() {\n    // a comment\n    return;\n}\n"
    assert expanded(text) == text


def test_values_are_names_and_expressions(expanded):
    assert expanded("let a = $A + ${A * 2}u + $(A)", A=3) == "let a = 3 + 6u + $(A)\n"
    assert expanded("$A$B ${A}_$B", A="x", B=1) == "x1 x_1\n"


def test_a_name_that_is_not_bound_is_an_error(expanded):
    with pytest.raises(NameError, match="MISSING"):
        expanded("$MISSING")
    with pytest.raises(NameError):
        expanded("${open('x')}")  # no builtins


def test_loops_nest_and_see_each_other(expanded):
    text = """\
//$ for i in range(N):
    //$ for j in [i, i + 1]:
c${i}_$j
    //$ end
row $i
//$ end
end"""
    assert expanded(text, N=2) == "c0_0\nc0_1\nrow 0\nc1_1\nc1_2\nrow 1\nend\n"
    assert expanded(text, N=0) == "end\n"


def test_a_loop_variable_does_not_outlive_its_loop(expanded):
    with pytest.raises(NameError, match="'i'"):
        expanded("//$ for i in range(2):\n//$ end\n$i")


@pytest.mark.parametrize("a", [False, True])
@pytest.mark.parametrize("b", [False, True])
def test_conditions_nest_and_only_the_part_that_holds_is_evaluated(expanded, a, b):
    text = """\
//$ if A:
a
//$ if B:
ab
//$ else:
a only
//$ end
//$ else:
not a
//$ for i in range(2 if not A else MISSING):
//$ if B:
b $i
//$ end
//$ end
//$ end
always"""
    if a:
        wanted = ["a", "ab" if b else "a only"]
    else:
        wanted = ["not a", *(["b 0", "b 1"] if b else [])]
    assert expanded(text, A=a, B=b).splitlines() == [*wanted, "always"]


def test_parts_that_are_not_taken_need_no_bindings(expanded):
    text = "//$ if A:\n$MISSING\n//$ for i in MISSING:\n$i\n//$ end\n//$ end\nlast"
    assert expanded(text, A=False) == "last\n"
    assert expanded("//$ for i in range(0):\n$MISSING\n//$ end", A=0) == "\n"


@pytest.mark.parametrize("text", ["//$ end", "a\n//$ else:", "//$ if A:\n//$ end\n//$ end"])
def test_an_end_without_a_beginning_is_an_error(expanded, text):
    with pytest.raises(AssertionError, match="ends a part that no line began"):
        expanded(text, A=1)


@pytest.mark.parametrize("text", ["//$ if A:", "//$ if A:\n//$ else:", "//$ for i in [1]:\n$i"])
def test_a_beginning_without_an_end_is_an_error(expanded, text):
    with pytest.raises(AssertionError, match="has no end"):
        expanded(text, A=1)


def test_a_loop_that_is_no_loop_is_an_error(expanded):
    with pytest.raises(AssertionError, match="line 2: expected `for NAME in"):
        expanded("first\n//$ for i:\n//$ end")


#: The gradients of a gated layer by its sums.
PULLED = epilogues.gated_layer(nf.activations()["silu"].curve).pulled_back(
    {"out_0": "grad"}, {"z_0": "d_0", "z_1": "d_1"}
)


def gate_arrays(access):
    return Array("a", access), Array("b", access), Array("out", access, stored=True)


def shaders():
    """One of each kind in every combination of what changes its text."""
    curve = nf.activations()["gelu"].curve
    layer = Formula.of(epilogues.layer, curve)
    slope = Formula.of(epilogues.layer_double_backward, curve, ("w", "bias"), guard=True)
    for tile in TILES:
        for wide in (False, True):
            for turned in (False, True):
                for dtype, acc in (("float32", "float32"), ("float16", "float32")):
                    factors = Access(dtype, wide, turned), Access(dtype, wide, not turned)
                    row = Access(dtype, wide)
                    bias, out = Array("bias", row, by_column=True), Array("out", row, stored=True)
                    yield Gemm(acc, layer.choose("out"), (bias, out), tile, factors)
                    yield Gemm(
                        acc, layer.choose("out", "pre", summed=("out",)),
                        (bias, out, Array("pre", Access(acc), stored=True)), tile, factors,
                        places=True, segments=True, planes=True,
                    )  # fmt: skip
                    reads = [Array(name, row) for name in ("z", "t", "grad")]
                    arrays = (*reads, Array("q", row, stored=True))
                    yield Gemm(acc, slope.choose("q"), arrays, tile, None)
        gated = Formula.whole(PULLED).choose("d_0", "d_1", summed=("d_0", "d_1"))
        stored = [Array(f"d_{i}", Access("float32"), stored=True) for i in range(2)]
        arrays = Array("grad", Access("float32")), stored[0], replace(stored[1], within="to_d_0")
        yield Gemm(
            "float32", gated, arrays, divided(tile, 2), (Access("float32", turned=True),) * 3,
            places=True, accumulators=("z_0", "z_1"),
        )  # fmt: skip
    gate = Formula.of(epilogues.gate, nf.activations()["none"].curve).choose("out")
    for wide in (False, True):
        access = Access("float64", wide)
        yield plain.join("float64", access, access, add=wide)
        yield Elementwise("float64", gate, gate_arrays(access))
    yield Elementwise("float64", gate, gate_arrays(Access("float64")), strided=True)
    yield plain.copy(Access("float32"), Access("float16"))
    yield plain.probe("a probe", Access("float16"), "float32", "f[0]")


def test_every_shader_is_wgsl_without_leftovers():
    for shader in shaders():
        text = shader.text()
        assert "$" not in text and "None" not in text and "True" not in text, shader.label
        assert text.count("{") == text.count("}") and text.count("(") == text.count(")")
        bindings = [int(b) for b in re.findall(r"@binding\((\d+)\)", text)]
        assert bindings == list(range(1 + len(shader.buffers)))
        assert ("enable f16;" in text) == any("f16" in b.element for b in shader.buffers)
        assert text == shader.text()
        used = set(re.findall(r"\bp\.(\w+)", text))
        assert used <= set(shader.uniform.names), shader.label


def test_one_chain_of_sums_leaves_no_trace_of_others():
    layer = Formula.of(epilogues.layer, nf.activations()["gelu"].curve).choose("out")
    factors, out = (Access("float32"),) * 2, Array("out", Access("float32"), stored=True)
    bias = Array("bias", Access("float32"), by_column=True)
    for tile in TILES:
        texts = [
            Gemm("float32", layer, (bias, out), replace(tile, chain=chain), factors).text()
            for chain in (0, 256)
        ]
        found = [set(re.findall(r"var slices|chain|kept", text)) for text in texts]
        assert found == [set(), {"var slices", "chain", "kept"}]
        assert texts[0].count("loop {") == texts[1].count("loop {") - 1


def test_shaders_are_equal_where_their_formulas_are():
    """Or a redefined activation would be computed by the pipeline of the one before."""

    def shader(act, **how):
        formula = Formula.of(epilogues.gate, nf.activations()[act].curve, **how).choose("out")
        return Elementwise("float32", formula, gate_arrays(Access("float32")))

    cases = [("gelu", {}), ("tanh", {}), ("gelu", {"guard": True}), ("gelu", {"absent": ("b",)})]
    made = [shader(act, **how) for act, how in cases]
    for i, one in enumerate(made):
        assert [one == other for other in made] == [i == j for j in range(len(made))]
        again = shader(cases[i][0], **cases[i][1])
        assert one == again and hash(one) == hash(again)


def test_a_uniform_is_packed_as_its_struct_says():
    uniform = Uniform(("stride", "first", "size"))
    assert uniform.struct() == (
        "struct Params {\n    stride: u32,\n    first: u32,\n    size: u32,\n}"
    )
    words = uniform.pack({"size": 7, "first": 5, "stride": -2})
    assert np.frombuffer(words, np.int32).tolist() == [-2, 5, 7]
    with pytest.raises(KeyError, match="first"):
        uniform.pack({"size": 7, "stride": 1})
