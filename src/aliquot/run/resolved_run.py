"""Resolve a run before its engine is built: read the model's description and the data, plan, choose what is `auto`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.checkpoint.directories import STATE, newest, step_of
from aliquot.config.schema import RunConfig
from aliquot.core.decode import read_json
from aliquot.core.errors import UnsupportedModelError
from aliquot.core.on_rank_0 import run_on_all_ranks, run_on_rank_0
from aliquot.data.batches import Batches, objective_of
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import Prepared, TokenizerChanges, prepare, prepare_together
from aliquot.data.token_store import answer_ends
from aliquot.data.tokenizer import largest_token
from aliquot.data.workload import batch_size
from aliquot.distributed.config_consistency import check_equal_on_ranks
from aliquot.distributed.leader_lease import follows_earlier_round
from aliquot.machine.matmul import caches_large_kernels
from aliquot.machine.memory import memory_limit
from aliquot.models.adapter import BASE
from aliquot.models.source import ModelSource, import_models, resolve
from aliquot.models.stored_weights import fingerprint
from aliquot.models.traits import Traits, traits
from aliquot.planner.automatic_settings import NO_CHOICES, with_choices
from aliquot.planner.compute_ceiling import Ceiling, ceiling
from aliquot.planner.plan import Plan
from aliquot.planner.preflight import PlanRequest, plan_together

if TYPE_CHECKING:
    from aliquot.run.trainer import Trainer


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
        fixed, adapter = self.batches.determinants(), self.config.adapter
        if self.data.day is not None:
            fixed["data.chat_template_date"] = self.data.day
        if (objective := self.batches.format.objective) is not None and objective.needs_reference:
            fixed[BASE] = str(self.source.fingerprint)
        if adapter is None:
            return fixed
        scaling = {f"adapter.{key}": getattr(adapter, key) for key in ("r", "alpha", "use_rslora")}
        return fixed | scaling | {BASE: str(self.source.fingerprint)}


def read_inputs(trainer: Trainer, trains: bool = True) -> ResolvedRun:
    """Read the model's description, tokenise the data, and lay out the batches, without a plan. Collective.

    `trains` is False for a stand-alone evaluation, which does not tokenise training data. Raises NodesDifferError if
    the ranks do not read the same data or model.
    """
    import_models()
    ranks = trainer.ranks
    positions = run_on_rank_0(ranks, lambda: resolve(trainer.requested.model).positions)  # only rank 0 downloads
    config = trainer.requested.with_positions(positions)
    source = run_on_all_ranks(ranks, lambda: _model_source(config))
    adds_tokens = config.model.add_tokens, config.model.add_special_tokens
    adapter = None if config.adapter is None else config.adapter.directory
    day = config.data.chat_template_date or date.fromisoformat(
        run_on_rank_0(ranks, lambda: str(trainer.directory.day()))
    )
    section = config.data.model_copy(update={"chat_template_date": day})
    prepare_node = partial(
        prepare, section, source.directory, source.largest_vocabulary, trainer.display.progress,
        source.config.to_dict(), TokenizerChanges(*adds_tokens, adapter), trains,
    )  # fmt: skip
    data = prepare_together(ranks, prepare_node)

    def load_tokenizer() -> Any:
        tokenizer = data.load_tokenizer()
        source.adopt_tokenizer(tokenizer, largest_token(tokenizer), any(adds_tokens))
        # This is the second check, because the padding token may have changed.
        source.check_length(config.data.sequence_length, config.train.answers)
        return tokenizer

    tokenizer = run_on_all_ranks(ranks, load_tokenizer)
    size = batch_size(config.train, ranks.world_size)
    epochs = None if config.train.max_steps else config.train.num_train_epochs
    model_traits = Traits(**run_on_rank_0(ranks, lambda: vars(traits(source.config, config.data.sequence_length))))
    fills_up = caches_large_kernels(ranks.topology.device, config.train.precision)

    def lay_out() -> tuple[Batches, dict[str, EvalBatches]]:
        fitting = replace(data, positions=source.positions)
        batches = Batches.of(fitting, config.data, config.run.seed, size, epochs, model_traits.packs, fills_up)
        held_out = EvalBatches.of(fitting, config.data, size, model_traits.packs, fills_up)
        if (objective := objective_of(config.train)) is not None:
            if getattr(source.config, "output_router_logits", False):
                raise UnsupportedModelError(
                    f"train.objective: {objective.name} has no loss for output_router_logits: set it to false in"
                    " config.json"
                )
            batches = batches.with_objective(objective)
            held_out = {name: batches_of_set.with_objective(objective) for name, batches_of_set in held_out.items()}
        batches.total_steps(config.train.max_steps)  # raises the error of data without a whole step
        return batches, held_out

    batches, held_out = run_on_all_ranks(ranks, lay_out)
    inputs = ResolvedRun(config, source, model_traits, data, tokenizer, batches, held_out)
    check_equal_on_ranks(ranks, lambda: _identities(inputs))
    return inputs


def _model_source(config: RunConfig) -> ModelSource:
    source = resolve(config.model)
    source.check_length(config.data.sequence_length, config.train.answers)  # early: tokenising a corpus takes long
    return source


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


def resolve_run(trainer: Trainer, inputs: ResolvedRun) -> ResolvedRun:
    """Plan the run, and choose each setting that is `auto`. Collective.

    Without a plan, layers are not compiled, a micro-batch has one sequence, and nodes hold no replicas.
    """
    measured = ceiling(trainer.ranks, inputs.config.train.precision)  # before the plan, which takes rates from it
    plan = _plan(trainer, inputs)
    config = with_choices(inputs.config, NO_CHOICES if plan is None else plan.choices)
    sequences = batch_size(config.train, trainer.ranks.world_size).micro
    if sequences > 1 and inputs.config.train.per_device_train_batch_size == "auto":
        trainer.display.line(f"micro-batches of {sequences} sequences (train.per_device_train_batch_size: auto)")
    held_out = {name: batches.with_micro_batches(sequences) for name, batches in inputs.held_out.items()}
    batches = inputs.batches.with_micro_batches(sequences)
    return replace(inputs, config=config, batches=batches, held_out=held_out, plan=plan, ceiling=measured)


def _plan(trainer: Trainer, inputs: ResolvedRun) -> Plan | None:
    """Plan the run on rank 0 and return the plan on every rank; None if no plan can be made. Collective."""
    ranks = trainer.ranks
    memory_bytes = min(ranks.gather(memory_limit()))
    # The plan assumes equal nodes. Unequal nodes cannot replicate each other.
    is_even = len(set(ranks.gather(ranks.topology.local_world_size))) == 1
    config = inputs.config if is_even else with_choices(inputs.config, {"shard.replicate": "none"})

    def request() -> PlanRequest:
        eval_sequences = sum(batches.epoch.packing.sequences for batches in inputs.held_out.values())
        newest_checkpoint = newest(trainer.directory.checkpoints)
        return PlanRequest(
            config, _recorded_choices(newest_checkpoint), ranks.topology, ranks.allowed_cores,
            replace(inputs.batches.workload(), eval_sequences=eval_sequences or None),
            vocabulary=inputs.source.config.vocab_size,
            steps_done=0 if newest_checkpoint is None else step_of(newest_checkpoint), memory_bytes=memory_bytes,
        )  # fmt: skip

    # Advice needs a dozen plans, for which all nodes wait some seconds. Later rounds of an elastic run get no advice.
    return plan_together(ranks, request, trainer.force, not follows_earlier_round(), trainer.display.warning)


def _recorded_choices(checkpoint: Path | None) -> dict[str, object]:
    """Return the values with which `checkpoint` was trained, of the settings of `train` that may be `auto`."""
    if checkpoint is None:
        return {}
    train = read_json(checkpoint / STATE)["config"]["train"]
    keys = [key for key in NO_CHOICES if key.startswith("train.")]
    return {key: train.get(key.removeprefix("train."), NO_CHOICES[key]) for key in keys}
