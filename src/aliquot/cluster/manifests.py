"""Read Kubernetes objects from manifest files, with file and line of each object, and write objects as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from aliquot.cluster.kind_schemas import SUFFIXES, well_typed
from aliquot.core.decode import BoundedLoader, TooDeepError, describe_yaml_error
from aliquot.core.errors import ManifestError

Document = dict[str, Any]

# Strings that `to_yaml` writes without quotes, unless they are in _WORDS. It quotes all others, because YAML parsers
# disagree about `y`, `1e3`, `0o14`, `1:30` and more.
_BARE = re.compile(r"^[A-Za-z/][A-Za-z0-9_./@:-]*$")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_BLOCK = re.compile(r"^[^\s\x00-\x1f][^\x00-\x09\x0b-\x1f\x7f-\xa0\u2028\u2029\ufeff]*\n$")


@dataclass(frozen=True)
class ManifestObject:
    """A Kubernetes object in a manifest.

    Rules read fields by `get` and `items`, which return None or nothing for values of the wrong type.
    """

    document: dict[str, Any]  # the object as written in the file
    place: str  # file:line

    @property
    def kind(self) -> str:
        return str(self.document.get("kind"))

    @property
    def name(self) -> str:
        return str(self.get("metadata", "name"))

    @property
    def namespace(self) -> str:
        return str(self.get("metadata", "namespace") or "default")

    def in_other_namespace(self, other: ManifestObject) -> bool:
        """Return whether both objects name a namespace and the namespaces differ.

        An object that names no namespace can be applied to any.
        """
        return namespaces_differ(self.get("metadata", "namespace"), other.get("metadata", "namespace"))

    def get(self, *path: str | int) -> Any:
        """Return the value at a path of keys and list indices; None if a part of the path is missing."""
        return dig(self._well_typed, *path)

    def items(self, *path: str | int) -> list[Any]:
        """Return the mappings in the list at `path`; empty if there is no list."""
        return [item for item in listed(self.get(*path)) if isinstance(item, dict)]

    @cached_property
    def _well_typed(self) -> dict[str, Any]:
        return well_typed(self.document)

    def __str__(self) -> str:
        return f"{self.place} {self.kind}/{self.name}"


def dig(value: Any, *path: str | int) -> Any:
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def mappings(holder: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the items of the list at `key`; an item that is no mapping counts as an empty one."""
    return [mapping(item) for item in listed(holder.get(key))]


def namespaces_differ(first: object, second: object) -> bool:
    return isinstance(first, str) and isinstance(second, str) and first != second


def select_kinds(manifests: Sequence[ManifestObject], *kinds: str) -> list[ManifestObject]:
    return [manifest for manifest in manifests if manifest.kind in kinds]


def read_manifests(path: Path) -> list[ManifestObject]:
    """Read a file, or the YAML and JSON files of a directory: those that its kustomization lists, if there is one.

    Raises UserError for a file that is not valid YAML, and for a listed file that is missing.
    """
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise ManifestError("no .yaml, .yml or .json file here", path)
    found = {file.name: list(_read(file)) for file in files}
    lists = [item.get("resources") for items in found.values() for item in items if item.kind == "Kustomization"]
    names = [str(name) for names in lists if path.is_dir() for name in listed(names)] or list(found)
    missing = [name for name in names if name not in found and "/" not in name]  # others are directories and URLs
    if missing:
        raise ManifestError(f"its kustomization lists {', '.join(missing)}, which is not here", path)
    return [item for name in names for item in found.get(name, []) if item.kind != "Kustomization"]


def is_manifest(path: Path) -> bool:
    """Return whether `path` contains Kubernetes objects, as opposed to the config of a run."""
    if path.is_dir():
        return True
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False  # the caller then reads the file as a config, and reports the error
    return any(line.startswith(("apiVersion:", "kind:")) for line in lines) or path.suffix == ".json"


def parse_manifests(text: str, name: str) -> Iterator[ManifestObject]:
    try:
        for node in yaml.compose_all(text, Loader=BoundedLoader):
            place = f"{name}:{node.start_mark.line + 1}"
            try:
                value = BoundedLoader("").construct_document(node)
            except (ValueError, KeyError, AttributeError) as error:  # such as the date 2026-99-99, or a wrong !!tag
                raise ManifestError(f"not valid YAML: {' '.join(str(error).split())}", place) from None
            if value is not None:  # None: there are only comments between two `---`
                yield from _objects(value, place)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ManifestError(f"not valid YAML: {describe_yaml_error(error, text)}", f"{name}:{line}") from None
    except (yaml.YAMLError, TooDeepError) as error:
        raise ManifestError(f"not valid YAML: {' '.join(str(error).split())}", name) from None


def _objects(value: Any, place: str) -> Iterator[ManifestObject]:
    if not isinstance(value, dict) or "kind" not in value:
        raise ManifestError("not a Kubernetes object: `kind` is missing", place)
    if value["kind"] == "List":
        items = value.get("items") or []
        if not isinstance(items, list):
            raise ManifestError("`items` of this List is no list", place)
        for item in items:
            yield from _objects(item, place)
    else:
        yield ManifestObject(value, place)


def _read(file: Path) -> Iterator[ManifestObject]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"cannot read this manifest: {error}", file) from None
    return parse_manifests(text, str(file))


class _ManifestDumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # indent lists below their key, as in hand-written manifests

    def ignore_aliases(self, data: Any) -> bool:
        return True  # write repeated values in full, without anchors


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
    """Write `document` as YAML that all YAML parsers read as the same values, below the comment lines `header`.

    Manifests are dumped from values, not filled into a text template, so that a value may contain any characters.
    """
    # A comment line must not contain line ends or control characters.
    lines = ("".join(character if character.isprintable() else "?" for character in line) for line in header)
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + yaml.dump(
        dict(document), Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False
    )


def literal(text: str) -> str:
    """Escape `$` in a command, argument or variable of a container, because the kubelet would expand `$(NAME)`."""
    return text.replace("$", "$$")


def compact(**items: Any) -> Document:
    """Make a dict of the keyword arguments, without those that are None, an empty list or an empty dict."""
    return {key: value for key, value in items.items() if value is not None and value not in ([], {})}
