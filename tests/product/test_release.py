"""What a release says of itself is one thing in all places: version, bounds, Python versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml  # dask, which the tests need, needs it
from packaging.requirements import Requirement  # pytest needs it
from packaging.utils import canonicalize_name
from packaging.version import Version

import numfuse as nf

ROOT = Path(__file__).parents[2]
GITHUB, CONDA = ROOT / ".github", ROOT / ".conda"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
#: Extras whose packages `.ci/lowest.txt` has no line for: too large, or tools of developers.
UNTESTED = {"cuda12", "jax", "torch", "bench", "docs"}


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def requirements(*extras: str) -> dict[str, Requirement]:
    """Return the requirements of the package and of some extras, by name."""
    lines = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(x.name): x for x in found if x.name != "numfuse"}


def lower_bound(requirement: Requirement) -> Version:
    """Return the oldest version that a requirement allows."""
    (bound,) = [x.version for x in requirement.specifier if x.operator == ">="]
    return Version(bound)


def pythons(workflow: str, job: str) -> set[str]:
    """Return the Python versions of a job's matrix."""
    matrix = yaml.safe_load(text(f".github/workflows/{workflow}"))["jobs"][job]["strategy"][
        "matrix"
    ]
    return {str(python) for python in matrix["python"]}


def test_the_version_is_the_same_wherever_it_stands():
    version = nf.__version__
    assert yaml.safe_load(text(".github/CITATION.cff"))["version"] == version
    assert yaml.safe_load(text(".conda/recipe.yaml"))["context"]["version"] == version
    heads = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", text("docs/CHANGELOG.md"), re.M)
    assert heads[0] == ("Unreleased", "") and heads[1][0] == version
    cited = yaml.safe_load(text(".github/CITATION.cff"))["date-released"]
    assert heads[1][1] == str(cited)


def test_every_lower_bound_is_in_the_list_of_the_lowest():
    extras = set(PROJECT["project"]["optional-dependencies"]) - UNTESTED
    bounds = {name: lower_bound(x) for name, x in requirements(*extras).items()}
    lines = [line for line in text(".ci/lowest.txt").splitlines() if not line.startswith("#")]
    lowest = {canonicalize_name(name): Version(v) for name, v in (x.split("==") for x in lines)}
    assert set(lowest) == set(bounds)
    for name, version in lowest.items():
        # the oldest release of that bound: 6.100 is 6.100.0
        assert version.release[: len(bounds[name].release)] == bounds[name].release, name


def test_no_extra_asks_for_less_than_another():
    found: dict[str, set[Version]] = {}
    for extra in PROJECT["project"]["optional-dependencies"]:
        for name, requirement in requirements(extra).items():
            found.setdefault(name, set()).add(lower_bound(requirement))
    assert {name: bounds for name, bounds in found.items() if len(bounds) > 1} == {}


def test_conda_and_pixi_ask_for_what_the_package_asks_for():
    asked = {name: str(x.specifier) for name, x in requirements().items()}
    recipe = yaml.safe_load(text(".conda/recipe.yaml"))
    run = [line.split(" ", 1) for line in recipe["requirements"]["run"]]
    of_conda = {canonicalize_name(name): bound for name, bound in run if name != "python"}
    pixi = PROJECT["tool"]["pixi"]["dependencies"]
    assert of_conda == asked
    assert {canonicalize_name(name): bound for name, bound in pixi.items()} == asked
    assert PROJECT["project"]["requires-python"] == f">={recipe['context']['python_min']}"
    (hatchling,) = [x for x in recipe["requirements"]["host"] if x.startswith("hatchling")]
    (built,) = PROJECT["build-system"]["requires"]
    assert hatchling.replace(" ", "") == built


def test_the_declared_pythons_are_those_that_are_tested():
    pattern = r"Programming Language :: Python :: (3\.\d+)$"
    classifiers = PROJECT["project"]["classifiers"]
    declared = {found[1] for x in classifiers if (found := re.match(pattern, x))}
    oldest = min(declared, key=Version)
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert pythons("tests.yml", "test") == declared == pythons("release.yml", "try")
    jobs = yaml.safe_load(text(".github/workflows/tests.yml"))["jobs"]
    steps = jobs["lowest"]["steps"]
    assert {x["with"]["python-version"] for x in steps if "setup-python" in x.get("uses", "")} == {
        oldest
    }
    # a build without the interpreter's lock is declared when its job must pass
    free = [x for x in classifiers if "Free Threading" in x]
    assert bool(free) != bool(jobs["free-threaded"].get("continue-on-error"))


def test_only_a_tag_that_passed_every_try_is_published():
    jobs = yaml.safe_load(text(".github/workflows/release.yml"))["jobs"]
    publish = jobs["publish"]
    assert set(publish["needs"]) == {"build", "try"}
    assert "refs/tags/v" in publish["if"] and publish["environment"]["name"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    for step in publish["steps"]:  # what sees the identity cannot be moved
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
    assert publish["steps"][-1]["with"]["attestations"] is True
    others = [name for name, job in jobs.items() if "id-token" in str(job.get("permissions"))]
    assert others == ["publish"]


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda x: x.stem)
def test_no_workflow_may_write_to_the_repository(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "write" not in str({**job.get("permissions", {}), "id-token": ""}), name


@pytest.mark.parametrize(
    "path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda x: x.stem
)
def test_a_form_asks_questions_that_have_names(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names)) > 0
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_pages_for_strangers_name_files_and_commands_that_exist():
    pages = sorted(GITHUB.rglob("*.md")) + sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
    assert {"SECURITY.md", "CODE_OF_CONDUCT.md", "PULL_REQUEST_TEMPLATE.md"} <= {
        x.name for x in pages
    }
    for page in pages:
        body = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", body):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        for named in re.findall(r"\bdocs/[\w/]+\.md", body):
            assert (ROOT / named).is_file(), f"{page.name}: {named}"
        for command in re.findall(r"python -m numfuse (\w+)", body):
            assert (ROOT / "numfuse" / "cli" / f"{command}.py").is_file(), command
