"""What comes after the last step of a run: the export, of what evaluated best or of the last weights, and a sample."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from aliquot.checkpoint.directories import complete_directories, directory_of, step_of
from aliquot.checkpoint.evaluation_history import EvaluationHistory
from aliquot.checkpoint.remote_download import fetch_best
from aliquot.core.errors import DamagedCheckpoint, UserError
from aliquot.core.on_rank_0 import run_on_rank_0
from aliquot.models.adapter import STEM
from aliquot.models.export import export, export_checkpoint
from aliquot.models.generate import continuation
from aliquot.models.model_files import export_dtype, exported_step, of_step
from aliquot.models.older_transformers import older_transformers
from aliquot.observe.console import Display
from aliquot.run.run_context import Attempt, Inputs, Model, Start
from aliquot.tensor_io.transfer import Watch

_WEIGHTS = re.compile(rf"(model|{STEM})(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")


def is_exported(run: Attempt, start: Start) -> bool:
    """Whether the export of a run that begins at its end holds the weights that it should. Collective."""
    best, target = start.evaluations.retained_step(run.config.checkpoint), run.directory.export
    wanted = start.step if best is None else best
    found = run_on_rank_0(run.ranks, lambda: (target.exists(), exported_step(target)))
    if found[0] and found[1] != wanted:
        run.display.line(f"{target} does not hold the weights of step {wanted}: it is made again")
    return found[1] == wanted


def export_run(
    run: Attempt,
    inputs: Inputs,
    model: Model,
    files: Mapping[str, bytes],
    evaluations: EvaluationHistory,
    done: int,
    watch: Watch,
) -> Path:
    """Where it lies. `files`: what is beside the weights; `done`: steps; `watch`: what it raises ends the export, as
    a UserError on all ranks. Collective."""
    target, root, built = run.directory.export, run.directory.checkpoints, model.built
    wanted, precision, adapter = run.config.model.dtype, run.config.train.precision, built.adapter
    # An adapter is small, and added to what is much larger.
    dtype = export_dtype(wanted, inputs.source.dtype if adapter is None else torch.float32, precision)
    best = evaluations.retained_step(run.config.checkpoint)
    kept = None if best is None else directory_of(root, best)
    if kept is not None and run_on_rank_0(run.ranks, lambda: kept not in complete_directories(root)):
        run.display.warning(f"step {best} evaluated best, but could not be saved: the last weights are exported")
        kept = None
    if adapter is None and (told := older_transformers(inputs.source.config.model_type)) is not None:
        run.display.warning(told)
    spare = partial(_keep_foreign, target.resolve(), files, run.display)
    how: dict[str, Any] = {"replace": True, "watch": watch, "spare": spare}
    if kept is not None and best != done and _export_kept(run, kept, target, dtype, of_step(files, step_of(kept)), how):
        run.display.line(f"exported is what evaluated best: {evaluations.summary()}")
        return target
    files = of_step(files, done)
    if adapter is None:
        export(
            model.engine, built.tensors, target, dtype, files, run.ranks, published=model.published, exact=built.exact,
            **how,
        )  # fmt: skip
    else:
        export(model.saved, built.saved, target, dtype, files, run.ranks, published=adapter.saves, stem=STEM, **how)
    return target


def _export_kept(
    run: Attempt, kept: Path, target: Path, dtype: torch.dtype, files: Mapping[str, bytes], how: dict[str, Any]
) -> bool:
    """Whether the checkpoint `kept`, or the mirror's copy of it, is whole and exported. Collective."""

    def damage() -> DamagedCheckpoint | None:
        try:
            export_checkpoint(kept, target, dtype, ranks=run.ranks, files=files, **how)
        except DamagedCheckpoint as found:
            return found
        return None

    found, warn = damage(), run.display.warning
    if found is not None and fetch_best(run.config.mirror, kept, run.ranks, warn):
        found = damage()
    if found is not None:
        warn(f"{found}: the last weights are exported, not those that evaluated best")
    return found is None


def sample(run: Attempt, inputs: Inputs, model: Model) -> str | None:
    """What the model makes of `observe.sample_prompt`, as a user's turn where it learned answers. Collective."""
    prompt, tokenizer = run.config.observe.sample_prompt, inputs.tokenizer
    if prompt is None:
        return None
    answers = any(store.mask is not None for store in inputs.data.open_train().values())
    chat = answers and tokenizer.chat_template is not None
    tokens, data = run.config.observe.sample_tokens, inputs.data
    prefix = data.chat_prefix if chat else data.prefix
    try:
        return continuation(
            model.engine.generate, tokenizer, prompt, prefix, tokens, inputs.source.positions, chat=chat
        )
    except UserError as error:  # on all ranks alike; what was trained is not lost for it
        run.display.warning(f"observe.sample_prompt: {error}")
        return None


def _keep_foreign(target: Path, files: Collection[str], display: Display, replaced: Path) -> bool:
    """An export of an earlier stage of this run is to be replaced; one in which a person has put files is kept, also
    where that was while the new one was written, and `replaced` has another name than `target` by now."""
    foreign = sorted(path.name for path in replaced.iterdir() if not _is_own(path, files))
    if foreign:
        kept = next(at for n in count(1) if not (at := target.with_name(f"{target.name}-{n}")).exists())
        replaced.rename(kept)
        display.warning(f"{target} held {foreign[0]}, which is not of an export: it is {kept} now")
    return bool(foreign)


def _is_own(path: Path, files: Collection[str]) -> bool:
    """Whether an export writes a file of that name; `files`: what is beside the weights."""
    return path.is_file() and (path.name in files or _WEIGHTS.fullmatch(path.name) is not None)
