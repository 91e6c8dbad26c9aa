"""Run tasks of lm-evaluation-harness, such as MMLU or HellaSwag, on a model directory, with transformers."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aliquot.core.errors import MissingToolError, UsageError, reason_of
from aliquot.models.generate import load
from aliquot.models.source import local_directory
from aliquot.observe.metrics import finite

# The parts of the harness' results that hold numbers, under the names of the harness.
_RESULTS = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better")


def evaluate_tasks(
    model: str,
    tasks: Sequence[str],
    base: str | None,
    include_path: Path | None,
    batch_size: str,
    apply_chat_template: bool,
    **options: int | None,
) -> dict[str, Any]:
    """Run `tasks` in this process, on a GPU if there is one, and return the results by the names of the harness.

    Args:
        model: the directory of a model or an adapter, or a hub id.
        tasks: names or patterns of tasks, groups and tags.
        base: the base model of an adapter, if the base model has moved.
        include_path: a directory with YAML files of further tasks.
        batch_size: a number, or "auto" for the largest batch that fits.
        options: of the harness: `num_fewshot`, by default the number that each task sets; `limit`, the number of
            examples of each task, by default all.

    Raises:
        UserError: for example, lm-eval is not installed, a task is unknown, or its data cannot be downloaded.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingToolError("--tasks needs lm-evaluation-harness: pip install 'aliquot[eval]'") from error
    if "RANK" in os.environ:
        raise UsageError("--tasks runs in one process: start the command without torchrun")
    if include_path is not None and not include_path.is_dir():
        raise UsageError("--include-path: no such directory", include_path)
    if not re.fullmatch(r"auto(:\d+)?|[1-9]\d*", batch_size):
        raise UsageError(f"--batch-size is {batch_size!r}: give a number, or auto")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    loaded_tasks = [task for name in _names(manager, tasks) for task in _load_task(manager, name)]
    loaded = load(local_directory(model), base)
    if apply_chat_template and not loaded.tokenizer.chat_template:
        raise UsageError("--apply-chat-template: the tokenizer has no chat template: leave the option out")
    try:
        results = simple_evaluate(
            model=HFLM(
                pretrained=loaded.model,
                tokenizer=loaded.tokenizer,
                add_bos_token=None if loaded.prefix is None else bool(loaded.prefix),
                batch_size=batch_size,
            ),
            tasks=loaded_tasks,
            task_manager=manager,
            apply_chat_template=apply_chat_template,
            log_samples=False,
            **options,
        )
    except ValueError as error:  # for example, a task that executes code of the model, or few-shot without examples
        raise UsageError(f"--tasks: lm-eval cannot run these tasks: {reason_of(error).rstrip('.')}") from error
    return {key: finite(results[key]) for key in _RESULTS if key in results}


def results_table(results: dict[str, Any]) -> str:
    """Return the harness' table of the tasks, and below it the table of the groups, as Markdown."""
    from lm_eval.utils import make_table

    return "\n".join(make_table(results, column) for column in ("results", "groups") if results.get(column))


def _names(manager: Any, tasks: Sequence[str]) -> list[str]:
    """Expand the patterns in `tasks`. Raises UsageError for a name that is neither a task nor a group or tag."""
    for task in tasks:
        if not manager.match_tasks([task]):
            similar = difflib.get_close_matches(task, manager.all_tasks, n=3)
            advice = f"did you mean {' or '.join(similar)}?" if similar else "`lm-eval ls tasks` lists the tasks"
            raise UsageError(f"--tasks: {task!r} is no task of lm-eval or --include-path; {advice}")
    return list(manager.match_tasks(list(tasks)))


def _load_task(manager: Any, name: str) -> list[Any]:
    """Load a task, a group or the tasks of a tag with their data. Raises UsageError."""
    try:
        loaded = manager.load([name])
    except Exception as error:  # each kind of data set fails in its own way
        raise UsageError(
            f"--tasks: the data of {name} cannot be loaded: {reason_of(error).rstrip('.')}. Without a network, download"
            " them elsewhere and copy the cache of datasets (HF_HOME)"
        ) from error
    groups = loaded.get("groups", {})
    return [groups[name]] if name in groups else list(loaded["tasks"].values())
