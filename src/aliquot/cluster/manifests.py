"""Read manifests from files, each object with its file and line, and write manifests as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from aliquot.cluster.kind_schemas import Violation, well_typed
from aliquot.core.decode import BoundedLoader, TooDeepError
from aliquot.core.errors import ManifestError

Document = dict[str, Any]

_SUFFIXES = (".yaml", ".yml", ".json")
# Strings that are written without quotes; others are quoted, because readers of YAML disagree on `y`, `1e3`, `0o14`,
# `1:30` and more.
_BARE = re.compile(r"^[A-Za-z/][A-Za-z0-9_./@:-]*$")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_BLOCK = re.compile(r"^[^\s\x00-\x1f][^\x00-\x09\x0b-\x1f\x7f-\xa0\u2028\u2029\ufeff]*\n$")


@dataclass(frozen=True)
class ManifestObject:
    """An object of a manifest. Rules read `get` and `items`, in which known fields have the right type or are None."""

    document: dict[str, Any]  # as written
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
        """Return whether both objects name a namespace and the names differ. An object without one can be anywhere."""
        return namespaces_differ(self.get("metadata", "namespace"), other.get("metadata", "namespace"))

    def get(self, *path: str | int) -> Any:
        """Return the value at a path of keys and indices, None if a part of the path is missing."""
        return dig(self._well_typed[0], *path)

    def items(self, *path: str | int) -> list[Any]:
        """Return the mappings of a list at `path`; empty if there is no list."""
        return [item for item in listed(self.get(*path)) if isinstance(item, dict)]

    @property
    def violations(self) -> list[Violation]:
        """Unknown fields, and values that were removed because of a wrong type."""
        return self._well_typed[1]

    @cached_property
    def _well_typed(self) -> tuple[dict[str, Any], list[Violation]]:
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


def namespaces_differ(first: object, second: object) -> bool:
    return isinstance(first, str) and isinstance(second, str) and first != second


def select_kinds(manifests: Sequence[ManifestObject], *kinds: str) -> list[ManifestObject]:
    return [manifest for manifest in manifests if manifest.kind in kinds]


def read_manifests(path: Path) -> list[ManifestObject]:
    """Read a file, or all YAML and JSON files of a directory. Raises UserError for a file that is no YAML."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    else:
        files = [path]
    if not files:
        raise ManifestError("no .yaml, .yml or .json file here", path)
    return [manifest for file in files for manifest in _read(file)]


def is_manifest(path: Path) -> bool:
    """Return whether `path` holds Kubernetes objects, not a run's configuration."""
    if path.is_dir():
        return True
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False  # the reader of configurations reports the error
    return any(line.startswith(("apiVersion:", "kind:")) for line in lines) or path.suffix == ".json"


def parse_manifests(text: str, name: str) -> Iterator[ManifestObject]:
    try:
        for node in yaml.compose_all(text, Loader=BoundedLoader):
            place = f"{name}:{node.start_mark.line + 1}"
            try:
                value = BoundedLoader("").construct_document(node)
            except (ValueError, KeyError, AttributeError) as error:  # 2026-99-99, or a value that contradicts its !!tag
                raise ManifestError(f"not valid YAML: {' '.join(str(error).split())}", place) from None
            if value is not None:  # only comments between two `---`
                yield from _objects(value, place)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ManifestError(f"not valid YAML: {error.problem or error.context}", f"{name}:{line}") from None
    except yaml.YAMLError as error:
        raise ManifestError(f"not valid YAML: {' '.join(str(error).split())}", name) from None
    except TooDeepError as error:
        raise ManifestError(str(error), name) from None


def _objects(value: Any, place: str) -> Iterator[ManifestObject]:
    if not isinstance(value, dict) or "kind" not in value:
        raise ManifestError("not a Kubernetes object: `kind` is missing", place)
    if value["kind"] == "List":
        items = value.get("items") or []
        if not isinstance(items, list):
            raise ManifestError("`items` of this List is no list", place)
        for item in items:
            yield from _objects(item, place)
    elif value["kind"] != "Kustomization":
        yield ManifestObject(value, place)


def _read(file: Path) -> Iterator[ManifestObject]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"cannot read this manifest: {error}", file) from None
    return parse_manifests(text, str(file))


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
    """Write `document` as YAML that every reader reads as the same values, below a comment line for each of `header`.

    No manifest is a string template: values of a config become scalars, whatever characters they contain.
    """
    # Line ends and invisible characters cannot follow a `#`.
    lines = ("".join(character if character.isprintable() else "?" for character in line) for line in header)
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + yaml.dump(
        dict(document), Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False
    )


def literal(text: str) -> str:
    """Escape `text` for a command, argument or variable of a container, in which the kubelet expands `$(NAME)`."""
    return text.replace("$", "$$")


def compact(**items: Any) -> Document:
    """Make a dict without None, empty lists and empty dicts."""
    return {key: value for key, value in items.items() if value is not None and value not in ([], {})}
