"""The `data` section: where documents are, what in them is learned, how they become sequences."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from aliquot.config.section import PATH, Section

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"


class RecordsSection(Section):
    """Files or a dataset, and which fields of their records are read."""

    path: Annotated[str | list[str] | None, PATH] = Field(
        None,
        description="Files, directories or globs of .txt, .md, .py, .jsonl, .json, .csv, .parquet, as they are or as"
        " .gz or .zst; or `stdlib`, Python's own.",
    )
    dataset: Annotated[str | None, PATH] = Field(None, description="A name for datasets.load_dataset.")
    dataset_config: str | None = Field(None, description="Its configuration, for example wikitext-2-raw-v1.")
    split: str = Field("train", description="Its split.")
    text_field: str | None = Field(
        None,
        description="Field of a record that holds the text, all of which is learned. Default: found by the records'"
        " fields: `messages`, `conversations`, `prompt` and `completion`, `instruction` and `output`, else `text`.",
    )
    messages: str | None = Field(None, description="Field that holds a chat: a list of messages.")
    prompt: str | None = Field(None, description="Field that holds what an answer is for; with `completion`.")
    completion: str | None = Field(None, description="Field that holds the answer.")
    document: Literal["file", "line", "block", "field"] | None = Field(
        None, description="What one document is. Default: a file of plain text; a record of the other formats."
    )

    @model_validator(mode="after")
    def one_way_to_read(self) -> Self:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt and completion name two fields of a record: give both")
        if sum(field is not None for field in (self.text_field, self.messages, self.prompt)) > 1:
            raise ValueError("give only one of text_field, messages, and prompt with completion")
        return self

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path or [])


class NamedSection(RecordsSection):
    """One of several sources."""

    name: str = Field(pattern=_NAME, description="What it is called in metrics and reports.")

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise ValueError(f"source {self.name}: give exactly one of path and dataset")
        return self


class SourceSection(NamedSection):
    """One source of a mixture."""

    weight: PositiveFloat | None = Field(
        None, description="Its share of the tokens, relative to the others'. Default for all: as many as each has."
    )
    repeat: bool = Field(
        True, description="Once all of it was seen, begin again, shuffled anew; false: it ends, the others go on."
    )


class DataSection(RecordsSection):
    sources: list[SourceSection] | None = Field(
        None, description="Several sources instead of `path`: a list of the keys above, with `name` and `weight`."
    )
    train_on: Literal["completions", "all"] = Field(
        "completions", description="completions: the loss is on answers alone, where records have them; all: on all."
    )
    chat_template: Annotated[str | None, PATH] = Field(
        None,
        description="A Jinja template, or the path of one, in place of the tokenizer's; `none`: prompts and completions"
        " as they are.",
    )
    chat_template_date: date | None = Field(
        None,
        description="The day that a chat template takes for today. Default: that on which the run began, which its"
        " directory keeps.",
    )
    special_tokens_in_text: Literal["encode", "text"] | None = Field(
        None,
        description="Letters of special tokens in texts, as `<|eot_id|>` in what a user says: encode: they become these"
        " tokens; text: they are encoded as other letters. Default: text for records that go through a chat template,"
        " encode for all others.",
    )
    add_bos: bool | None = Field(None, description="Begin each document with bos. Default: the model's convention.")
    add_eos: bool | None = Field(None, description="End each document with eos. Default: true if there is one.")
    tokenizer: Annotated[str | None, PATH] = Field(
        None, description="Directory, tokenizer.json or hub id. Default: the model's own."
    )
    tokenizer_vocab_size: PositiveInt | None = Field(
        None, description="Train a byte-level BPE tokenizer of this size on the training text instead."
    )
    sequence_length: PositiveInt = Field(
        1024, ge=2, le=1 << 24, description="Tokens of a sequence, documents packed into it."
    )
    packing: bool = Field(
        True,
        description="Pack documents, exactly isolated. false: each is a sequence, unpadded but for what makes "
        "micro-batches one of few lengths, with AMX.",
    )
    eval_path: Annotated[str | list[str] | None, PATH] = Field(None, description="Files to evaluate on, as data.path.")
    eval_split: str | None = Field(None, description="A split of data.dataset to evaluate on.")
    eval_fraction: float = Field(
        0.0,
        ge=0.0,
        le=0.5,
        description="Hold out this part of each source, where neither eval_path nor eval_split says what.",
    )
    eval_sources: list[NamedSection] = Field(
        [],
        description="Several sets to evaluate on, each with its own loss: a list of `name` and the keys of a source.",
    )
    num_proc: PositiveInt | None = Field(
        None,
        description="Processes that tokenise. Default: the physical cores. Records with answers of megabytes take 1 GiB"
        " of memory in each, and those of more than 4 MiB are left out.",
    )
    cache_directory: Annotated[Path | None, PATH] = Field(
        None, description="Default: $ALIQUOT_CACHE, else ~/.cache/aliquot."
    )

    @model_validator(mode="after")
    def one_place(self) -> Self:
        if sum(place is not None for place in (self.path, self.dataset, self.sources)) != 1:
            raise ValueError(
                "give exactly one of data.path (local files), data.dataset (datasets.load_dataset) and data.sources"
            )
        if self.tokenizer is not None and self.tokenizer_vocab_size is not None:
            raise ValueError("give only one of data.tokenizer and data.tokenizer_vocab_size")
        if self.eval_path is not None and self.eval_split is not None:
            raise ValueError("give only one of data.eval_path and data.eval_split")
        if self.eval_split is not None and self.dataset is None:
            raise ValueError("data.eval_split is a split of data.dataset; with data.path give data.eval_path")
        return self

    @model_validator(mode="after")
    def sources_fit(self) -> Self:
        if self.sources is not None:
            fields = ("text_field", "messages", "prompt", "document", "dataset_config")
            misplaced = [name for name in fields if getattr(self, name)]
            misplaced += ["split"] if "split" in self.model_fields_set else []
            if misplaced:
                raise ValueError(f"data.{misplaced[0]} belongs into each of data.sources")
            if not self.sources:
                raise ValueError("data.sources is empty")
            if len({source.weight is None for source in self.sources}) > 1:
                raise ValueError("data.sources: give all of them a weight, or none")
        for key, sources in (("sources", self.sources or []), ("eval_sources", self.eval_sources)):
            names = [source.name for source in sources]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"data.{key}: two are called {twice}")
        return self

    @property
    def source_count(self) -> int:
        return len(self.sources or [self])

    def every_path(self) -> Iterator[tuple[str, str]]:
        """(key, path) of all local data that the section names."""
        yield from (("data.path", path) for path in self.paths)
        evaluated = [self.eval_path] if isinstance(self.eval_path, str) else self.eval_path or []
        yield from (("data.eval_path", path) for path in evaluated)
        for key, sources in (("sources", self.sources or []), ("eval_sources", self.eval_sources)):
            yield from ((f"data.{key}", path) for source in sources for path in source.paths)

    def datasets(self) -> list[str]:
        """Names of the datasets that it names."""
        places: list[RecordsSection] = [self, *(self.sources or []), *self.eval_sources]
        return [place.dataset for place in places if place.dataset is not None]
