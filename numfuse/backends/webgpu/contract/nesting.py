"""How deep WGSL nests: compilers of it are recursive, and end the process where the stack does."""

from __future__ import annotations

import re

from numfuse.backends.webgpu.contract.source import declarations, without_comments

__all__ = ["MOST", "PER_LEVEL", "depth"]

#: Levels that a module may nest. The largest ones, a call or an index within another, take wgpu
#: (0.32, with the driver behind it) 3.5 KB of the stack: these are 0.9 MB. The smallest stack that
#: a thread of Python has unless asked is that of Windows, of 2 MB; on Linux it is 8.
MOST = 256
#: Operators or members in a row that count as one level, each of which takes up to 0.6 KB, and
#: declarations each of which uses the one before: 0.3 KB for types, less for functions.
PER_LEVEL = 4

# Numbers first, with their points and signs; of the rest what opens, closes, ends or joins.
_TOKEN = re.compile(
    r"0[xX][\da-fA-F]*\.?[\da-fA-F]*(?:[pP][-+]?\d+)?[a-z]*"
    r"|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[a-z]*"
    r"|(?P<word>[^\W\d]\w*)"
    r"|(?P<sign>->|<<=?|&&|\|\||[-+*/%&|^=!<>]=|[][(){};,<>+\-*/%&|^!~=.])"
)
_DECLARED = re.compile(
    r"(?:@\s*\w+\s*(?:\([^()]*\))?\s*)*(?:fn|struct|alias|const|override|var(?:\s*<[^>]*>)?)\s+(\w+)"
)
_CLOSED = {")": "(", "]": "[", "}": "{"}


class _Level:
    """A level of nesting that is open between two brackets."""

    def __init__(self, bracket: str) -> None:
        self.bracket = bracket
        #: Operators and members of the expression so far.
        self.operators = 0
        #: `<` without a `>`: a list of a template, or a comparison.
        self.angles = 0
        #: `else`s of the chain so far.
        self.elses = 0
        self.after_block = False


def depth(source: str) -> int:
    """The number of levels of the deepest place of a module, or more, never less.

    A bracket, a block, a list between angles and an `else` are a level each, `PER_LEVEL` operators
    of one expression another, and so many declarations, each of which uses the next one.
    """
    text = without_comments(source)
    return max(_nested(text), -(-_chained(text) // PER_LEVEL))


def _chained(text: str) -> int:
    """The length of the longest chain of declarations in which each names the next."""
    uses: dict[str, set[str]] = {}
    for declaration in declarations(text):
        found = _DECLARED.match(declaration)
        if found is not None:
            uses[found[1]] = set(re.findall(r"\w+", declaration[found.end() :])) - {found[1]}
    length: dict[str, int] = {}
    for first in uses:
        stack = [first]
        while stack:
            name = stack[-1]
            if length.get(name):
                stack.pop()
                continue
            inner = [other for other in uses[name] if other in uses]
            if name not in length:
                length[name] = 0  # on its way: a circle, which is no WGSL, ends here
                stack += [other for other in inner if other not in length]
                continue
            length[name] = 1 + max((length.get(other, 0) for other in inner), default=0)
            stack.pop()
    return max(length.values(), default=0)


def _nested(text: str) -> int:
    """The levels within one declaration."""
    here = _Level("")
    open_levels = [here]
    operators = angles = elses = deepest = 0
    for token in _TOKEN.finditer(text):
        word, sign = token["word"], token["sign"]
        if here.after_block:
            here.after_block = False
            operators, angles = operators - here.operators, angles - here.angles
            here.operators = here.angles = 0
            if word != "else":
                elses -= here.elses
                here.elses = 0
        if word == "else":
            here.elses += 1
            elses += 1
        elif sign is None or sign == "->":
            continue
        elif sign in "([{":
            here = _Level(sign)
            open_levels.append(here)
        elif sign in _CLOSED:
            if _CLOSED[sign] == here.bracket:
                operators, angles = operators - here.operators, angles - here.angles
                elses -= here.elses
                open_levels.pop()
                here = open_levels[-1]
                here.after_block = sign == "}"
        elif sign in ";,":
            operators -= here.operators
            here.operators = 0
            if sign == ";":
                angles -= here.angles
                here.angles = 0
        elif sign == "<":
            here.angles += 1
            angles += 1
        elif sign == ">" and here.angles:
            here.angles -= 1
            angles -= 1
        else:
            here.operators += 1
            operators += 1
        deepest = max(deepest, len(open_levels) - 1 + angles + elses + operators // PER_LEVEL)
    return deepest
