"""Counts in a model's configuration that no model has, found before anything is made that many times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from aliquot.core.errors import ModelFilesError

# Of the keys that lists are made by, or that what is planned is counted through: far more than any model has.
_MOST = {
    re.compile(r"(.*_)?(layers?|blocks|layers_per_stack)|attention_types"): (10_000, "layers"),
    re.compile(r"(.*_)?experts"): (65_536, "experts"),
    re.compile(r"(.*_)?vocab_size"): (100_000_000, "tokens in its vocabulary"),
    re.compile(r"num_labels"): (1_000_000, "labels"),
    # A model of such a width is made on the meta device, but its rotary frequencies are computed.
    re.compile(r"(?!(.*_)?vocab_size)(.*_)?(size|dim|rank|heads?|model|embd|inner|ff)"): (10_000_000, "columns"),
}


def refuse_absurd_counts(values: dict[str, Any], where: str) -> None:
    """Raises UserError that names the key, which may be one of a configuration within this one."""
    for path, count in _integers(values):
        key = path.rpartition(".")[2]
        for keys, (most, of) in _MOST.items():
            if count > most and keys.fullmatch(key):
                raise ModelFilesError(f"{path} is {count}: no model has more than {most} {of}", where)


def _integers(values: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Each with the keys that lead to it; in lists, too, such as GPT-Neo's of [kinds of layers, how often]."""
    waiting: list[tuple[str, Any]] = list(values.items())
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, int):
            yield path, value
        elif isinstance(value, list):
            waiting += [(path, each) for each in value]
        elif isinstance(value, dict):
            waiting += [(f"{path}.{key}", each) for key, each in value.items()]
