"""What stands in the pages: links, configurations, command lines and what they need.

The convention. A block fenced as ```sh holds commands. Its first line may be a comment that begins with `# needs:` and
says what a test does not have: cluster, gpu, hub (or a package index), data (the reader's own files), or minutes, which
only a long test has. A block without it is run by a test, from a directory with the repository's files. A block fenced
as ```yaml whose first line begins with `# NAME.yaml` is a configuration that commands of the same page may name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
NEEDS = {"cluster", "gpu", "hub", "data", "minutes"}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def needs(self) -> set[str]:
        """What its commands need; nothing: a test runs them."""
        found = re.match(r"# needs: ([a-z, ]+)", self.text)
        return set(re.split(r"[, ]+", found[1].strip())) if found else set()

    @property
    def config_name(self) -> str | None:
        found = re.match(r"# ([\w-]+\.yaml)\b", self.text)
        return found[1] if self.language == "yaml" and found else None

    def commands(self) -> Iterator[list[str]]:
        """Each command line as words, comments left out, continued lines joined."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def blocks(page: Path) -> list[Block]:
    return [Block(language, text) for language, text in _BLOCK.findall(page.read_text())]


def header(example: Path) -> Block:
    """The commands that the comment at the head of an example names: lines indented by three blanks."""
    lines = []
    for line in example.read_text().splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#   "):
            lines.append(line[4:])
    return Block("sh", "\n".join(lines))


def links(page: Path) -> Iterator[str]:
    """Targets of links outside fenced blocks, those to the web left out, without their anchors."""
    for target in _LINK.findall(_BLOCK.sub("", page.read_text())):
        place = target.partition("#")[0]
        if place and "://" not in target:
            yield place


def write_table(page: Path, tool: str, table: str) -> None:
    """Replace the table below the comment that names the tool which makes the table."""
    place = re.compile(rf"(<!-- made by `python -m tests\.tools\.{tool}` -->\n\n)(?:\|.*\n)+")
    text, count = place.subn(lambda found: found[1] + table, page.read_text())
    assert count == 1, page
    page.write_text(text)


def headings(page: Path) -> list[tuple[int, str]]:
    """(level, text) of each heading."""
    text = _BLOCK.sub("", page.read_text())
    return [(len(marks), title) for marks, title in re.findall(r"^(#+) (.+)$", text, re.MULTILINE)]
