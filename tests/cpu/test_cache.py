"""Compiled kernels on disk: found by the next process, never stale, and not needed.

Numba looks at a template's file and bytecode only; what else a kernel is made of is in the digest
in its name. Every case runs in processes of its own, with a cache directory of its own.

Guards: a stale kernel never runs, and a cache that is damaged or missing costs time alone.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import numfuse
from numfuse.runtime import binaries

#: Minutes of compiling, in processes of their own.
pytestmark = pytest.mark.long
PACKAGE = Path(numfuse.__file__).parent


def run(code: str, cache: Path | None, **settings: str) -> str:
    """Run `code` with Numba's cache in `cache`; None: where Numba puts it by itself."""
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    # A layer whose entries are always the same, and more than one thread on any machine.
    env |= {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"}
    if cache is not None:
        env["NUMBA_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=240, check=False, env=env | settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# One call of every kind, small and on threads, and where each kernel came from.
EVERYTHING = """
import hashlib, json, sys
import ml_dtypes, numpy as np
import numfuse as nf
from numfuse.runtime import specialise

entries = {}
plain_entry = specialise.entry
def kept_entry(template, *args, **kwargs):
    entries[template.__name__] = made = plain_entry(template, *args, **kwargs)
    return made
specialise.entry = kept_entry

rng = np.random.default_rng(0)
results = []
for size in (50, 270):
    a, b, grad = (rng.standard_normal((size, size)).astype("f4") for _ in range(3))
    bias = a[0].copy()
    results += [nf.matmul_bias_activation(a, b, bias, "gelu")]
    results += nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
results += [nf.silu_mul(a, b), *nf.silu_mul_bwd(grad, a, b)]
results += [nf.matmul_bias_activation(*(x.astype(ml_dtypes.bfloat16) for x in (a, b)))]
digest = hashlib.sha256(b"".join(x.tobytes() for x in results)).hexdigest()
print(json.dumps({
    "kernels": {kernel.name: kernel.cache_hits for kernel in specialise.kernels()},
    "entries": {name: sum(made.stats.cache_hits.values()) for name, made in entries.items()},
    "results": digest,
    "what Numba can compile": "numba.np.arraymath" in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(cache: Path) -> dict[str, dict[str, int]]:
    """What the first process of this cache reports."""
    report: dict[str, dict[str, int]] = json.loads(run(EVERYTHING, cache))
    return report


def test_the_first_process_compiles_everything_and_the_second_nothing(first, cache):
    assert len(first["kernels"]) > 8
    assert set(first["kernels"].values()) == {0}
    every = "run_here", "run_with_helpers", "help_launches", "read", "separate"
    assert first["entries"] == dict.fromkeys(every, 0)
    before = sorted(cache.rglob("*.nb?"))
    second = json.loads(run(EVERYTHING, cache))
    assert second["kernels"] == dict.fromkeys(first["kernels"], 1)
    assert second["entries"] == dict.fromkeys(first["entries"], 1)
    assert second["results"] == first["results"]
    told = "what Numba can compile"  # 0.7 s to import
    assert first[told] and not second[told]
    assert sorted(cache.rglob("*.nb?")) == before


def test_loading_a_backend_compiles_nothing(tmp_path):
    code = """
import numfuse
from numfuse.runtime import specialise
import numfuse.backends.cpu
import numfuse as nf
assert nf.backends()["cpu"]
print(specialise.kernels())
"""
    assert run(code, tmp_path).strip() == "[]"
    assert list(tmp_path.rglob("*.nb?")) == []


# A user's own activation of one name, with a formula from the command line.
OWN = """
import gc, json, sys
import numpy as np
import numfuse as nf
from numfuse.runtime import specialise

x = np.linspace(-2, 2, 48, dtype=np.float32).reshape(6, 8)
eye = np.eye(8, dtype=np.float32)

def define(factor):
    @nf.activation(source="a test")
    def mine(x):
        return factor * x * x
    return mine

def check(factor):
    out = nf.matmul_bias_activation(x, eye, None, "mine")
    assert np.allclose(out, factor * x * x, 1e-6), (factor, out / x**2)
    d_a = nf.matmul_bias_activation_bwd(np.ones_like(x), x, eye, None, "mine").d_a
    assert np.allclose(d_a, 2 * factor * x, 1e-5), factor
    assert np.allclose(nf.activation_mul(x, x, "mine"), factor * x**3, 1e-5), factor

def hits():
    rows = ("layer_row", "layer_backward_row", "gate_row")
    gc.collect()
    kernels = specialise.kernels()
    return {
        row: [k.cache_hits for k in kernels if specialise.readable_name(k.name) == row]
        for row in rows
    }
"""


def test_a_redefined_activation_never_runs_the_stale_kernel(first, cache):
    run(
        OWN
        + """
# Each is the only one of its name: the kernels of the formula before went with it.
for factor, from_disk in ((2.0, 0), (3.0, 0), (2.0, 1), (5.0, 0)):
    define(factor)
    check(factor)
    assert all(found == [from_disk] for found in hits().values()), hits()
""",
        cache,
    )


def test_another_process_with_another_formula_of_that_name_compiles_its_own(first, cache):
    def hits(factor: float) -> dict[str, list[int]]:
        code = OWN + f"define({factor}); check({factor}); print(json.dumps(hits()))"
        found: dict[str, list[int]] = json.loads(run(code, cache))
        return found

    rows = ("layer_row", "layer_backward_row", "gate_row")
    assert hits(7.0) == {row: [0] for row in rows}
    assert hits(11.0) == {row: [0] for row in rows}
    assert hits(7.0) == {row: [1] for row in rows}


def test_one_bound_value_makes_another_kernel():
    from numfuse.backends.cpu.kernels import elementwise
    from numfuse.runtime import specialise

    def template(x):
        return x

    def name(which=template, **bindings):
        return specialise.bound(which, bindings).__name__

    import numpy as np

    different = [
        name(), name(A=1), name(A=2), name(A=1.0), name(A=True), name(A="1"), name(A=None),
        name(B=1), name(A=1, B=1), name(A=np.float32(1)), name(A=np.float64(1)),
        name(A=np.float32(0)), name(A=np.float32(-0.0)), name(elementwise.move, A=1),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert name(A=1, B=2) == name(B=2, A=1)


def test_what_has_no_identity_cannot_be_bound():
    from numfuse.runtime import specialise

    for value in (lambda x: x, [1], object()):
        with pytest.raises(TypeError, match="numfuse_key"):
            specialise.bound(lambda x: x, {"A": value})


def test_formats_activations_and_options_have_kernels_of_their_own(first):
    code = """
from numfuse.runtime import specialise
from numfuse.activations import get
from numfuse import epilogues
from numfuse.backends.cpu.kernels import library, rows
from numfuse.backends.cpu.kernels.printer import Result, Source
def gate(f, fmt, streams=False):
    sources = tuple(Source(x, x, fmt) for x in "ab")
    return rows.fused(epilogues.gate(f), fmt, sources, (Result("out", "out", fmt),), (), streams)
def gate_backward(f, fmt, guard, streams=False):
    made = epilogues.gate(f).backward()
    sources = tuple(Source(x, x, fmt) for x in ("a", "b", "grad"))
    results = Result("d_a", "out", fmt), Result("d_b", "extra", fmt)
    return rows.fused(made.guarded() if guard else made, fmt, sources, results, (), streams)
names = []
plain = specialise.bound
def bound(template, bindings):
    clone = plain(template, bindings)
    names.append(clone.__name__)
    return clone
class Uncompiled:
    def __init__(self, name): self.name = name
specialise.kernel = lambda template, **bindings: Uncompiled(bound(template, bindings).__name__)
made = []
for fmt in library.FORMATS:
    for act in ("relu", "gelu", "silu", "tanh"):
        f = get(act).curve
        for flag in (False, True):
            made += [rows.forward(f, fmt, flag, False, None if flag else fmt)]
            made += [rows.grad_pre(f, fmt, True, None, True, True, flag)]
            made += [gate_backward(f, fmt, flag, x) for x in (False, True)]
        made += [gate(f, fmt), gate(f, fmt, True)]
    made += [rows.forward(get("none").curve, fmt, x, True, None) for x in (False, True)]
    made += [rows.store(fmt), rows.column_sums(fmt)]
    acc = library.accumulator(fmt)
    made += [library.pack_a(fmt, acc), library.pack_b(fmt, acc)]
assert len({kernel.name for kernel in made}) == len(made)
"""
    run(code, None)


def kernel_names(package: Path) -> set[str]:
    """Names of kernels of a copy of the package, compiling nothing."""
    code = f"""
import sys
sys.path.insert(0, {str(package.parent)!r})
from numfuse.runtime import specialise
from numfuse.activations import get
from numfuse.backends.cpu.kernels import library, rows
assert specialise.__file__.startswith({str(package)!r})
class Uncompiled: pass
class Name(str):  # with attributes, as a kernel has them
    pass
specialise.kernel = lambda template, **bindings: Name(specialise.bound(template, bindings).__name__)
gelu = get("gelu")
print(library.gemm_cell("float32"), library.pack_a("float32", "float32"),
      rows.forward(gelu.curve, "float32", True, False, None))
"""
    return set(run(code, None).split())


def test_a_changed_source_text_makes_other_kernels(tmp_path):
    """Every file from which kernel code is made; what else Numba inlines it does not look at."""
    package = tmp_path / "numfuse"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = kernel_names(package)
    assert len(before) == 3
    assert kernel_names(package) == before
    cpu, runtime = package / "backends" / "cpu", package / "runtime"
    files = [
        *(cpu / "kernels" / f"{name}.py" for name in ("gemm", "packing")),
        *(cpu / "llvm" / f"{name}.py" for name in ("microkernel", "primitives")),
        *(runtime / f"{name}.py" for name in ("specialise", "machine_code")),
    ]
    for path in files:
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "\n# another line\n", encoding="utf-8")
        assert not kernel_names(package) & before, path
        path.write_text(text, encoding="utf-8")
    path = package / "expr.py"
    text = path.read_text(encoding="utf-8")
    assert text.count('FASTMATH = {"contract"}') == 1
    path.write_text(text.replace('{"contract"}', '{"contract", "arcp"}'), encoding="utf-8")
    assert not kernel_names(package) & before, "the compiler's options"
    path.write_text(text, encoding="utf-8")
    # The coefficients and the primitives are in formulas only.
    for name in ("arithmetic.py", "coefficients.py", "python.py", "scalar.py"):
        path = package / "language" / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "\n# another line\n", encoding="utf-8")
        changed = kernel_names(package) - before
        assert {name.rpartition("_")[0] for name in changed} >= {"layer_row"}
        path.write_text(text, encoding="utf-8")


# Root may write anywhere: without its capabilities it is a user like any other.
UNPRIVILEGED = """
import os, sys, warnings
if os.geteuid() == 0:
    import ctypes
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) == 0
try:
    open(os.path.join(INSTALL, "numfuse", "probe"), "w")
except PermissionError:
    pass
else:
    raise SystemExit("the install is not read-only")
sys.path.insert(0, INSTALL)
sys.dont_write_bytecode = True
import numpy as np
import numfuse as nf
assert nf.__file__.startswith(INSTALL), nf.__file__
from numfuse.runtime import specialise
a, b = np.random.default_rng(0).standard_normal((2, 40, 40)).astype("f4")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    out = nf.matmul_bias_activation(a, b, a[0], "relu")
    d_a, d_b, d_bias = nf.matmul_bias_activation_bwd(a, a, b, a[0], "relu")
assert np.allclose(out, np.maximum(a @ b + a[0], 0), 1e-4, 1e-4)
assert np.allclose(d_a, np.where(out > 0, a, 0) @ b.T, 1e-4, 1e-4)
caught = [w for w in caught if "numfuse" in str(w.message)]
hits = [kernel.cache_hits for kernel in specialise.kernels()]
"""


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the package that may be read and not written."""
    if sys.platform != "linux" and (os.name != "posix" or os.geteuid() == 0):
        pytest.skip("no way to give up the right to write here")
    where = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, where / "numfuse", ignore=shutil.ignore_patterns("__pycache__"))
    directories = [where, *(path for path in where.rglob("*") if path.is_dir())]
    for path in directories:
        path.chmod(0o555)
    yield where
    for path in directories:
        path.chmod(0o755)


def test_a_read_only_install_without_a_cache_runs_and_warns_once(read_only):
    home = {"HOME": str(read_only), "XDG_CACHE_HOME": str(read_only / "none")}
    code = f"INSTALL = {str(read_only)!r}" + UNPRIVILEGED
    out = run(
        code
        + """
assert len(caught) == 1, [str(w.message) for w in caught]
assert caught[0].category is RuntimeWarning
assert "NUMBA_CACHE_DIR" in str(caught[0].message)
assert hits and not any(hits)
from numfuse.backends.cpu.face import BACKEND
print(BACKEND.describe()["kernel cache"])
""",
        None,
        **home,
    )
    assert out.startswith("none: ")


def test_a_read_only_install_caches_where_it_may(read_only, tmp_path):
    code = f"INSTALL = {str(read_only)!r}" + UNPRIVILEGED
    code += """
from numfuse.backends.cpu.face import BACKEND
assert not caught
print(set(hits), BACKEND.describe()["kernel cache"])
"""
    assert run(code, tmp_path).startswith("{0} " + str(tmp_path))
    assert run(code, tmp_path).startswith("{1} " + str(tmp_path))


def test_a_read_only_install_caches_in_the_users_own_directory(read_only, tmp_path):
    code = f"INSTALL = {str(read_only)!r}" + UNPRIVILEGED + "print(set(hits), len(caught))"
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert run(code, None, **home).strip() == "{0} 0"
    assert run(code, None, **home).strip() == "{1} 0"


# --- files that are damaged, or cannot be written -------------------------------------------------
# Three kernels, where each came from, what was warned of, and where `info` says that they are.
GATE = """
import glob, json, os, resource, shutil, warnings
import numpy as np
import numfuse as nf

x = np.linspace(-3, 3, 12).reshape(3, 4)
BEFORE
from numfuse.runtime import specialise
entered = []
plain_entry = specialise.entry
def kept_entry(*args, **kwargs):
    entered.append(plain_entry(*args, **kwargs))
    return entered[-1]
specialise.entry = kept_entry
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    out = nf.silu_mul(x, x)
    AFTER
assert np.allclose(out, nf.silu_mul(x, x, backend="reference"))
from numfuse.backends.cpu.face import BACKEND
hits = [kernel.cache_hits for kernel in specialise.kernels()]
for made in entered:
    hits += made.stats.cache_hits.values() or [0]
place = BACKEND.describe()["kernel cache"]
assert all(w.category is RuntimeWarning for w in caught)
print(json.dumps([hits, [str(w.message) for w in caught], place]))
"""


def gate(cache: Path, before: str = "", after: str = "") -> tuple[list[int], list[str], Path]:
    code = GATE.replace("BEFORE", before).replace("AFTER", after)
    hits, warned, place = json.loads(run(code, cache))
    return hits, warned, Path(place)


def test_a_cache_that_is_damaged_full_or_gone_costs_a_compilation_and_one_warning(tmp_path):
    # No file can have more than 100 bytes, as on a disk that is full.
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))" if os.name == "posix" else ""
    hits, warned, place = gate(tmp_path, full)
    assert hits == [0, 0, 0]
    if full:
        assert len(warned) == 1 and str(place) in warned[0] and "NUMBA_CACHE_DIR" in warned[0]
        assert list(place.iterdir()) == []  # nor what was begun
    # A directory that disappears is made anew (there is one for each folder of templates).
    gone = f"shutil.rmtree({str(tmp_path)!r}); nf.relu_mul(x, x)"
    assert gate(tmp_path, after=gone)[1:] == ([], place)
    # (what reads arrays' forms is of another folder)
    kernels = [x for x in tmp_path.rglob("*.nbc") if "array_objects" not in x.name]
    assert len(list(place.iterdir())) == len(kernels) == 1
    assert gate(tmp_path)[:2] == ([0, 0, 0], [])
    files = sorted(x for x in tmp_path.rglob("*.nbc") if "array_objects" not in x.name)
    whole = {path: path.read_bytes() for path in files}
    assert len(whole) == 4  # (one of the gate that the call above took)
    for path, damaged in zip(
        files, (b"", whole[files[1]][:1000], whole[files[0]], os.urandom(5000)), strict=True
    ):
        path.write_bytes(damaged)
    hits, warned, _ = gate(tmp_path)
    assert hits == [0, 0, 0]
    assert len(warned) == 1 and "is damaged" in warned[0] and str(place) in warned[0]
    assert gate(tmp_path)[:2] == ([1, 1, 1], []), "not replaced"


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has warned of nothing yet."""
    monkeypatch.setattr(binaries, "_TOLD", set())
    monkeypatch.setattr(binaries, "_UNSAID", [])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=300), data=st.data())
def test_a_kept_file_is_found_whole_or_not_at_all(untold, tmp_path, body, data):
    path = tmp_path / "kernel.nbc"
    binaries.write(path, body)
    assert binaries.read(path) == body
    whole = path.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    other = bytes([whole[position] ^ data.draw(st.integers(1, 255))])
    renamed = tmp_path / "another.nbc"
    binaries.write(renamed, body)
    for damaged in (
        whole[:position], whole[:position] + other + whole[position + 1 :], whole + b"x",
        data.draw(st.binary(max_size=300)), pickle.dumps("0.60.0") + body, renamed.read_bytes(),
    ):  # fmt: skip
        path.write_bytes(damaged)
        assert binaries.read(path) is None
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["another.nbc", "kernel.nbc"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_file_that_cannot_be_written_is_told_of_once(untold, tmp_path, monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    for name in ("one", "two"):
        binaries.write(tmp_path / name, b"body")
    (told,) = binaries.unsaid()
    assert str(tmp_path / "one") in told and os.strerror(number) in told
    assert list(tmp_path.iterdir()) == [] and binaries.unsaid() == []


def test_what_is_in_the_place_of_a_file_or_directory_is_told_of_once(untold, tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "directory", tmp_path / "file" / "kernel"):
        assert binaries.read(place) is None
        binaries.write(place, b"body")
    texts = binaries.unsaid()
    assert len(texts) == 2  # cannot be read, cannot be written
    assert all(str(tmp_path) in text for text in texts)
