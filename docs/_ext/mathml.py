"""Formulas as MathML, written at build time.

Sphinx's usual renderer, MathJax, is a script from the network that runs in the reader's browser.
Docutils can translate the LaTeX of our docstrings itself, every current browser draws MathML, and
a screen reader reads it.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def translate(node: nodes.Element, block: bool) -> str:
    """The node's LaTeX as MathML; what docutils does not know is shown as it is, with a warning."""
    code = node.astext().strip()
    # Words are words, not products of their letters; docutils allows \textstyle in groups alone.
    code = re.sub(r"(?<![\\A-Za-z{])(bias|grad|out|residual)(?![A-Za-z])", r"\\mathrm{\1}", code)
    code = re.sub(r"_\{(bias|residual)\}", r"_{\\mathrm{\1}}", code).replace(r"\textstyle", "")
    # Each line a formula of its own: browsers cut the first column of an aligned table that is
    # wider than the page.
    lines = re.split(r"\\\\", code.replace("&", "")) if block else [code]
    try:
        return "".join(tex2mathml(line.strip(), as_block=block) for line in lines)
    except MathError as error:
        LOGGER.warning("no MathML for %r: %s", node.astext(), error, location=node)
        return f"<code>{nodes.Text(code).astext()}</code>"


def visit_math(self: Any, node: nodes.math) -> None:
    self.body.append(translate(node, block=False))
    raise nodes.SkipNode


def visit_block(self: Any, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="formula"))
    self.body.append(translate(node, block=True) + "</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
