"""Sphinx configuration: pages in MyST Markdown, the API from docstrings, the configuration reference from the code."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import config_reference
import metrics_reference
from sphinx import addnodes

from rllib_nlac.version import __version__

config_reference.write(HERE / "_generated" / "configuration.md", config_reference.reference())
config_reference.write(HERE / "_generated" / "metrics.md", metrics_reference.reference())

project = "rllib_nlac"
author = "The authors of rllib_nlac"
copyright = "Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4
myst_enable_extensions = ["deflist", "fieldlist", "linkify"]
myst_linkify_fuzzy_links = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
# Types of other packages, and type variables: there is no page to link them to.
nitpick_ignore_regex = [
    (r"py:.*", r"(ray|torch|numpy|np|gym|gymnasium|collections|typing|abc|enum|pathlib|Any|Self)(\..*)?"),
    (r"py:.*", r"(Sequence|Mapping|Callable|Iterator|Iterable|ClassVar|Generic|NamedTuple|StrEnum|Task|optional|shape.*)"),
    (r"py:.*", r"(int|float|str|bool|dict|list|tuple|set|type|object|None)(\[.*)?"),
    (
        r"py:.*",
        r"(rllib_nlac\.envs\.base\.Task|AlgorithmConfig|Algorithm|NotProvided|ReplayConfig|CriticConfig|ReplayAlgorithm)",
    ),
]

highlight_language = "none"  # what a program prints is no Python
html_theme = "furo"
html_title = f"rllib_nlac {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

_properties: dict[str, list[str]] = {}


def before_napoleon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Our Returns sections and properties have no type before a colon, and napoleon would take any text there for one."""
    if what == "property":
        _properties[name] = list(lines)
    for number, line in enumerate(lines[:-1]):
        if line.strip() == "Returns:":
            indent = len(lines[number + 1]) - len(lines[number + 1].lstrip())
            lines[number + 1] = f"{' ' * indent}: {lines[number + 1].strip()}"


def after_napoleon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Bars are those of formulas, as in |y|, and no substitutions."""
    lines[:] = [line.replace("|", "\\|") for line in _properties.get(name, lines)]


def without_research(app: Any, doctree: Any) -> None:
    """Shows links to ``research/``, which is not part of the site, as plain text."""
    for link in [*doctree.findall(addnodes.pending_xref), *doctree.findall(addnodes.download_reference)]:
        if re.search(r"(^|/)research/", link["reftarget"]):
            link.replace_self(link.children)


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("doctree-read", without_research)
    app.connect("autodoc-process-docstring", before_napoleon, priority=1)
    app.connect("autodoc-process-docstring", after_napoleon, priority=900)
