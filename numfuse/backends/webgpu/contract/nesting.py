"""How deep WGSL nests: compilers of it are recursive, and end the process where the stack does."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter

from numfuse.backends.webgpu.contract.source import declarations, without_comments

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


def depth(source: str) -> int:
    """The number of levels of the deepest place of a module, or more, never less.

    A bracket, a block, a list between angles and an `else` are a level each, `PER_LEVEL` operators
    of one expression another, and so many declarations, each of which uses the next one.
    """
    text = without_comments(source)
    return max(_nested(text), -(-_chained(text) // PER_LEVEL))


def _chained(text: str) -> int:
    """The length of the longest chain of declarations in which each names the next, or more."""
    uses: dict[str, set[str]] = {}
    for declaration in declarations(text):
        found = _DECLARED.match(declaration)
        if found is not None:
            uses[found[1]] = set(re.findall(r"\w+", declaration[found.end() :])) - {found[1]}
    names = set(uses)
    uses = {name: words & names for name, words in uses.items()}
    length: dict[str, int] = {}
    try:
        for name in TopologicalSorter(uses).static_order():
            length[name] = 1 + max((length[other] for other in uses[name]), default=0)
    except CycleError:  # no WGSL, or local variables with the names of functions
        return len(uses)
    return max(length.values(), default=0)


def _nested(text: str) -> int:
    """The levels within one declaration."""
    #: Of what is open so far: operators and members of expressions, `<` without a `>` (a list of a
    #: template, or a comparison), and `else`s of chains.
    operators = angles = elses = deepest = 0
    #: Every open bracket, and these numbers outside of it.
    levels = [("", 0, 0, 0)]
    after_block = False
    for token in _TOKEN.finditer(text):
        word, sign = token["word"], token["sign"]
        bracket, *outside = levels[-1]
        if after_block:
            operators, angles = outside[:2]
            if word != "else":
                elses = outside[2]
        after_block = False
        if word == "else":
            elses += 1
        elif sign is None or sign == "->":
            continue
        elif sign in "([{":
            levels.append((sign, operators, angles, elses))
        elif sign in _CLOSED:
            if _CLOSED[sign] == bracket:
                operators, angles, elses = outside
                levels.pop()
                after_block = sign == "}"
        elif sign in ";,":
            operators = outside[0]
            if sign == ";":
                angles = outside[1]
        elif sign == "<":
            angles += 1
        elif sign == ">" and angles > outside[1]:
            angles -= 1
        else:
            operators += 1
        deepest = max(deepest, len(levels) - 1 + angles + elses + operators // PER_LEVEL)
    return deepest
