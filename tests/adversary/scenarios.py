"""Processes under pressure: threads, forks, signals, little memory, damaged caches, environments.

Each scenario is a program in a process of its own. It ends well when it prints a line that begins
with "ok"; a scenario that does not, that dies or that outlasts its time is a finding. The calls and
their truths are those of a few cases that the program draws itself, so that a wrong value is seen
as well as a crash.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: Seconds that a scenario may take; kernels are compiled in most of them.
LONGEST = 600

#: What every program begins with: `check()` makes calls of some kinds and compares them.
HEAD = """
import os, signal, sys, threading, time
import numpy as np
import numfuse as nf
from numfuse import expr as ex

rng = np.random.default_rng(0)
A, B, BIAS = rng.standard_normal((37, 19)), rng.standard_normal((19, 23)), rng.standard_normal(23)
TANH = np.tanh(A @ B + BIAS)

def scaled(z, x):
    return ex.tanh(z + x)

def check(dtype=np.float64, many=True):
    a, b, bias = (x.astype(dtype) for x in (A, B, BIAS))
    near = dict(rtol=1e-10, atol=1e-12) if dtype == np.float64 else dict(rtol=2e-3, atol=1e-3)
    out = nf.matmul_bias_activation(a, b, bias, "tanh")
    np.testing.assert_allclose(out, TANH, **near)
    if many:
        d = nf.matmul_bias_activation_bwd(np.ones_like(out), a, b, bias, "tanh").d_bias
        np.testing.assert_allclose(d, (1 - TANH**2).sum(axis=0), **near)
        np.testing.assert_allclose(nf.matmul_epilogue(a, b, scaled, bias), TANH, **near)
        np.testing.assert_allclose(nf.mlp(a, [b], [bias], (), final="tanh"), TANH, **near)
"""

PROGRAMS = {
    "threads": """
failed = []
def work(i):
    try:
        for j in range(40):
            check((np.float64, np.float32)[(i + j) % 2])
            x = np.full((5 + i, 7), 0.5 + i)
            y = nf.activation_mul(x, x, ("silu", "tanh", "gelu", "relu")[(i + j) % 4])
            assert np.isfinite(y).all()
    except BaseException as error:
        failed.append(repr(error))
threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
[t.start() for t in threads]
[t.join(200) for t in threads]
assert not failed, failed
assert not any(t.is_alive() for t in threads), "a thread hangs"
print("ok")
""",
    "redefinition in threads": """
failed = []
def work(i):
    try:
        for j in range(15):
            f = nf.activation(lambda x: x * (1.0 + (i + j) % 3), name="shared")
            x = np.full((4, 3), 2.0)
            y = nf.activation_mul(x, np.ones_like(x), f)
            assert (y == 2.0 * (1 + (i + j) % 3)).all(), y
    except BaseException as error:
        failed.append(repr(error))
threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
[t.start() for t in threads]
[t.join(200) for t in threads]
assert not failed, failed[:2]
print("ok")
""",
    "fork": """
check()
for turn in range(3):
    pid = os.fork()
    if not pid:
        try:
            check()
            check(np.float32)  # (compiles in the child)
        except BaseException as error:
            print("in the child", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    check()
    assert os.waitpid(pid, 0)[1] == 0, "a child failed"
print("ok")
""",
    "fork while others call": """
check(); check(np.float32)
stop = []
def work():
    while not stop:
        check()
threads = [threading.Thread(target=work) for _ in range(3)]
[t.start() for t in threads]
children = []
import warnings
warnings.simplefilter("ignore")
for turn in range(6):
    pid = os.fork()
    if not pid:
        signal.alarm(100)
        try:
            check()
        except BaseException as error:
            print("in the child", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    children.append(pid)
    time.sleep(0.05)
codes = [os.waitpid(pid, 0)[1] for pid in children]
stop.append(1)
[t.join() for t in threads]
assert not any(codes), codes
print("ok")
""",
    "fork while another compiles": """
check()
thread = threading.Thread(target=lambda: check(np.float32))
thread.start()
time.sleep(0.05)
import warnings
warnings.simplefilter("ignore")
pid = os.fork()
if not pid:
    signal.alarm(150)
    try:
        check()
        x = np.ones((3, 3), np.float32)
        nf.activation_mul(x, x, "softplus")
    except BaseException as error:
        print("in the child", repr(error), flush=True)
        os._exit(1)
    os._exit(0)
thread.join()
assert os.waitpid(pid, 0)[1] == 0, "the child failed or hung"
print("ok")
""",
    "spawn": """
import multiprocessing
def job(x):
    return float(nf.mlp(np.full((2, 2), x), [np.eye(2)], None, (), final="relu").sum())
if __name__ == "__main__":
    check()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(job, [1.0, 2.0, -1.0]) == [4.0, 8.0, 0.0]
    print("ok")
""",
    "interrupts in calls": """
big = rng.standard_normal((600, 600))
nf.matmul_bias_activation(big, big, None, "gelu"); check()
wanted = nf.matmul_bias_activation(big, big, None, "gelu")
def shoot():
    for _ in range(60):
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    done.append(1)
done, seen = [], []
signal.signal(signal.SIGINT, lambda *_: seen.append(1) or (_ for _ in ()).throw(KeyboardInterrupt))
thread = threading.Thread(target=shoot)
def calls():
    while not done:
        nf.matmul_bias_activation(big, big, None, "gelu")
        nf.mlp(big, [big, big], None, "tanh")
def outlive(f):
    while True:  # (a signal may come in the handler of the one before)
        try:
            return f()
        except KeyboardInterrupt:
            pass
outlive(thread.start)
while not done:
    outlive(calls)
outlive(thread.join)
outlive(lambda: time.sleep(0.1))
seen = len(seen)
assert seen > 5, seen
np.testing.assert_array_equal(nf.matmul_bias_activation(big, big, None, "gelu"), wanted)
check()
print("ok", seen)
""",
    "interrupts in compilation": """
names = ["silu", "gelu", "tanh", "softplus", "gelu_erf", "sigmoid"]
x = np.linspace(-2, 2, 12).reshape(3, 4)
seen = 0
for i, name in enumerate(names):
    for dtype in (np.float64, np.float32):
        y = x.astype(dtype)
        signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.03 * i)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        try:
            nf.activation_mul(y, y, name)
            nf.matmul_bias_activation_bwd(y, y, np.eye(4, dtype=dtype), None, name)
        except KeyboardInterrupt:
            seen += 1
        try:
            signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(0.01)
        except KeyboardInterrupt:
            seen += 1
        got = nf.activation_mul(y, y, name)
        wanted = nf.activation_mul(y, y, name, backend="reference")
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
check()
print("ok", seen)
""",
    "little memory": """
import faulthandler, resource
faulthandler.dump_traceback_later(100, exit=True)
# (more than 32 MiB each: no free memory of the process serves them)
big, w = (rng.standard_normal(s).astype(np.float32) for s in ((6100, 1500), (1500, 1500)))
check()
wanted = nf.matmul_bias_activation(big, w, None, "gelu")
f = nf.epilogue(lambda x, y: x * y + 1.0, name="f")
calls = (
    lambda: nf.matmul_bias_activation(big, w, None, "gelu"),
    lambda: nf.matmul_bias_activation_bwd(big, big, w, None, "gelu"),
    lambda: nf.mlp(big, [w, w], None, "tanh"),
    lambda: nf.mlp_jet(big[:, :3], [w[:3, :256], w[:256, :700]], None, "tanh"),
    lambda: nf.elementwise(f, big, big),
)
[call() for call in calls]  # (what LLVM does without memory is its own affair)
now = int(open("/proc/self/statm").read().split()[0]) * 4096
refused = 0
for more in (-1000, 0, 4, 30, 40, 60, 80, 200):
    resource.setrlimit(resource.RLIMIT_AS, (now + (more << 20), resource.RLIM_INFINITY))
    for call in calls:
        try:
            call()
        except MemoryError:
            refused += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    np.testing.assert_array_equal(nf.matmul_bias_activation(big, w, None, "gelu"), wanted)
    check()
assert refused, "nothing was short of memory"
print("ok", refused)
""",
    "beyond 2**31": """
# very many equal elements, which take no memory: indices and counts beyond 32 bits
k = 2**31 + 3
a = np.broadcast_to(np.float32(0.5), (1, k))
b = np.broadcast_to(np.float32(2.0), (k, 1))
out = nf.matmul_bias_activation(a, b, None, "none")
np.testing.assert_allclose(out, float(k), rtol=1e-4)
m = 2**31 + 5
x = np.broadcast_to(np.float32(1.0), (m, 1))
one, zero = np.ones((1, 1), np.float32), np.zeros(1, np.float32)
d = nf.matmul_bias_activation_bwd(x, x, one, zero, "none", needs=("b", "bias"))
np.testing.assert_allclose([d.d_b.item(), d.d_bias.item()], float(m), rtol=1e-4)
print("ok")
""",
}
#: Programs that are run with a cache that was damaged in some way, and the damage.
CACHES = ("truncated", "foreign", "empty", "swapped", "read-only", "gone", "a file")
#: Environments in which the plain check has to work, or to say what is wrong.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "one thread of OpenMP": {"OMP_NUM_THREADS": "1"},
    "one thread of Numba": {"NUMBA_NUM_THREADS": "1"},
    "many threads": {"NUMBA_NUM_THREADS": "64"},
    "another layer": {"NUMBA_THREADING_LAYER": "workqueue"},
    "nonsense for WebGPU": {"NUMFUSE_WEBGPU_ADAPTER": "no such thing"},
    "nonsense of our own": {"NUMFUSE_NONSENSE": "\x01", "NUMFUSE_THREADS": "many"},
    "no home": {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent/cache"},
    "another locale": {"LC_ALL": "tr_TR.UTF-8", "LANG": "C", "PYTHONUTF8": "0"},
    "optimised away": {"PYTHONOPTIMIZE": "2"},
    "no bytecode": {"PYTHONDONTWRITEBYTECODE": "1"},
    "hashes": {"PYTHONHASHSEED": "12345"},
    "a debugger of memory": {"PYTHONMALLOC": "debug", "MALLOC_PERTURB_": "165"},
    "an old processor": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
}
#: Of those, ones whose value may be refused, by an error that names it.
REFUSABLE = {"many threads": "NUMBA_NUM_THREADS", "another layer": "NUMBA_THREADING_LAYER"}


class Finding(NamedTuple):
    """What became of a program."""

    code: int
    out: str
    err: str

    @property
    def well(self) -> bool:
        return self.code == 0 and any(line.startswith("ok") for line in self.out.splitlines())


def program(text: str, environment: Mapping[str, str], folder: Path) -> Finding:
    """Run a program, from a file (spawned processes import it)."""
    path = folder / "scenario.py"
    path.write_text(HEAD + text)
    words = [sys.executable, "-X", "faulthandler", str(path)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=LONGEST, cwd=folder,
            env=dict(environment), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return Finding(-1, "", f"it took more than {LONGEST} s: {error.stderr!r:.800}")
    return Finding(done.returncode, done.stdout, done.stderr)


PLAIN = "check(); check(np.float32)\nprint('ok')\n"


def damage(cache: Path, how: str) -> None:
    """Damage the files of a cache."""
    files = sorted(x for x in cache.rglob("*") if x.is_file())
    for i, path in enumerate(files):
        data = path.read_bytes()
        if how == "truncated":
            path.write_bytes(data[: len(data) // (2 + i % 3)])
        elif how == "foreign":
            path.write_bytes(b"\x80\x04not a kernel" * 50)
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "swapped":
            other = files[(i + 1) % len(files)]
            if other.suffix == path.suffix:
                held = other.read_bytes()
                other.write_bytes(data)
                path.write_bytes(held)
    if how == "read-only":
        for path in [cache, *cache.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
    elif how in ("gone", "a file"):
        shutil.rmtree(cache)
        if how == "a file":
            cache.write_text("no folder")


def _with_cache(how: str, environment: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Yield what is wrong with calls on a damaged cache."""
    cache = folder / "cache"
    env = {**environment, "NUMBA_CACHE_DIR": str(cache)}
    made = program(PLAIN, env, folder)
    if not made.well:
        yield f"no cache was made: {made}"
        return
    damage(cache, how)
    for turn in ("the first process", "the next one"):
        found = program(PLAIN, env, folder)
        if how == "a file" and found.code and "NUMBA_CACHE_DIR" in found.err:
            return  # refused by an error that says where to look
        if not found.well:
            yield f"{turn} after it: {found.code} {found.out[-300:]} {found.err[-1200:]}"
    for path in [cache, *cache.rglob("*")]:
        if path.exists():
            path.chmod(0o755 if path.is_dir() else 0o644)


def _in_environment(name: str, environment: Mapping[str, str], folder: Path) -> Iterator[str]:
    found = program(PLAIN, {**environment, **ENVIRONMENTS[name]}, folder)
    refused = name in REFUSABLE and REFUSABLE[name] in found.err
    if not found.well and not refused:
        yield f"{found.code} {found.out[-300:]} {found.err[-1200:]}"


def _program(name: str, environment: Mapping[str, str], folder: Path) -> Iterator[str]:
    found = program(PROGRAMS[name], environment, folder)
    if not found.well:
        yield f"{found.code} {found.out[-500:]} {found.err[-1500:]}"


Scenario = Callable[[str, Mapping[str, str], Path], Iterator[str]]


def scenarios() -> dict[str, tuple[Scenario, str]]:
    """Return all scenarios by name, and what each is run with."""
    found: dict[str, tuple[Scenario, str]] = {name: (_program, name) for name in PROGRAMS}
    found |= {f"cache {how}": (_with_cache, how) for how in CACHES}
    found |= {f"with {name}": (_in_environment, name) for name in ENVIRONMENTS}
    return found


def run(names: Sequence[str], environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield what is wrong in the scenarios of these names."""
    known = scenarios()
    chosen = list(known) if "all" in names else list(names)
    for name in chosen:
        if name not in known:
            raise SystemExit(f"a scenario must be 'all' or one of {', '.join(known)}, got {name!r}")
        work, what = known[name]
        with tempfile.TemporaryDirectory(prefix="adversary-") as folder:
            env = {**os.environ, **environment}
            found = list(work(what, env, Path(folder)))
        print(f"{name}: {'FAILED' if found else 'ok'}", flush=True)
        for fault in found:
            yield {"word": f"scenario:{name}:0:0", "call": name, "fault": fault}
