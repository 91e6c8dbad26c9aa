"""Whether each page that exists in two languages says the same in both: `python -m tests.tools.docs_translations`.

One of the two pages is a translation: its first line has the hash of the other, as it was when it was translated. Part
of `make lint`, not of the tests: who changes an English page need not write Korean to see the tests pass.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.tools.docs_pages import ROOT, blocks, headings

_KOREAN = ROOT / "docs" / "ko"
NAMES = sorted(str(page.relative_to(_KOREAN).with_suffix("")) for page in _KOREAN.rglob("*.md"))
_HASH = re.compile(r"<!-- translation of (\S+) sha256:([0-9a-f]{16}) -->\n")


def differences(name: str) -> Iterator[str]:
    """What is to be done about the two pages of a name."""
    pair = (_KOREAN / f"{name}.md", ROOT / "docs" / f"{name}.md")
    if not pair[1].exists():
        yield f"docs/ko/{name}.md: there is no page docs/{name}.md"
        return
    carriers = [page for page in pair if _HASH.match(page.read_text())]
    if len(carriers) != 1:
        yield f"{name}: just one of the two pages must begin with <!-- translation of PATH sha256:... -->"
        return
    translation, origin = carriers[0], next(page for page in pair if page not in carriers)
    told, of = translation.relative_to(ROOT), origin.relative_to(ROOT)
    found = _HASH.match(translation.read_text())
    if found is None or (translation.parent / found[1]).resolve() != origin:
        yield f"{told}: its first line does not name {of}"
        return
    digest = hashlib.sha256(origin.read_bytes()).hexdigest()[:16]
    if found[2] != digest:
        yield f"{told}: {of} has changed: translate the change, then write sha256:{digest}"
    if _outline(origin) != _outline(translation):
        yield f"{told}: its headings are not those of {of}"
    if _commands(origin) != _commands(translation):
        yield f"{told}: its commands are not those of {of}"


def _outline(page: Path) -> list[int]:
    return [level for level, _ in headings(page)]


def _commands(page: Path) -> list[list[list[str]]]:
    return [list(block.commands()) for block in blocks(page) if block.language == "sh"]


def main() -> None:
    found = [line for name in NAMES for line in differences(name)]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
