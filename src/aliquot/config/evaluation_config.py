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


def read_evaluation_config(
    model: Path | str, data: Path | str, overrides: Sequence[str] = (), base: str | None = None
) -> RunConfig:
    """Return the configuration with which `evaluate_model` evaluates a model on a text.

    Args:
        model: the directory or hub id of a model, or the directory of an adapter.
        data: a text file, or the YAML config of a run. Of a run, the evaluation data and the settings for sequences,
            precision and ranks are used, but the tokenizer is that of `model`.
        overrides: texts `section.key=value`, except for the keys that `model` and `data` set.
        base: the base model of an adapter, if the base model has moved.

    Raises:
        UserError: for example, the config of the run has no evaluation data.
    """
    model, data = str(model), str(data)
    if data.endswith((".yaml", ".yml")):
        config = read_config(Path(data), overrides)
        if not config.data.has_evaluation:
            raise ConfigError("no evaluation data: set data.eval_path, or give a text file instead of this YAML", data)
    else:
        values: dict[str, Any] = {"model": {"path": model}, "data": {"path": data, "eval_path": data}}
        locations: dict[KeyPath, Location] = {}
        for override in overrides:
            apply_override(values, override, locations)
        config = validate(values, locations, "command line")
        for override in overrides:
            _refuse_argument(override)
    train, shard, source = config.train, config.shard, _section_at(ModelSection, model)
    directory = with_home(model)
    is_adapter = (directory / ADAPTER_CONFIG).is_file()
    if base is not None and not is_adapter:
        raise UsageError(f"--base: {model} is no adapter, and only an adapter has a base model: leave --base out")
    # An adapter may have a tokenizer of its own, with the chat template that it was trained with.
    has_tokenizer = is_adapter and (directory / "tokenizer_config.json").is_file()
    tokenizer = {"tokenizer": str(directory) if has_tokenizer else None, "tokenizer_vocab_size": None}
    return RunConfig(
        run=config.run,
        model=_section_at(ModelSection, adapter_base_model(directory, base)) if is_adapter else source,
        adapter=_section_at(AdapterSection, model) if is_adapter else None,
        data=config.data.model_copy(update=tokenizer | _evaluation_source(config.data)),
        train=TrainSection(
            max_steps=1,
            global_batch_size=max(_SHARED_SEQUENCES, train.micro_batch_size),
            per_device_train_batch_size=train.per_device_train_batch_size,
            precision=train.precision,
            compile=train.compile,
        ),
        shard=ShardSection(
            engine="auto" if shard.engine == "deepspeed" else shard.engine, collectives=shard.collectives
        ),
        checkpoint=CheckpointSection(resume="never"),
        observe=config.observe.model_copy(update={"prometheus": None}),
        launch=config.launch.model_copy(update={"nodes": 1} if config.launch.is_elastic else {}),
    )


def _refuse_argument(override: str) -> None:
    """Raise UserError for an override of a key that MODEL or DATA sets, because the override would have no effect."""
    key = override.partition("=")[0].strip()
    if key.partition(".")[0] in ("model", "adapter"):
        raise ConfigError(
            f"override {override!r}: the argument MODEL sets the model: leave the override out; --base"
            " names the model of an adapter"
        )
    if key in ("data.path", "data.eval_path"):
        raise ConfigError(f"override {override!r}: the argument DATA sets the text: leave the override out")


def _section_at(section: type[_Section], path: str) -> _Section:
    try:
        return section(path=path)
    except ValidationError as error:
        problem = error.errors()[0]
        subject = "the argument MODEL " if problem["type"] == ABOUT_KEY else ""
        raise ConfigError(subject + str(problem["msg"]).removeprefix("Value error, ")) from None


def _evaluation_source(data: DataSection) -> dict[str, Any]:
    """Return updates of a data section that make the evaluation source its only source.

    Returns no updates if the evaluation data are a held-out part of the training source.
    """
    if data.eval_fraction or data.eval_split:
        return {}
    first = {"path": data.eval_path, "dataset": None} if data.eval_path else data.eval_sources[0].model_dump()
    fields = {key: value for key, value in first.items() if key in RecordsSection.model_fields}
    unstreamed = {key: DataSection.model_fields[key].default for key in ("streaming", "shuffle_buffer")}
    return {"sources": None, **unstreamed, **fields}
