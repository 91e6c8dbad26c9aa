"""A hook of mkdocs: the pages link to source files for those who read them in the repository; the site has no sources.

tests/test_docs.py checks that all those files exist.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\[\]]+)\]\((?:\.\./)+(?:src|tests|examples|benchmarks|deploy|[A-Z])[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links that leave docs/ become their text."""
    return _OUTSIDE.sub(r"\1", markdown)
