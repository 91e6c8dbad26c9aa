"""What would make a run faster: one that waits for the network or for memory, or computes in the slower precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from aliquot.config.schema import RunConfig
from aliquot.core.errors import UserError
from aliquot.data.batch_size import batch_size
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.planner.plan import Plan
from aliquot.planner.planner import Planner
from aliquot.planner.search import NO_NAMES, Names, in_a_line, with_settings

Precision = Literal["bf16", "fp32"]

_SIDE = 512  # of a product
_LARGER = (2, 4, 8, 16)
_FEWER = (1, 2, 4, 8, 16)  # ranks of a node
_WORTH = 1.1  # a gain in tokens/s below is no reason to change a setting
_NEARLY_BEST = 0.9  # of what the best of a kind gains


@dataclass(frozen=True)
class Change:
    config: RunConfig  # as it is then
    settings: Mapping[str, object]  # that make it so: `section.key` -> value
    what: str | None = None  # in words, where the one setting is clear from them
    layout: RankLayout | None = None  # None: the present one

    def words(self, more: Mapping[str, object], names: Names) -> str:
        """`more`: settings to be made beside."""
        lines = in_a_line({**self.settings, **more}, names)
        if self.what is None:
            return lines
        return self.what if len(self.settings) + len(more) == 1 else f"{self.what} ({lines})"


Changes = Iterator[Change]


def with_advice(
    plan: Plan,
    planner: Planner,
    config: RunConfig,
    layout: RankLayout,
    workload: Workload,
    names: Names = NO_NAMES,
) -> Plan:
    """`plan` of that run, and beside its bottleneck what would help most. It makes a dozen plans more: for a reader."""
    kinds = _kinds(planner, config, layout, plan)
    if not plan.fits or not kinds or (words := _helps(planner, config, layout, workload, kinds, names)) is None:
        return plan
    return replace(plan, bottleneck=f"{plan.bottleneck}: {words}")


def _kinds(planner: Planner, config: RunConfig, layout: RankLayout, plan: Plan) -> list[Changes]:
    """Of changes that may help. Each plan costs time: none where there is nothing to gain."""
    other: Precision = "bf16" if config.train.precision == "fp32" else "fp32"
    slower = _product_s(planner, layout, other) < _product_s(planner, layout, config.train.precision)
    found = [_in_precision(config, other)] if slower else []
    if plan.engine != "host" and planner.engine(config, layout) == "host":  # which did not fit
        found.append(_fewer_ranks(planner, config, layout))
    if plan.bottleneck != "compute-bound":
        found += [
            _batches(config, layout),
            _micro_batches(config, layout),
            _engines(config, layout, plan.engine),
            _compiled(config, layout),
            _reduced(config, layout, plan.engine),
        ]
    return found


def _product_s(planner: Planner, layout: RankLayout, precision: Precision) -> float:
    return planner.rates(layout).matmul_s(1, _SIDE, _SIDE, _SIDE, 4 if precision == "fp32" else 2)


def _helps(
    planner: Planner, config: RunConfig, layout: RankLayout, workload: Workload, kinds: list[Changes], names: Names
) -> str | None:
    """`a global batch of 64 sequences would be 1.4x`: the change that gains most of those that fit; None: nothing does.

    Of a series that goes on gaining, the first that comes near its best.
    """
    now = planner.plan(config, layout, workload, approximate=True).tokens_per_s
    gains: list[tuple[float, str]] = []
    for kind in kinds:
        series = [(made.tokens_per_s / now, words) for words, made in _planned(kind, planner, layout, workload, names)]
        if series:
            most = max(gain for gain, _ in series)
            gains.append(next(each for each in series if each[0] >= _NEARLY_BEST * most))
    gain, words = max(gains, default=(0.0, ""))
    return f"{words} would be {gain:.1f}x" if gain >= _WORTH else None


def _planned(
    kind: Changes, planner: Planner, layout: RankLayout, workload: Workload, names: Names = NO_NAMES
) -> Iterator[tuple[str, Plan]]:
    for change in kind:
        spread = change.layout or layout
        try:
            made = planner.plan(change.config, spread, workload, approximate=True)
            # Automatic ranks go by the batch: without that number the change would bring others with it.
            automatic = planner.machine.layout(change.config, spread.nodes)
        except UserError:  # settings that exclude each other
            continue
        if made.fits:
            given = change.config.launch.ranks != "auto" or names.get("launch.ranks") == "--ranks-per-node"
            kept = given or automatic.ranks_per_node == spread.ranks_per_node
            yield change.words({} if kept else {"launch.ranks": spread.ranks_per_node}, names), made


def _in_precision(config: RunConfig, precision: Precision) -> Changes:
    yield _set(config, {"train.precision": precision})


def _batches(config: RunConfig, layout: RankLayout) -> Changes:
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
        yield Change(_sized(config, total, size.micro), settings, f"a global batch of {total} sequences")


def _micro_batches(config: RunConfig, layout: RankLayout) -> Changes:
    size = batch_size(config.train, layout.world_size)
    for factor in _LARGER:
        if (micro := factor * size.micro) * layout.world_size <= size.total:
            settings: dict[str, object] = {"train.per_device_train_batch_size": micro}
            if config.train.gradient_accumulation_steps is not None:
                total = {"train.global_batch_size": size.total} if config.train.global_batch_size is None else {}
                settings = {**total, **settings, "train.gradient_accumulation_steps": "null"}
            yield Change(_sized(config, size.total, micro), settings)


def _engines(config: RunConfig, layout: RankLayout, engine: str) -> Changes:
    if layout.device == "cpu" and engine != "host":
        yield _set(config, {"shard.engine": "host"})


def _fewer_ranks(planner: Planner, config: RunConfig, layout: RankLayout) -> Changes:
    """Each rank of engine host holds activations and a ring of its own: with fewer of them it may fit."""
    for ranks in (count for count in _FEWER if count < layout.ranks_per_node):
        spread = planner.machine.layout(config, layout.nodes, ranks)
        launch = config.launch.model_copy(update={"ranks": ranks})
        yield Change(config.model_copy(update={"launch": launch}), {"launch.ranks": ranks}, layout=spread)


def _compiled(config: RunConfig, layout: RankLayout) -> Changes:
    if layout.device == "cpu" and config.train.compile == "none":
        yield _set(config, {"train.compile": "layers"})


def _reduced(config: RunConfig, layout: RankLayout, engine: str) -> Changes:
    if layout.nodes > 1 and engine == "host" and config.shard.reduce_dtype == "fp32":
        yield _set(config, {"shard.reduce_dtype": "bf16"})


def _set(config: RunConfig, settings: Mapping[str, object]) -> Change:
    return Change(with_settings(config, settings), settings)


def _sized(config: RunConfig, total: int, micro: int) -> RunConfig:
    sizes = {"train.global_batch_size": total, "train.per_device_train_batch_size": micro}
    return with_settings(config, sizes)
