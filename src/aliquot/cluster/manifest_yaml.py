"""Write manifests, which are Python dicts, as YAML that every YAML reader reads as the same values.

No manifest is a string template: values of a config become scalars, whatever characters they contain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Document = dict[str, Any]

# Strings without quotes; others are quoted, because readers of YAML disagree on `y`, `1e3`, `0o14`, `1:30` and more.
_BARE = re.compile(r"^[A-Za-z/][A-Za-z0-9_./@:-]*$")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_BLOCK = re.compile(r"^[^\s\x00-\x1f][^\x00-\x09\x0b-\x1f\x7f-\xa0\u2028\u2029\ufeff]*\n$")


class _ManifestDumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists are indented, as people write them

    def ignore_aliases(self, data: Any) -> bool:
        return True  # repeated values are written out, without anchors


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    if _BARE.match(value) and not value.endswith("\n") and value.lower() not in _WORDS:
        style = None
    elif "\n" in value[:-1] and _BLOCK.match(value) and " \n" not in value:
        style = "|"
    else:
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_ManifestDumper.add_representer(str, _string)


def to_yaml(document: Mapping[str, Any], header: Sequence[str] = ()) -> str:
    """Write `document` with its keys in their order, below one comment line for each item of `header`."""
    comments = "".join(f"# {one_line(line)}\n" for line in header)
    return comments + yaml.dump(
        dict(document), Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False
    )


def one_line(text: str) -> str:
    """Replace line ends and invisible characters of `text`, so that it can follow a `#`."""
    return "".join(character if character.isprintable() else "?" for character in text)


def literal(text: str) -> str:
    """Escape `text` for a command, argument or variable of a container, in which the kubelet expands `$(NAME)`."""
    return text.replace("$", "$$")


def compact(**items: Any) -> Document:
    """Make a dict without None, empty lists and empty dicts."""
    return {key: value for key, value in items.items() if value is not None and value not in ([], {})}
