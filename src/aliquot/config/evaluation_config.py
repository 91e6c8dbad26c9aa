"""Turn the arguments of `aliquot evaluate` into the config of a run that only evaluates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from aliquot.config.adapter_section import ADAPTER_CONFIG, AdapterSection, adapter_base_model
from aliquot.config.data_section import DataSection, RecordsSection
from aliquot.config.key_locations import KeyPath, Location
from aliquot.config.read_config import apply_override, read_config, validate
from aliquot.config.schema import CheckpointSection, ModelSection, RunConfig, ShardSection, TrainSection
from aliquot.config.section import ABOUT_KEY
from aliquot.core.errors import ConfigError, UsageError
from aliquot.core.small_files import with_home

_Section = TypeVar("_Section", ModelSection, AdapterSection)

_SHARED_SEQUENCES = 64  # by which the automatic number of ranks is chosen; the result does not depend on it
# Keys of a run that decide its evaluation. The others get their defaults.
_TRAIN_KEYS = {
    "objective", "beta", "loss_type", "label_smoothing", "simpo_gamma", "desirable_weight", "undesirable_weight",
    "per_device_train_batch_size", "precision", "compile",
}  # fmt: skip
_SETS_TEXT = "the argument DATA sets the text"
_SETS_MODEL = "the argument MODEL sets the model, with its tokenizer; --base names the model of an adapter"
_NO_STREAM = "an evaluation reads all data first"
# Override of a section, or of a key -> why it would have no effect, whatever DATA is, and if DATA is a text.
_NO_EFFECT = {
    "data.tokenizer": _SETS_MODEL, "data.tokenizer_vocab_size": _SETS_MODEL, "adapter": _SETS_MODEL,
    "data.streaming": _NO_STREAM, "data.shuffle_buffer": _NO_STREAM,
}  # fmt: skip
_NO_EFFECT_ON_TEXT = _NO_EFFECT | {"model": _SETS_MODEL} | {
    f"data.{key}": _SETS_TEXT
    for key in ("path", "dataset", "dataset_config", "split", "sources", "eval_path", "eval_split", "eval_fraction",
                "eval_sources")
}  # fmt: skip


class EvaluationConfig(RunConfig):
    """The config of a run that only evaluates `model`."""

    reference: ModelSection | None = None
    """The model before training, with which dpo and kto compare `model`."""
    reference_adapter: AdapterSection | None = None


def read_evaluation_config(
    model: Path | str, data: Path | str, overrides: Sequence[str] = (), base: str | None = None
) -> RunConfig:
    """Return the configuration with which `evaluate_model` evaluates a model on a text.

    Args:
        model: the directory or hub id of a model, or the directory of an adapter.
        data: a text file, or the YAML config of a run. Of a run, the evaluation data and the settings for sequences,
            objective, precision and ranks are used, but the tokenizer is that of `model`.
        overrides: texts `section.key=value`, except for the keys that `model` and `data` set.
        base: the base model of an adapter, if the base model has moved; for the objectives dpo and kto, the model
            before training. Default: `model.path` of the run.

    Raises:
        UserError: for example, the config of the run has no evaluation data.
    """
    model, data = str(model), str(data)
    is_run = data.endswith((".yaml", ".yml"))
    for override in overrides:
        key = override.partition("=")[0].strip()
        reasons = _NO_EFFECT if is_run else _NO_EFFECT_ON_TEXT
        if (reason := reasons.get(key, reasons.get(key.partition(".")[0]))) is not None:
            raise ConfigError(f"override {override!r} has no effect: {reason}. Leave the override out")
    if is_run:
        config = read_config(Path(data), overrides)
        if not config.data.has_evaluation:
            raise ConfigError("no evaluation data: set data.eval_path, or give a text file instead of this YAML", data)
    else:
        values: dict[str, Any] = {"model": {"path": model}, "data": {"path": data, "eval_path": data}}
        locations: dict[KeyPath, Location] = {}
        for override in overrides:
            apply_override(values, override, locations)
        config = validate(values, locations, "command line")
    train, shard, source = config.train, config.shard, _section_at(ModelSection, model)
    directory = with_home(model)
    is_adapter, compares = (directory / ADAPTER_CONFIG).is_file(), train.objective in ("dpo", "kto")
    if base is not None and not is_adapter and not compares:
        raise UsageError(f"--base: {model} is no adapter, and only an adapter has a base model: leave --base out")
    if is_adapter:
        source = _section_at(ModelSection, adapter_base_model(directory, base))
    elif compares and base is None and not is_run:
        raise UsageError(
            f"train.objective: {train.objective} compares MODEL with the model before training: name that model with"
            " --base, or give the YAML of the run as DATA"
        )
    before_training = {"path": base or (config.model.path if is_run else source.path)}
    # An adapter may have a tokenizer of its own, with the chat template that it was trained with.
    has_tokenizer = is_adapter and (directory / "tokenizer_config.json").is_file()
    tokenizer = {"tokenizer": str(directory) if has_tokenizer else None, "tokenizer_vocab_size": None}
    return EvaluationConfig(
        run=config.run,
        model=source,
        adapter=_section_at(AdapterSection, model) if is_adapter else None,
        data=config.data.model_copy(update=tokenizer | _evaluation_source(config.data)),
        train=TrainSection(
            max_steps=1,
            global_batch_size=max(_SHARED_SEQUENCES, train.micro_batch_size),
            **train.model_dump(include=_TRAIN_KEYS),
        ),
        shard=ShardSection(
            engine="auto" if shard.engine == "deepspeed" else shard.engine, collectives=shard.collectives
        ),
        checkpoint=CheckpointSection(resume="never"),
        observe=config.observe.model_copy(update={"prometheus": None}),
        launch=config.launch.model_copy(update={"nodes": 1} if config.launch.is_elastic else {}),
        reference=config.model.model_copy(update=before_training) if compares else None,
        reference_adapter=config.adapter if compares and config.adapter and config.adapter.directory else None,
    )


def _section_at(section: type[_Section], path: str) -> _Section:
    try:
        return section(path=path)
    except ValidationError as error:
        problem = error.errors()[0]
        subject = "the argument MODEL " if problem["type"] == ABOUT_KEY else ""
        raise ConfigError(subject + str(problem["msg"]).removeprefix("Value error, ")) from None


def _evaluation_source(data: DataSection) -> dict[str, Any]:
    """Return updates of a data section that make the evaluation source its only source, and read it whole.

    The training source remains if the evaluation data are a held-out part of it.
    """
    updates: dict[str, Any] = {key: DataSection.model_fields[key].default for key in ("streaming", "shuffle_buffer")}
    if data.eval_path:
        defaults = {key: RecordsSection.model_fields[key].default for key in ("dataset", "dataset_config", "split")}
        return updates | defaults | {"sources": None, "path": data.eval_path}
    if data.eval_fraction or data.eval_split:
        return updates
    return updates | data.eval_sources[0].model_dump(include=set(RecordsSection.model_fields)) | {"sources": None}
