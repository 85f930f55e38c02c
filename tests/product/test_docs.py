"""What the pages and the docstrings show is true, and every public name is in the reference."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import unavailable

import numfuse as nf

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    page
    for page in sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
    if not {"_build", "auto_gallery", "generated"} & set(page.relative_to(ROOT).parts)
]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
# A program between fences, and the comment that says why it is not run.
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>.*) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# A page whose programs need a backend.
NEEDS = {"docs/webgpu.md": "webgpu", "docs/cuda.md": "cuda"}
# A page whose programs need other libraries.
MODULES = {
    "docs/distributed.md": ("dask.array",),
    "docs/guide/arrays.md": ("autograd", "dask.array"),
    "docs/guide/scikit_learn.md": ("sklearn",),
}


def programs(name):
    return [found for found in FENCE.finditer(TEXTS[name]) if found["why"] is None]


def line_of(name, found):
    return TEXTS[name].count("\n", 0, found.start("code")) + 1


@pytest.mark.parametrize("name", [name for name in TEXTS if programs(name)])
def test_the_programs_of_a_page_do_what_it_shows(name):
    needs = NEEDS.get(name)
    if needs is not None and not nf.backends()[needs]:
        unavailable(needs, str(nf.backends()[needs]))
    for module in MODULES.get(name, ()):
        pytest.importorskip(module)
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    for found in programs(name):
        line = line_of(name, found)
        if ">>>" in found["code"]:
            parser = doctest.DocTestParser()
            test = parser.get_doctest(found["code"], names, f"{name}:{line}", name, line - 1)
            runner.run(test, clear_globs=False)
            names.update(test.globs)
        else:
            # Lines of the page, so that a traceback leads there.
            exec(compile("\n" * (line - 1) + found["code"], str(ROOT / name), "exec"), names)
    assert runner.summarize(verbose=False).failed == 0


def modules():
    """Every module of the package that can be imported here, and that is meant to be."""
    found = []
    for info in pkgutil.walk_packages(nf.__path__, "numfuse."):
        if info.name.endswith("__main__"):
            continue
        text = Path(importlib.util.find_spec(info.name).origin).read_text(encoding="utf-8")
        if ">>>" in text:
            found.append(info.name)
    return found


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_a_modules_docstrings_are_true(name):
    module = pytest.importorskip(name, exc_type=ImportError)
    result = doctest.testmod(module, optionflags=FLAGS)
    assert result.attempted > 0 and result.failed == 0


def test_a_program_that_is_not_run_says_why():
    for name in TEXTS:
        for found in FENCE.finditer(TEXTS[name]):
            assert found["why"] is None or len(found["why"]) > 5, f"{name}:{line_of(name, found)}"


#: Public modules beside `numfuse` itself, the library that each needs, and whether the reference
#: lists the module as a whole, which shows all of its names.
MODULES_WITH_NAMES = {
    "expr": (None, True),
    "webgpu": (None, True),
    "adapters.autograd": ("autograd", False),
    "adapters.dask": ("dask.array", False),
    "adapters.jax": ("jax", False),
    "adapters.sklearn": ("sklearn", True),
    "adapters.torch": ("torch", False),
}
#: What dispatch asks every adapter for: users call the functions of `numfuse` in their place.
HOOKS = {
    "activation", "describe", "epilogue_jet", "fused", "jet", "network", "perceptron",
    "perceptron_along", "perceptron_at_once", "perceptron_is_whole", "repeated",
}  # fmt: skip


def listed_names():
    return set(re.findall(r"^   ~numfuse\.(\S+)$", TEXTS["docs/api.md"], re.M))


def test_every_public_name_is_in_the_reference():
    listed = listed_names()
    assert not (missing := set(nf.__all__) - listed), f"docs/api.md must list {missing}"
    modules = {name for name, (_, whole) in MODULES_WITH_NAMES.items() if whole}
    parents = tuple(f"{name}." for name in MODULES_WITH_NAMES)
    for name in listed - set(nf.__all__) - modules:
        assert name.startswith(parents), f"docs/api.md lists {name}"


@pytest.mark.parametrize("name", MODULES_WITH_NAMES)
def test_every_public_name_of_a_module_is_in_the_reference(name):
    library, whole = MODULES_WITH_NAMES[name]
    if library is not None:
        pytest.importorskip(library)
    if whole:
        assert name in listed_names()
        return
    own = set(importlib.import_module(f"numfuse.{name}").__all__) - set(nf.__all__) - HOOKS
    listed = {x.removeprefix(f"{name}.") for x in listed_names() if x.startswith(f"{name}.")}
    assert own == listed, f"docs/api.md must list {sorted(own)} of numfuse.{name}"


def test_every_variable_of_the_environment_is_in_the_reference():
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "numfuse").rglob("*.py"))
    read = {name for text in sources for name in re.findall(r"\bNUMFUSE_[A-Z_]+\b", text)}
    assert read == set(re.findall(r"\bNUMFUSE_[A-Z_]+\b", TEXTS["docs/api.md"]))


def test_links_between_pages_and_their_anchors_exist():
    def anchors(text):
        headings = re.findall(
            r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M
        )
        plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings)
        return {heading.replace(" ", "-") for heading in plain}

    for name, text in TEXTS.items():
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            page = ((ROOT / name).parent / path).resolve() if path else ROOT / name
            assert page.exists(), f"{name} links to {target}"
            if anchor and page.suffix == ".md":
                assert anchor in anchors(page.read_text(encoding="utf-8")), f"{name}: {target}"


def test_the_files_that_contributing_names_exist():
    text = TEXTS["docs/contributing.md"]
    named = re.findall(r"`((?:numfuse|tests|asv_benches|\.ci)/[\w./]*\w)`", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert len(named) > 15 and not missing, missing


def test_the_scripts_that_pages_name_exist():
    named = {
        x for text in TEXTS.values() for x in re.findall(r"\b(?:asv_benches|docs)/[\w/]+\.py", text)
    }
    table = TEXTS["docs/performance.md"].partition("\n## In use\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|.* \| `(\w+\.py)[^`]*` \|$", table, re.M)
    assert len(rows) == table.count("\n|") - 2, "each row of uses names the script that measures it"
    rows += re.findall(r"`(\w+\.py)", TEXTS["docs/choosing.md"])
    named |= {f"asv_benches/{name}" for name in rows}
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert len(named) > 15 and not missing, missing


def test_the_extra_of_the_pages_has_what_the_examples_import():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    brought = [*project["dependencies"], *extras["docs"]]
    for names in re.findall(r"numfuse\[([\w,]+)\]", " ".join(extras["docs"])):
        brought += [line for name in names.split(",") for line in extras[name]]
    installed = {re.match(r"[\w-]+", line)[0].lower() for line in brought}
    examples = [path.read_text(encoding="utf-8") for path in (DOCS / "gallery").glob("*.py")]
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", "\n".join(examples), re.M))
    imported = {{"sklearn": "scikit-learn"}.get(name, name) for name in imported}
    missing = imported - installed - sys.stdlib_module_names
    assert len(imported) > 8 and not missing, missing


def test_a_picture_shows_the_figures_of_its_table(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    pictures = importlib.import_module("pictures")
    drawn = {
        "uses": pictures.uses(), "roofline_cpu": pictures.cases(),
        "precision": pictures.precisions(),
    }  # fmt: skip
    for name, figures in drawn.items():
        found = re.search(
            rb"tEXtFigures\0([0-9a-f]{16})", (DOCS / "images" / f"{name}.png").read_bytes()
        )
        assert found is not None, name
        assert found[1].decode() == pictures.digest(figures), (
            f"python docs/pictures.py draws {name}.png"
        )


def test_pictures_have_a_text_for_those_who_do_not_see_them():
    for name, text in TEXTS.items():
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
            assert len(alt) > 10, f"{name}: {target}"
            assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"
