"""What every test shares: the `backend` fixture, what may be skipped, and how Hypothesis draws.

``NUMFUSE_REQUIRE="cpu,webgpu"`` names what this machine must be able to run: where one of them is
missing, the tests that need it fail instead of being skipped.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any, NoReturn

import hypothesis
import numpy as np
import pytest
import weekly
from tolerance import DTYPES

import numfuse as nf
from numfuse import definitions
from numfuse.backends import Traits, resolve

#: Whether CUDA kernels run in Numba's simulator, a million times slower than on a GPU.
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
if SIMULATED:
    import simulator

    simulator.install()
    # What a device gives is held to what the same call gives of NumPy arrays, whose backend need
    # not be one that compiles.
    sys.modules["numfuse.backends"].DEFAULT = "reference"  # type: ignore[attr-defined]
#: The precision of every product on CUDA of the dtype that it is for, where the suite is run once
#: more for that.
PRECISION = os.environ.get("NUMFUSE_TEST_PRECISION")
if PRECISION:
    from numfuse.backends.cuda.plan.program import Recorder

    usual = Recorder.__init__
    Recorder.__init__ = lambda self, device, _: usual(self, device, PRECISION)  # type: ignore[method-assign]
#: Of every test, so many sets of parameters run there.
SIMULATED_SETS = int(os.environ.get("NUMFUSE_TEST_SETS", "2"))
#: Every backend that has a name: one joins the suite with its line in `numfuse.backends`.
BACKENDS = tuple(nf.backends())
#: The kinds of array that a conformance test is run on: NumPy's, numfuse's own on a device, CuPy's.
ARRAYS = ("host", "device", "cupy")
REQUIRED = {name.strip() for name in os.environ.get("NUMFUSE_REQUIRE", "").split(",")} - {""}

# Compilers make millions of objects, hardly any of them garbage in cycles: to search for it after
# each 700, as Python does, takes a twentieth of a run.
gc.set_threshold(50_000, 20, 20)

# Derandomised: the same commit draws the same examples everywhere, and a failure is nobody's luck.
# HYPOTHESIS_PROFILE=explore draws new ones, many more.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    max_examples=12,
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def torch_on_a_gpu() -> Any:
    """Return PyTorch, for a file that has tensors of a GPU; skip it where there is none.

    With NUMFUSE_TEST_TENSORS those of the CPU are a simulated GPU's (`simulated_tensors`).
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    status = nf.backends()["cuda"]
    if not status:
        unavailable("cuda", str(status))
    if SIMULATED and os.environ.get("NUMFUSE_TEST_TENSORS"):
        import simulated_tensors

        simulated_tensors.install()
        return torch
    if SIMULATED or not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU here", allow_module_level=True)
    return torch


def unavailable(name: str, reason: str) -> NoReturn:
    """Skip a test, or a file, for want of a backend or an adapter; fail where it is required."""
    if name in REQUIRED:
        pytest.fail(f"NUMFUSE_REQUIRE names {name!r}, but: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of activations and epilogues that are registered in a test vanish after it."""
    # as an attribute of the package, `activations` is the function
    monkeypatch.setattr(sys.modules["numfuse.activations.table"], "TABLE", nf.activations())
    monkeypatch.setattr(definitions, "TABLE", dict(definitions.TABLE))


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """What earlier files left alive is no longer searched for garbage: a second a collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend in turn."""
    name: str = request.param
    status = nf.backends()[name]
    if not status:
        unavailable(name, str(status))
    return name


@pytest.fixture
def webgpu_device() -> Any:
    """The device of the WebGPU backend."""
    status = nf.backends()["webgpu"]
    if not status:
        unavailable("webgpu", str(status))
    from numfuse.backends import load

    backend: Any = load("webgpu")
    return backend.device


@pytest.fixture
def submits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The labels of what WebGPU dispatched, call by call, of which none waits."""
    from numfuse.backends.webgpu import tiling
    from numfuse.backends.webgpu.device.forks import DEVICES
    from numfuse.backends.webgpu.device.submits import Submits

    found: list[list[str]] = []
    give = Submits._give

    def given(self: Submits, calls: Any, dispatches: Any = (), copies: Any = ()) -> None:
        each = [*[call for _, call in calls], dispatches]
        found.extend([how.label.partition(" ")[0] for how, _, _ in x] for x in each if x)
        give(self, calls, dispatches, copies)

    usual, known = tiling.WAITING_BYTES, list(DEVICES)
    monkeypatch.setattr(tiling, "WAITING_BYTES", 0)
    for device in known:
        if not device.lost:
            device.submit()
            monkeypatch.setattr(device, "most", 0)
            monkeypatch.setattr(device, "left", 0)
    monkeypatch.setattr(Submits, "_give", given)
    yield found
    for device in list(DEVICES):
        if device not in known:  # the first of the process, say: later tests have it too
            device.most = device.left = usual


@cache
def traits(backend: str) -> Traits | None:
    """Return what a backend leaves open; None where it cannot run here."""
    return resolve(backend).traits if nf.backends()[backend] else None


@cache
def device_of(backend: str) -> str:
    """Return the name of the device that a backend's calls must run on."""
    one = np.ones(1, DTYPES[served(backend)[0]])
    nf.silu_mul(one, one, backend=backend)
    call = nf.last_call()
    assert call is not None
    return call.device


@cache
def served(backend: str) -> tuple[str, ...]:
    """Return the names of the dtypes that a backend computes, as far as is known here."""
    found = traits(backend)
    return tuple(name for name in DTYPES if found is None or name in found.dtypes)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # marks before -m chooses, and the order at the end
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Leave out what a backend's device has no dtype for, named by a parameter or by a mark.

    ``test_a_dtype_that_is_not_served_is_a_type_error`` holds it to refuse those. The long tests
    come first, so that no process waits for one at the end.
    """
    kept, left = [], []
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        mark = item.get_closest_marker("dtype")
        dtype = mark.args[0] if mark else parameters.get("dtype")
        backend = parameters.get("backend")
        without = backend is not None and dtype in DTYPES and dtype not in served(backend)
        memory = item.get_closest_marker("memory")
        found = traits(backend) if backend in BACKENDS else None
        without |= None not in (memory, found) and found.memory != memory.args[0]
        arrays = parameters.get("arrays", "host")
        kind = item.get_closest_marker("kind")
        without |= kind is not None and backend in BACKENDS and not _has(backend, kind.args[0])
        without |= weekly.is_left_out(item.nodeid)
        if backend in BACKENDS:
            without |= arrays != "host" and not _there(item, arrays, backend, dtype)
        (left if without else kept).append(item)
    kept = _few(kept, left) if SIMULATED else _covering(kept, left)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
    _mark_quick(items)
    yield
    items.sort(key=_turn)


def _has(backend: str, kind: str) -> bool:
    """Whether a backend that can run here has problems of this kind."""
    return traits(backend) is None or hasattr(resolve(backend), kind)


def _there(item: pytest.Item, arrays: str, backend: str, dtype: str | None) -> bool:
    """Whether a test can be given arrays of this kind of a device."""
    if item.get_closest_marker("host"):
        return False
    found = traits(backend)
    if arrays == "cupy":
        # CuPy takes no bfloat16
        taken = found is not None and "cupy" in found.libraries
        return taken and find_spec("cupy") is not None and dtype != "bfloat16"
    return found is None or found.memory == "device"


def _turn(item: pytest.Item) -> int:
    """Return 0 for a long test that shares its work with others (so one process does it), 1, 2."""
    mark = item.get_closest_marker("long")
    return 2 if mark is None else 0 if mark.kwargs.get("shared") else 1


def _mark_quick(items: list[pytest.Item]) -> None:
    """Mark one set of parameters of each test that is not long; the backends take turns."""
    tests: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        backend = getattr(getattr(item, "callspec", None), "params", {}).get("backend", "")
        missing = backend in BACKENDS and traits(backend) is None
        if not missing and item.get_closest_marker("long") is None:
            sets = tests.setdefault(item.nodeid.partition("[")[0], {})
            sets.setdefault(backend, []).append(item)
    for turn, sets in enumerate(tests.values()):
        found = list(sets.values())[turn % len(sets)]
        found[turn % len(found)].add_marker("quick")


@cache
def compiles_slowly(backend: str) -> bool:
    """Return whether a backend's device, a processor, takes 0.3 s for the kernel of a product."""
    found = traits(backend)
    if found is None or found.memory != "device":
        return False
    return "llvmpipe" in str(resolve(backend).describe()["device"])


def _is_covered(backend: str) -> bool:
    """Return whether sets of parameters that compile are too many to be all run on a backend."""
    return compiles_slowly(backend) or (backend == "cpu" and not weekly.ALL)


def _covering(items: list[pytest.Item], left: list[pytest.Item]) -> list[pytest.Item]:
    """Of tests whose sets take long, or are compiled, sets that have every value of each parameter.

    The rest joins `left`.
    """
    sets: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        call = getattr(item, "callspec", None)
        backend = call.params.get("backend", "") if call is not None else ""
        compiles = item.get_closest_marker("compiles") and backend in BACKENDS
        covered = (compiles and _is_covered(backend)) or weekly.is_covered(item.name)
        if covered and not _is_skipped(item):  # (what does not run holds no value)
            sets.setdefault((item.nodeid.partition("[")[0], backend), []).append(item)
    dropped: set[pytest.Item] = set()
    for found in sets.values():
        values = {item: set(enumerate(item.nodeid.split("-"))) for item in found}
        dropped |= set(found) - weekly.covering(values)
    left += [item for item in items if item in dropped]
    return [item for item in items if item not in dropped]


def _is_skipped(item: pytest.Item) -> bool:
    """Whether a test says of itself that it does not run here."""
    return any(bool(mark.args) and mark.args[0] is True for mark in item.iter_markers("skipif"))


def _few(items: list[pytest.Item], left: list[pytest.Item]) -> list[pytest.Item]:
    """Small sets of parameters of each test, spread over all of them; the rest joins `left`."""
    sets: dict[str, list[pytest.Item]] = {}
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        found = traits(parameters["backend"]) if "backend" in parameters else None
        if found is not None and not found.simulator:
            continue
        lengths = [x for x in parameters.values() if type(x) is int]
        if prod(lengths) > 10_000 or max(lengths, default=0) > 600:
            continue
        sets.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen: set[pytest.Item] = set()
    for found in sets.values():
        step = (len(found) - 1) / max(1, min(SIMULATED_SETS, len(found)) - 1)
        chosen |= {found[round(i * step)] for i in range(min(SIMULATED_SETS, len(found)))}
    left += [item for item in items if item not in chosen]
    return [item for item in items if item in chosen]


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"numfuse {nf.__version__}"]
    for name, status in nf.backends().items():
        lines.append(f"  {name}: {status}")
        found = traits(name)
        if found is not None and found.memory == "device":
            told = resolve(name).describe()
            others = f", of {'; '.join(told['adapters'])}" if "adapters" in told else ""
            lines.append(f"  {name} on {told['device']}{others}")
    if REQUIRED:
        lines.append(f"  required: {', '.join(sorted(REQUIRED))}")
    return lines
