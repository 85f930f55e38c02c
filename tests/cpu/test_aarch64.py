"""The kernels as a 64-bit ARM processor would run them: Numba compiles them for one here, and the
assembly is inspected.

Nothing is executed.  That the same kernels (128-bit vectors, the tile of NEON, factors taken from
lanes) compute the right thing, the last test of `test_cpu_kernels` shows on the host's own
processor.

Guards: on 64-bit ARM the loops are vector code that calls no library.
"""

import re

import llvmlite.binding as llvm
import pytest
import weekly
from listings import listings_of, loops, operations

from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.kernels import protocol

#: It compiles for a minute.
pytestmark = pytest.mark.long
TRIPLE = "aarch64-unknown-linux-gnu"
#: NEON alone, and with 256-bit SVE beside it, which LLVM takes for the loops of row functions.
PROCESSORS = ("neoverse-n1", "neoverse-v1")

# Numba's own compiler with another target.  What would run or link the machine code is left out.
EMIT = f"""
import llvmlite.binding as llvm
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.get_process_triple = lambda: {TRIPLE!r}
llvm.get_host_cpu_features = lambda: llvm.FeatureMap(neon=True)
from numba.core import codegen
codegen.JITCPUCodegen.set_env = lambda self, name, environment: None
codegen.JITCodeLibrary._finalize_specific = lambda self: None
codegen.JITCodeLibrary.get_pointer_to_function = lambda self, name: self._ensure_finalized() or 1
from types import SimpleNamespace
from numfuse.runtime import machine_code, specialise
specialise._cached = lambda decorate: decorate(False)
machine_code.Code = lambda image, symbol: SimpleNamespace(address=1)
from numfuse.activations import get
from numfuse.backends.cpu import host
from numfuse.backends.cpu.kernels import library, rows
assert host.vector_bytes() == 16 and host.vector_name() == "NEON"
listings = {{}}
for acc in ("float32", "float64") if WHOLE else ():
    listings[f"gemm {{acc}}"] = library.gemm_cell(acc)
for fmt in library.FORMATS:
    acc = library.accumulator(fmt)
    if WHOLE:
        listings[f"pack_a {{fmt}}"] = library.pack_a(fmt, acc)
        listings[f"pack_b {{fmt}}"] = library.pack_b(fmt, acc)
    for name in ("gelu", "tanh"):
        act = get(name)
        row = rows.forward(act.curve, fmt, True, False, None)
        listings[f"row forward {{name}} {{fmt}}"] = row
    row = rows.grad_pre(get("gelu").curve, fmt, True, None, True, True, True)
    listings[f"row backward gelu {{fmt}}"] = row
"""


@pytest.fixture(scope="module", params=PROCESSORS)
def listings(request, tmp_path_factory):
    """The kernel's own instructions (not its C wrapper's) by what it does."""
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple(TRIPLE)
    except RuntimeError as error:
        pytest.skip(f"llvmlite's LLVM has no AArch64 target here: {error}")
    environment = {"NUMBA_CPU_NAME": request.param, "NUMBA_CPU_FEATURES": "+neon"}
    # (what multiplies and what packs say by themselves which vectors they take: NEON's)
    whole = weekly.ALL or request.param == PROCESSORS[0]
    code = f"WHOLE = {whole}\n{EMIT}"
    return listings_of(code, environment, tmp_path_factory.mktemp("cache"))


def vector_spills(text: str) -> list[str]:
    return re.findall(r"^\t(?:ld|st)\S+\s+[qdsv]\d.*\[sp.*$", text, re.M)


@pytest.mark.parametrize("acc", ["float32", "float64"])
def test_a_rank_1_update_is_fmas_by_lanes_and_as_few_loads_as_the_tile_needs(listings, acc):
    r = tiling.registers(16, {"float32": 4, "float64": 8}[acc], lanes=True)
    shape, lane = {"float32": ("4s", "s"), "float64": ("2d", "d")}[acc]
    tiles = [loop for loop in loops(listings[f"gemm {acc}"], "b") if "fmla" in loop]
    assert len(tiles) >= 2 * r.mr + 1  # every height, two widths; one with requests beside
    fma = rf"fmla\tv\d+\.{shape}, v\d+\.{shape}, v\d+\.{lane}\[\d\]"
    for loop in tiles:
        # No arithmetic but whole vectors times a lane, and all of the tile in registers.
        assert len(re.findall(fma, loop)) == operations(loop)["fmla"]
        assert not vector_spills(loop), loop
    whole = max(tiles, key=lambda loop: operations(loop)["fmla"])
    count = operations(whole)
    updates = protocol.STREAM_COUNT
    assert count["fmla"] == updates * r.mr * r.vectors
    assert count["prfm"] == updates
    # Of A and B, each register once; nothing is copied or broadcast.
    assert re.findall(r"\tld\S+\t[bhsdv]\d", whole) == []
    loaded = len(re.findall(r"\tldr\tq", whole)) + 2 * len(re.findall(r"\tldp\tq", whole))
    assert loaded <= updates * (r.mr // r.vl + r.vectors)
    assert not set(count) & {"dup", "ins", "ext", "fmov", "str", "stp", "bl", "blr"}, count
    assert not re.search(r"\tmov\tv", whole)
    # Addresses, steps and jumps beside it: at most one instruction for four FMAs.
    others = sum(count.values()) - count["fmla"] - count["prfm"] - count["ldr"] - count["ldp"]
    assert 4 * others <= count["fmla"], count


@pytest.mark.parametrize("fmt", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("which", ["pack_a", "pack_b"])
def test_packing_is_vector_code_without_calls(listings, which, fmt):
    count = operations(listings[f"{which} {fmt}"])
    assert not set(count) & {"bl", "blr"}
    assert set(count) & {"zip1", "trn1", "uzp1"}, count  # transposes inside registers
    widening = {"float16": {"fcvtl", "fcvtl2"}, "bfloat16": {"shll", "shll2", "ushll"}}
    assert fmt not in widening or set(count) & widening[fmt], count


@pytest.mark.parametrize("fmt", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("row", ["forward gelu", "forward tanh", "backward gelu"])
def test_row_functions_are_vector_code_without_calls(listings, row, fmt):
    text = listings[f"row {row} {fmt}"]
    assert set(re.findall(r"^\tbl\t(\w+)$", text, re.M)) <= {"memset"}  # sums begin with zeros
    assert "\tblr\t" not in text
    width = "d" if fmt == "float64" else "s"
    arithmetic = [
        loop
        for loop in loops(text, "b")
        if re.search(rf"\tfdivr?\t(v\d+\.{{n}}{width}|z\d+\.{width})".replace("{n}", r"\d"), loop)
    ]
    assert arithmetic, "the quotient of the sigmoid is not of vectors"
    for loop in arithmetic:
        fmas = re.findall(r"\tfn?m(?:la|ls|ad|sb)\t[vz]\d+", loop)
        assert len(fmas) >= 8, loop
        assert not re.search(r"\tfn?m(add|sub)\t[sd]\d", loop)
