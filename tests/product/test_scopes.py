"""A comprehension's variable never has a name that its function takes from an enclosing function.

From Python 3.12 on, list, set and dict comprehensions run in their function's own frame. A name of
both kinds is then bound wrongly: what a function inside reads is the comprehension's variable,
which is gone, and the call raises NameError (https://github.com/python/cpython/issues/121377). No
test on Python 3.11 sees it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("numfuse", "tests", "asv_benches", "docs")
FILES = [path for room in ROOMS for path in sorted(ROOT.glob(f"{room}/**/*.py"))]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.GeneratorExp
INLINED = ast.ListComp | ast.SetComp | ast.DictComp


@dataclass
class Scope:
    """The names of a function, a class, a module or a comprehension."""

    node: ast.AST
    outer: Scope | None = None
    bound: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    inner: list[Scope] = field(default_factory=list)

    def free(self) -> set[str]:
        """Return the names that it, or what is inside of it, takes from outside."""
        of_inner = set().union(*(scope.free() for scope in self.inner))
        if isinstance(self.node, ast.ClassDef):  # whose names its methods do not see
            return (self.read - self.bound) | of_inner
        return (self.read | of_inner) - self.bound

    def scopes(self) -> Iterator[Scope]:
        yield self
        for scope in self.inner:
            yield from scope.scopes()

    def variables(self) -> set[str]:
        """Return the variables of the comprehensions that run in its frame."""
        inlined = [scope for scope in self.inner if isinstance(scope.node, INLINED)]
        return set().union(*(scope.bound | scope.variables() for scope in inlined))

    def from_functions(self) -> set[str]:
        """Return the names of the functions that it is inside of."""
        found, scope = set(), self.outer
        while scope is not None:
            found |= scope.bound if isinstance(scope.node, FUNCTIONS) else set()
            scope = scope.outer
        return found


class Names(ast.NodeVisitor):
    """Which scope binds and reads which names."""

    def __init__(self) -> None:
        self.scope = Scope(ast.Module())

    def within(self, node: ast.AST, *parts: ast.AST) -> Scope:
        """Visit the parts as those of a scope of their own."""
        scope = Scope(node, self.scope)
        self.scope.inner.append(scope)
        self.scope = scope
        for part in parts:
            self.visit(part)
        assert scope.outer is not None
        self.scope = scope.outer
        return scope

    def visit_Name(self, node: ast.Name) -> None:
        (self.scope.read if isinstance(node.ctx, ast.Load) else self.scope.bound).add(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        scope = self.scope  # the name is the function's, which the comprehension is in
        while scope.outer is not None and isinstance(scope.node, INLINED | ast.GeneratorExp):
            scope = scope.outer
        scope.bound.add(node.target.id)
        self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        name, body = getattr(node, "name", None), node.body
        every = node.args
        for part in [*every.defaults, *every.kw_defaults, *getattr(node, "decorator_list", [])]:
            if part is not None:
                self.visit(part)
        if name is not None:
            self.scope.bound.add(name)
        scope = self.within(node, *(body if isinstance(body, list) else [body]))
        own = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
        scope.bound |= {arg.arg for arg in own if arg is not None}
        passed = {
            name for part in ast.walk(node) if isinstance(part, ast.Nonlocal) for name in part.names
        }
        scope.bound -= passed
        scope.read |= passed

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in [*node.bases, *node.keywords, *node.decorator_list]:
            self.visit(part)
        self.scope.bound.add(node.name)
        self.within(node, *node.body)

    def visit_ListComp(self, node: INLINED | ast.GeneratorExp) -> None:
        first, *others = node.generators
        self.visit(first.iter)
        results = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        self.within(node, first.target, *first.ifs, *others, *results)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_alias(self, node: ast.alias) -> None:
        self.scope.bound.add((node.asname or node.name).partition(".")[0])

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.scope.bound |= {node.name} - {None}
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)  # the annotation is text
        if node.value is not None:
            self.visit(node.value)


def shadowed(source: str) -> list[str]:
    """Return the comprehensions' variables of a source that break the rule."""
    names = Names()
    names.visit(ast.parse(source))
    found = []
    for scope in names.scope.scopes():
        if isinstance(scope.node, FUNCTIONS):
            both = scope.free() & scope.variables() & scope.from_functions()
            found += [f"line {scope.node.lineno}: {name}" for name in sorted(both)]
    return found


def test_no_comprehension_hides_a_name_of_an_enclosing_function():
    assert len(FILES) > 300
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in FILES
        if (lines := shadowed(path.read_text(encoding="utf-8")))
    }
    assert not found


WRONG = [
    "needs = [name for name in x]; inner = lambda: name; return inner()",
    "needs = {name: i for i, name in enumerate(x)}; return list(name for _ in x)",
    "needs = {name for name in x}; return [name for _ in x]",
    "needs = [(lambda: name) for name in x]; return name",
    "needs = [[name for name in [i]] for i in x]; return max(x, key=lambda _: name)",
]
RIGHT = [
    "needs = list(name for name in x); inner = lambda: name; return inner()",
    "needs = [i for i in x]; inner = lambda: name; return inner()",
    "name = 1; needs = [name for name in x]; inner = lambda: name; return inner()",
    "needs = [name for name in x]; return needs",
]


@pytest.mark.parametrize("body", [*WRONG, *RIGHT])
def test_the_rule_is_broken_where_both_are_in_one_frame(body):
    source = f"def outer(name):\n    def middle(x):\n        {body}\n    return middle\n"
    assert bool(shadowed(source)) == (body in WRONG)
