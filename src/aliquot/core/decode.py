"""Decode untrusted JSON and YAML within limits on nesting and on repetition by aliases.

The limit on nesting is constant and does not depend on the interpreter's recursion limit, because libraries such as
torch.compile raise that limit. Otherwise the same file could be refused in one process, read in another process, and
overflow the stack in a third. The YAML loaders check the limits during composition, so that a text is parsed only once.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from aliquot.core.errors import WeightsFileError, reading
from aliquot.core.small_files import (
    LIMIT_BYTES,
    RUN_FILE_BYTES,
    Links,
    pointer_message,
    publish_text,
    read_small_file,
)

DEEPEST = 100  # levels; configurations and records have at most 30, and recursion takes a few frames per level

_MAX_REPEATED_NODES = 10_000  # limit of nodes that aliases repeat, per YAML document
_JSON_STRING = re.compile(r'"(?:[^"\\]++|\\.|\\\Z)*+(?:"|\Z)', re.DOTALL)  # the last string may be cut short
_NO_BRACKET = re.compile(r"[^\[\]{}]+")


class TooDeepError(ValueError):
    """Lists and mappings nest more deeply than `DEEPEST`."""

    def __init__(self) -> None:
        super().__init__(f"lists and mappings nest more than {DEEPEST} levels deep")


# JSON


def decode_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text; `options` are those of `json.loads`.

    Raises ValueError if the text is not UTF-8, is not JSON, has a number of thousands of digits, or nests too deeply.
    """
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    check_json_depth(text)
    return json.loads(text, **options)


def decode_json_object(data: bytes, unique_names: bool = False) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises ValueError with a message for the user.

    `unique_names` refuses an object in which a name occurs twice, because Python would keep only the last value.
    """
    keys = UniqueKeys()
    try:
        value = decode_json(data, object_pairs_hook=keys if unique_names else None)
        if keys.repeated is not None:
            raise ValueError(f"the name {keys.repeated[0]!r} occurs twice")
    except ValueError as error:
        message = pointer_message(data) or f"not valid JSON: {ascii(str(error))[1:-1][:200]}"
        raise ValueError(message) from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def read_json_object(path: Path, links: Links = "inside") -> dict[str, Any]:
    """Return the JSON object in a small file. Raises OSError, and ValueError if the file holds no JSON object."""
    return decode_json_object(read_small_file(path, LIMIT_BYTES, links))


def read_json_lines(path: Path, backwards: bool = False) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line of a file of a run that is a JSON object, and the object. Raises OSError.

    Other lines are skipped, because a killed run may leave a part of a line. `backwards` begins with the last line.
    """
    lines = read_small_file(path, RUN_FILE_BYTES, "none").splitlines(keepends=True)
    for line in reversed(lines) if backwards else lines:
        with suppress(ValueError):
            yield line, decode_json_object(line)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`, a small file of a model or a checkpoint. Raises UserError."""
    return parse_json(read_small(path), path)


def read_small(path: Path) -> bytes:
    """Return the content of a small regular file (see `small_files.read_small_file`). Raises UserError."""
    with reading(path):
        return read_small_file(path)


def parse_json(data: bytes, where: str | Path) -> dict[str, Any]:
    """Parse a JSON object from UTF-8 `data`. Raises UserError, also if an object repeats a name.

    `where`: the path of the file, for the error message.
    """
    try:
        return decode_json_object(data, unique_names=True)
    except ValueError as error:  # bad UTF-8, bad JSON, too many digits, too deep nesting
        raise WeightsFileError(str(error), where) from error


# JSON files that aliquot itself writes and reads again hold a checksum of their fields, because nobody trusts them.


def with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object, and a checksum of them."""
    return {**fields, "crc32": _crc32(fields)}


def has_checksum(fields: dict[str, Any]) -> bool:
    """Remove the checksum from the fields of a JSON object, and return whether it fits."""
    return bool(fields.pop("crc32", None) == _crc32(fields))


def publish_checked_json(path: Path, fields: Mapping[str, Any], indent: int | None = None) -> None:
    """Replace `path` by a file with `fields` atomically. Raises OSError."""
    publish_text(path, json.dumps(with_checksum(fields), indent=indent))


def read_checked_json(path: Path) -> dict[str, Any] | None:
    """Return the fields that `publish_checked_json` wrote; None for any other file, and for one that cannot be read."""
    try:
        fields = decode_json_object(read_small_file(path, links="none"))
    except (OSError, ValueError):
        return None
    return fields if has_checksum(fields) else None


def _crc32(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def without_nulls(value: Any) -> Any:
    """Return a decoded value without the nulls in its objects; a null in a list stays."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def check_json_depth(text: str) -> None:
    """Raise TooDeepError before a parser recurses into `text`."""
    if text.count("[") + text.count("{") > DEEPEST:  # with fewer brackets, no text is too deep
        brackets = _NO_BRACKET.sub("", _JSON_STRING.sub("", text))
        if max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > DEEPEST:
            raise TooDeepError


def check_depth(value: object) -> None:
    """Raise TooDeepError if dicts, lists and tuples in `value` nest too deeply or contain themselves."""
    level: list[Any] = [value]
    for _ in range(DEEPEST + 1):  # the first level is `value` itself, even if `value` is empty
        level = [item for item in level if isinstance(item, dict | list | tuple)]
        if not level:
            return
        # An item that several collections share counts once.
        inner = {id(item): item for one in level for item in (one.values() if isinstance(one, dict) else one)}
        level = list(inner.values())
    raise TooDeepError


class UniqueKeys:
    """An `object_pairs_hook` that records a repeated key of an object, of which Python would keep the last value."""

    def __init__(self) -> None:
        self.repeated: tuple[str, int] | None = None  # the key, and how often it occurs

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            self.repeated = Counter(name for name, _ in pairs).most_common(1)[0]
        return fields


# YAML


class _Bounded:
    """A mixin that limits depth and aliases in PyYAML's loaders, both in Python and in C.

    Both composers of PyYAML call `descend_resolver` before they compose a node. For a whole document, they call one of
    the two `get_...` methods.
    """

    _ancestors = 0  # collections around the node that is being composed

    def descend_resolver(self, parent: yaml.Node | None, index: Any) -> None:
        if self._ancestors > DEEPEST:  # checked before the composer recurses; `_measure` counts aliases
            raise TooDeepError
        self._ancestors += 1
        super().descend_resolver(parent, index)  # type: ignore[misc]

    def ascend_resolver(self) -> None:
        self._ancestors -= 1
        super().ascend_resolver()  # type: ignore[misc]

    def get_node(self) -> yaml.Node | None:
        return _check_document(super().get_node())  # type: ignore[misc]

    def get_single_node(self) -> yaml.Node | None:
        return _check_document(super().get_single_node())  # type: ignore[misc]


class BoundedLoader(_Bounded, yaml.SafeLoader):
    """yaml.SafeLoader that raises TooDeepError, and MarkedYAMLError for excessive or self-referencing aliases."""


class BoundedFastLoader(_Bounded, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """BoundedLoader in C, if PyYAML has C loaders, for texts of megabytes."""


def load_yaml(text: str, loader_type: type[BoundedLoader] = BoundedLoader) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML document, and its root node, which has line numbers; (None, None) for an empty text.

    Raises yaml.YAMLError, and ValueError if the text nests too deeply or has an impossible date like 2026-99-99.
    """
    loader = loader_type(text)
    root = loader.get_single_node()
    return (loader.construct_document(root) if root is not None else None), root


def describe_yaml_error(error: yaml.MarkedYAMLError, text: str) -> str:
    """Describe in plain words what is wrong with a YAML text, and how to write it; unknown errors in PyYAML's words."""
    problem, lines = str(error.problem or error.context), text.splitlines()
    at, begins = error.problem_mark, error.context_mark
    line = lines[at.line] if at is not None and at.line < len(lines) else ""
    first = at.line + 1 if begins is None and at is not None else begins.line + 1 if begins is not None else 1
    if "\t" in problem or (line[: len(line) - len(line.lstrip())].count("\t")):
        return "a tab in the indentation, where YAML allows only spaces: replace the tab by spaces"
    if "mapping values are not allowed" in problem:
        above = next((row for row in reversed(lines[: at.line if at is not None else 0]) if row.strip()), "")
        if line.count(": ") + line.rstrip().endswith(":") > 1:
            return "a value with `: ` in it: put the value in quotes"
        if ":" not in above:
            return f"no colon after {above.strip()!r} in the line above: write `key: value` or `section:`"
        return "this line is indented more than the line above, which has a value already: indent both equally"
    advice = {
        "could not find expected ':'": f"no colon in line {first}: write `key: value` or `section:`",
        "^expected <block end>.*<scalar>": "text after a closing quote: put the whole value in one pair of quotes",
        "^expected <block end>": (
            "this line is indented unlike the lines above: indent all keys of a section, and all items of a list, alike"
        ),
        "\\n.*quoted scalar": f"the quote that opens in line {first} is not closed: close the quote",
        "^expected (',' or|the node content, but found '<stream end>')": (
            f"the bracket that opens in line {first} is not closed, or a comma is missing"
        ),
        "cannot start any token|undefined alias|\\n.*scanning an a": (
            f"a value cannot begin with {line.partition(': ')[2].strip()[:1]!r}: put the value in quotes"
        ),
    }
    both = f"{problem}\n{error.context}"
    return next((text for pattern, text in advice.items() if re.search(pattern, both)), problem)


def _check_document(root: yaml.Node | None) -> yaml.Node | None:
    """Return `root` if it is within the limits. Raises TooDeepError, and MarkedYAMLError for excessive aliases."""
    if root is None:
        return None
    sizes: dict[int, tuple[int, int]] = {}
    nodes, depth = _measure(root, sizes)
    if nodes - len(sizes) > _MAX_REPEATED_NODES:
        raise yaml.MarkedYAMLError(
            problem=f"aliases repeat more than {_MAX_REPEATED_NODES} nodes: write the values out",
            problem_mark=root.start_mark,
        )
    if depth > DEEPEST:
        raise TooDeepError
    return root


def _measure(node: yaml.Node, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of nodes in `node`, with every repetition by an alias, and the depth of `node`.

    `sizes` caches the result for every distinct node, so that an alias, which follows its anchor, costs nothing.
    """
    key = id(node)
    if key not in sizes:
        sizes[key] = 0, 0  # marks a node whose items are being measured
        items = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            items = [item for pair in items for item in pair]
        inner = [_measure(item, sizes) for item in items]
        depth = max((depth for _, depth in inner), default=0) + isinstance(node, yaml.CollectionNode)
        sizes[key] = 1 + sum(nodes for nodes, _ in inner), depth
    elif sizes[key] == (0, 0):
        raise yaml.MarkedYAMLError(problem="an alias within its own anchor", problem_mark=node.start_mark)
    return sizes[key]
