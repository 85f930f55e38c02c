"""Threads and processes: calls at the same time, after a fork, on any number of threads.

Numba's threading layer is chosen once in a process, and what fails here ends the process (an abort,
a deadlock, a killed child), so every case runs in a process of its own.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys

import pytest

# What every case starts with. A product of 263 x 263 x 251 is just beyond tiling.PARALLEL_FMAS, and
# no size is a multiple of a tile, a chunk or a block.
PRELUDE = """
import os, sys, threading, time
import ml_dtypes, numba, numpy as np
import numfuse as nf
from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.kernels import protocol
from numfuse.backends.cpu.launch import entries, sequence, workspace
from numfuse.backends.cpu.launch import threads as launching

M, N, K = 263, 263, 251
assert M * N * K > tiling.PARALLEL_FMAS

def operands(m, n, k, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shapes = (m, k), (k, n), (n,), (m, n)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

def forward(m=M, n=N, k=K, dtype="float32", seed=0):
    a, b, bias, grad = operands(m, n, k, dtype, seed)
    return nf.matmul_bias_activation(a, b, bias, "gelu").tobytes()

def backward(m=M, n=N, k=K, dtype="float32", seed=0):
    a, b, bias, grad = operands(m, n, k, dtype, seed)
    return b"".join(x.tobytes() for x in nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"))

def gated(m=M, n=4 * N, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    a, b, grad = (rng.standard_normal((m, n)).astype(dtype) for _ in range(3))
    results = nf.silu_mul(a, b), *nf.silu_mul_bwd(grad, a, b)
    return b"".join(x.tobytes() for x in results)

def right(result, m=M, n=N, k=K, seed=0):
    a, b, bias, _ = operands(m, n, k, "float32", seed)
    wanted = nf.matmul_bias_activation(a, b, bias, "gelu", backend="reference")
    return np.allclose(np.frombuffer(result, np.float32).reshape(m, n), wanted, 1e-3, 1e-3)

entered = set()  # names of the entries that launches took
plain_entry = launching.entry
def spied_entry(name):
    entered.add(name)
    return plain_entry(name)
launching.entry = entries.entry = spied_entry

def alone():
    return "helped" not in entered

def check_layer():
    layer = os.environ["NUMBA_THREADING_LAYER"]
    assert launching.layer() == layer, launching.layer()
    assert "helped" in entered, entered

def board():
    return [
        launching._board[protocol.BOARD_WORDS + i * protocol.PLACE_WORDS:][:protocol.PLACE_WORDS]
        for i in range(protocol.PLACES)
    ]
"""


def finished(code: str, layer: str, threads: int = 4) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": str(threads)}
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True, text=True, timeout=120, check=False, env=env,
    )  # fmt: skip


def run(code: str, layer: str, threads: int = 4) -> str:
    done = finished(code, layer, threads)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout


@functools.cache
def why_not(layer: str) -> str:
    """Empty where Numba can start this threading layer, else what it says."""
    env = os.environ | {"NUMBA_THREADING_LAYER": layer}
    done = subprocess.run(
        [sys.executable, "-c", "import numba; numba.get_num_threads()"],
        capture_output=True, text=True, timeout=60, check=False, env=env,
    )  # fmt: skip
    return "" if done.returncode == 0 else f"Numba finds no library for its layer {layer}"


def has_tbb() -> bool:
    """Whether Numba finds the library; it starts no thread before it is asked for one."""
    try:
        import numba.np.ufunc.tbbpool  # noqa: F401
    except ImportError:
        return False
    return True


#: An extra package; Numba itself brings the other layers.
TBB = pytest.param("tbb", marks=pytest.mark.skipif(not has_tbb(), reason="Numba finds no TBB"))


@pytest.fixture(params=["omp", "workqueue", TBB])
def layer(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "tbb" and why_not(name):
        pytest.skip(why_not(name))  # Numba finds it, and its version is not one that it takes
    return name


#: Under tbb a fork is Numba's business; a forked child of numfuse is serial under every layer.
FORKING = ["omp", "workqueue"]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def test_threads_that_call_at_once_get_what_single_calls_get(layer):
    run(
        """
wanted = forward(), backward(), gated()
check_layer()
wrong = []
barrier = threading.Barrier(4)
def work(t):
    barrier.wait()
    for i in range(6):
        which = (t + i) % 3
        if (forward, backward, gated)[which]() != wanted[which]:
            wrong.append((t, i))
team = [threading.Thread(target=work, args=(t,)) for t in range(4)]
for t in team: t.start()
for t in team: t.join()
assert not wrong, wrong
assert right(wanted[0])
""",
        layer,
    )


def test_the_first_calls_may_be_at_once(layer):
    """Nothing is compiled, loaded or started yet.

    But tbb, which has to be started by the main thread: a process that starts it in another one, be
    it for a prange of its own and without numfuse, never ends (Numba 0.68, TBB 2023.2).
    """
    run(
        """
if os.environ["NUMBA_THREADING_LAYER"] == "tbb":
    numba.get_num_threads()
results = [None] * 4
barrier = threading.Barrier(4)
def work(t):
    barrier.wait()
    results[t] = forward()
team = [threading.Thread(target=work, args=(t,)) for t in range(4)]
for t in team: t.start()
for t in team: t.join()
check_layer()
assert len(set(results)) == 1 and right(results[0])
""",
        layer,
    )


def test_a_pool_of_threads_with_different_shapes(layer):
    run(
        """
from concurrent.futures import ThreadPoolExecutor
rng = np.random.default_rng(7)
shapes = [tuple(int(x) for x in rng.integers(1, 300, 3)) for _ in range(24)]
shapes += [(M, N, K), (1, 1500, 3000), (3000, 1, 1500), (64, 64, 1100)]
def both(shape):
    return forward(*shape, seed=shape[0]), backward(*shape, seed=shape[0])
wanted = [both(shape) for shape in shapes]
check_layer()
with ThreadPoolExecutor(8) as pool:
    assert list(pool.map(both, shapes * 2)) == wanted * 2
""",
        layer,
    )


USERS_PRANGE = """
@numba.njit(parallel=True, nogil=True)
def users(x):
    total = 0.0
    for i in numba.prange(x.size):
        total += np.sqrt(x[i])
    return total
x = np.full(100_003, 4.0)
users(x)
stop = threading.Event()
rounds, wrong = [0], []
def loop():
    while not stop.is_set():
        rounds[0] += 1
        if users(x) != 2.0 * x.size: wrong.append(rounds[0])
"""


def test_a_users_prange_in_another_thread_is_not_disturbed(layer):
    run(
        USERS_PRANGE
        + """
wanted = forward(), backward(), gated()
user = threading.Thread(target=loop)
user.start()
deadline = time.monotonic() + 0.7
calls = 0
while time.monotonic() < deadline:
    assert (forward(), backward(), gated()) == wanted
    calls += 1
stop.set()
user.join()
check_layer()
assert calls > 1 and rounds[0] > 1 and not wrong, (calls, rounds, wrong)
""",
        layer,
    )


def test_workqueue_would_abort_if_it_were_entered_twice():
    """What the test above relies on: an entry of two threads at once does not go unnoticed."""
    code = """
team = [threading.Thread(target=loop, daemon=True) for _ in range(4)]
for t in team: t.start()
time.sleep(20)
"""
    done = finished(USERS_PRANGE + code, "workqueue")
    assert done.returncode == -signal.SIGABRT or "Concurrent access" in done.stderr


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_results_have_the_same_bits_on_any_number_of_threads(layer, dtype):
    run(
        f"""
dtype = {dtype!r}
results = []
for threads in (1, 2, 3, 4):
    numba.set_num_threads(threads)
    entered.clear()
    results.append((
        forward(dtype=dtype), backward(dtype=dtype), gated(dtype=dtype),
        # K in several blocks, and gradients that sum over many rows
        forward(67, 53, 1301, dtype), backward(1301, 53, 67, dtype),
    ))
    if threads == 1:
        assert alone(), entered
    else:
        check_layer()
assert all(result == results[0] for result in results)
""",
        layer,
    )


def test_a_backward_by_blocks_has_the_same_bits_on_any_number_of_threads(layer):
    """Four blocks of rows, on the threads of a layer and by four callers at once."""
    run(
        """
tiling.GRAD_PRE_BYTES, tiling.GRAD_PRE_ROWS, tiling.PARALLEL_FMAS = 0, 1, 0
for dtype in ("float64", "float32", "bfloat16"):
    results = []
    for threads in (1, 2, 3, 4):
        numba.set_num_threads(threads)
        entered.clear()
        launching._until = 0.0  # (a launch that waited long lets the next ones go alone)
        results.append(backward(200, 263, 70, dtype))
        if threads == 1:
            assert alone(), entered
        else:
            check_layer()
    def work(): results.append(backward(200, 263, 70, dtype))
    team = [threading.Thread(target=work) for _ in range(4)]
    for t in team: t.start()
    for t in team: t.join()
    assert len(results) == 8 and all(result == results[0] for result in results)
""",
        layer,
    )


# Threads that used the processor in one long call (in several calls they may be others). Upper
# bounds alone are certain: a thread of the team may find all cells done.
BUSY = """
def times():
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/schedstat") as f:
                found[task] = int(f.read().split()[0])
        except OSError:
            pass  # a thread that has ended
    return found

def busy():
    a, b, bias, _ = operands(2000, 1500, 2000)
    before = times()
    nf.matmul_bias_activation(a, b, bias, "gelu")
    spent = {task: t - before.get(task, 0) for task, t in times().items()}
    return sum(t > 0.02 * sum(spent.values()) for t in spent.values())
counts = []
from numfuse.backends.cpu.face import BACKEND
plain_run = BACKEND.launch
def spied_run(program, arrays):
    counts.append(program.threads)
    plain_run(program, arrays)
BACKEND.launch = spied_run
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@linux
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_in_the_environment_is_respected(layer, threads):
    code = f"""
forward()
assert launching.number() == {threads}
found = busy()
assert 1 <= found <= {threads}, found
assert set(counts) == {{{threads}}}, set(counts)
{"check_layer()" if threads > 1 else "assert alone()"}
"""
    run(BUSY + code, layer, threads)


@linux
@pytest.mark.parametrize("threads", [1, 2])
def test_set_num_threads_is_respected(layer, threads):
    code = f"""
numba.set_num_threads({threads})
forward()
assert launching.number() == {threads}
found = busy()
assert 1 <= found <= {threads}, found
assert set(counts) == {{{threads}}}, set(counts)
numba.set_num_threads(3)
counts.clear()
forward()
assert set(counts) == {{3}}
check_layer()
"""
    run(BUSY + code, layer)


def test_set_num_threads_belongs_to_the_thread_that_calls_it(layer):
    run(
        """
numba.set_num_threads(3)
seen = []
def work():
    numba.set_num_threads(1)
    entered.clear()
    forward()
    seen.append((launching.number(), alone()))
other = threading.Thread(target=work)
other.start(); other.join()
assert seen == [(1, True)], seen
assert launching.number() == 3
forward()
check_layer()
""",
        layer,
    )


def test_a_small_call_stays_in_its_thread(layer):
    # (with 32-byte vectors a product of 56 cubed goes to two threads, with 64 one of more than 64)
    run(
        """
small = forward(40, 40, 40), backward(31, 33, 35), gated(31, 33)
assert alone(), entered
""",
        layer,
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_in_a_larger_problem(dtype):
    """Rows that other threads, cells and tiles computed; K = 1100 is several blocks."""
    run(
        f"""
for k in (1, 127, 1100):
    a, b, bias, grad = operands(401, 131, k, {dtype!r})
    whole = nf.matmul_bias_activation(a, b, bias, "gelu")
    pre = nf.matmul_bias_activation(a, b, bias, "gelu", return_pre_activation=True)[1]
    d_a = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", needs=("a",)).d_a
    for start, stop in ((0, 1), (13, 14), (14, 15), (57, 171), (200, 401), (400, 401)):
        part = slice(start, stop)
        out, own = nf.matmul_bias_activation(a[part], b, bias, "gelu", return_pre_activation=True)
        assert out.tobytes() == whole[part].tobytes(), (k, part)
        assert own.tobytes() == pre[part].tobytes(), (k, part)
        g = nf.matmul_bias_activation_bwd(grad[part], a[part], b, bias, "gelu", needs=("a",))
        assert g.d_a.tobytes() == d_a[part].tobytes(), (k, part)
""",
        "workqueue",
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_member_of_a_batch_has_the_same_bits_alone(dtype):
    run(
        f"""
rng = np.random.default_rng(3)
batch, m, n, k = 80, 45, 37, 1100  # several threads for tiles too
a, b, bias, grad = (
    rng.standard_normal(shape).astype({dtype!r})
    for shape in ((batch, m, k), (batch, k, n), (batch, 1, n), (batch, m, n))
)
out = nf.matmul_bias_activation(a, b, bias, "gelu")
gradients = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
assert not alone()
entered.clear()
numba.set_num_threads(1)
for i in (0, 5, 10):
    own = nf.matmul_bias_activation(a[i], b[i], bias[i, 0], "gelu")
    assert own.tobytes() == out[i].tobytes(), i
    single = nf.matmul_bias_activation_bwd(grad[i], a[i], b[i], bias[i, 0], "gelu")
    for name, x, y in zip("a b bias".split(), single, gradients):
        assert x.tobytes() == y[i].tobytes(), (i, name)
assert alone(), entered
""",
        "workqueue",
    )


@needs_fork
@pytest.mark.parametrize("layer", FORKING)
@pytest.mark.parametrize("used", ["used", "used by threads", "unused"])
def test_a_forked_child_may_call_after_its_parent_has(layer, used):
    run(
        f"""
used = {used!r}
if used != "unused":
    wanted = forward(), backward(), gated()
    check_layer()
if used == "used by threads":
    team = [threading.Thread(target=backward) for _ in range(3)]
    for t in team: t.start()
    for t in team: t.join()
if used == "unused":
    nf.matmul_bias_activation(np.ones((2, 2)), np.ones((2, 2)))  # the backend is loaded, no more
child = os.fork()
if child == 0:
    status = 1
    try:
        assert launching.number() == 1
        entered.clear()
        got = forward(), backward(), gated()
        assert alone(), entered
        assert right(got[0]) and (used == "unused" or got == wanted)
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if forward() == got[0] else 3)
        assert os.waitpid(grandchild, 0)[1] == 0
        status = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
# The parent still has all its threads. (Its own at once may have made it wait and go alone.)
launching._until = launching._pause = 0.0
entered.clear()
got = forward(), backward(), gated()
check_layer()
assert right(got[0]) and (used == "unused" or got == wanted)
""",
        layer,
    )


@needs_fork
@pytest.mark.parametrize("layer", FORKING)
def test_workers_of_a_forking_pool_may_call(layer):
    run(
        """
import multiprocessing
wanted = [forward(seed=seed) for seed in range(4)]
check_layer()
def work(seed):
    return forward(seed=seed), os.getpid()
with multiprocessing.get_context("fork").Pool(2) as pool:
    got = pool.map(work, [0, 1, 2, 3] * 2, chunksize=1)
    pool.close()
    pool.join()
assert [result for result, _ in got] == wanted * 2
assert os.getpid() not in {pid for _, pid in got}
process = multiprocessing.get_context("fork").Process(target=work, args=(0,))
process.start()
process.join()
assert process.exitcode == 0
""",
        layer,
    )


@needs_fork
@pytest.mark.parametrize("layer", FORKING)
def test_a_parent_and_its_children_do_not_share_workspaces(layer):
    """A workspace is kept for the next call: a child's copy of it must be its own memory."""
    run(
        """
numba.set_num_threads(1)  # then parent and children keep the same one workspace
wanted = {seed: forward(seed=seed) for seed in range(3)}
children = []
for seed in (1, 2):
    child = os.fork()
    if child == 0:
        os._exit(0 if all(forward(seed=seed) == wanted[seed] for _ in range(60)) else 1)
    children.append(child)
wrong = sum(forward(seed=0) != wanted[0] for _ in range(60))
statuses = [os.waitpid(child, 0)[1] for child in children]
assert wrong == 0 and statuses == [0, 0], (wrong, statuses)
# The sure proof, whatever the scheduler did: a store by a child is not seen here.
import ctypes
word = ctypes.c_int64.from_address(workspace.pool[0].address)
word.value = 1
child = os.fork()
if child == 0:
    word.value = 2
    os._exit(0)
os.waitpid(child, 0)
assert word.value == 1
""",
        layer,
    )


@needs_fork
@pytest.mark.parametrize("layer", FORKING)
def test_a_fork_while_other_threads_are_in_a_call(layer):
    run(
        """
wanted = forward()
stop = threading.Event()
wrong = []
def loop():
    while not stop.is_set():
        if forward() != wanted: wrong.append(1)
team = [threading.Thread(target=loop) for _ in range(2)]
for t in team: t.start()
statuses = []
for _ in range(8):
    time.sleep(0.02)
    child = os.fork()
    if child == 0:
        os._exit(0 if forward() == wanted else 1)
    statuses.append(os.waitpid(child, 0)[1])
stop.set()
for t in team: t.join()
assert not wrong and statuses == [0] * 8, (wrong, statuses)
""",
        layer,
    )


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_an_interrupted_call_leaves_the_next_one_right(layer):
    run(
        """
import signal
a, b, bias, _ = operands(400, 300, 500)
out = np.empty((400, 300), np.float32)
wanted = nf.matmul_bias_activation(a, b, bias, "gelu").tobytes()
class Interrupt(KeyboardInterrupt): pass
armed = False
def handler(*_):
    global armed
    if armed:
        armed = False  # (where Python drops what a finaliser raises, the loop below ends too)
        raise Interrupt
signal.signal(signal.SIGALRM, handler)
def call_on():
    while armed:
        nf.matmul_bias_activation(a, b, bias, "gelu", out=out)
rng = np.random.default_rng(0)
interrupted = 0
deadline = time.monotonic() + 20
while interrupted < 100 and time.monotonic() < deadline:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-4, 4e-3)))
        call_on()
    except Interrupt:
        interrupted += 1
    # Nobody writes to the output of the call that was interrupted any more.
    out.fill(7)
    assert nf.matmul_bias_activation(a, b, bias, "gelu").tobytes() == wanted
    assert (out == 7).all()
assert interrupted >= 25
check_layer()
""",
        layer,
    )


def test_an_interrupt_at_any_step_of_a_launch_leaves_nothing_locked(layer):
    run(
        """
a, b, bias, _ = operands(M, N, K)
wanted = nf.matmul_bias_activation(a, b, bias, "gelu").tobytes()
class Interrupt(BaseException): pass
files = sequence.__file__, launching.__file__, threading.__file__, "<string>"
def interrupt_at(step):
    left = step
    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in files: return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if left == 0: raise Interrupt
            left -= 1
        return trace
    return trace
out = np.empty((M, N), np.float32)
sys._getframe().f_trace_opcodes = True  # Python 3.12 asks before it begins to trace
step = 0
while True:
    sys.settrace(interrupt_at(step))
    try:
        nf.matmul_bias_activation(a, b, bias, "gelu", out=out)
        break
    except Interrupt:
        step += 1
    finally:
        sys.settrace(None)
    out.fill(7)
    assert nf.matmul_bias_activation(a, b, bias, "gelu").tobytes() == wanted
    assert (out == 7).all()
assert step > 100, step
assert len(launching._helpers) <= 2 * 3, launching._helpers
assert not any(place[0] for place in board()), board()
check_layer()
""",
        layer,
    )


def test_an_exception_in_one_thread_leaves_the_others_right(layer):
    run(
        """
wanted = forward()
wrong, raised = [], []
def failing():
    for _ in range(10):
        try:
            nf.matmul_bias_activation(np.ones((3, 4)), np.ones((5, 6)))
        except ValueError:
            raised.append(1)
def working():
    for _ in range(10):
        if forward() != wanted: wrong.append(1)
team = [threading.Thread(target=f) for f in (failing, working, failing, working)]
for t in team: t.start()
for t in team: t.join()
assert len(raised) == 20 and not wrong
assert forward() == wanted
check_layer()
""",
        layer,
    )


def test_a_call_while_the_interpreter_ends_still_runs(layer):
    """No thread can be started any more: the caller computes everything."""
    out = run(
        """
import atexit
wanted = forward()
def last():
    print("same bits:", forward() == wanted)
atexit.register(last)
""",
        layer,
    )
    assert out.strip() == "same bits: True"


def test_nobody_waits_for_a_helper_that_has_not_begun():
    """Guards: another library's threads on the other cores cost a launch its helpers, no more."""
    run(
        """
wanted = forward(), backward(), gated()
launching._start_helpers = lambda count: None
launching._helpers[:] = []
time.sleep(0.2)  # those that are there sleep, and are not woken
asleep = protocol.BOARD["B_ASLEEP"]
launching._board[protocol.BOARD["B_HELPERS"]] = 0
assert launching._board[asleep] == 3
for _ in range(20):
    assert (forward(), backward(), gated()) == wanted
assert launching._board[asleep] == 3
# The seats that they were offered are withdrawn, and the place is free.
assert all(place[0] == 0 and place[protocol.PLACE["L_SEATS"]] <= 0 for place in board()), board()
""",
        "omp",
    )


def test_launches_that_wait_for_helpers_go_alone_for_a_while():
    """Guards: other work on the other cores costs a launch its helpers, no more."""
    run(
        """
wanted = forward()
check_layer()
launching._pause = 0.0  # (the first launch, of four threads, may have waited for its helpers)
for expected in (1, 3, 7):
    before = launching.time.monotonic()
    launching._note_waiting(0.4, 1.0)
    assert launching._pause == expected * launching.ALONE, launching._pause
    assert launching._until >= before + launching._pause
entered.clear()
launching._until = launching.time.monotonic() + 600
assert all(forward() == wanted for _ in range(28)) and alone()
launching._note_waiting = lambda waited, seconds: None
launching._until = launching.time.monotonic()
assert forward() == wanted and not alone()
""",
        "omp",
    )
    run(
        """
launching._pause = 0.0
for waited, expected in ((0.4, 1), (0.4, 3), (0.1, 1.5), (0.1, 0.75), (0.1, 0)):
    launching._note_waiting(waited, 1.0)
    assert launching._pause == expected * launching.ALONE, launching._pause
for _ in range(20):
    launching._note_waiting(0.4, 1.0)
assert launching._pause == launching.MOST_ALONE
""",
        "omp",
    )


def test_a_full_board_leaves_a_launch_alone():
    run(
        """
wanted = forward(), backward(), gated()
for i in range(protocol.PLACES):
    launching._board[protocol.BOARD_WORDS + i * protocol.PLACE_WORDS] = 1
before = board()
assert (forward(), backward(), gated()) == wanted
assert board() == before
""",
        "omp",
    )


@linux
def test_helpers_sleep_when_there_is_nothing_to_do():
    run(
        BUSY
        + """
forward()
time.sleep(0.2)
assert launching._board[protocol.BOARD["B_ASLEEP"]] == len(launching._helpers) == 3
before = times()
time.sleep(0.3)
after = times()
assert sum(after.values()) - sum(before.values()) < 0.1e9
wanted = forward()
assert launching._board[protocol.BOARD["B_ASLEEP"]] < 3 or forward() == wanted
""",
        "omp",
    )


@linux
@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two processors")
def test_a_helper_wakes_off_the_processor_of_its_caller_without_the_interpreters_lock():
    """Guards: beside its caller, or waiting for its lock, a helper comes milliseconds late."""
    run(
        BUSY
        + """
sys.setswitchinterval(60)  # who needs the interpreter waits for this thread to give it up
launching._note_waiting = lambda waited, seconds: None
every = os.sched_getaffinity(0)
forward()
def work(processor):
    os.sched_setaffinity(0, {processor})
    forward()
for processor in [*every][:2] * 2:
    time.sleep(0.1)  # the helper sleeps
    assert launching._board[protocol.BOARD["B_ASLEEP"]] == len(launching._helpers)
    caller = threading.Thread(target=work, args=(processor,))
    caller.start()
    caller.join()
    kept_off = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    assert every - {processor} in kept_off, (processor, kept_off)
time.sleep(0.1)
asleep = launching._board[protocol.BOARD["B_ASLEEP"]]
forward()
deadline = time.monotonic() + 5
while launching._board[protocol.BOARD["B_ASLEEP"]] < asleep:  # it came, and sleeps again
    assert time.monotonic() < deadline
""",
        "omp",
        threads=2,
    )


@linux
def test_no_memory_for_a_workspace_is_a_memory_error_and_nothing_is_written():
    run(
        """
import resource
n = 1500
a = np.ones((n, n), np.float32)
few = a[:64, :64]
out, d_a, d_b = (np.full_like(a, 7) for _ in range(3))
nf.matmul_bias_activation(few, few)
nf.matmul_bias_activation_bwd(few, few, few, None, "gelu")
launching.number()  # (it loads a library, which a large call would do first)
with open("/proc/self/statm") as f:
    mapped = int(f.read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 20), limits[1]))
def refused(call):
    try:
        call()
    except MemoryError as error:
        return "workspace" in str(error)
calls = (
    lambda: nf.matmul_bias_activation(a, a, None, "none", out=out),
    lambda: nf.matmul_bias_activation_bwd(a, a, a, None, "gelu", out=(d_a, d_b, None)),
)
said = [refused(call) for call in calls]
resource.setrlimit(resource.RLIMIT_AS, limits)
assert said == [True, True], said
assert all((x == 7).all() for x in (out, d_a, d_b))
for call in calls: call()
assert (out == n).all()
""",
        "workqueue",
        threads=1,
    )
