"""Importing numfuse is cheap, takes nothing optional, and arrows between modules point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import numfuse

PACKAGE = Path(numfuse.__file__).parent
OPTIONAL = (
    "torch", "jax", "jaxlib", "autograd", "dask", "cupy", "wgpu", "numba_cuda", "sklearn",
    "matplotlib", "rich", "hypothesis", "mpmath", "threadpoolctl",
)  # fmt: skip
CORE = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in ("adapters", "cli", "__main__.py")
]

BLOCK = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Blocked())
BLOCKED = {OPTIONAL!r}
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def imports(path: Path) -> set[str]:
    """Every module that an import statement in the file names, inside functions too."""
    return imports_of(ast.walk(ast.parse(path.read_text(encoding="utf-8"))), path)


def imports_at_run_time(path: Path) -> set[str]:
    """Every module that the file imports when it runs, not for its annotations alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = imports_of((node for node in ast.walk(tree) if id(node) not in typing), path)
    # `from numfuse import language` names the package and the room, `import x` of a class neither
    return {name for name in found if is_module(name)} - {"numfuse"} | (
        {"numfuse"} if path.parent.name == "cli" else set()
    )


def is_module(name: str) -> bool:
    """Whether a dotted name is that of a module or a package of numfuse."""
    parts = name.split(".")
    path = PACKAGE.joinpath(*parts[1:])
    return parts[0] == "numfuse" and (path.is_dir() or path.with_suffix(".py").exists())


def imports_of(nodes: Iterable[ast.AST], path: Path) -> set[str]:
    """Every module that the import statements among the nodes name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_importing_takes_neither_a_compiler_nor_a_device_library():
    heavy = ("numba", "llvmlite", "scipy", "ml_dtypes", *OPTIONAL)
    loaded = run(f"import sys, numfuse; print([name for name in {heavy!r} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_public_functions_take_neither_until_they_are_called():
    loaded = run(
        "import sys, numfuse\n"
        "for name in numfuse.__all__: getattr(numfuse, name)\n"
        "print([name for name in ('numba', 'scipy', 'ml_dtypes', 'torch') if name in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_importing_takes_less_than_a_tenth_of_a_second_beyond_numpy():
    code = (
        "import numpy, time; start = time.perf_counter(); import numfuse;"
        "print(time.perf_counter() - start)"
    )
    # The fastest of a few: a busy machine delays an import, and nothing speeds one up.
    assert min(float(run(code)) for _ in range(5)) < 0.1


def test_the_core_runs_with_every_optional_package_blocked():
    out = run(
        BLOCK + "import numpy as np, numfuse as nf\n"
        "x = np.ones((3, 3), np.float32)\n"
        "for backend in ('reference', 'cpu'):\n"
        "    out = nf.matmul_bias_activation(x, x, x[0], 'gelu', backend=backend)\n"
        "    nf.matmul_bias_activation_bwd(x, x, x, x[0], 'gelu', backend=backend)\n"
        "    print(out.shape)\n"
    )
    assert out.split("\n")[:2] == ["(3, 3)", "(3, 3)"]


def test_without_numba_the_cpu_backend_says_so_and_the_reference_runs():
    out = run(
        BLOCK + "BLOCKED += ('numba', 'llvmlite')\n"
        "import numpy as np, numfuse as nf\n"
        "x = np.ones((2, 2))\n"
        "print(nf.silu_mul(x, x, backend='reference').shape)\n"
        "try:\n"
        "    nf.silu_mul(x, x)\n"
        "except nf.BackendUnavailable as error:\n"
        "    print(error)\n"
    )
    assert out.startswith("(2, 2)\nbackend 'cpu' is not available: the module")


@pytest.mark.parametrize("name", ["torch", "jax", "dask", "autograd"])
def test_an_adapter_is_looked_for_only_when_its_array_arrives(name):
    out = run(
        "import sys, numpy as np, numfuse as nf\n"
        "x = np.ones((2, 2))\n"
        "nf.silu_mul(x, x, backend='reference')\n"
        f"print(any(m.startswith('numfuse.adapters') or m == {name!r} for m in sys.modules))"
    )
    assert out.strip() == "False"


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_core_module_imports_an_adapter_or_an_optional_package(path):
    found = imports(path)
    assert not {name for name in found if name.startswith("numfuse.adapters")}
    # A backend may need the library of its device; the rest may need none.
    device = {"cuda": {"cupy", "numba_cuda"}, "webgpu": {"wgpu"}}
    parts = path.relative_to(PACKAGE).parts
    own = device.get(Path(parts[1]).stem, set()) if parts[0] == "backends" and parts[1:] else set()
    assert not {name.partition(".")[0] for name in found} & (set(OPTIONAL) - own)


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_backend_imports_another(path):
    parts = path.relative_to(PACKAGE).parts
    inside = parts[0] == "backends" and parts != ("backends", "__init__.py")
    own = Path(parts[1]).stem if inside else None
    rooms = {entry.stem for entry in (PACKAGE / "backends").iterdir()}
    named = {
        name.split(".")[2] for name in imports(path) if name.startswith("numfuse.backends.")
    } & rooms
    # The device functions of an activation are compiled by the backend's own primitives.
    allowed = {own} if own else set()
    assert named <= allowed


# A room may import those to its right. The backends' own rooms come after `backends`, the protocol.
ARROWS = {
    "numfuse": {
        "activations", "backends", "devices", "differentials", "functional", "runtime", "webgpu",
    },
    "adapters": {
        "activations", "backends", "backends.cpu", "backends.cuda", "backends.webgpu", "devices",
        "differentials", "epilogues", "expr", "functional", "language", "problem", "runtime",
    },
    "cli": {"numfuse", "backends", "backends.cpu"},
    "functional": {"activations", "backends", "problem", "runtime"},
    "differentials": {"activations", "backends", "functional", "problem", "runtime"},
    "devices": {"activations", "backends", "problem", "runtime"},
    "webgpu": {"backends"},
    "backends.cpu": {"backends", "epilogues", "expr", "language", "problem", "runtime", "tiling"},
    "backends.cuda": {
        "activations", "backends", "epilogues", "expr", "language", "problem", "runtime", "tiling",
    },
    "backends.webgpu": {
        "activations", "backends", "epilogues", "expr", "language", "problem", "runtime", "webgpu",
    },
    "backends.reference": {"backends", "epilogues", "language", "problem"},
    "backends": {"runtime"},
    "problem": {"activations"},
    "activations": {"expr", "language", "runtime"},
    "epilogues": {"language"},
    "expr": {"language"},
    "language": {"expr"},
    "runtime": {"expr", "language"},
    "tiling": set(),
    "errors": set(),
}  # fmt: skip


def room(module: str) -> str:
    """Return the room of a module: a folder, a module of the root, or one backend."""
    parts = module.split(".")
    if len(parts) > 2 and parts[1] == "backends" and parts[2] in BACKENDS:
        return ".".join(parts[1:3])
    return parts[min(1, len(parts) - 1)]


BACKENDS = {path.stem for path in (PACKAGE / "backends").iterdir()} - {"__init__", "__pycache__"}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_arrows_between_rooms_point_one_way(path):
    own = room(
        ".".join(["numfuse", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
            ".__init__"
        )
    )
    if own == "__main__":
        return
    found = {
        room(module)
        for module in imports_at_run_time(path)
        if module.startswith("numfuse.") or module == "numfuse"
    }
    assert found - {own, "errors"} <= ARROWS[own]
