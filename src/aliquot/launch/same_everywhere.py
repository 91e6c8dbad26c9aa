"""Whether all nodes of a run do the same: told and compared when ranks have joined, and when data and model are known.

A node with another text, another batch size or other weights would train to the end without a word, on a mixture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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
    check_same(ranks, lambda: common_settings(config))


def common_settings(config: RunConfig) -> dict[str, Any]:
    """What must be the same on all nodes, by key, and the versions of the software."""
    settings = dict(_flat(config.model_dump(mode="json", by_alias=True)))
    common = {key: value for key, value in settings.items() if not key.startswith(_OWN)}
    return {**common, **{f"version of {name}": version(name) for name in _PACKAGES}}


def check_same(ranks: Ranks, tell: Callable[[], Mapping[str, Any]]) -> None:
    """Whether each node tells the same, by its first rank. Collective; raises NodesDifferError on every rank."""
    topology = ranks.topology
    everybody = ranks.gather([topology.node_rank, dict(_flat(tell()))] if topology.local_rank == 0 else None)
    first = everybody[0][1]
    for rank, (node, own) in ((rank, told) for rank, told in enumerate(everybody) if told is not None):
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
            yield f"{before}{key}", json.loads(json.dumps(value, default=str))  # as others will get it


def _shown(values: Mapping[str, Any], key: str) -> str:
    return str(values[key])[:60] if key in values else "not set"
