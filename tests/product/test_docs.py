"""What the pages and the docstrings show is true, and every public name is in the reference."""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
import re
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


def test_every_public_name_is_in_the_reference():
    listed = set(re.findall(r"^   ~numfuse\.(\S+)$", TEXTS["docs/api.md"], re.M))
    missing, unknown = set(nf.__all__) - listed, listed - set(nf.__all__) - {"expr"}
    assert not missing, f"docs/api.md must list {', '.join(sorted(missing))}"
    for name in unknown:  # a public module of its own: an adapter, whose library may be missing
        assert importlib.util.find_spec(f"numfuse.{name}") is not None, name


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


def test_pictures_have_a_text_for_those_who_do_not_see_them():
    for name, text in TEXTS.items():
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
            assert len(alt) > 10, f"{name}: {target}"
            assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"
