"""Settings of the documentation site, which `make docs` builds with notebooks executed and warnings as errors."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[1]
# The notebooks' processes import the checkout, too, and stay as quiet as the tests.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("WANDB_MODE", "offline")

project = "lit_recon"
project_copyright = "the authors of lit_recon"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "myst-nb"}
html_theme = "furo"
html_title = "lit_recon"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["style"]
html_css_files = ["style.css"]
nitpicky = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds a cell, for busy machines
nb_execution_in_temp = True
nb_merge_streams = True
copybutton_prompt_text = "$ "

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
default_role = "code"
# Packages of others are not linked, since a build needs no network.
nitpick_ignore_regex = [("py:.*", r"(?!lit_recon\.).*")]

#: Modules with a page in docs/api.
_DOCUMENTED = {
    module or owner
    for page in (ROOT / "docs" / "api").glob("*.md")
    for module, owner in re.findall(r"automodule:: ([\w.]+)|autoclass:: ([\w.]+)\.\w+", page.read_text())
}


def _home(module: str, value: object) -> str:
    """The documented module that `value`, which `module` exports, belongs to."""
    own = getattr(value, "__module__", module)
    if own in _DOCUMENTED:
        return str(own)
    inside = [name for name in _DOCUMENTED if f"{own}.".startswith(f"{name}.")]
    return max(inside, key=len, default=module)


@functools.cache
def _public_names() -> dict[str, str]:
    """Documented names by the names of definition, which annotations have: one may stand for the other in links."""
    names = {}
    for module in _DOCUMENTED:
        room = importlib.import_module(module)
        for name in getattr(room, "__all__", ()):
            value = getattr(room, name)
            if hasattr(value, "__qualname__") and _home(module, value) == module:
                names[f"{value.__module__}.{value.__qualname__}"] = f"{module}.{name}"
    return names


def _exists(name: str) -> bool:
    """Whether a dotted name is that of something in a module."""
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError):
        return bool(module) and _exists(module)


def _link_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Resolve the name of a definition by that of its public export.

    In a signature or among base classes, what is not public has no page, and is text.
    """
    target, page = node.get("reftarget", ""), node.get("refdoc", "")
    if node.get("refdomain") != "py" or not target.startswith("lit_recon."):
        return None
    if name := _public_names().get(target):
        python = env.domains.python_domain
        return python.resolve_xref(env, page, app.builder, node["reftype"], name, node, content)
    return content if page.startswith("api/") and _exists(target) else None


def _skip(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, inherited documentation of PyTorch, and names with a page elsewhere."""
    text = getattr(value, "__doc__", None) or ""
    if text.startswith("Alias for field number") or (name == "forward" and text.startswith("Define the computation")):
        return True
    module = app.env.current_document.autodoc_module if what == "module" else ""
    return True if module and hasattr(value, "__qualname__") and _home(module, value) != module else None


def _separate_arguments(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """`a, b: text` of a docstring describes two arguments, which reST takes for one of type `a`."""
    pattern = re.compile(r":(param|ivar) ((?:[\w*\\]+, )+)([\w*\\]+): ?(.*)")
    for i in reversed(range(len(lines))):
        if found := pattern.fullmatch(lines[i]):
            kind, first, last, text = found.groups()
            several = [*first.split(", ")[:-1], last]
            same = f"see ``{several[0]}``" if text or lines[i + 1 : i + 2] else ""
            end = next((j for j in range(i + 1, len(lines)) if not lines[j].startswith(" ")), len(lines))
            lines[end:end] = [f":{kind} {other}: {same}" for other in several[1:]]
            lines[i] = f":{kind} {several[0]}: {text}"


def _plain_attribute(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Keep Napoleon from taking words before a colon for an attribute's type: it does not see such lines."""
    if what in ("attribute", "data", "property", "type") and ":" in "".join(lines[:1]):
        _unseen[name] = lines[:]
        lines[:] = []


def _restored(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Put back what `_plain_attribute` took away."""
    lines[:] = _unseen.pop(name, lines)


_unseen: dict[str, list[str]] = {}


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("autodoc-process-docstring", _plain_attribute, priority=400)
    app.connect("autodoc-process-docstring", _restored, priority=550)
    app.connect("missing-reference", _link_public_name)
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _separate_arguments, priority=600)
