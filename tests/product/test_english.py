"""The English of docstrings, comments and documentation: how a text begins, and words it avoids."""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "numfuse").rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    *(
        x
        for x in sorted((ROOT / "docs").rglob("*.md"))
        if not {"_build", "generated"} & set(x.parts)
    ),
]

#: A docstring begins with what a function returns or does, or what a module or class is.
BEGINNING = re.compile(r"(?:Of|That of|They|Those|The same|What|It)\b")

#: Longer or vaguer than the word beside them, or praise without a figure.
BANNED = [
    "a variety of", "actually", "aforementioned", "amongst", "and/or", "as mentioned",
    "at this point in time", "basically", "blazing", "cutting-edge", "due to the fact",
    "easily", "facilitate", "functionality", "in order to", "in terms of", "in the event that",
    "it is important", "it should be noted", "leverage", "make use of", "makes use of",
    "methodology", "myriad", "needless to say", "obviously", "of course", "performant",
    "please note", "plethora", "powerful", "prior to", "quite", "robust", "seamless",
    "state-of-the-art", "subsequent to", "the fact that", "thereof", "threadblock", "trivially",
    "under the hood", "utilise", "utilize", "warpgroup", "whereby", "whilst", "worth noting",
]  # fmt: skip
# A phrase may go on in the next line of a comment.
WORDS = re.compile(
    r"\b(?:" + "|".join(re.escape(x).replace(r"\ ", r"(?:\s|#:?)+") for x in BANNED) + r")\b",
    re.IGNORECASE,
)


def docstrings(text: str) -> list[ast.Constant]:
    """Return the docstrings of a module, its classes and its functions."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.body[0].value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None
    ]


def bad_beginnings(text: str) -> list[tuple[int, str]]:
    """Return the line and the beginning of each docstring that begins as none should."""
    return [
        (found.lineno, found.value.split("\n")[0][:60])
        for found in docstrings(text)
        if BEGINNING.match(found.value.strip())
    ]


def bad_words(text: str, python: bool) -> list[tuple[int, str]]:
    """Return line and text of each banned word, in Python only those of docstrings and comments."""
    found = [(text.count("\n", 0, m.start()) + 1, m) for m in WORDS.finditer(text)]
    if found and python:
        prose = {x for d in docstrings(text) for x in range(d.lineno, d.end_lineno + 1)}
        comments = {
            token.start[0]: token.start[1]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT
        }
        found = [
            (line, m)
            for line, m in found
            if line in prose
            or m.start() - text.rfind("\n", 0, m.start()) > comments.get(line, len(text))
        ]
    return [(line, m[0]) for line, m in found]


def test_a_docstring_begins_with_what_its_function_returns_or_does():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {beginning}"
        for path in SOURCES
        for line, beginning in bad_beginnings(path.read_text())
    ]
    assert SOURCES and not wrong, "docstrings must not begin so:\n" + "\n".join(wrong)


def test_docstrings_comments_and_pages_have_no_banned_word():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in [*SOURCES, *PAGES]
        for line, word in bad_words(path.read_text(), path.suffix == ".py")
    ]
    assert len(PAGES) > 1 and not wrong, "say it in fewer words:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "text, line",
    [
        ('"""What a module is."""', 1),
        ('x = 1\ndef f():\n    """Of a thing, the size."""', 3),
        ('class C:\n    """\n    The same again."""', 2),
        ('class C:\n    async def f(self):\n        """That of the other."""', 3),
        ('def f():\n    def g():\n        """Those that are left."""', 3),
        ('def f():\n    """They."""', 2),
        ('def f():\n    r"""It is x."""', 2),
    ],
)
def test_a_beginning_is_found(text, line):
    assert [found for found, _ in bad_beginnings(text)] == [line]


@pytest.mark.parametrize(
    "text",
    ['"""Iterate."""', '"""Often."""', '"""The sameness."""', 'x = 1\n"""What is no docstring."""'],
)
def test_another_beginning_is_no_fault(text):
    assert not bad_beginnings(text)


@pytest.mark.parametrize("word", BANNED)
def test_a_banned_word_is_found(word):
    assert bad_words(f"One\n{word.capitalize()} two.", python=False) == [(2, word.capitalize())]
    broken = word.replace(" ", "\n# ")
    assert bad_words(f"x = 1\ny = 'robust'  # {broken} z", python=True) == [(2, broken)]
    assert bad_words(f'def f():\n    """A.\n\n    B {word}.\n    """', python=True) == [(4, word)]
    assert not bad_words(f"x = '{word}'  # nothing\n", python=True)
    assert not bad_words(f"un{word}", python=False)
