"""The description on a package index: README.md without what leads into the repository."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
#: A link or an image whose target is no URL: files of the repository, which an index does not have.
RELATIVE = r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)[^)]*\)"


def description() -> str:
    """README.md with the text of relative links in their place, without relative images and comments."""
    text = re.sub(r"<!--.*?-->\n*", "", README, flags=re.DOTALL)
    return re.sub(RELATIVE, lambda link: "" if link["image"] else link["text"], text)


setup(long_description=description(), long_description_content_type="text/markdown")
