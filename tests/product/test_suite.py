"""The suite itself: what it holds every backend to, and its quick part."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import weekly

import numfuse as nf

TESTS = Path(__file__).parents[1]
ROOMS = sorted({path.parent.name for path in TESTS.glob("*/test_*.py")})
#: A file of each room that has quick tests: to collect all of them takes half a minute.
QUICK = (
    "adapters/test_adapters.py",
    "conformance/test_conformance.py",
    "cpu/test_protocol.py",
    "cuda/test_cuda_modules.py",
    "language/test_definitions.py",
    "product/test_names.py",
    "webgpu/test_template.py",
)


def test_no_property_of_every_backend_depends_on_a_backends_name():
    """A backend says in its traits what it leaves open, so that another one needs no test."""
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((TESTS / "conformance").glob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bbackend (==|!=|in|not in) |indirect=True", line)
    ]
    assert not found, "\n".join(found)


def test_a_test_of_an_internal_says_which_promise_it_guards():
    """In its own docstring, or in its file's under "Guards"."""
    rooms = ("numfuse.backends.", "numfuse.runtime", "numfuse.problem", "numfuse.language")
    found = []
    for path in sorted(TESTS.glob("*/test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if "Guards: " in (ast.get_docstring(tree) or ""):
            continue
        inner = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            if f"{node.module}.{alias.name}".startswith(rooms)
        }
        for test in ast.walk(tree):
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
                if names & inner and not ast.get_docstring(test):
                    found.append(f"{path.name}: {test.name}")
    assert not found, "\n".join(found)


def test_what_is_kept_for_every_week_is_named_after_tests_that_there_are():
    """A test that was given another name would run in full, and nobody would see why."""
    tests = {
        f"{path.name}::{node.name}["
        for path in TESTS.glob("*/test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    names = [f"::{name}[" for name in weekly.COVERED]
    names += [name.partition("[")[0] for name in weekly.SELDOM]
    assert not [name for name in names if not any(name in test for test in tests)]


@pytest.mark.long
def test_every_room_and_every_backend_has_quick_tests():
    words = ["-m", "pytest", "--co", "-q", "-n0", "-m", "quick", "-p", "no:cacheprovider"]
    files = [f"tests/{file}" for file in QUICK]
    done = subprocess.run(
        [sys.executable, *words, *files],
        capture_output=True, text=True, timeout=300, check=False, cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    names = [line for line in done.stdout.splitlines() if "::" in line]
    for room in ROOMS:
        assert any(name.startswith(f"tests/{room}/") for name in names), room
    for backend, there in nf.backends().items():
        chosen = [x for x in names if "conformance.py" in x and re.search(rf"\b{backend}\b", x)]
        assert len(chosen) >= 10 * bool(there), backend
