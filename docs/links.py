"""A hook of mkdocs, for what differs between the repository and the site.

The pages link to source files for those who read them in the repository; the site has no sources. tests/test_docs.py
checks that all those files exist. In the repository, docs/reference/python.md has signatures that
tests/tools/docs_python.py has written; on the site, mkdocstrings writes them with all arguments.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\[\]]+)\]\((?:\.\./)+(?:src|tests|examples|benchmarks|deploy|[A-Z])[^)]*\)")

_SIGNATURE = re.compile(r"^<!-- (::: [^>]*?)-->\n.*?(?=^## |^<!-- :::|\Z)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links that leave docs/ become their text, and signatures become directives of mkdocstrings."""
    return _OUTSIDE.sub(r"\1", _SIGNATURE.sub(r"\1\n", markdown))
