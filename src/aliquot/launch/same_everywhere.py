"""Whether all nodes of a run do the same: told and compared when ranks have joined, and when data and model are known.

A node with another text, another batch size or other weights would train to the end without a word, on a mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.errors import NodesDifferError
from aliquot.launch.ranks import Ranks

# A node's own: where it finds things (what it finds there is compared), how many processes it has, what it shows.
_OWN = (
    "cluster", "launch", "run.directory", "model.path", "data.path", "data.eval_path", "data.tokenizer",
    "data.cache_directory", "data.num_proc", "observe.console",
)  # fmt: skip
_PACKAGES = ("aliquot", "torch", "transformers")
_MOST_TOLD = 3


def check_configs(ranks: Ranks, config: RunConfig) -> None:
    """Settings and versions. Collective; raises NodesDifferError on every rank."""
    settings = dict(_flat(config.model_dump(mode="json", by_alias=True)))
    common = {key: value for key, value in settings.items() if not key.startswith(_OWN)}
    check_same(ranks, {**common, **{f"version of {name}": version(name) for name in _PACKAGES}})


def check_same(ranks: Ranks, told: Mapping[str, Any]) -> None:
    """Whether each rank tells the same. Collective; raises NodesDifferError on every rank."""
    flat = dict(_flat(told))
    everybody = ranks.gather([ranks.topology.node_rank, flat])
    first = everybody[0][1]
    for rank, (node, own) in enumerate(everybody):
        different = [key for key in {**first, **own} if first.get(key) != own.get(key)]
        if different:
            words = [f"{key} is {_shown(first, key)} there and {_shown(own, key)} here" for key in different]
            more = f", and {len(words) - _MOST_TOLD} more" if len(words) > _MOST_TOLD else ""
            raise NodesDifferError(
                f"node {node} (rank {rank}) does not train what node 0 does: {'; '.join(words[:_MOST_TOLD])}{more}"
            )


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", list(value) if isinstance(value, tuple) else value


def _shown(values: Mapping[str, Any], key: str) -> str:
    return str(values[key])[:60] if key in values else "not set"
