"""What `aliquot evaluate` is asked for, as the configuration of a run that has no step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from aliquot.config.adapter_section import ADAPTER_CONFIG, AdapterSection, adapter_base_model
from aliquot.config.data_section import DataSection, RecordsSection
from aliquot.config.key_locations import KeyPath, Location
from aliquot.config.launch_section import is_elastic
from aliquot.config.read_config import apply_override, read_config, validate
from aliquot.config.schema import (
    CheckpointSection,
    ModelSection,
    RunConfig,
    ShardSection,
    TrainSection,
)
from aliquot.config.section import ABOUT_KEY
from aliquot.core.errors import ConfigError, UsageError
from aliquot.core.paths import with_home

_Section = TypeVar("_Section", ModelSection, AdapterSection)

_TOGETHER = 64  # sequences that the automatic number of ranks shares out; the result does not depend on it


def read_evaluation_config(model: str, data: str, overrides: Sequence[str], base: str | None = None) -> RunConfig:
    """`model`, or an adapter beside its own, on the text at `data`, or on what a run's YAML configuration evaluates on.

    `base`: where the model of an adapter lies, if it has moved.
    Of that configuration, or of `overrides`, counts how text becomes sequences, how it is computed and by which ranks;
    the tokenizer is the model's. Raises UserError as `read_config` does, for one that evaluates on nothing, and for
    overrides of what the two arguments say.
    """
    if data.endswith((".yaml", ".yml")):
        read = read_config(Path(data), overrides)
        if not (read.data.eval_path or read.data.eval_split or read.data.eval_fraction or read.data.eval_sources):
            raise ConfigError("has nothing to evaluate on: set data.eval_path, or give the text instead", data)
    else:
        values: dict[str, Any] = {"model": {"path": model}, "data": {"path": data, "eval_path": data}}
        locations: dict[KeyPath, Location] = {}
        for override in overrides:
            apply_override(values, override, locations)
        read = validate(values, locations, "command line")
        for override in overrides:
            _check_not_said(override)
    train, shard, of_model = read.train, read.shard, _at(ModelSection, model)
    adapter = model if (with_home(model) / ADAPTER_CONFIG).is_file() else None
    if base is not None and adapter is None:
        raise UsageError(f"--base: {model} is no adapter, and only an adapter has a base model: leave it out")
    own = None if adapter is None else with_home(adapter)
    beside = own is not None and (own / "tokenizer_config.json").is_file()  # as it was trained, with its chat template
    tokenizer = {"tokenizer": str(own) if beside else None, "tokenizer_vocab_size": None}
    return RunConfig(
        run=read.run,
        model=of_model if adapter is None else _at(ModelSection, adapter_base_model(with_home(adapter), base)),
        adapter=None if adapter is None else _at(AdapterSection, adapter),
        data=read.data.model_copy(update=tokenizer | _without_training(read.data)),
        train=TrainSection(
            max_steps=1,
            global_batch_size=max(_TOGETHER, train.per_device_train_batch_size),
            per_device_train_batch_size=train.per_device_train_batch_size,
            precision=train.precision,
            compile=train.compile,
        ),
        shard=ShardSection(
            engine="auto" if shard.engine == "deepspeed" else shard.engine, collectives=shard.collectives
        ),
        checkpoint=CheckpointSection(resume="never"),
        observe=read.observe.model_copy(update={"prometheus": None}),
        launch=read.launch.model_copy(update={"nodes": 1} if is_elastic(read.launch.nodes) else {}),
    )


def _check_not_said(override: str) -> None:
    """Of what the arguments say already, an override would be without effect."""
    key = override.partition("=")[0].strip()
    if key.partition(".")[0] in ("model", "adapter"):
        raise ConfigError(
            f"override {override!r}: the argument MODEL says which model it is: leave it out; --base"
            " names the model of an adapter"
        )
    if key in ("data.path", "data.eval_path"):
        raise ConfigError(f"override {override!r}: the argument DATA says which text it is: leave it out")


def _at(section: type[_Section], path: str) -> _Section:
    try:
        return section(path=path)
    except ValidationError as error:
        told = error.errors()[0]
        named = "the argument MODEL " if told["type"] == ABOUT_KEY else ""
        raise ConfigError(named + str(told["msg"]).removeprefix("Value error, ")) from None


def _without_training(data: DataSection) -> dict[str, Any]:
    """What to evaluate on in the place of what to train on, which is not read, where it is no part of that."""
    if data.eval_fraction or data.eval_split:
        return {}
    first = {"path": data.eval_path, "dataset": None} if data.eval_path else data.eval_sources[0].model_dump()
    return {"sources": None, **{key: value for key, value in first.items() if key in RecordsSection.model_fields}}
