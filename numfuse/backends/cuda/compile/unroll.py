"""Writing a kernel template out: constant loops are unrolled, constant conditions decided.

An accumulator of a tensor core lives in registers, and a register has no index: every subscript of
it must be a constant before the compiler sees it.  So a template says ``for j in unrolled(8):``
and ``if SLOPE:`` in plain Python, and `text` writes both out, with the UPPER-case names that
are bound to numbers, texts or tuples replaced by their values.  A record (`schema`)
among the parameters, or of an annotated assignment, is written out as its fields, and so it is as
an argument of another template and where it is made.  What it makes
is Python again.

A function of `kernels` that a template calls is a template as well: a device function with the same
names bound.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import textwrap
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from numfuse.backends.cuda.compile.schema import Schema, arguments, fields_of, parameters, written
from numfuse.backends.cuda.compile.toolchain import (
    Kernel,
    device_function,
    identity,
    kernel,
    with_names,
)
from numfuse.expr import Expr
from numfuse.runtime.lifetimes import formulas_of

#: Where the templates are.
_ROOM = "numfuse.backends.cuda.kernels."


def unrolled(*bounds: int) -> range:
    """`range` in a template: its loop is written out."""
    return range(*bounds)


class _Writer(ast.NodeTransformer):
    """Replaces what is constant, bottom up."""

    def __init__(
        self,
        constants: Mapping[str, Any],
        records: Mapping[str, tuple[str, ...]],
        scope: Mapping[str, Any],
    ) -> None:
        self.constants, self.records, self.scope = dict(constants), dict(records), scope

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and node.id in self.constants:
            return ast.Constant(self.constants[node.id])
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        name, _, field = ast.unparse(node).partition(".")
        if field in self.records.get(name, ()):
            return ast.Name(written(name, field), node.ctx)
        self.generic_visit(node)
        return node

    def _argument(self, node: ast.expr) -> list[ast.expr]:
        """Return an argument, or the fields of one that is a record or a record's."""
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return [node]
        name, _, field = ast.unparse(node).partition(".")
        own = [x for x in self.records.get(name, ()) if not field or x.startswith(f"{field}.")]
        return [ast.Name(written(name, x), ast.Load()) for x in own] or [node]

    def _folded(self, node: ast.expr) -> ast.expr:
        """Return an expression of constants as one."""
        self.generic_visit(node)
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        if not all(isinstance(part, ast.Constant) for part in parts):
            return node
        whole = ast.fix_missing_locations(ast.Expression(node))
        return ast.Constant(eval(compile(whole, "<template>", "eval")))

    visit_BinOp = visit_UnaryOp = visit_Compare = visit_Subscript = _folded

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        decides = isinstance(node.op, ast.Or)
        open_: list[ast.expr] = []
        for part in node.values:
            value = self.visit(part)
            if not isinstance(value, ast.Constant) or bool(value.value) == decides:
                open_.append(value)
            if isinstance(value, ast.Constant) and bool(value.value) == decides:
                break  # what follows is never asked for
        if len(open_) > 1:
            return ast.BoolOp(node.op, open_)
        return open_[0] if open_ else ast.Constant(not decides)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.visit(node.body if test.value else node.orelse)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.args = [given for argument in node.args for given in self._argument(argument)]
        self.generic_visit(node)
        if fields_of(self.scope.get(getattr(node.func, "id", ""))):
            return ast.Tuple(node.args, ast.Load())
        known = {"min": min, "max": max}.get(getattr(node.func, "id", ""))
        if known and all(isinstance(a, ast.Constant) for a in node.args):
            return ast.Constant(known(a.value for a in node.args))  # type: ignore[attr-defined]
        return node

    def _body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            made.extend(new if isinstance(new, list) else [new])
            if made and isinstance(made[-1], ast.Return):
                break  # of a condition that was decided: what follows is never reached
        return made

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self._body(node.body if test.value else node.orelse)
        body = self._body(node.body) or [ast.Pass()]
        return ast.If(test, body, self._body(node.orelse))

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | list[ast.stmt]:
        node.value = self.visit(node.value)
        target = node.targets[0]
        # an UPPER-case name that is given a constant is one, from here on
        if isinstance(target, ast.Name) and target.id.isupper():
            if not isinstance(node.value, ast.Constant):
                raise ValueError(f"{target.id} must be constant, got {ast.unparse(node.value)}")
            self.constants[target.id] = node.value.value
            return []
        node.targets = [self.visit(t) for t in node.targets]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        assert isinstance(node.target, ast.Name) and isinstance(node.annotation, ast.Name)
        name, own = node.target.id, fields_of(self.scope[node.annotation.id])
        self.records[name] = own
        names: list[ast.expr] = [ast.Name(written(name, field), ast.Store()) for field in own]
        assert node.value is not None
        return ast.Assign([ast.Tuple(names, ast.Store())], self.visit(node.value))

    def visit_While(self, node: ast.While) -> ast.stmt:
        return ast.While(self.visit(node.test), self._body(node.body) or [ast.Pass()], [])

    def visit_For(self, node: ast.For) -> ast.stmt | list[ast.stmt]:
        match node:
            case ast.For(ast.Name(name), ast.Call(ast.Name("unrolled"), arguments)):
                bounds = [self.visit(bound) for bound in arguments]
            case _:
                return ast.For(node.target, self.visit(node.iter), self._body(node.body), [])
        if not all(isinstance(bound, ast.Constant) for bound in bounds):
            raise ValueError(f"unrolled() must have constant bounds, got {ast.unparse(node.iter)}")
        made: list[ast.stmt] = []
        source = ast.unparse(ast.Module(node.body, []))
        for i in range(*[bound.value for bound in bounds]):
            self.constants[name] = i
            made += self._body(ast.parse(source).body)
        self.constants.pop(name, None)
        return made


#: Elements of a tuple, and arguments of a call, that Python's compiler puts together at once. It
#: appends more one by one, of which Numba makes a sum of tuples each: a call of 55 arguments took
#: 835 of them to be compiled, and with them half of the time that the kernel took.
_AT_ONCE = 30


def _tuple(elements: list[ast.expr]) -> ast.expr:
    """Return a tuple of them, as a sum of tuples that are put together at once."""
    parts: list[ast.expr] = [
        ast.Tuple(elements[i : i + _AT_ONCE], ast.Load()) for i in range(0, len(elements), _AT_ONCE)
    ]
    return functools.reduce(lambda left, right: ast.BinOp(left, ast.Add(), right), parts)


class _Short(ast.NodeTransformer):
    """Writes a long tuple as a sum of short ones, and many arguments as such a tuple's elements."""

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        self.generic_visit(node)
        short = len(node.elts) <= _AT_ONCE or not isinstance(node.ctx, ast.Load)
        return node if short else _tuple(node.elts)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if len(node.args) > _AT_ONCE:
            node.args = [ast.Starred(_tuple(node.args), ast.Load())]
        return node


def _constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_constant(v) for v in value)
    return isinstance(value, (bool, int, str)) or value is None


@functools.cache
def _source(template: Callable[..., Any]) -> str:
    return textwrap.dedent(inspect.getsource(template))


def text(template: Callable[..., Any], bindings: Mapping[str, Any]) -> str:
    """`template` written out under `bindings`, as Python text."""
    function = ast.parse(_source(template)).body[0]
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    function.decorator_list = []
    function.returns = None
    function.args.args = [ast.arg(name) for name in arguments(template)]
    constants = {name: value for name, value in bindings.items() if _constant(value)}
    writer = _Writer(constants, parameters(template), template.__globals__)
    function.body = writer._body(function.body) or [ast.Pass()]
    _Short().visit(function)
    return ast.unparse(ast.fix_missing_locations(function)) + "\n"


class Template:
    """A template with its names bound, written out when the compiler asks for it.

    It has what `toolchain.kernel` wants of a function.  Its key needs no text: the template is in
    the digest of the sources, and what is bound is in the key.

    Parameters
    ----------
    template : callable
    bindings : mapping
        Of its UPPER-case names.  Those that it does not use do not count.
    """

    def __init__(self, template: Callable[..., Any], bindings: Mapping[str, Any]) -> None:
        self._template = template
        used: dict[str, Any] = {}
        for name in sorted(template.__code__.co_names):
            own = template.__globals__.get(name)
            if name in bindings:
                used[name] = bindings[name]
            elif isinstance(own, FunctionType) and own.__module__.startswith(_ROOM):
                used[name] = Template(own, bindings)
        self._constants = {name: value for name, value in used.items() if _constant(value)}
        #: What is no constant, by its name.
        self.others = {name: value for name, value in used.items() if not _constant(value)}
        self.__module__, self.__name__ = template.__module__, template.__name__
        self.__qualname__ = template.__qualname__
        material = "\n".join(f"{name}={identity(value)}" for name, value in used.items())
        digest = hashlib.sha256(material.encode()).hexdigest()
        self.numfuse_key = f"{template.__module__}.{template.__qualname__} {digest}"

    def formulas(self) -> list[Expr]:
        """The formulas in what is bound."""
        return formulas_of(tuple(self.others.values()))

    @functools.cached_property
    def function(self) -> FunctionType:
        """The function, written out; what is no constant stays a free name."""
        template, source = self._template, text(self._template, self._constants)
        filename = f"<{template.__name__} {hashlib.sha256(source.encode()).hexdigest()[:20]}>"
        # tracebacks and the compiler's messages show the lines of the text
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        scope = dict(template.__globals__)
        exec(compile(source, filename, "exec"), scope)
        made: FunctionType = scope[template.__name__]
        return made

    def build(self) -> Any:
        """The device function, for the compiler: bound to a name of a kernel or a template."""
        return device_function(with_names(self.function, self.others))


def rebound(template: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a template with other records or functions at some of the names that it uses."""
    made = FunctionType(template.__code__, {**template.__globals__, **names}, template.__name__)
    made.__annotations__ = template.__annotations__
    return made


def inlined(template: Callable[..., Any], **bindings: Any) -> Template:
    """`Template`, with the names as keywords."""
    return Template(template, bindings)


def bound(owner: Any, names: str) -> dict[str, Any]:
    """Return attributes, their names separated by blanks, as bindings of UPPER-case names."""
    return {name.upper(): getattr(owner, name) for name in names.split()}


def kernel_of(
    template: Callable[..., Any],
    schema: Schema,
    bindings: Mapping[str, Any],
    *,
    threads: int,
    name: str,
    blocks: int = 0,
    feature: str = "",
) -> Kernel:
    """Return the kernel (`toolchain.kernel`) of a template with its names bound.

    Every new shape asks for it; one that was made is found by the objects that are bound.
    """
    values = bindings.values()
    # (1, True and 1.0 are equal, but not as text)
    key = (template, schema.signature, threads, blocks, feature, name)
    key += *bindings, *values, *map(type, values)
    found = _MADE.get(key)
    if found is None:
        made = Template(template, bindings)
        options: Any = {"threads": threads, "blocks": blocks, "feature": feature, "name": name}
        found = kernel(made, schema.signature, **options, **made.others)
        if len(_MADE) >= _MOST_MADE:
            _MADE.clear()
        _MADE[key] = found
    return found


#: Kernels by all that they are made of, as long as somebody has them.
_MADE: weakref.WeakValueDictionary[Any, Kernel] = weakref.WeakValueDictionary()
_MOST_MADE = 4096
