"""The CUDA backend without a GPU: the conformance suite in Numba's simulator.

A process is either a simulator or a compiler, so the suite runs in one of its own, on tiles and
shapes that are small (see `conftest.SIMULATED`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import once
import pytest
import weekly
from conftest import SIMULATED, unavailable

if find_spec("numba_cuda") is None:
    unavailable("cuda-simulator", "numba-cuda is not installed")
if SIMULATED:
    pytest.skip("this is the process of the simulator", allow_module_level=True)

TESTS = Path(__file__).parents[1]
#: Files of the suite, and how many of their tests pass at least (of long sums few are short enough
#: for it); of that of higher derivatives, a part.
FILES = {
    "conformance/test_conformance.py": 6,
    "conformance/test_conformance_higher.py": 6,
    "conformance/test_special_values.py": 6,
    "conformance/test_sums.py": 2,
}
HIGHER = "exact_within or guard or zero"


ENVIRONMENT = {"NUMBA_ENABLE_CUDASIM": "1", "NUMFUSE_REQUIRE": "cuda", "PYTHONHASHSEED": "0"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=900,
        env={**os.environ, **ENVIRONMENT}, cwd=TESTS.parent,
    )  # fmt: skip


def suite(files: Iterable[str], *options: str, **variables: str) -> once.Process:
    words = [sys.executable, "-m", "pytest", "-rpfE", "-p", "no:cacheprovider"]
    paths = [f"tests/{file}" for file in files]
    return once.Process(lambda _: [*words, *paths, *options], {**ENVIRONMENT, **variables})


#: Of each test, where the process before has run the same property.
SETS = "2" if weekly.ALL else "1"
#: One process (each takes seconds to begin); not the tests that are in a process of their own.
CONFORMANCE = suite(FILES, "-k", f"cuda and not pages and (not conformance_higher.py or {HIGHER})")
#: The same where float64 is made of integers: what a product ends in, and its gradients' products.
INTEGERS = suite(
    [file for file in FILES if "test_conformance" in file],
    *("-k", f"cuda and float64 and not pages and (not conformance_higher.py or {HIGHER})"),
    NUMFUSE_TEST_PRECISION="int8", NUMFUSE_TEST_SETS=SETS,
)  # fmt: skip
NAMES = (
    "along", "arrays", "cut", "frames", "fused", "members", "networks", "series", "small", "tuned",
    "values",
)  # fmt: skip
ARRAYS = suite(
    ["conformance/test_integers.py", *(f"cuda/test_cuda_{name}.py" for name in NAMES)],
    NUMFUSE_TEST_SETS=SETS,
)

#: In a process whose tensors all say that they are on a GPU. Left out: tests of what the simulator
#: has none of, of many rows, and of tensors that are made on a GPU.
LEFT_OUT = (
    "stream", "captured", "compile", "devices", "autocast", "cupy", "step_of_training",
    "looked_at_again", "written_through", "memory_does_not",
)  # fmt: skip
TENSORS = suite(
    [f"cuda/test_{name}.py"
     for name in ("cuda_tensors", "torch_cuda", "torch_cuda_jets", "torch_cuda_values")],
    *("-k", f"not ({' or '.join(LEFT_OUT)})"),
    NUMFUSE_TEST_SETS="30", NUMFUSE_TEST_TENSORS="1",
)  # fmt: skip


def test_the_simulator_is_that_of_numba_cuda_and_runs_the_kernels():
    done = run(
        "-c",
        "import numba_cuda, numpy as np, numfuse as nf\n"
        "from numfuse.backends.cuda.compile import toolchain\n"
        "assert toolchain.SIMULATED\n"
        "assert toolchain.cuda.__file__.startswith(list(numba_cuda.__path__)[0])\n"
        "from numba.cuda.simulator.kernel import FakeCUDAKernel\n"
        "ran, call = [], FakeCUDAKernel.__call__\n"
        "def counted(self, *arguments):\n"
        "    ran.append(self.fn.__name__)\n"
        "    return call(self, *arguments)\n"
        "FakeCUDAKernel.__call__ = counted\n"
        "a = np.arange(6, dtype=np.float32).reshape(2, 3)\n"
        "out = nf.matmul_bias_activation(a, a.T.copy(), backend='cuda')\n"
        "assert (out == a @ a.T).all(), out\n"
        "assert 'product' in ran, ran\n"
        "print(nf.last_call().device, nf.last_call().tier)\n",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "cuda:0 (CUDA simulator) mirror"


@pytest.mark.long(shared=True)
@pytest.mark.parametrize("file", FILES)
def test_the_suite_passes_in_the_simulator(file):
    done = CONFORMANCE.result()
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.findall(rf"^PASSED tests/{file}::", done.stdout, re.MULTILINE)
    assert len(passed) >= FILES[file], done.stdout[-1000:]


@pytest.mark.long(shared=True)
def test_the_suite_passes_where_float64_is_made_of_integers():
    done = INTEGERS.result()
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("PASSED") >= 12, done.stdout[-1000:]


@pytest.mark.long(shared=True)  # (the longest of all: begun first)
def test_arrays_of_a_device_stay_there_in_the_simulator():
    done = ARRAYS.result()
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-1000:]


@pytest.mark.long(shared=True)
def test_pytorchs_tensors_are_nodes_in_the_simulator():
    pytest.importorskip("torch")
    done = TENSORS.result()
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("PASSED") >= 56, done.stdout[-1000:]
