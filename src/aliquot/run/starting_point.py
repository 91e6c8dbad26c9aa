"""Load the weights with which a run starts: of its newest checkpoint, or else pretrained or initial weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.directories import complete_directories, directory_of
from aliquot.checkpoint.mirror import fetch_best, fetch_replacement
from aliquot.checkpoint.resume import changed_settings, check_continuity, check_model, is_from_another_run, resume
from aliquot.checkpoint.retention import EvaluationHistory
from aliquot.core.errors import DamagedCheckpoint, UsageError
from aliquot.core.number_format import count_of, gib
from aliquot.core.on_rank_0 import run_on_all_ranks, run_on_rank_0
from aliquot.data.batches import Position
from aliquot.data.data_files import files_written_after
from aliquot.machine.allocator import release_free_memory
from aliquot.models import initialize
from aliquot.models.load import LoadOptions, load_adapter, load_weights
from aliquot.models.model_config import computation_settings
from aliquot.tensor_io.manifest import STATE, read_state
from aliquot.tensor_io.parts import Part
from aliquot.tensor_io.transfer import read_part

if TYPE_CHECKING:
    from aliquot.engines.base import Engine
    from aliquot.run.prepared_run import PreparedRun
    from aliquot.run.trainer import Trainer

_MAX_FILES = 3  # changed files that an error names


@dataclass(frozen=True)
class Start:
    """The point where training begins: after the steps and tokens (without padding) of earlier runs, if it resumes."""

    step: int = 0
    tokens: int = 0
    resumed_from: Path | None = None
    position: Position = field(default_factory=lambda: Position(0, 0))  # in the data
    ends: tuple[int, ...] = ()  # where earlier runs ended within a batch (data/data_order.py)
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    state: Mapping[str, Any] = field(default_factory=dict)  # values of the caller's loop


def fill_model(trainer: PreparedRun, has_begun: bool = False) -> Start:
    """Load the weights from a checkpoint of this run, or else those with which the run begins. Collective.

    `has_begun`: `begin_model` has been called, so that the model has the latter already.
    """
    if trainer.model.built.adapter is not None and not has_begun:
        _load_pretrained(trainer)
    start = _resume(trainer)
    if start is None:
        start = Start(evaluations=EvaluationHistory(metric=trainer.config.train.metric_for_best_model))
        if not has_begun:
            _load_initial(trainer)
    trainer.ledger.mark("weights loaded", trainer.model.engine.counters().memory())
    release_free_memory()  # initialisation draws whole tensors, although this rank keeps only its rows
    return start


def begin_model(trainer: PreparedRun) -> None:
    """Load the weights with which the run begins, and get the engine ready to compute with them. Collective."""
    if trainer.model.built.adapter is not None:
        _load_pretrained(trainer)
    _load_initial(trainer)
    trainer.model.engine.ready()


@contextmanager
def initial_weights(trainer: Trainer) -> Iterator[None]:
    """Compute with the weights before training within the block. Collective.

    The first call loads these weights. Each rank then keeps its trainable shards of them, in fp32. If the block raises
    an exception, the run must end. Raises UsageError on every rank if a rank has too little memory for its shards.
    """
    engine = trainer.model.engine
    parts = [part for part in trainer.model.saved.parts() if part.kind == "weight"]
    run_on_all_ranks(trainer.ranks, lambda: _check_room(trainer, 2 * 4 * sum(part.numel for part in parts)))
    trainer.checkpoints.saver.before_update()  # a save may still read the weights
    trainer.ranks.barrier()  # no rank may compute while another one writes
    present = [read_part(engine, part) for part in parts]
    if trainer.initial_weights is None:
        _load_initial(trainer)  # of an adapter, its base stays as it is
        engine.ready()
        trainer.initial_weights = [read_part(engine, part) for part in parts]
    else:
        _write_parts(engine, parts, trainer.initial_weights)
    yield
    trainer.ranks.barrier()
    _write_parts(engine, parts, present)


def _check_room(trainer: Trainer, needed_bytes: int) -> None:
    plan = trainer.resolved.plan  # its limit is the memory of a GPU if the run has GPUs
    if plan is None or plan.device == "cuda" or trainer.force or needed_bytes <= plan.unused_bytes:
        return
    raise UsageError(
        f"forward(reference=True) needs {gib(needed_bytes)} on each rank for the weights before training, and"
        f" {gib(max(0, plan.unused_bytes))} are free: use more ranks or machines, or train an adapter"
    )


def _write_parts(engine: Engine, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
    for part, tensor in zip(parts, values, strict=True):
        engine.write(part, part.start, tensor)
    engine.ready()


def check_newest(trainer: PreparedRun) -> None:
    """Raise UserError if the run cannot continue from its newest checkpoint."""
    resumes = trainer.config.checkpoint.resume != "never"
    for checkpoint in complete_directories(trainer.directory.checkpoints)[-1:] if resumes else ():
        with suppress(DamagedCheckpoint):  # then the run resumes from an earlier one
            _check_unchanged(trainer, checkpoint, read_state(checkpoint))


def _check_unchanged(trainer: PreparedRun, checkpoint: Path, state: dict[str, Any]) -> str | None:
    """Return a warning of a changed model. Raises UserError if the run cannot continue from `state`."""
    explain = partial(_changed_data, trainer, state, checkpoint)
    check_continuity(state, trainer.resolved.determinants(), checkpoint, explain)
    return check_model(state, computation_settings(trainer.resolved.source.config), checkpoint)


def _load_initial(trainer: PreparedRun) -> None:
    """Load the pretrained model, or the adapter, with which the run begins, or initialise the weights randomly."""
    config, built = trainer.config, trainer.model.built
    if built.adapter is not None and config.adapter is not None and config.adapter.directory is not None:
        fingerprint = trainer.resolved.source.fingerprint
        load_adapter(trainer.model.saved, config.adapter.directory, built.adapter.saves, fingerprint, trainer.ranks)
    elif built.adapter is not None or trainer.resolved.source.directory is None:
        initialize.initialize(trainer.model.engine, built.fills, config.run.seed)
    else:
        _load_pretrained(trainer)


def _load_pretrained(trainer: PreparedRun) -> None:
    config, model, built = trainer.config, trainer.model, trainer.model.built
    assert trainer.resolved.source.directory is not None
    may_grow = built.vocabulary if config.model.add_tokens or config.model.add_special_tokens else ()
    load_weights(
        model.engine, trainer.resolved.source.directory, built.tensors, built.tied, trainer.ranks,
        LoadOptions(
            published=model.published, may_grow=may_grow, seed=config.run.seed, names=model.names,
            inform=trainer.display.line,
        ),
    )  # fmt: skip


def _resume(trainer: PreparedRun) -> Start | None:
    """Load the checkpoint from which this run continues; return None if there is no such checkpoint."""
    config, ranks, model, warn = trainer.config, trainer.ranks, trainer.model, trainer.display.warning
    settings = config.model_dump(mode="json", by_alias=True)
    resumed = resume(
        config.checkpoint, trainer.directory.checkpoints, model.saved,
        CheckpointSpec(model.built.saved, trained=model.built.learned), ranks, settings,
        lambda damaged: fetch_replacement(config.checkpoint, config.mirror, damaged, ranks, warn),
    )  # fmt: skip
    if resumed is None:
        return None
    checkpoint, state = resumed
    if (difference := _check_unchanged(trainer, checkpoint, state)) is not None:
        warn(difference)
    model.engine.resume_at(state["step"])
    evaluations = _resume_evaluations(trainer, checkpoint, state)
    trainer.display.line(f"resuming from {checkpoint}")
    if (former_engine := state.get("engine")) not in (None, model.engine_name):
        warn(
            f"the engine is {model.engine_name}, but this checkpoint was saved by {former_engine}: losses agree up to"
            f" rounding, not bit for bit. Set shard.engine={former_engine} to continue exactly"
        )
    for change in changed_settings(state, settings):
        trainer.display.line(f"changed since: {change}")
    position, ends = Position(**state["position"]), tuple(state.get("ends", ()))
    return Start(state["step"], state["tokens"], checkpoint, position, ends, evaluations, state.get("caller", {}))


def _size(documents_and_tokens: Sequence[int]) -> str:
    documents, tokens = documents_and_tokens
    return f"{count_of(documents, 'document')} with {count_of(tokens, 'token')}"


def _changed_data(trainer: PreparedRun, state: dict[str, Any], checkpoint: Path, determinant: str) -> str | None:
    """Describe how training data have changed since a checkpoint; None if `determinant` is not a hash of data."""
    if determinant not in (sizes := trainer.resolved.batches.sizes()):
        return None
    name = determinant.removeprefix("data").partition(" (")[0].removeprefix(".sources, ").rstrip(":")
    subject = f"the training data {name}".strip()
    before, now = state.get("sizes", {}).get(determinant), sizes[determinant]
    if before is None:
        change = f"{subject} have changed and have {_size(now)} now"
    elif tuple(before) == now:
        change = f"{subject} have as many documents and tokens as before, but another content"
    else:
        change = f"{subject} had {_size(before)} and have {_size(now)} now"
    settings = trainer.config.model_dump(mode="json", by_alias=True)
    causes = [line for line in changed_settings(state, settings) if line.startswith(("data.", "model."))]
    saved_s = (checkpoint / STATE).stat().st_mtime
    files = files_written_after((path for _, path in trainer.config.data.every_path()), saved_s)
    causes += [f"{', '.join(map(str, files[:_MAX_FILES]))} changed after the checkpoint"] if files else []
    return f"{change} ({'; '.join(causes)})" if causes else change


def _resume_evaluations(trainer: PreparedRun, checkpoint: Path, state: dict[str, Any]) -> EvaluationHistory:
    """Return the history of evaluations in the state of `checkpoint`.

    The history is empty if the state belongs to another run, or if the evaluation data or the metric have changed. The
    history has no best step if the checkpoint of that step is neither in the run directory nor in the mirror.
    """
    root, mirror, history = trainer.directory.checkpoints, trainer.config.mirror, EvaluationHistory.from_state(state)
    empty = EvaluationHistory(metric=trainer.config.train.metric_for_best_model)
    if is_from_another_run(trainer.config.checkpoint, mirror, root, checkpoint):
        return empty
    if None not in (before := state.get("evaluated"), now := trainer.resolved.evaluated) and before != now:
        trainer.display.warning("the evaluation data have changed: the best evaluation is forgotten")
        return empty
    if history.metric != empty.metric:
        if history.best_step is not None:
            trainer.display.warning("train.metric_for_best_model has changed: the best evaluation is forgotten")
        return empty
    if not trainer.config.checkpoint.best or history.best_step is None:
        return history
    best = directory_of(root, history.best_step)
    is_here = run_on_rank_0(trainer.ranks, lambda: best in complete_directories(root))
    if is_here or fetch_best(mirror, best, trainer.ranks, trainer.display.warning):
        return history
    trainer.display.warning(f"the checkpoint of step {history.best_step}, which evaluated best, is missing")
    return replace(history, best_step=None)


def continuation_advice(trainer: PreparedRun) -> str | None:
    """Return how the user can continue a run that has no steps left; None if steps are left."""
    train, start = trainer.config.train, trainer.start
    if start.evaluations.exhausts(train.early_stopping_patience):
        return f"it stopped early, {start.evaluations.summary()}; raise train.early_stopping_patience"
    if start.step < trainer.total_steps:
        return None
    return f"raise {'train.max_steps' if train.max_steps else 'train.num_train_epochs'}"
