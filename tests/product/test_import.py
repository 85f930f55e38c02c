"""Importing numfuse is cheap, takes nothing optional, and arrows between modules point one way."""

from __future__ import annotations

import ast
import functools
import re
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


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that an import statement in the file names, inside functions too."""
    return imports_of(ast.walk(ast.parse(path.read_text(encoding="utf-8"))), path)


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


def module_of(path: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = ["numfuse", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
BACKENDS = {path.stem for path in (PACKAGE / "backends").iterdir()} - {"__init__", "__pycache__"}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    """Every node of a module, which several tests look at: to walk is what takes them longest."""
    return list(ast.walk(tree_of(module)))


def nodes_that_run(module: str) -> list[ast.AST]:
    """Return the nodes of a module but those that are there for annotations alone."""
    typing = {
        id(inner)
        for node in nodes_of(module)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    return [node for node in nodes_of(module) if id(node) not in typing]


@functools.cache
def reached(module: str) -> set[str]:
    """Return the modules of numfuse that one reaches when it runs.

    That is by an import anywhere, inside functions too, or by a string that is a module's name.
    """
    found: set[str] = set()
    for node in nodes_that_run(module):
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from numfuse.language import wgsl` needs wgsl; what else is imported, the module has
            found |= inner & MODULES.keys()
            if inner - MODULES.keys():
                found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found.add(node.value.rstrip("."))  # (f"numfuse.cli.{name}" has a part with a point)
    return found & MODULES.keys() - {module}


#: {room: the rooms it may reach}, from the ground up: each of them stands above its own line.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "language": set(),
    "tiling": set(),
    "moduli": set(),
    "expr": {"language"},
    "epilogues": {"language"},
    "runtime": {"expr", "language"},
    "kept": {"runtime"},
    "activations": {"errors", "expr", "language", "runtime"},
    "problem": {"activations", "epilogues", "language", "runtime"},
    "backends": {"errors", "runtime"},
    "backends.reference": {"backends", "epilogues", "language", "problem"},
    "backends.cpu": {
        "backends", "epilogues", "errors", "expr", "kept", "language", "moduli", "problem",
        "runtime", "tiling",
    },
    "backends.cuda": {
        "activations", "backends", "epilogues", "errors", "expr", "language", "moduli", "problem",
        "runtime", "tiling",
    },
    "webgpu": {"backends"},
    "backends.webgpu": {
        "activations", "backends", "epilogues", "errors", "expr", "kept", "language", "problem",
        "runtime",
    },
    "operations": {"activations", "backends", "problem", "runtime"},
    "functional": {"activations", "backends", "operations", "problem"},
    "differentials": {"functional", "operations", "problem"},
    "definitions": {"activations", "epilogues", "expr", "language", "runtime"},
    "fused_operations": {
        "backends", "definitions", "epilogues", "operations", "problem", "runtime",
    },
    "fusion": {"functional", "fused_operations", "problem"},
    "gated": {"activations", "epilogues", "functional", "fused_operations", "problem"},
    "jets": {"backends", "functional", "operations", "problem", "runtime"},
    "epilogue_jets": {
        "backends", "definitions", "functional", "fused_operations", "jets", "problem", "runtime",
    },
    "packs": {"problem", "runtime"},
    "repeats": {"activations", "backends", "kept", "packs", "problem", "runtime"},
    "perceptron": {
        "activations", "functional", "jets", "kept", "packs", "problem", "runtime", "tiling",
    },
    "networks": {
        "backends", "functional", "kept", "packs", "perceptron", "problem", "repeats", "runtime",
    },
    "chains": {
        "differentials", "functional", "fusion", "kept", "networks", "perceptron", "problem",
        "runtime",
    },
    "multilayer": {
        "backends", "chains", "functional", "kept", "networks", "perceptron", "problem", "repeats",
        "runtime",
    },
    "devices": {"activations", "backends", "problem", "runtime"},
    "tuning": {"backends", "devices"},
    "adapters": {
        "activations", "backends", "backends.cpu", "backends.cuda", "backends.webgpu", "chains",
        "definitions", "devices", "differentials", "epilogue_jets", "epilogues", "errors", "expr",
        "functional", "fused_operations", "fusion", "gated", "jets", "kept", "language",
        "multilayer", "networks", "operations", "perceptron", "problem", "repeats", "runtime",
    },
    # The one that names the backends and the adapters to the core.
    "registry": {
        "activations", "adapters", "backends", "backends.cpu", "backends.cuda",
        "backends.reference", "backends.webgpu", "runtime",
    },
    "numfuse": {
        "activations", "backends", "definitions", "devices", "differentials", "epilogue_jets",
        "errors", "functional", "fusion", "gated", "jets", "multilayer", "networks", "packs",
        "registry", "runtime", "tuning", "webgpu",
    },
    # The public functions only, but for the benchmark's ceilings, PyTorch's modules and what `info`
    # tells of JAX.
    "cli": {"adapters", "numfuse", "backends", "backends.cpu", "expr"},
    "__main__": {"cli", "numfuse"},
}  # fmt: skip


def room(module: str) -> str:
    """Return the room of a module: a folder, a module of the root, or one backend."""
    parts = module.split(".")
    if len(parts) > 2 and parts[1] == "backends" and parts[2] in BACKENDS:
        return ".".join(parts[1:3])
    return parts[min(1, len(parts) - 1)]


@pytest.mark.parametrize("module", MODULES)
def test_arrows_between_rooms_point_one_way(module):
    own = room(module)
    assert {room(other) for other in reached(module)} - {own} <= ARROWS[own]


def test_the_table_of_arrows_has_every_room_above_those_it_reaches():
    assert ARROWS.keys() == {room(module) for module in MODULES}
    order = list(ARROWS)
    for own, others in ARROWS.items():
        assert all(order.index(other) < order.index(own) for other in others), own


def test_no_modules_reach_each_other():
    graph = {module: reached(module) for module in MODULES}
    while True:  # take away what reaches nothing that is left, and what nothing left reaches
        reaching = {other for others in graph.values() for other in others}
        ends = {module for module, others in graph.items() if not others or module not in reaching}
        if not ends:
            break
        graph = {module: others - ends for module, others in graph.items() if module not in ends}
    assert not graph


@pytest.mark.parametrize("module", MODULES)
def test_no_module_reaches_for_the_underscore_names_of_another(module):
    names: dict[str, str] = {}
    taken: set[str] = set()
    for node in nodes_of(module):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("numfuse"):
            taken |= {alias.name for alias in node.names}
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in nodes_of(module):
        if isinstance(node, ast.Attribute) and names.get(ast.unparse(node.value)) in MODULES:
            taken.add(node.attr)
    private = {name for name in taken if name.startswith("_") and not name.startswith("__")}
    assert not private


FOLDERS = [path.parent for path in sorted(PACKAGE.rglob("*/__init__.py"))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda x: x.relative_to(PACKAGE).as_posix())
def test_a_folder_that_lists_its_files_lists_them_all(folder):
    """A newcomer finds a file by its folder's docstring, where that is a list."""
    said = ast.get_docstring(tree_of(module_of(folder / "__init__.py"))) or ""
    listed = said.partition("\n- ")[2]
    if listed:
        files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        files |= {path.parent.name for path in folder.glob("*/__init__.py")}
        assert files <= set(re.findall(r"`(\w+)`", listed)), folder
