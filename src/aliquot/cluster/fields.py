"""Judge single fields of Kubernetes objects: a table row names a field and the values that keep a run alive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aliquot.cluster.findings import Level, RuleFinding, finding
from aliquot.cluster.manifests import dig, listed

_ALL = "*"


@dataclass(frozen=True)
class Field:
    """A field that can break a run."""

    path: str  # keys joined by `/`; `*` stands for all items of a list, and an empty path for the whole object
    rule: str  # key in RULES
    is_safe: Callable[[Any], object]  # gets None if the field is missing and Kubernetes has no default
    fix: str | Callable[[Any], str]
    message: str = ""  # with {path} and {value}; by default both
    absent: Any = None  # the value that a missing field has for its controller
    level: Level | None = None

    def judge(self, document: Any, where: object) -> Iterator[RuleFinding]:
        """Yield a finding for each value that is not safe."""
        keys = self.path.split("/") if self.path else []
        for path, value in values(document, keys):
            effective = self.absent if value is None else value
            if self.is_safe(effective):
                continue
            shown = (
                f"{value!r}"
                if value is not None
                else "missing"
                if self.absent is None
                else f"not set, so {self.absent}"
            )
            message = self.message or "{path} is {value}"
            yield finding(
                self.rule,
                where,
                message.format(path=path, value=shown),
                self.fix if isinstance(self.fix, str) else self.fix(effective),
                self.level,
            )


def judge_fields(fields: Sequence[Field], document: Any, where: object) -> Iterator[RuleFinding]:
    for field in fields:
        yield from field.judge(document, where)


def values(document: Any, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each field that `keys` select; the value of a missing field is None."""
    if _ALL not in keys:
        yield ".".join(keys), dig(document, *keys)
        return
    at = keys.index(_ALL)
    for index, item in enumerate(listed(dig(document, *keys[:at]))):
        for path, value in values(item, keys[at + 1 :]):
            yield f"{'.'.join(keys[:at])}[{index}]{'.' if path else ''}{path}", value


def one_of(*allowed: object) -> Callable[[Any], bool]:
    return lambda value: value in allowed


def none_of(*forbidden: object) -> Callable[[Any], bool]:
    return lambda value: value not in forbidden


def like(pattern: str) -> Callable[[Any], bool]:
    """Accept a missing value, and text that matches the whole `pattern`."""
    return lambda value: value is None or re.fullmatch(pattern, str(value), re.DOTALL) is not None


def unlike(pattern: str) -> Callable[[Any], bool]:
    """Accept text in which `pattern` occurs nowhere."""
    return lambda value: re.search(pattern, str(value or ""), re.MULTILINE) is None


def holds(*words: str) -> Callable[[Any], bool]:
    """Accept a list that has all of `words`."""
    return lambda value: set(words) <= set(map(str, listed(value)))
