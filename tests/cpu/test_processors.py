"""Another processor than the host's, of which Numba is told, and settings that a backend refuses.

A process of its own for each processor: LLVM ends it where code needs what that processor lacks.

Guards: the setting of an environment never ends the process, and a backend that it disables says
so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import once
import pytest
from arrays import bits
from conftest import unavailable
from numba import types
from numba.core import config
from tolerance import DTYPES

import numfuse as nf
from numfuse.backends import load
from numfuse.backends.cpu import host
from numfuse.backends.cpu.llvm import conversions, intrinsics, moves
from numfuse.backends.cuda.driver import libcuda
from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a template are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Forward, backward and gate, with edges in every direction, within the bounds of `tolerance`.
WORK = """
import itertools, sys
sys.path.insert(0, "tests")
import numpy as np
import tolerance
from arrays import normal
import numfuse as nf
from numfuse.backends.cpu import host
from numfuse.backends.cpu.kernels import library

SHAPES = (37, 45, 51), (3, 45, 51), (37, 2, 51)
for name, (m, n, k) in itertools.product(sys.argv[1:], SHAPES):
    dtype = tolerance.DTYPES[name]
    rng = np.random.default_rng(0)
    a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
    bias, grad = normal(rng, (n,), dtype), normal(rng, (m, n), dtype)
    # Of float16: subnormal numbers, which only some conversions keep.
    a[0] *= dtype.type(2.0**-20)
    exact = tolerance.forward(a, b, bias, "gelu", dtype)
    out = nf.matmul_bias_activation(a, b, bias, "gelu")
    tolerance.assert_within("out", out, exact.out, exact.out_error)
    rounded = library.grad_pre_format(name) == name
    back = tolerance.backward(grad, a, b, bias, "gelu", dtype, rounded_grad_pre=rounded)
    got = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
    for what, x in zip(("d_a", "d_b", "d_bias"), got, strict=True):
        tolerance.assert_within(what, x, getattr(back, what), getattr(back, what + "_error"))
    # The gate, and what goes past the caches: both round as NumPy does.
    for rows in (3, 4096):
        x = normal(rng, (rows, 1031), dtype)
        gate = nf.relu_mul(x, np.broadcast_to(dtype.type(3), x.shape))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(gate, np.maximum(x, dtype.type(0)) * dtype.type(3))
print(host.vector_bytes(), host.converts_halves(), host.product("bfloat16"))
"""
#: What Numba is told, the dtypes, the widest vectors, and whether float16 has an instruction (None:
#: the host's own).
TOLD: dict[str, tuple[dict[str, str], tuple[str, ...], int, bool | None]] = {
    "generic": ({"NUMBA_CPU_NAME": "generic"}, tuple(DTYPES), 16, False),
    # On x86 alone; elsewhere LLVM ignores features that it does not know.
    "without F16C": (
        {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+avx2,+fma"}, ("float16",), 32, False
    ),
    "haswell": ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}, ("float16",), 32, True),
    "without AVX": ({"NUMBA_ENABLE_AVX": "0"}, ("bfloat16",), 32, None),
}  # fmt: skip
PROCESSES = {
    name: once.Process(lambda _, d=dtypes: [sys.executable, "-c", WORK, *d], environment)
    for name, (environment, dtypes, *_) in TOLD.items()
}


@pytest.mark.skipif(not host.is_x86(), reason="these are processors of x86")
@pytest.mark.long
@pytest.mark.parametrize("told", TOLD)
def test_every_dtype_is_right_on_a_processor_that_numba_is_told_of(told):
    done = PROCESSES[told].result()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    width, converts, product = done.stdout.split()
    *_, widest, instruction = TOLD[told]
    assert int(width) <= widest
    assert instruction is None or converts == str(instruction)
    assert product == "fma"


def test_the_compiler_is_asked_for_the_vectors_that_this_processor_has():
    have = host.features()
    if host.is_x86():
        wide = 64 if "avx512f" in have else 32 if {"avx2", "fma"} <= have else 16
        assert host.vector_bytes() == wide
        assert host.converts_halves() == ("f16c" in have)


def widen_all(source, target, count):
    halves, floats = HALVES(source), FLOATS(target)
    for i in range(count):
        floats[i] = WIDEN(halves[i])


def narrow_all(source, target, count):
    floats, halves = FLOATS(source), HALVES(target)
    for i in range(count):
        halves[i] = NARROW(floats[i])


def copy_rows(source, target, count):
    for i in range(0, count, 8):
        COPY(source + 2 * i, target + 4 * i)


def by_integers(template, monkeypatch):
    """A function of two addresses and a count, as on a processor without the instruction."""
    monkeypatch.setattr(host, "converts_halves", lambda: False)
    names = {"HALVES": intrinsics.make_elements("float16"),
             "FLOATS": intrinsics.make_elements("float32")}  # fmt: skip
    made = {
        "WIDEN": conversions.make_widen, "NARROW": conversions.make_narrow,
        "COPY": lambda fmt, acc: moves.make_copy_rows(fmt, acc, 8, 8),
    }  # fmt: skip
    for name, make in made.items():
        # not what is kept of this processor's own
        names[name] = getattr(make, "__wrapped__", make)("float16", "float32")
    if template is copy_rows:
        names["COPY"] = moves.make_copy_rows.__wrapped__("float16", "float32", 8, 8)
    used = {name: value for name, value in names.items() if name in template.__code__.co_names}
    return specialise.entry(template, types.void(*[types.int64] * 3), **used)


@pytest.mark.parametrize("template", [widen_all, copy_rows])
def test_every_float16_is_widened_exactly_by_integers(template, monkeypatch):
    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = np.empty(halves.size, np.float32)
    by_integers(template, monkeypatch)(halves.ctypes.data, floats.ctypes.data, halves.size)
    exact = halves.view(np.float16).astype(np.float32)
    nan = np.isnan(exact)
    np.testing.assert_array_equal(bits(floats[~nan]), bits(exact[~nan]))
    assert np.isnan(floats[nan]).all()
    np.testing.assert_array_equal(np.signbit(floats), np.signbit(exact))


def test_every_float32_beside_a_float16_or_a_tie_is_rounded_right_by_integers(monkeypatch):
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves[-1] = 65536.0  # where the next one would be
    ties = (halves[1:] + halves[:-1]) / 2
    near = np.concatenate([halves, ties])
    around = [near, np.nextafter(near, np.float32(-1)), np.nextafter(near, np.float32(np.inf))]
    least, most = np.float32(1e-45), np.finfo(np.float32).max
    special = [least, np.finfo(np.float32).tiny, most, np.inf, np.nan]
    x = np.abs(np.concatenate([*around, np.array(special, np.float32)]))
    x = np.concatenate([x, -x])
    # NaN whose payload is in the bits that are cut off
    x = np.concatenate([x, np.array([0x7F800001, 0xFFC00001], np.uint32).view(np.float32)])
    found = np.empty(x.size, np.float16)
    by_integers(narrow_all, monkeypatch)(x.ctypes.data, found.ctypes.data, x.size)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        exact = x.astype(np.float16)
    nan = np.isnan(x)
    np.testing.assert_array_equal(bits(found[~nan]), bits(exact[~nan]))
    assert np.isnan(found[nan]).all() and nan.sum() == 4
    np.testing.assert_array_equal(np.signbit(found), np.signbit(x))


# --- settings -----------------------------------------------------------------------------------
ASKED = """
import json
import numpy as np
import numfuse as nf
said = {name: str(status) for name, status in nf.backends().items()}
try:
    nf.silu_mul(np.ones(3), np.ones(3))
except nf.BackendUnavailable as error:
    said["call"] = str(error)
nf.silu_mul(np.ones(3), np.ones(3), backend="reference")
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("variable", "value"), [("NUMBA_DISABLE_JIT", "1"), ("NUMBA_NUM_THREADS", "0")]
)
def test_a_setting_under_which_there_is_no_compiler_makes_the_cpu_unavailable(variable, value):
    environment = os.environ | {variable: value}
    done = subprocess.run(
        [sys.executable, "-c", ASKED],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said["cpu"] == said["call"] and variable in said["cpu"]
    assert said["reference"] == "available"


def test_info_says_which_setting_leaves_the_cpu_without_threads():
    done = subprocess.run(
        [sys.executable, "-m", "numfuse", "info", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"NUMBA_THREADING_LAYER": "nonsense"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout)["backends"]["cpu"]
    assert not facts["available"]
    assert "NUMBA_THREADING_LAYER must be one of tbb, omp" in facts["reason"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DISABLE_JIT", 1, "NUMBA_DISABLE_JIT is set"),
        ("CPU_FEATURES", "avx2", "must begin with + or -, got 'avx2'"),
        ("CPU_FEATURES", "+avx2, -fma", "must begin with + or -, got '+avx2, -fma'"),
        ("THREADING_LAYER", "nonsense", "NUMBA_THREADING_LAYER must be one of"),
        ("THREADING_LAYER_PRIORITY", ["tbb"], "must name each of tbb, omp, workqueue once"),
    ],
)
def test_a_setting_that_numba_or_llvm_fails_over_is_refused_by_its_name(
    name, value, said, monkeypatch
):
    assert host.refused_setting() is None
    monkeypatch.setattr(config, name, value)
    assert said in (host.refused_setting() or "")


@pytest.mark.parametrize("features", [None, "", "+avx2,-fma", "+avx2,,-fma,"])
def test_what_llvm_reads_is_no_refused_setting(features, monkeypatch):
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    assert host.refused_setting() is None


#: As an attribute of the package, `backends` is the function.
LOADED = sys.modules["numfuse.backends"].LOADED
NONSENSE = ["abc", "-1", "2", "1.0", " 1", "\u0661", "\u00b2", "9" * 5000, "cuda", "0x1", "\n"]


@pytest.mark.parametrize("value", NONSENSE)
def test_a_cuda_device_that_is_none_makes_cuda_unavailable(value, monkeypatch):
    monkeypatch.setenv("NUMFUSE_CUDA_DEVICE", value)
    monkeypatch.setattr(libcuda, "count", lambda: 2)
    monkeypatch.delitem(LOADED, "cuda", raising=False)
    status = nf.backends()["cuda"]
    assert not status
    assert f"NUMFUSE_CUDA_DEVICE must be the number of a CUDA device below 2, got {value!r}" in str(
        status
    )
    with pytest.raises(nf.BackendUnavailable, match="NUMFUSE_CUDA_DEVICE"):
        nf.silu_mul(np.ones(2), np.ones(2), backend="cuda")


@pytest.mark.parametrize(("value", "device"), [("1", 1), ("", 0), ("00", 0), ("cuda:1", 1)])
def test_a_cuda_device_is_named_by_its_number(value, device, monkeypatch):
    monkeypatch.setenv("NUMFUSE_CUDA_DEVICE", value)
    monkeypatch.setattr(libcuda, "count", lambda: 2)
    monkeypatch.delitem(LOADED, "cuda", raising=False)
    try:
        assert load("cuda").ordinal == device
    finally:
        LOADED.pop("cuda", None)


@pytest.mark.parametrize("value", ["nonsense", "-1", "9" * 5000, "\n"])
def test_an_adapter_that_is_none_makes_webgpu_unavailable(value, monkeypatch):
    pytest.importorskip("wgpu")
    if not nf.backends()["webgpu"]:
        unavailable("webgpu", str(nf.backends()["webgpu"]))
    monkeypatch.setenv("NUMFUSE_WEBGPU_ADAPTER", value)
    monkeypatch.delitem(LOADED, "webgpu", raising=False)
    for module in ("numfuse.backends.webgpu", "numfuse.backends.webgpu.face"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert "NUMFUSE_WEBGPU_ADAPTER" in str(nf.backends()["webgpu"])
