"""Finish a run after its last step: export the best or the last weights, generate a sample, print a summary."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aliquot.checkpoint.directories import complete_directories, directory_of
from aliquot.checkpoint.mirror import fetch_best
from aliquot.core.errors import DamagedCheckpoint, RunDirectoryError, TrainingError, UserError
from aliquot.core.on_rank_0 import run_on_rank_0
from aliquot.models.adapter import STEM
from aliquot.models.export import ExportOptions, export, export_checkpoint
from aliquot.models.generate import Sampling, continuation
from aliquot.models.model_files import export_dtype, exported_step, older_transformers, with_step
from aliquot.observe import run_summary
from aliquot.observe.console import Display
from aliquot.observe.ledger import STEADY_PEAK
from aliquot.run.shutdown import IS_EXPORTED, Phase, saved_outcome

if TYPE_CHECKING:
    from aliquot.run.trainer import Trainer

_WEIGHTS = re.compile(rf"(model|{STEM})(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")


def finish_run(trainer: Trainer) -> Path | None:
    """Export, generate the sample, and show the summary. Collective.

    Returns the export, if `checkpoint.export` is true.

    If a rank has received a stop signal, save first if possible, then raise Terminated.
    """
    checkpoints, progress, shutdown = trainer.checkpoints, trainer.progress, trainer.shutdown
    stop_signal = trainer.stop_poll.now()
    if stop_signal and not progress.is_saved:  # the export is given up, so a checkpoint must hold the last step
        checkpoints.save_now()
    trainer.watchdog.stop()
    if stop_signal:
        raise shutdown.stopped(stop_signal, saved_outcome(progress))
    if progress.is_saved:
        shutdown.enter(Phase.EXPORT, progress.step)
    else:
        shutdown.enter(Phase.SOLE_EXPORT if trainer.config.checkpoint.export else Phase.UNSAVED, progress.step)
    trainer.ledger.mark(STEADY_PEAK, trainer.model.engine.counters().memory())
    trainer.recorder.finish()
    run_on_rank_0(trainer.ranks, trainer.directory.check_publish)
    exported = _export_or_save(trainer) if trainer.config.checkpoint.export else None
    trainer.activity.enter("generating the sample")
    text = sample(trainer)
    # A process that has trained no step has not measured the memory that training needs.
    rows = []
    if progress.step > trainer.start.step:
        rows = trainer.ledger.publish(trainer.directory.ledger, trainer.ranks, trainer.record.as_json())
    trainer.liveness.heartbeat.stop()
    if trainer.ranks.rank == 0:
        speed, is_chat = trainer.recorder.meter.overall().tokens_per_s, trainer.resolved.is_chat
        run_summary.finish(trainer.display, trainer.directory, rows, speed, text, exported, is_chat)
    return exported


def _export_or_save(trainer: Trainer) -> Path:
    """Export; if the export fails and no checkpoint holds the last step, save a checkpoint.

    Raises UserError and Terminated.
    """
    checkpoints, progress, shutdown = trainer.checkpoints, trainer.progress, trainer.shutdown

    def check_stop(_: object) -> None:
        """Give up the export after a stop signal, so that enough time is left to save a checkpoint."""
        if shutdown.requested:
            raise TrainingError("a signal came before the export was complete")
        if (lost := trainer.directory.lock.why_lost()) is not None:
            raise RunDirectoryError(lost)

    trainer.activity.enter("exporting the model")
    try:
        exported = _export(trainer, ExportOptions(replace=True, watch=check_stop))
    except UserError:  # every rank raises the same error
        if not progress.is_saved:
            checkpoints.save_now()
        if stop_signal := trainer.stop_poll.now():
            raise shutdown.stopped(stop_signal, saved_outcome(progress)) from None
        raise
    shutdown.enter(Phase.DONE, progress.step)
    if stop_signal := trainer.stop_poll.now():  # the signal arrived when the export was almost complete
        raise shutdown.stopped(stop_signal, IS_EXPORTED.format(step=progress.step))
    return exported


def is_exported(trainer: Trainer) -> bool:
    """Whether the existing export of a complete run holds the weights of the right step. Collective."""
    start = trainer.start
    best, target = start.evaluations.retained_step(trainer.config.checkpoint), trainer.directory.export
    step = start.step if best is None else best
    exists, step_of_export = run_on_rank_0(trainer.ranks, lambda: (target.exists(), exported_step(target)))
    if exists and step_of_export != step:
        trainer.display.line(f"{target} does not hold the weights of step {step}: exporting again")
    return bool(step_of_export == step)


def _export(trainer: Trainer, options: ExportOptions) -> Path:
    """Export the weights that evaluated best, or the last ones; return the directory. Collective.

    `options.watch` may raise an exception to end the export; all ranks then raise a UserError.
    """
    model, progress = trainer.model, trainer.progress
    target, root, adapter = trainer.directory.export, trainer.directory.checkpoints, model.built.adapter
    # An adapter is exported in fp32: it is small, and merging adds it to much larger weights.
    source_dtype = trainer.resolved.source.dtype if adapter is None else torch.float32
    dtype = export_dtype(trainer.config.model.dtype, source_dtype, trainer.config.train.chosen_precision)
    best = progress.evaluations.retained_step(trainer.config.checkpoint)
    checkpoint = None if best is None else directory_of(root, best)
    if checkpoint is not None and run_on_rank_0(trainer.ranks, lambda: checkpoint not in complete_directories(root)):
        trainer.display.warning(f"step {best} evaluated best, but could not be saved: the last weights are exported")
        checkpoint = None
    if adapter is None and (warning := older_transformers(trainer.resolved.source.config.model_type)) is not None:
        trainer.display.warning(warning)
    keep_former = partial(_keep_foreign_files, target.resolve(), trainer.files, trainer.display)
    options = replace(options, keep_former=keep_former)
    if checkpoint is not None and best is not None and best != progress.step:
        files = with_step(trainer.files, best)
        if _export_checkpoint(trainer, checkpoint, dtype, replace(options, config_files=files)):
            trainer.display.line(f"the export holds the weights that evaluated best: {progress.evaluations.summary()}")
            return target
    files = with_step(trainer.files, progress.step)
    if adapter is None:
        options = replace(options, published=model.published, exact=model.built.exact)
    else:
        options = replace(options, published=adapter.saves, stem=STEM)
    export(model.saved, model.built.saved, target, dtype, files, trainer.ranks, options)
    return target


def _export_checkpoint(trainer: Trainer, checkpoint: Path, dtype: torch.dtype, options: ExportOptions) -> bool:
    """Export a checkpoint of this run. Collective.

    Returns False if both the checkpoint and its copy in the mirror are damaged.
    """

    def attempt() -> DamagedCheckpoint | None:
        try:
            export_checkpoint(checkpoint, trainer.directory.export, dtype, trainer.ranks, options=options)
        except DamagedCheckpoint as damage:
            return damage
        return None

    damage, warn = attempt(), trainer.display.warning
    if damage is not None and fetch_best(trainer.config.mirror, checkpoint, trainer.ranks, warn):
        damage = attempt()
    if damage is not None:
        warn(f"{damage}: the last weights are exported, not those that evaluated best")
    return damage is None


def sample(trainer: Trainer) -> str | None:
    """Generate a continuation of `observe.sample_prompt`; None without a usable prompt. Collective.

    If the training data has answers (chat data), the prompt is a message of the user.
    """
    run, observe = trainer.resolved, trainer.config.observe
    if observe.sample_prompt is None:
        return None
    prefix, sampling = run.data.chat_prefix if run.is_chat else run.data.prefix, Sampling(observe.sample_tokens)
    try:
        return continuation(
            trainer.model.engine.generate, run.tokenizer, observe.sample_prompt, prefix, run.source.positions, sampling,
            chat=run.is_chat,
        )  # fmt: skip
    except UserError as error:  # raised on all ranks; a bad prompt must not fail a run after its training
        trainer.display.warning(f"observe.sample_prompt: {error}")
        return None


def _keep_foreign_files(target: Path, files: Collection[str], display: Display, replaced: Path) -> bool:
    """Rename an old export that contains files of the user, so that the new export does not replace the old one.

    Args:
        target: the final path of the export.
        files: the names of the files that an export writes beside the weights.
        replaced: the present path of the old export, which may differ from `target`.

    Returns:
        Whether the old export was renamed.
    """
    foreign = sorted(path.name for path in replaced.iterdir() if not _is_export_file(path, files))
    if foreign:
        free = next(path for n in count(1) if not (path := target.with_name(f"{target.name}-{n}")).exists())
        replaced.rename(free)
        display.warning(f"{target} held {foreign[0]}, which no export writes: the directory is now {free}")
    return bool(foreign)


def _is_export_file(path: Path, files: Collection[str]) -> bool:
    """Whether `path` is a file that an export writes; `files` are the names of files beside the weights."""
    return path.is_file() and (path.name in files or _WEIGHTS.fullmatch(path.name) is not None)
