"""The documentation as a site: `make docs` writes build/docs/index.html.

The source directory is the repository, so that links between Markdown files, notebooks and code
are the same on the site as they are among the files.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import fp8rl_jax  # noqa: E402

project = "fp8rl_jax"
author = "The fp8rl_jax authors"
version = release = fp8rl_jax.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**.md",
    "notebooks/*.ipynb",
    "pallas_kernels/README.md",
]
exclude_patterns = [".*", "build", "runs", "tests", "experiments", "fp8rl_jax"]

# notebooks are shown as they were committed
nb_execution_mode = "off"
myst_heading_anchors = 4
# x86_64 and the like: what is in backticks is no role, and a docstring's are Markdown's
default_role = "code"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
# two classes may have fields of one name, which annotations and tables then do not link to
suppress_warnings = ["ref.python"]

smartquotes = False  # values are copied from here

html_theme = "furo"
html_title = f"fp8rl_jax {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False


def with_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give docs/index.md the table of contents that its lists are: one for each heading."""
    if docname != root_doc:
        return
    parts = re.split(r"^(?=## )", source[0], flags=re.M)
    for at, part in enumerate(parts[1:], 1):
        caption = part.splitlines()[0].removeprefix("## ")
        pages = re.findall(r"^- \[([^]]*)\]\(([^)#]+)\)", part, re.M)
        entries = [f"{title} <{path}>" for title, path in pages]
        parts[at] += "\n".join(
            ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", "", ""]
        )
    source[0] = "".join(parts)


def signature(app: Sphinx, kind: str, name: str, thing: Any, *rest: Any) -> tuple[str, str] | None:
    """Of a dataclass the names of its fields, which follow with types."""
    if kind == "class" and dataclasses.is_dataclass(thing):
        return f"({', '.join(field.name for field in dataclasses.fields(thing))})", ""
    return None


def as_rest(app: Sphinx, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Make a docstring reST: only backticks mark anything in it, indented blocks are code, and
    several values that are returned are a list."""
    made: list[str] = []
    block = depth = 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line and block and indent < block:
            block = 0
        if line and not block and indent >= depth + 4 and (not made or not made[-1]):
            block = indent
            made += [" " * depth + "::", ""]
        if not block:
            parts = re.split(r"(`[^`]*`)", line)
            parts[::2] = [re.sub(r"[*|]|_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
            line, depth = "".join(parts), indent if line else depth
        made.append(line)
    if kind in ("attribute", "property"):  # napoleon takes what is before a colon for a type
        made[0] = made[0].replace(":", _COLON)
    lines[:] = re.sub(RETURNED, _listed, "\n".join(made)).split("\n")


def with_colons(app: Sphinx, kind: str, name: str, thing: Any, rest: Any, lines: list[str]) -> None:
    """Put back what `as_rest` has taken from napoleon."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


_COLON = "\x02"
RETURNED = re.compile(r"^Returns:\n((?:    .*\n?)+)", re.M)


def _listed(section: re.Match[str]) -> str:
    values = re.split(r"^    (?=\w+: )", section[1], flags=re.M)
    if len(values) < 3 or values[0]:
        return section[0]
    items = ["    * " + re.sub(r"\n +", "\n      ", value) for value in values[1:]]
    return ":returns:\n" + "".join(items)


class SourcePages(SphinxPostTransform):
    """Turns a link to a file of the repository, which is no page, into one to a page that shows
    it."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(addnodes.download_reference)):
            folder = (ROOT / self.env.docname).parent
            path = (folder / node["reftarget"].lstrip("/")).resolve().relative_to(ROOT).as_posix()
            _linked(self.app).add(path)
            here = self.app.builder.get_target_uri(self.env.docname)
            uri = relative_uri(here, self.app.builder.get_target_uri(f"source/{path}"))
            node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))


def _linked(app: Sphinx) -> set[str]:
    return app.env.__dict__.setdefault("linked_files", set())


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages of the files that are linked to."""
    languages = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml"}
    for path in sorted(_linked(app)):
        file = ROOT / path
        text = file.read_text(encoding="utf-8")
        language = languages.get(file.suffix, "text")
        body = app.builder.highlighter.highlight_block(text, language, linenos="inline")
        yield f"source/{path}", {"title": path, "body": f"<h1>{path}</h1>{body}"}, "page.html"


def first_page(app: Sphinx, fault: Exception | None) -> None:
    """build/docs/index.html leads to the contents, which stand where docs/index.md does."""
    page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
    (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("source-read", with_contents)
    app.connect("autodoc-process-docstring", as_rest, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", with_colons, priority=600)
    app.connect("autodoc-process-signature", signature)
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", first_page)
    app.add_post_transform(SourcePages)
