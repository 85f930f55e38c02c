"""What every test shares: the `backend` fixture, what may be skipped, and how Hypothesis draws.

``NUMFUSE_REQUIRE="cpu,webgpu"`` names what this machine must be able to run: where one of them is
missing, the tests that need it fail instead of being skipped.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import NoReturn

import ahead
import hypothesis
import numpy as np
import pytest
from tolerance import DTYPES

import numfuse as nf
from numfuse.backends import resolve

#: Whether CUDA kernels run in Numba's simulator, a million times slower than on a GPU.
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
#: Of every test, so many sets of parameters run there.
SIMULATED_SETS = 2
#: The kinds of array that a conformance test is run on: NumPy's, numfuse's own on a device, CuPy's.
ARRAYS = ("host", "device", "cupy")
REQUIRED = {name.strip() for name in os.environ.get("NUMFUSE_REQUIRE", "").split(",")} - {""}

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


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ahead.Plugin())


def unavailable(name: str, reason: str) -> NoReturn:
    """Skip a test, or a file, for want of a backend or an adapter; fail where it is required."""
    if name in REQUIRED:
        pytest.fail(f"NUMFUSE_REQUIRE names {name!r}, but: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of activations that are registered in a test vanish after it."""
    # as an attribute of the package, `activations` is the function
    monkeypatch.setattr(sys.modules["numfuse.activations"], "_TABLE", nf.activations())


@pytest.fixture(scope="session", params=["reference", "cpu", "cuda", "webgpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend in turn."""
    name: str = request.param
    status = nf.backends()[name]
    if not status:
        unavailable(name, str(status))
    return name


@cache
def device_of(backend: str) -> str:
    """The name of the device that a backend's calls must run on."""
    if backend == "webgpu":
        from numfuse.backends.webgpu.device.adapters import choose

        return choose().name  # as NUMFUSE_WEBGPU_ADAPTER asks
    nf.silu_mul(np.ones(1), np.ones(1), backend=backend)
    call = nf.last_call()
    assert call is not None
    return call.device


@cache
def served(backend: str) -> tuple[str, ...]:
    """The names of the dtypes that a backend computes on its device."""
    if backend != "webgpu" or not nf.backends()[backend]:
        return tuple(DTYPES)
    known = resolve(backend).describe()["dtypes"]
    return tuple(name for name in DTYPES if name in known)


@cache
def flushes(backend: str) -> tuple[str, ...]:
    """The names of the dtypes of which a backend says that subnormal numbers may count as zero."""
    return tuple(resolve(backend).describe().get("flushes subnormals", ()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a backend's device has no dtype for, named by a parameter or by a mark.

    ``test_a_dtype_that_is_not_served_is_a_type_error`` holds it to refuse those.
    """
    kept, left = [], []
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        mark = item.get_closest_marker("dtype")
        dtype = mark.args[0] if mark else parameters.get("dtype")
        backend = parameters.get("backend")
        without = backend is not None and dtype in DTYPES and dtype not in served(backend)
        arrays = parameters.get("arrays", "host")
        without |= arrays != "host" and not _there(item, arrays, backend, dtype)
        (left if without else kept).append(item)
    if SIMULATED:
        kept = _few(kept, left)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _there(item: pytest.Item, arrays: str, backend: str, dtype: str | None) -> bool:
    """Whether a test can be given arrays of this kind of a device."""
    if backend not in ("cuda", "webgpu") or item.get_closest_marker("host"):
        return False
    if arrays == "cupy":
        # CuPy takes no bfloat16
        return backend == "cuda" and not SIMULATED and _cupy() and dtype != "bfloat16"
    return True


@cache
def _cupy() -> bool:
    return find_spec("cupy") is not None and bool(nf.backends()["cuda"])


def _few(items: list[pytest.Item], left: list[pytest.Item]) -> list[pytest.Item]:
    """Small sets of parameters of each test, spread over all of them; the rest joins `left`."""
    sets: dict[str, list[pytest.Item]] = {}
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("backend", "cuda") != "cuda":
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
    found = nf.backends()
    lines = [f"numfuse {nf.__version__}"]
    lines += [f"  {name}: {status}" for name, status in found.items()]
    if found["webgpu"]:
        device = resolve("webgpu").describe()
        lines.append(f"  webgpu on {device['device']}, of {'; '.join(device['adapters'])}")
    if found["cuda"]:
        lines.append(f"  cuda on {resolve('cuda').describe()['device']}")
    if REQUIRED:
        lines.append(f"  required: {', '.join(sorted(REQUIRED))}")
    return lines
