"""Whether each Korean page says what its English page says: `python -m tests.tools.docs_translations`.

The first line of a page in docs/ko names its English page, with the hash of that page as the author last read it. The
pages are written in Korean, not translated sentence by sentence: headings may differ, commands may not. Part of `make
lint`, not of the tests, so that a change of an English page passes the tests without Korean.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.tools.docs_pages import ROOT, blocks

_FIRST_LINE = re.compile(r"<!-- translation of (\S+) sha256:([0-9a-f]{16}) -->\n")
_KOREAN_ONLY = {"glossary.md"}


def differences(page: Path) -> Iterator[str]:
    """Yield what must be done about a Korean page."""
    name = page.relative_to(ROOT)
    first_line = _FIRST_LINE.match(page.read_text())
    if first_line is None:
        yield f"{name}: the first line must be <!-- translation of PATH sha256:... -->"
        return
    english = (page.parent / first_line[1]).resolve()
    if not english.is_file():
        yield f"{name}: its first line names {first_line[1]}, which does not exist"
        return
    digest = hashlib.sha256(english.read_bytes()).hexdigest()[:16]
    if first_line[2] != digest:
        changed = english.relative_to(ROOT)
        yield f"{name}: {changed} has changed: say the same in Korean, then write sha256:{digest}"
    if _commands(english) != _commands(page):
        yield f"{name}: its commands are not those of {english.relative_to(ROOT)}"


def _commands(page: Path) -> list[list[list[str]]]:
    return [list(block.commands()) for block in blocks(page) if block.language == "sh"]


def main() -> None:
    pages = [page for page in sorted((ROOT / "docs/ko").rglob("*.md")) if page.name not in _KOREAN_ONLY]
    lines = [line for page in pages for line in differences(page)]
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
