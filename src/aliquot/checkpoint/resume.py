"""Resume a run: choose the checkpoint by `checkpoint.resume`, and refuse changes of settings that must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.directories import newest
from aliquot.checkpoint.remote_checkpoint import split_url
from aliquot.checkpoint.restore import restore, restore_newest
from aliquot.checkpoint.retention import EvaluationHistory, Retention, tidy
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import DamagedCheckpoint, ResumeError
from aliquot.core.number_format import first_few, short_hash
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.stores.store import is_url
from aliquot.tensor_io.manifest import STATE
from aliquot.tensor_io.parts import PartStore

# Of these sections, only these settings determine the tensors of a checkpoint.
_TENSOR_KEYS = {"data": ("tokenizer", "tokenizer_vocab_size"), "train": ("freeze",)}
_NOT_SET = object()


def resume(
    settings: CheckpointSection,
    root: Path,
    store: PartStore,
    spec: CheckpointSpec,
    ranks: RankGroup,
    config: Mapping[str, Any],
    replace_damaged: Callable[[Path], Path | None] = lambda _: None,
) -> tuple[Path, dict[str, Any]] | None:
    """Restore the checkpoint that `settings.resume` (auto, never, a path or a URL) selects. Collective.

    If `settings.resume` is a path, the run begins from the checkpoint at that path. Once `root` has checkpoints of the
    run, the run resumes from the newest of them, so that a restarted job makes progress.

    Args:
        root: the directory of the run's checkpoints. For a URL, mirror.py has already fetched the checkpoint there.
        config: the run's configuration as JSON, to explain tensors that differ from the checkpoint.
        replace_damaged: see `restore_newest`.

    Returns the checkpoint's directory and state; None if the run starts from scratch. Raises UserError if the path is
    no checkpoint, if it is a checkpoint of this run that is not the newest, and as `restore` does.
    """
    if settings.resume == "never":
        return None
    explain_mismatch = partial(_changed_tensor_settings, config)
    source = Path(settings.resume)
    is_path = settings.resume != "auto" and not is_url(settings.resume)
    if is_path and not run_on_rank_0(ranks, lambda: _has_begun(source, root)):
        try:
            return source, restore(source, store, spec, ranks, explain_mismatch)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(
                f"{error}; checkpoint.resume names this checkpoint: choose another one, or auto"
            ) from None
    restored = restore_newest(root, store, spec, ranks, replace_damaged, explain_mismatch)
    if restored is not None:
        # Apply retention now: a run that was killed while removing old checkpoints may be complete and save no more.
        best = EvaluationHistory.from_state(restored[1]).best_step if settings.best else None
        run_on_rank_0(ranks, lambda: tidy(root, restored[0], Retention(settings.keep, best)))
    return restored


def is_from_another_run(settings: CheckpointSection, mirror: str | None, root: Path, directory: Path) -> bool:
    """Return whether the restored checkpoint `directory` is from a different run.

    This is the case if the checkpoint lies outside `root`, or if it was fetched from a URL outside the run's `mirror`.
    """
    if directory.resolve().parent != root.resolve():
        return True
    if not is_url(settings.resume):
        return False
    store, name = split_url(settings.resume)
    return name == directory.name and store != mirror


def _has_begun(directory: Path, root: Path) -> bool:
    """Return whether a run that began from checkpoint `directory` already has its own checkpoints under `root`.

    Raises ResumeError if `directory` is no checkpoint, or is under `root`, but not the newest there.
    """
    if not (directory / STATE).is_file():
        raise ResumeError(
            "checkpoint.resume: no checkpoint here; give a directory like checkpoints/step-00000100", directory
        )
    latest = newest(root)
    if latest is None or latest.resolve() == directory.resolve():
        return False
    if directory.resolve().parent == root.resolve():
        raise ResumeError(
            f"checkpoint.resume: this run already has the newer {latest.name}; choose another run.name", directory
        )
    return True


def check_continuity(
    state: Mapping[str, Any],
    determinants: Mapping[str, Any],
    directory: Path,
    explain: Callable[[str], str | None] = lambda key: None,
) -> None:
    """Raise UserError, naming each change, if settings have changed that a resumed run must not change.

    Args:
        determinants: the settings that the order of the data depends on. With an adapter they include its scaling and
            the fingerprint of its base model.
        explain: describes in words how a determinant that is a hash has changed; None for other determinants.
    """
    saved = state["determinants"]
    if changed := [key for key, value in determinants.items() if saved.get(key) != value]:
        changes = "; ".join(
            explain(key) or f"{key} was {_short(saved.get(key))} and is {_short(determinants[key])}" for key in changed
        )
        remedy = "start a new run under another run.name"
        if not any(key.startswith(("adapter", "model")) for key in changed):  # otherwise these weights have no use
            remedy += f" with {'adapter' if state['config'].get('adapter') else 'model'}.path set to this directory"
        raise ResumeError(f"cannot continue on the same data: {changes}. Undo the change, or {remedy}", directory)


def check_model(state: Mapping[str, Any], model: Mapping[str, Any], directory: Path) -> str | None:
    """Compare the model's configuration with the saved one, because a change would alter the results of the weights.

    `model` and the saved configuration are results of `computation_settings` in models/model_config.py.

    Raises UserError, naming each change. If the version of transformers has changed, too, a warning is returned
    instead, because versions may read the same config.json differently. Returns None if nothing has changed.
    """
    saved = state["model"]
    before, now = saved["config"], model["config"]
    common_keys = before.keys() & now.keys()
    changes = list(_differences({key: before[key] for key in common_keys}, {key: now[key] for key in common_keys}))
    if not changes:
        return None
    message = f"the model's configuration has changed: {first_few(changes)}"
    if saved["transformers"] != model["transformers"]:
        return f"{message}; transformers was {saved['transformers']} and is {model['transformers']}"
    raise ResumeError(f"{message}. Undo the change, or start a new run under another run.name", directory)


def changed_settings(state: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return a line `section.key was A and is B` for each setting that differs from the saved configuration."""
    return [
        f"{section}.{key} was {before!r} and is {config[section][key]!r}"
        for section in ("model", "data", "train")
        for key, before in state["config"][section].items()
        if key in config[section] and config[section][key] != before
    ]


def _changed_tensor_settings(config: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Describe changes of the settings that determine the tensors and the trained tensors; empty without changes."""

    def tensor_settings(config: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {section: config.get(section) or {} for section in ("model", "data", "train", "adapter")}
        return chosen | {name: {key: chosen[name].get(key) for key in keys} for name, keys in _TENSOR_KEYS.items()}

    return first_few(list(_differences(tensor_settings(state.get("config", {})), tensor_settings(config))))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted({*before, *now}):
        old, new = before.get(key, _NOT_SET), now.get(key, _NOT_SET)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} was {_short(old)} and is {_short(new)}"


def _short(value: Any) -> str:
    return "not set" if value is _NOT_SET else repr(short_hash(value))[:100]
