"""Keys such as [Zhu2019] have to lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_key_of_a_docstring_is_in_the_list_of_references() -> None:
    key = re.compile(r"\[([A-Z][A-Za-z]+(?:19|20)\d\d)\]")
    used = {found for path in (ROOT / "lit_recon").rglob("*.py") for found in key.findall(path.read_text("utf-8"))}
    listed = re.findall(r"^\| (\w+) \|", (ROOT / "docs" / "references.md").read_text("utf-8"), re.MULTILINE)[1:]
    assert len(used) > 30
    assert used <= set(listed), f"missing in docs/references.md: {sorted(used - set(listed))}"
    assert listed == sorted(set(listed)), "keys in docs/references.md are to be in order, each once"
