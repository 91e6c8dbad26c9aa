"""Whether all ranks of a run do the same: told and compared when they have joined, and when data and model are known.

A node with another text, another batch size or other weights would train to the end without a word, on a mixture; so
would a rank that somebody starts by hand beside others of its host.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.core.errors import NodesDifferError
from aliquot.distributed.ranks import Ranks

# A node's own: where it finds things (what it finds there is compared), how many processes it has, what it shows.
_OWN = (
    "cluster", "launch", "run.directory", "model.path", "data.path", "data.eval_path", "data.tokenizer",
    "data.dataset", "data.chat_template", "data.cache_directory", "data.num_proc", "observe.console", "adapter.path",
    "shard.offload_directory",
)  # fmt: skip
_PACKAGES = ("aliquot", "torch", "transformers")
_MOST_TOLD = 3


def check_configs(ranks: Ranks, config: RunConfig) -> None:
    """Settings, versions and what is trained on. Collective; raises NodesDifferError on every rank."""
    check_same(ranks, lambda: {**common_settings(config), "launch.device": ranks.topology.device})


def common_settings(config: RunConfig) -> dict[str, Any]:
    """What must be the same on all nodes, by key, and the versions of the software."""
    settings = dict(_flat(config.model_dump(mode="json", by_alias=True)))
    common = {key: _anywhere(key, value) for key, value in settings.items() if not _is_own(key)}
    return {**common, **{f"version of {name}": version(name) for name in _PACKAGES}, "files of aliquot (hash)": _code()}


@cache
def _code() -> str:
    """Two checkouts of one version may differ."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        total.update(f"{file.relative_to(package)} ".encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:12]


def _is_own(key: str) -> bool:
    return any(key == own or key.startswith(f"{own}.") for own in _OWN)


def _anywhere(key: str, value: Any) -> Any:
    """A setting without where this node finds what it names."""
    if key in ("data.sources", "data.eval_sources") and isinstance(value, list):
        return [{name: each for name, each in source.items() if name != "path"} for source in value]
    if key in ("model.config", "checkpoint.resume") and isinstance(value, str) and value not in ("auto", "never"):
        return value if "://" in value else "a path"
    return value


def check_same(ranks: Ranks, tell: Callable[[], Mapping[str, Any]]) -> None:
    """Whether each rank tells the same. Collective; raises NodesDifferError on every rank."""
    own = dict(_flat(tell()))
    digests = ranks.gather(hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    differs = digests[ranks.rank] != digests[0]
    everybody = ranks.gather([ranks.topology.node_rank, own] if ranks.rank == 0 or differs else None)
    first_node, first = everybody[0]
    for rank, (node, told) in ((rank, each) for rank, each in enumerate(everybody[1:], 1) if each is not None):
        words = differences(first, told)
        if not words:  # one value written in two ways, like 10000 and 10000.0
            continue
        who, others = (f"node {node} (rank {rank})", "node 0") if node != first_node else (f"rank {rank}", "rank 0")
        raise NodesDifferError(f"{who} does not train what {others} does: {words}")


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first keys of which both tell something else, and their values."""
    different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    words = [f"{key} is {_shown(there, key)} there and {_shown(here, key)} here" for key in different[:_MOST_TOLD]]
    more = f", and {len(different) - _MOST_TOLD} more" if len(different) > _MOST_TOLD else ""
    return "; ".join(words) + more


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", json.loads(json.dumps(value, default=str))  # as others will get it


def _shown(values: Mapping[str, Any], key: str) -> str:
    return str(values[key])[:60] if key in values else "not set"
