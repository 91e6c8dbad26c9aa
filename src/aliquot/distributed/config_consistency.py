"""Check that all ranks of a run have the same settings, data and software.

The ranks compare their settings after they have joined, and again when data and model are known. Without the check, a
run whose nodes have different texts, batch sizes or weights would train to the end without an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aliquot.config.deepspeed_json import leaves
from aliquot.config.schema import RunConfig
from aliquot.core.errors import NodesDifferError
from aliquot.core.number_format import first_few, short_hash
from aliquot.distributed.ranks import Ranks

# Keys that may differ between nodes: paths (the contents are compared), numbers of processes, console output.
_LOCAL_KEYS = (
    "cluster", "launch", "run.directory", "model.path", "data.path", "data.eval_path", "data.tokenizer",
    "data.dataset", "data.chat_template", "data.cache_directory", "data.num_proc", "observe.console", "adapter.path",
    "shard.offload_directory",
)  # fmt: skip
_PACKAGES = ("aliquot", "torch", "transformers")


def check_configs(ranks: Ranks, config: RunConfig) -> None:
    """Compare settings, versions and device over all ranks. Collective. Raises NodesDifferError on every rank."""
    check_equal_on_ranks(ranks, lambda: {**common_settings(config), "launch.device": ranks.topology.device})


def common_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that must be equal on all nodes, by key, and the versions of the software."""
    settings = dict(leaves(config.model_dump(mode="json", by_alias=True)))
    common = {
        key: _without_paths(key, value)
        for key, value in settings.items()
        if not f"{key}.".startswith(tuple(f"{local}." for local in _LOCAL_KEYS))
    }
    return {
        **common,
        **{f"version of {name}": version(name) for name in _PACKAGES},
        "files of aliquot (hash)": _source_hash(),
    }


@cache
def _source_hash() -> str:
    """Hash the source files of aliquot, because two checkouts of one version may differ."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        total.update(f"{file.relative_to(package)} ".encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:12]


def _without_paths(key: str, value: Any) -> Any:
    """Return the value of setting `key` without paths, which may differ between nodes."""
    if key in ("data.sources", "data.eval_sources") and isinstance(value, list):
        return [{name: setting for name, setting in source.items() if name != "path"} for source in value]
    if key in ("model.config", "checkpoint.resume") and isinstance(value, str) and value not in ("auto", "never"):
        return value if "://" in value else "a path"
    return value


def check_equal_on_ranks(ranks: Ranks, describe: Callable[[], Mapping[str, Any]]) -> None:
    """Check that `describe` returns equal JSON values on all ranks. Collective.

    Raises NodesDifferError on every rank, with the first keys that differ.
    """
    values = dict(leaves(json.loads(json.dumps(describe(), default=str))))  # as other ranks receive them
    digests = ranks.gather(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    differs = digests[ranks.rank] != digests[0]
    entries = ranks.gather([ranks.topology.node_rank, values] if ranks.rank == 0 or differs else None)
    first_node, first = entries[0]
    for rank, (node, there) in ((rank, entry) for rank, entry in enumerate(entries[1:], 1) if entry is not None):
        words = describe_differences(first, there)
        if not words:  # equal values in two spellings, like 10000 and 10000.0
            continue
        who, first_name = (f"node {node} (rank {rank})", "node 0") if node != first_node else (f"rank {rank}", "rank 0")
        raise NodesDifferError(f"{who} differs from {first_name}: {words}")


def describe_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe the first keys whose values differ; an empty string if all values are equal."""
    different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return first_few([f"{key} is {_shown(there, key)} there and {_shown(here, key)} here" for key in different])


def _shown(values: Mapping[str, Any], key: str) -> str:
    return str(short_hash(values[key]))[:60] if key in values else "not set"
