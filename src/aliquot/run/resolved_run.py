"""Resolve a run before its engine is built: read the model's description and the data, plan, choose what is `auto`."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.checkpoint.directories import complete_directories
from aliquot.config.schema import RunConfig
from aliquot.core.errors import ConfigError, UnsupportedModelError, UserError
from aliquot.core.on_rank_0 import run_on_all_ranks, run_on_rank_0
from aliquot.data.batches import Batches, objective_of
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import Prepared, prepare, prepare_together
from aliquot.data.remote_files import NamedProgress
from aliquot.data.token_store import answer_ends
from aliquot.data.vocabulary import TokenizerChanges, adopt_tokenizer
from aliquot.data.workload import batch_size
from aliquot.distributed.config_consistency import check_equal_on_ranks
from aliquot.distributed.leader_lease import follows_earlier_round
from aliquot.distributed.ranks import Ranks
from aliquot.machine.cpu import Precision
from aliquot.machine.matmul import faster_precision_here, matmul_rate, multiplies_with_amx
from aliquot.machine.memory import memory_limit
from aliquot.models.adapter import BASE
from aliquot.models.source import HUB_FILES, ModelSource, import_models, resolve
from aliquot.models.stored_weights import fingerprint
from aliquot.models.traits import Traits, traits
from aliquot.planner.automatic_settings import NO_CHOICES, with_choices, with_settings
from aliquot.planner.compute_ceiling import Ceiling, ceiling
from aliquot.planner.plan import Plan
from aliquot.planner.preflight import PlanRequest, plan_together
from aliquot.tensor_io.manifest import read_state

if TYPE_CHECKING:
    from aliquot.run.prepared_run import PreparedRun


_NOT_MEASURED = Ceiling(0.0, False)  # for a stand-alone evaluation


@dataclass(frozen=True)
class ResolvedRun:
    """All that determines a run before its engine is built. Header, config.yaml, plan and resume share this object."""

    config: RunConfig  # with a value for each setting that may be `auto`
    source: ModelSource
    traits: Traits
    data: Prepared
    tokenizer: Any  # a tokenizer of transformers
    batches: Batches  # from the first step on; a resumed run continues them
    held_out: dict[str, EvalBatches]  # evaluation sets by name; a single set may have the name ""
    plan: Plan | None = None  # None: no plan could be made
    ceiling: Ceiling = _NOT_MEASURED

    @property
    def evaluated(self) -> str | None:
        """The hash of the tokens of the evaluation set that decides which checkpoint is best."""
        return next((Path(store).name for store in self.data.eval.values()), None)

    @property
    def is_chat(self) -> bool:
        """Whether the training data has answers (chat data), and the tokenizer has a chat template."""
        has_answers = any(store.mask is not None for store in self.data.open_train().values())
        return has_answers and self.tokenizer.chat_template is not None

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """The tokens with which answers of the training data end."""
        return answer_ends(self.data.open_train().values(), self.tokenizer, self.config.data.train_on == "all")

    def determinants(self) -> dict[str, str | int | float | None]:
        """Return the values that must not change when a run resumes, by key.

        They determine the order of the data, the reference of a preference loss, and the base model and the scaling of
        an adapter.
        """
        fixed, adapter, objective = self.batches.determinants(), self.config.adapter, self.batches.format.objective
        if self.data.day is not None:
            fixed["data.chat_template_date"] = self.data.day
        if adapter is not None:
            fixed |= {f"adapter.{key}": getattr(adapter, key) for key in ("r", "alpha", "use_rslora")}
        if adapter is not None or (objective is not None and objective.needs_reference):
            fixed[BASE] = str(self.source.fingerprint)
        return fixed


def read_inputs(trainer: PreparedRun, trains: bool = True) -> ResolvedRun:
    """Read the model's description, tokenise the data, and lay out the batches, without a plan. Collective.

    `trains` is False for a stand-alone evaluation, which does not tokenise training data. Raises NodesDifferError if
    the ranks do not read the same data or model.
    """
    import_models()
    ranks = trainer.ranks
    positions = run_on_rank_0(ranks, lambda: resolve(trainer.requested.model).positions)  # only rank 0 downloads
    resume, root = trainer.requested.checkpoint.resume, trainer.directory.checkpoints
    state = run_on_rank_0(ranks, lambda: resumed_state(root, resume))
    precision = choose_precision(trainer, state["config"]["train"].get("precision"))
    config = with_choices(trainer.requested.with_positions(positions), {"train.precision": precision})
    # Without a setting, the global batch follows from the number of ranks; a resumed run keeps it.
    now = batch_size(config.train, ranks.world_size).total
    before = state["determinants"].get("train.global_batch_size", now)
    if config.train.global_batch_size is None and before != now:
        trainer.display.line(f"train.global_batch_size is {before}, as in the checkpoint, and not {now}")
        config = with_settings(config, {"train.global_batch_size": before})
    source = run_on_all_ranks(ranks, lambda: model_source(config))
    # A checkpoint has the day of the run, too, with a checksum.
    recorded_day = state["determinants"].get("data.chat_template_date")
    day = date.fromisoformat(run_on_rank_0(ranks, lambda: recorded_day or str(trainer.directory.day())))
    data = prepare_together(ranks, partial(prepare_data, config, source, day, trainer.display.progress, trains))
    tokenizer = run_on_all_ranks(ranks, lambda: adopt_tokenizer(config, source, data.load_tokenizer()))
    model_traits = traits_together(ranks, config, source)
    fills_up = multiplies_with_amx(ranks.topology.device, precision)
    layout = partial(lay_out, config, source, data, ranks.world_size, model_traits.packs, fills_up)
    batches, held_out = run_on_all_ranks(ranks, layout)
    inputs = ResolvedRun(config, source, model_traits, data, tokenizer, batches, held_out)
    check_equal_on_ranks(ranks, lambda: _identities(inputs))
    return inputs


def choose_precision(trainer: PreparedRun, recorded: Precision | None) -> Precision:
    """Return the precision of the run, which is the same on all nodes, and warn if it is slow on one. Collective.

    Args:
        recorded: the precision in the checkpoint from which the run resumes, which `auto` keeps.

    Raises:
        NodesDifferError: the faster precision is not the same on all nodes, and nothing else decides.
    """
    ranks, setting, device = trainer.ranks, trainer.requested.train.precision, trainer.ranks.topology.device
    faster = faster_precision_here(device)
    precision = recorded if setting == "auto" else setting
    if precision is None:
        check_equal_on_ranks(ranks, lambda: {"the faster precision (set train.precision to one for all nodes)": faster})
    slow = next(filter(None, ranks.gather(platform.node() if faster == "fp32" else "")), None)
    if precision == "bf16" and slow is not None:
        fp32, bf16 = (matmul_rate(device, kind, ranks.barrier) for kind in ("fp32", "bf16"))
        trainer.display.warning(
            f"{'train.precision is' if setting == 'bf16' else 'this run began in'} bf16, but {slow} has no instructions"
            f" for bf16: matrix products take {max(ranks.gather(fp32 / bf16)):.0f} times as long as in fp32. Set"
            " train.precision=fp32"
        )
    return precision or faster


def traits_together(ranks: Ranks, config: RunConfig, source: ModelSource) -> Traits:
    """Return how the model computes, by a trial on rank 0. Collective."""
    length, drops = config.data.sequence_length, config.train.drops
    return Traits(**run_on_rank_0(ranks, lambda: vars(traits(source.config, length, drops))))


def model_source(config: RunConfig, hub_files: Sequence[str] = HUB_FILES) -> ModelSource:
    """Return the model's description. Raises UserError for sequences that are longer than the model's positions."""
    source = resolve(config.model, hub_files)
    if config.adapter is not None and source.from_scratch:
        raise ConfigError("adapter: an adapter needs a pretrained model: give model.path")
    source.check_length(config.data.sequence_length, config.train.answers)  # early: tokenising a corpus takes long
    return source


def prepare_data(
    config: RunConfig, source: ModelSource, day: date, progress: NamedProgress | None, trains: bool = True
) -> Prepared:
    """Tokenise the data of a run, unless the cache has the tokens. `day`: the day on which the run began."""
    section = config.data.model_copy(update={"chat_template_date": config.data.chat_template_date or day})
    fields, rows = source.config.to_dict(), source.largest_vocabulary
    prepared = prepare(section, source.directory, rows, progress, fields, TokenizerChanges.from_config(config), trains)
    return replace(prepared, positions=source.positions)


def lay_out(
    config: RunConfig, source: ModelSource, data: Prepared, ranks: int, packs: bool = True, fills_up: bool = False
) -> tuple[Batches, dict[str, EvalBatches]]:
    """Return the batches and the evaluation batches of a run on a number of ranks."""
    size, train = batch_size(config.train, ranks), config.train
    epochs = None if train.max_steps else train.num_train_epochs
    batches = Batches.of(data, config.data, config.run.seed, size, epochs, packs, fills_up)
    held_out = EvalBatches.of(data, config.data, size, packs, fills_up)
    if (objective := objective_of(train)) is not None:
        if getattr(source.config, "output_router_logits", False):
            raise UnsupportedModelError(
                f"train.objective: {objective.name} has no loss for output_router_logits: set it to false in"
                " config.json"
            )
        batches = batches.with_objective(objective)
        held_out = {name: batches_of_set.with_objective(objective) for name, batches_of_set in held_out.items()}
    batches.total_steps(train.max_steps)  # raises the error of data without a whole step
    return batches, held_out


def _identities(inputs: ResolvedRun) -> dict[str, Any]:
    """Return what must be the same on all ranks; the paths of files may differ."""
    data, config = inputs.data, inputs.source.config.to_dict()
    adapter = None if inputs.config.adapter is None else inputs.config.adapter.directory
    return {
        **{f"{name or 'data'} (hash of the tokens)": Path(path).name for name, path in data.train.items()},
        **{f"held-out {name or 'data'} (hash of the tokens)": Path(path).name for name, path in data.eval.items()},
        "tokenizer (hash of its files)": Path(data.tokenizer).name,
        "model.config": {key: value for key, value in config.items() if not key.startswith("_")},
        "weights (hash of samples)": inputs.source.fingerprint,
        "adapter (hash of samples)": None if adapter is None else fingerprint(adapter),
    }


def resolve_run(trainer: PreparedRun, inputs: ResolvedRun) -> ResolvedRun:
    """Plan the run, and choose each setting that is `auto`. Collective.

    Without a plan, layers are not compiled, a micro-batch has one sequence, and nodes hold no replicas.
    """
    # The measurement comes before the plan, which takes rates from it.
    measured = ceiling(trainer.ranks, inputs.config.train.chosen_precision)
    plan = _plan(trainer, inputs)
    config = with_choices(inputs.config, NO_CHOICES if plan is None else plan.choices)
    sequences = batch_size(config.train, trainer.ranks.world_size).micro
    if sequences > 1 and inputs.config.train.per_device_train_batch_size == "auto":
        trainer.display.line(f"micro-batches of {sequences} sequences (train.per_device_train_batch_size: auto)")
    held_out = {name: batches.with_micro_batches(sequences) for name, batches in inputs.held_out.items()}
    return replace(
        inputs, config=config, batches=inputs.batches.with_micro_batches(sequences), held_out=held_out, plan=plan,
        ceiling=measured,
    )  # fmt: skip


def _plan(trainer: PreparedRun, inputs: ResolvedRun) -> Plan | None:
    """Plan the run on rank 0 and return the plan on every rank; None if no plan can be made. Collective."""
    ranks = trainer.ranks
    memory_bytes = min(ranks.gather(memory_limit()))
    # The plan assumes equal nodes. Unequal nodes cannot replicate each other.
    is_even = len(set(ranks.gather(ranks.topology.local_world_size))) == 1
    config = inputs.config if is_even else with_choices(inputs.config, {"shard.replicate": "none"})

    def request() -> PlanRequest:
        eval_sequences = sum(batches.epoch.packing.sequences for batches in inputs.held_out.values())
        state = resumed_state(trainer.directory.checkpoints, config.checkpoint.resume)
        return PlanRequest(
            config, recorded_choices(state), ranks.topology, ranks.allowed_cores,
            replace(inputs.batches.workload(), eval_sequences=eval_sequences or None),
            vocabulary=inputs.source.config.vocab_size,
            steps_done=state["step"], memory_bytes=memory_bytes,
        )  # fmt: skip

    # Advice needs a dozen plans, for which all nodes wait some seconds. Later rounds of an elastic run get no advice.
    return plan_together(ranks, request, trainer.force, not follows_earlier_round(), trainer.display.warning)


def recorded_choices(state: Mapping[str, Any]) -> dict[str, object]:
    """Return the values in the state of a checkpoint of the settings that may be `auto`, except those of `shard`.

    0 steps between checkpoints are no choice: a run that was begun with 0 may resume with `auto`.
    """
    recorded = [(section, name, value) for section in ("train", "checkpoint")
                for name, value in state["config"].get(section, {}).items() if value]  # fmt: skip
    return {key: value for section, name, value in recorded if (key := f"{section}.{name}") in NO_CHOICES}


def resumed_state(root: Path, resume: str) -> dict[str, Any]:
    """Return the state from which the run resumes, or empty fields if it resumes from no checkpoint.

    It is the newest undamaged state under `root`, or else the state of the checkpoint that `checkpoint.resume` names.
    """
    for checkpoint in (*reversed(complete_directories(root)), Path(resume)) if resume != "never" else ():
        with suppress(UserError, OSError):
            return read_state(checkpoint)
    return {"step": 0, "config": {"train": {}}, "determinants": {}}
