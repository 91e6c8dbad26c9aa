"""The change that would make a run faster, if it waits for network or memory or computes in the slower precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from aliquot.config.schema import RunConfig
from aliquot.core.errors import UserError
from aliquot.data.workload import Workload, batch_size
from aliquot.distributed.topology import RankLayout
from aliquot.planner.plan import Plan
from aliquot.planner.planner import Planner
from aliquot.planner.search import NO_NAMES, Names, as_arguments, with_settings

Precision = Literal["bf16", "fp32"]

_SIDE = 512  # of the matrix product that compares precisions
_LARGER = (2, 4, 8, 16)
_FEWER_RANKS = (1, 2, 4, 8, 16)
_WORTH = 1.1  # a smaller gain in tokens/s is no reason to change a setting
_NEARLY_BEST = 0.9  # of the best gain of a series


@dataclass(frozen=True)
class Change:
    config: RunConfig  # after the change
    settings: Mapping[str, object]  # `section.key` -> value
    description: str | None = None  # None: the settings speak for themselves
    layout: RankLayout | None = None  # None: the present layout

    def words(self, more: Mapping[str, object], names: Names) -> str:
        """Describe the change together with `more` settings that it needs."""
        arguments = as_arguments({**self.settings, **more}, names)
        if self.description is None:
            return arguments
        return self.description if len(self.settings) + len(more) == 1 else f"{self.description} ({arguments})"


Changes = Iterator[Change]


def with_advice(
    plan: Plan,
    planner: Planner,
    config: RunConfig,
    layout: RankLayout,
    workload: Workload,
    names: Names = NO_NAMES,
) -> Plan:
    """Add the best change to the bottleneck of a plan. Makes about a dozen more plans."""
    series = _series(planner, config, layout, plan)
    if not plan.fits or not series:
        return plan
    present = planner.plan(config, layout, workload, approximate=True).tokens_per_s
    best: list[tuple[float, str]] = []
    for changes in series:
        gains = [
            (made.tokens_per_s / present, words) for words, made in _plans(changes, planner, layout, workload, names)
        ]
        if gains:
            enough = _NEARLY_BEST * max(gain for gain, _ in gains)
            best.append(next(pair for pair in gains if pair[0] >= enough))  # the smallest change that comes near
    gain, words = max(best, default=(0.0, ""))
    if gain < _WORTH:
        return plan
    return replace(plan, bottleneck=f"{plan.bottleneck}: {words} would be {gain:.1f}x")


def _series(planner: Planner, config: RunConfig, layout: RankLayout, plan: Plan) -> list[Changes]:
    """Return series of changes that may help; none where a run has nothing to gain, because each plan costs time."""
    alternative: Precision = "bf16" if config.train.precision == "fp32" else "fp32"
    is_slow = _product_s(planner, layout, alternative) < _product_s(planner, layout, config.train.precision)
    series = [iter([_set(config, {"train.precision": alternative})])] if is_slow else []
    if plan.engine != "host" and planner.engine(config, layout) == "host":  # engine host does not fit
        series.append(_fewer_ranks(planner, config, layout))
    if plan.bottleneck != "compute-bound":
        series += [_larger_batches(config, layout), _larger_micro_batches(config, layout)]
        if layout.device == "cpu" and plan.engine != "host":
            series.append(iter([_set(config, {"shard.engine": "host"})]))
        series.append(_compiled_layers(config, layout))
        if layout.nodes > 1 and plan.engine == "host" and config.shard.reduce_dtype == "fp32":
            series.append(iter([_set(config, {"shard.reduce_dtype": "bf16"})]))
    return series


def _product_s(planner: Planner, layout: RankLayout, precision: Precision) -> float:
    return planner.rates(layout).matmul_s(1, _SIDE, _SIDE, _SIDE, 4 if precision == "fp32" else 2)


def _plans(
    changes: Changes, planner: Planner, layout: RankLayout, workload: Workload, names: Names = NO_NAMES
) -> Iterator[tuple[str, Plan]]:
    """Yield words and plan of each change that fits."""
    for change in changes:
        changed_layout = change.layout or layout
        try:
            made = planner.plan(change.config, changed_layout, workload, approximate=True)
            automatic = planner.machine.layout(change.config, changed_layout.nodes)
        except UserError:  # settings that exclude each other
            continue
        if made.fits:
            is_fixed = change.config.launch.ranks != "auto" or names.get("launch.ranks") == "--ranks-per-node"
            # Automatic ranks follow the batch: without a number the change would change the ranks, too.
            needs_ranks = not is_fixed and automatic.ranks_per_node != changed_layout.ranks_per_node
            yield change.words({"launch.ranks": changed_layout.ranks_per_node} if needs_ranks else {}, names), made


def _larger_batches(config: RunConfig, layout: RankLayout) -> Changes:
    size = batch_size(config.train, layout.world_size)
    for factor in _LARGER:
        total = factor * size.total
        settings: dict[str, object] = {"train.global_batch_size": total}
        if config.train.global_batch_tokens is not None:
            settings["train.global_batch_tokens"] = "null"
        if config.train.per_device_train_batch_size != size.micro:
            settings["train.per_device_train_batch_size"] = size.micro
        if config.train.gradient_accumulation_steps is not None:
            settings["train.gradient_accumulation_steps"] = "null"
        yield Change(_with_batch(config, total, size.micro), settings, f"a global batch of {total} sequences")


def _larger_micro_batches(config: RunConfig, layout: RankLayout) -> Changes:
    size = batch_size(config.train, layout.world_size)
    for factor in _LARGER:
        if (micro := factor * size.micro) * layout.world_size <= size.total:
            settings: dict[str, object] = {"train.per_device_train_batch_size": micro}
            if config.train.gradient_accumulation_steps is not None:
                total = {"train.global_batch_size": size.total} if config.train.global_batch_size is None else {}
                settings = {**total, **settings, "train.gradient_accumulation_steps": "null"}
            yield Change(_with_batch(config, size.total, micro), settings)


def _fewer_ranks(planner: Planner, config: RunConfig, layout: RankLayout) -> Changes:
    """Engine host may fit with fewer ranks, because each rank holds activations and a ring of its own."""
    for ranks in (count for count in _FEWER_RANKS if count < layout.ranks_per_node):
        launch = config.launch.model_copy(update={"ranks": ranks})
        changed = config.model_copy(update={"launch": launch})
        yield Change(changed, {"launch.ranks": ranks}, layout=planner.machine.layout(config, layout.nodes, ranks))


def _compiled_layers(config: RunConfig, layout: RankLayout) -> Changes:
    if layout.device == "cpu" and config.train.compile == "none":
        yield _set(config, {"train.compile": "layers"})


def _set(config: RunConfig, settings: Mapping[str, object]) -> Change:
    return Change(with_settings(config, settings), settings)


def _with_batch(config: RunConfig, total: int, micro: int) -> RunConfig:
    return with_settings(config, {"train.global_batch_size": total, "train.per_device_train_batch_size": micro})
