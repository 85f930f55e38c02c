"""A parser that finds a WGSL module's entry points, their workgroups and the buffers they touch.

The text is read only as far as the shader contract asks. wgpu has compiled it before, so it is
known to be WGSL, and what is not understood here is left to the validation of pipelines.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_END = "; \t\r\n"
_LINE_END = "\n\v\f\r\u0085\u2028\u2029"
_COMMENT = re.compile(rf"//[^{_LINE_END}]*|/\*")
_INSIDE = re.compile(r"/\*|\*/")
_FUNCTION = re.compile(r"fn\s+(\w+)\s*\(")
_VALUE = re.compile(r"(?:const|override)\s+(\w+)\s*(?::[^=]*)?=(.*)", re.DOTALL)
_ALIAS = re.compile(r"alias\s+(\w+)\s*=(.*)", re.DOTALL)
_BUFFER = re.compile(r"var\s*<\s*(\w+)\s*(?:,\s*(\w+)\s*,?\s*)?>\s*(\w+)\s*:(.*)", re.DOTALL)
_ATTRIBUTE = re.compile(r"@\s*(\w+)\s*")
#: An integer with its suffix. A number with a point or an exponent is none, and stays as it is.
_INTEGER = re.compile(r"(?<![\w.])(0[xX][0-9a-fA-F]+|\d+)[iu]?(?![\w.])")


def without_comments(text: str) -> str:
    """The text with a space for every comment; block comments nest."""
    out: list[str] = []
    depth = at = 0
    while found := (_INSIDE if depth else _COMMENT).search(text, at):
        if depth == 0:
            out += (text[at : found.start()], " ")
        depth += {"/*": 1, "*/": -1}.get(found[0], 0)
        at = found.end()
    return "".join(out) + ("" if depth else text[at:])


def _quotient(x: int, y: int) -> int:
    if y == 0:
        raise ValueError("division by zero")
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda x, y: x - _quotient(x, y) * y,
    ast.LShift: lambda x, y: x << min(max(y, 0), 64),
    ast.RShift: lambda x, y: x >> min(max(y, 0), 64),
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_CALLS: dict[str, Callable[..., int]] = {
    "u32": lambda x=0: x,
    "i32": lambda x=0: x,
    "min": min,
    "max": max,
    "abs": abs,
    "clamp": lambda x, low, high: min(max(x, low), high),
}


class Variable(NamedTuple):
    """A buffer that the module declares."""

    name: str
    group: int | None
    binding: int | None
    space: str
    access: str
    type: str


class Module:
    """The parts of a module that the contract asks for."""

    def __init__(self, source: str) -> None:
        #: {name: the text of its @workgroup_size} of compute entry points.
        self.entry_points: dict[str, str] = {}
        #: {name: parameters and body}.
        self.functions: dict[str, str] = {}
        #: {name: text} of constants, and of overrides with a default.
        self.values: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        late: list[tuple[dict[str, str], re.Match[str]]] = []
        for declaration in declarations(without_comments(source)):
            attributes, rest = _attributes(declaration)
            if found := _FUNCTION.match(rest):
                self.functions[found[1]] = rest[found.end() :]
                if "compute" in attributes:
                    self.entry_points[found[1]] = attributes.get("workgroup_size", "")
            elif found := _VALUE.match(rest):
                self.values[found[1]] = found[2].rstrip(_END)
            elif found := _ALIAS.match(rest):
                self.aliases[found[1]] = found[2].rstrip(_END)
            elif found := _BUFFER.match(rest):
                late.append((attributes, found))
        # the constants of their attributes may be declared behind them
        self.variables = [self._variable(attributes, *found.groups()) for attributes, found in late]

    def _variable(
        self, attributes: dict[str, str], space: str, access: str | None, name: str, kind: str
    ) -> Variable:
        def number(word: str) -> int | None:
            return self.integer(attributes[word]) if word in attributes else None

        where = number("group"), number("binding")
        return Variable(name, *where, space, access or "read", kind.rstrip(_END))

    def workgroup(self, entry_point: str) -> tuple[int, int, int]:
        """The size of a workgroup.

        ValueError if it is not made of integers, their arithmetic and their names.
        """
        parts = split_arguments(self.entry_points[entry_point])
        x, y, z = ([self.integer(part) for part in parts] + [1, 1])[:3]
        return x, y, z

    def integer(self, text: str, inside: tuple[str, ...] = ()) -> int:
        """A constant expression of integers, or ValueError; `inside` are the names it is of.

        WGSL's arithmetic of integers is written as Python's, but for suffixes and quotients.
        """

        text = text.strip()

        def value(node: Any) -> int:
            match node:
                case ast.Constant(value=int(number)) if not isinstance(number, bool):
                    return number
                case ast.Name(id=name) if name in self.values and name not in inside:
                    return self.integer(self.values[name], (*inside, name))
                case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                    return _BINARY[type(op)](value(left), value(right))
                case ast.UnaryOp(op=ast.USub(), operand=operand):
                    return -value(operand)
                case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
                    return _CALLS[name](*map(value, args))
            raise ValueError("not an integer")

        plain = _INTEGER.sub(lambda m: str(int(m[1], 0)) if m[1] != "0" else "0", text)
        try:
            return value(ast.parse(f"({plain})", mode="eval").body)
        except (SyntaxError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{text!r} is not an expression of integer constants") from error

    def touched(self, entry_point: str, binding: int) -> list[Variable]:
        """The buffers of a binding, named in an entry point or in a function that it calls.

        A local variable of the same name counts too: there may be more than there are, never less.
        """
        todo, seen = [self.functions[entry_point]], set[str]()
        while todo:
            for name in re.findall(r"\w+", todo.pop()):
                if name not in seen:
                    seen.add(name)
                    if name in self.functions:
                        todo.append(self.functions[name])
        return [
            v for v in self.variables if v.name in seen and (v.group, v.binding) == (0, binding)
        ]

    def resolved(self, type_name: str) -> str:
        """A type's text without spaces, with the aliases in it replaced."""
        for _ in range(len(self.aliases) + 1):
            replaced = re.sub(r"\w+", lambda m: self.aliases.get(m[0], m[0]), type_name)
            if replaced == type_name:
                break
            type_name = replaced
        return re.sub(r"\s+", "", type_name)


def declarations(text: str) -> list[str]:
    """Return a module's declarations, each with its attributes, without the `;` of the next."""
    out, start, depth = [], 0, 0
    for found in re.finditer(r"[{};]", text):
        if found[0] == "{":
            depth += 1
        elif found[0] == "}":
            depth -= 1
        if depth == 0 and found[0] != "{":
            out.append(text[start : found.end()].lstrip("; \t" + _LINE_END))
            start = found.end()
    return out


def _attributes(declaration: str) -> tuple[dict[str, str], str]:
    """{name: text of its arguments} of the leading attributes, and what follows them."""
    found: dict[str, str] = {}
    at = 0
    while match := _ATTRIBUTE.match(declaration, at):
        at = match.end()
        if declaration[at : at + 1] == "(":
            end = _closing(declaration, at)
            found[match[1]] = declaration[at + 1 : end]
            at = end + 1
        else:
            found[match[1]] = ""
        while declaration[at : at + 1].isspace():
            at += 1
    return found, declaration[at:]


def _closing(text: str, at: int) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def split_arguments(text: str) -> list[str]:
    """The arguments between commas outside of parentheses; a last comma is allowed."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
