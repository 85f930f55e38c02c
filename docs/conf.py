"""Sphinx configuration: ``sphinx-build -W docs docs/_build/html``.

A build needs no network: formulas become MathML (`_ext/mathml.py`), fonts and scripts are the
theme's own, and there is no intersphinx. The pages are Markdown, so that they are also read as they
are in the repository.
"""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]  # the numfuse that these pages describe

import numfuse  # noqa: E402

project = "numfuse"
author = "The numfuse developers"
copyright = author
version = release = numfuse.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "sphinx_gallery.gen_gallery",
    "mathml",
]
exclude_patterns = ["_build", "gallery"]
templates_path = ["_templates"]

# --- Markdown -------------------------------------------------------------------------------------
myst_heading_anchors = 4
html_math_renderer = "mathml"
smartquotes = False  # act'' is a second derivative, no quotation
highlight_language = "none"  # a fence without a language holds commands or formulas

# --- API ------------------------------------------------------------------------------------------
autosummary_generate = True
autodoc_typehints = "none"  # the docstrings tell types, in words
numpydoc_show_class_members = False

# --- gallery --------------------------------------------------------------------------------------
# Every file of docs/gallery is run, but the one that starts a cluster of processes: it is shown.
# One process, two threads: what the others need at most.
os.environ.setdefault("MPLBACKEND", "agg")
sphinx_gallery_conf = {
    "reset_argv": "example_arguments.of",
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"/(?!train_on_dask)\w+\.py$",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
    "capture_repr": (),
    "reset_modules": ("matplotlib",),
    "write_computation_times": False,
}

# --- HTML -----------------------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = f"numfuse {release}"
html_static_path = ["_static"]
html_css_files = ["numfuse.css"]
html_show_sourcelink = False
html_domain_indices = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "numfuse"},
    "navigation_with_keys": False,  # arrow keys scroll
    "header_links_before_dropdown": 5,
    "navbar_persistent": ["search-button"],
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
# The pages at the top have no others below them, but for the reference.
html_sidebars = {"*": [], "api": ["sidebar-nav-bs"]}


# --- links ----------------------------------------------------------------------------------------
def examples_are_as_they_were_run(app, docname, source):
    """A link to an example, which leads to its source in the repository, leads to its run here."""
    source[0] = re.sub(
        r"\]\(((?:\.\./)?)gallery/(\w+)\.(?:py|rst)\)",
        lambda link: f"]({link[1]}auto_gallery/{'index' if link[2] == 'README' else link[2]}.rst)",
        source[0],
    )


def setup(app):
    app.connect("source-read", examples_are_as_they_were_run)
