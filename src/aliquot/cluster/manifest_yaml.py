"""Manifests as Python dicts, and those as YAML that every reader of YAML takes for the same values.

No manifest is ever a string with holes: what a config holds becomes a scalar, whatever characters it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Document = dict[str, Any]

# Written bare; anything else is quoted. YAML 1.1 and Go's reader disagree on `y`, `1e3`, `0o14`, `1:30` and more.
_BARE = re.compile(r"^[A-Za-z/][A-Za-z0-9_./@:-]*$")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_BLOCK = re.compile(r"^[^\s\x00-\x1f][^\x00-\x09\x0b-\x1f\x7f-\xa0\u2028\u2029\ufeff]*\n$")


class _ManifestDumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists are indented, as people write them

    def ignore_aliases(self, data: Any) -> bool:
        return True  # each value is written out: no anchors for a reader to follow


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
    """`document` with its keys in the order given, below one comment line for each of `header`."""
    comments = "".join(f"# {one_line(line)}\n" for line in header)
    return comments + yaml.dump(
        dict(document), Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False
    )


def one_line(text: str) -> str:
    """`text` with nothing in it that ends a line or cannot be seen: what may follow a `#`."""
    return "".join(character if character.isprintable() else "?" for character in text)


def literal(text: str) -> str:
    """`text` for a command, argument or variable of a container, where the kubelet expands `$(NAME)`; `$$` is `$`."""
    return text.replace("$", "$$")


def compact(**items: Any) -> Document:
    """A dict of what is there: None, empty lists and empty dicts are left out."""
    return {key: value for key, value in items.items() if value is not None and value not in ([], {})}
