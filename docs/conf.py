"""Builds the documentation site from the pages of this directory: see script/docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typing_extensions import override

import onceflow

project = "onceflow"
author = "the onceflow authors"
version = release = onceflow.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
root_doc = "index"
exclude_patterns = ["_build"]

# A link that leads nowhere is a warning, which script/docs makes an error.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = [
    # A block may hold what its lexer does not know, such as an ellipsis.
    "misc.highlighting_failure",
    # Annotations in docstrings that could mean several attributes, such as `type`, are no links.
    "ref.python",
]

# Docstrings say a name in single backquotes, as in Markdown.
default_role = "code"
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "show-inheritance": True,
    "member-order": "groupwise",
}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = f"onceflow {version}"
html_static_path: list[str] = []
html_show_sourcelink = False
html_theme_options = {
    "header_links_before_dropdown": 7,
    "navbar_align": "left",
    "navbar_end": ["version-switcher", "theme-switcher"],
    # docs/versions.py writes this file beside the versions that it finds.
    "switcher": {"json_url": "../versions.json", "version_match": version},
    "check_switcher": False,
    "show_version_warning_banner": True,
    # Half of the build's time goes into deeper ones.
    "navigation_depth": 2,
    "collapse_navigation": True,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars: dict[str, list[str]] = {"quickstart": [], "guarantee": []}


class CommandLineReference(SphinxDirective):
    """Inserts the help of every command, as typer writes it in Markdown."""

    @override
    def run(self) -> list[nodes.Node]:
        printed = subprocess.run(
            [
                sys.executable,
                "-m",
                "typer",
                "onceflow.cli.main",
                "utils",
                "docs",
                "--name",
                "onceflow",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        # Its title is the page's.
        _, _, body = printed.stdout.partition("\n")
        self.env.note_dependency(str(Path(onceflow.__file__).parent / "cli" / "main.py"))
        return self.parse_text_to_nodes(body, allow_section_headings=True)


_PAGES = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s]+)\)")
# Where the repository's files can be read, with a slash at the end. Not set: paths are printed.
_SOURCE_URL = os.environ.get("ONCEFLOW_SOURCE_URL", "")


def resolve_links_to_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make links to files outside of the pages links to the repository, or the files' paths."""

    def resolve(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path = (_PAGES / docname).parent.joinpath(target.partition("#")[0]).resolve()
        if path.is_relative_to(_PAGES) or not path.is_relative_to(_PAGES.parent):
            return match[0]
        name = path.relative_to(_PAGES.parent).as_posix()
        if _SOURCE_URL:
            return f"[{text}]({_SOURCE_URL}{name})"
        return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"

    source[0] = _LINK.sub(resolve, source[0])


def keep_attribute_whole(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Keep what is before a colon in an attribute's docstring: napoleon would call it its type."""
    if what == "attribute":
        # An escaped blank prints nothing. Napoleon takes the first line that holds something apart.
        lines.insert(0, "\\ ")


def setup(app: Sphinx) -> None:
    """Register what this file adds to Sphinx."""
    # Before napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", keep_attribute_whole, priority=400)
    app.add_directive("command-line-reference", CommandLineReference)
    app.connect("source-read", resolve_links_to_source)
