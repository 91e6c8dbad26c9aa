"""Advice in a plan: the change of settings that would make the run fastest, and by which factor.

There is advice for runs that wait for network, memory or disk, and for runs in the slower precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from aliquot.config.schema import RunConfig
from aliquot.core.errors import UserError
from aliquot.data.workload import BatchSize, batch_size
from aliquot.distributed.topology import RankLayout
from aliquot.planner.automatic_settings import larger_micro_batches, with_settings
from aliquot.planner.plan import Plan
from aliquot.planner.settings_search import Search, as_arguments, batch_changes

_LARGER = (2, 4, 8, 16)  # factors by which a batch or a micro-batch grows
_FEWER_RANKS = (1, 2, 4, 8, 16)
_WORTH = 1.1  # a smaller gain in tokens/s is no reason to change a setting
_NEARLY_BEST = 0.9  # a smaller change with at least this fraction of the largest gain is preferred


@dataclass(frozen=True)
class Change:
    """A change of settings that may make the run faster."""

    config: RunConfig  # after the change
    settings: Mapping[str, object]  # `section.key` -> value
    description: str | None = None  # None: the settings need no description
    layout: RankLayout | None = None  # None: the present layout


def with_advice(plan: Plan, search: Search, requested: RunConfig) -> Plan:
    """Append the most helpful change of settings to `plan.bottleneck`. This makes about a dozen more plans.

    Rates of a busy machine, which are not slowed alike, are no reason to change a setting.

    Args:
        requested: the config of `search` before the plan chose the settings that are `auto`.
    """
    series = _series(plan, search, requested) if plan.fits and search.planner.rates(search.layout).is_sure else []
    if not series:
        return plan
    present = search.planner.plan(search.config, search.layout, search.workload, approximate=True).tokens_per_s
    best: list[tuple[float, str]] = []
    for changes in series:
        gains = [(made.tokens_per_s / present, words) for words, made in _plans(changes, search)]
        if gains:
            enough = _NEARLY_BEST * max(gain for gain, _ in gains)
            best.append(next(pair for pair in gains if pair[0] >= enough))  # smallest change with nearly the best gain
    gain, words = max(best, default=(0.0, ""))
    if gain < _WORTH:
        return plan
    return replace(plan, bottleneck=f"{plan.bottleneck}: {words} would be {gain:.1f}x as fast")


def _series(plan: Plan, search: Search, requested: RunConfig) -> list[Iterator[Change]]:
    """Return series of changes, each from the smallest to the largest change.

    A series that cannot help is left out, because each change costs the time of a plan. So is a setting that is `auto`:
    its value is the best by the same plans.
    """
    planner, config, layout = search.planner, search.config, search.layout
    faster = planner.machine.faster_precision(layout.device)
    series: list[Iterator[Change]] = []
    if config.train.chosen_precision != faster:
        # The other settings that are `auto`, and the ranks, have other values in the other precision.
        precision = {"train.precision": faster}
        fewer = _fewer_ranks(replace(search, config=requested), precision)
        series.append(chain([Change(with_settings(requested, precision), precision)], fewer))
    if plan.engine != "host" and planner.engine(config, layout) == "host":  # engine host does not fit
        series.append(_fewer_ranks(search, {}))
    if plan.bottleneck != "compute-bound":
        is_chosen = next(larger_micro_batches(requested, layout.world_size), None) is not None
        series += _larger_batches(config, layout)[: 1 if is_chosen else None]
        several_nodes, no_offload = layout.nodes > 1, {"shard.offload": "none"}
        can_replicate = layout.ranks_per_node > 1 and (plan.engine, plan.replicate) == ("fsdp", "none")
        single: list[tuple[bool, dict[str, object]]] = [
            # On GPUs, engine host is another way to keep states in host memory.
            (plan.engine != "host", {"shard.engine": "host", **(no_offload if config.shard.offload == "cpu" else {})}),
            (
                several_nodes and plan.engine != "deepspeed" and config.shard.reduce_dtype == "fp32",
                {"shard.reduce_dtype": "bf16"},
            ),
            (several_nodes and can_replicate, {"shard.replicate": "nodes"}),
        ]
        series += [iter([Change(with_settings(config, changed), changed)]) for may_help, changed in single if may_help]
    return series


def _plans(changes: Iterator[Change], search: Search) -> Iterator[tuple[str, Plan]]:
    """Plan each change, and yield its description and its plan if the run then fits into memory."""
    planner, names = search.planner, search.names
    for change in changes:
        layout = change.layout or search.layout
        try:
            made = planner.plan(change.config, layout, search.workload, approximate=True)
            automatic = planner.machine.layout(change.config, layout.nodes)
        except UserError:  # settings that exclude each other
            continue
        if made.fits:
            settings = dict(change.settings)
            is_fixed = change.config.launch.ranks != "auto" or names.get("launch.ranks") == "--ranks-per-node"
            if not is_fixed and automatic.ranks_per_node != layout.ranks_per_node:
                settings["launch.ranks"] = layout.ranks_per_node  # `launch.ranks: auto` depends on the batch
            arguments = as_arguments(settings, names)
            details = f" ({arguments})" if len(settings) > 1 else ""
            yield arguments if change.description is None else f"{change.description}{details}", made


def _larger_batches(config: RunConfig, layout: RankLayout) -> list[Iterator[Change]]:
    """Return two series: larger global batches, and larger micro-batches of the present global batch."""
    size = batch_size(config.train, layout.world_size)
    batches = [BatchSize(factor * size.total, size.micro) for factor in _LARGER]
    micro_batches = [BatchSize(size.total, factor * size.micro) for factor in _LARGER]
    return [
        (_with_batch(config, layout, larger, f"a global batch of {larger.total} sequences") for larger in batches),
        (
            _with_batch(config, layout, larger, None)
            for larger in micro_batches
            if larger.micro * layout.world_size <= size.total
        ),
    ]


def _fewer_ranks(search: Search, others: Mapping[str, object]) -> Iterator[Change]:
    """Yield changes to fewer ranks per node together with `others`: engine host may then fit.

    Each rank needs memory for activations and for a ring buffer of gradients.
    """
    config, layout = search.config, search.layout
    for ranks in (count for count in _FEWER_RANKS if count < layout.ranks_per_node):
        settings = {**others, "launch.ranks": ranks}
        fewer = search.planner.machine.layout(config, layout.nodes, ranks)
        yield Change(with_settings(config, settings), settings, layout=fewer)


def _with_batch(config: RunConfig, layout: RankLayout, size: BatchSize, description: str | None) -> Change:
    batch = {"train.global_batch_size": size.total, "train.per_device_train_batch_size": size.micro}
    return Change(with_settings(config, batch), batch_changes(config, layout, size), description)
