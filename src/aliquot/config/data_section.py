"""The `data` section: sources of documents, the parts of documents that are trained on, and packing into sequences."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from aliquot.config.section import PATH, KeyUse, Section, refuse, refuse_unused

# The chat templates in data/templates, and the special tokens that a tokenizer needs for them.
CHAT_TEMPLATES: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "zephyr": (),
}


def fitting_templates(tokens: Collection[str]) -> str:
    """Return the names of the chat templates whose special tokens are all among `tokens`, the tokens of a tokenizer."""
    return " or ".join(name for name, needed in CHAT_TEMPLATES.items() if set(needed) <= set(tokens))


MOST_HELD_OUT = 0.5
NO_TOKENIZER = "a model from scratch has no tokenizer: set data.tokenizer or data.tokenizer_vocab_size"
Objective = Literal["sft", "dpo", "simpo", "orpo", "kto"]
PAIR_OBJECTIVES: tuple[Objective, ...] = ("dpo", "simpo", "orpo")
_DEFAULT_FIELDS: dict[Objective, tuple[str, ...]] = {
    **dict.fromkeys(PAIR_OBJECTIVES, ("chosen", "rejected")), "kto": ("prompt", "completion", "label")
}  # fmt: skip
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"


class RecordsSection(Section):
    """Files or a dataset, and the fields of their records."""

    path: Annotated[str | list[str] | None, PATH] = None
    """Files, directories or globs of .txt, .md, .py, .jsonl, .json, .csv, .parquet, .arrow, text also compressed as .gz
    or .zst; or URLs of them (s3://, gs://, hf:// or another that fsspec knows); or `stdlib`, the files of Python's
    standard library."""
    dataset: Annotated[str | None, PATH] = None
    """A name for datasets.load_dataset."""
    dataset_config: str | None = None
    """The dataset's configuration, for example wikitext-2-raw-v1."""
    split: str = "train"
    """The dataset's split."""
    text_field: str | None = None
    """Field of a record that holds the text, all of which is learned. Default: the names of the fields decide the
    format of the records (docs/guides/data.md)."""
    messages: str | None = None
    """Field that holds a chat: a list of messages."""
    prompt: str | None = None
    """Field that holds the prompt of an answer; with `completion`, or with a preference objective."""
    completion: str | None = None
    """Field that holds the answer."""
    chosen: str | None = None
    """Field that holds the preferred answer of a pair, for train.objective dpo, simpo and orpo. Default there:
    `chosen`."""
    rejected: str | None = None
    """Field that holds the other answer of a pair. Default with such an objective: `rejected`."""
    label: str | None = None
    """Field that tells whether an answer is desirable, true or false, for train.objective: kto. Default there: `label`,
    with `prompt` and `completion`."""
    unused_fields: list[str] = Field([])
    """Fields of a record with text that is not to be read: they are not counted, and are no prompt of a pair."""
    document: Literal["file", "line", "block", "field"] | None = None
    """The unit that is one document. Default: a file of plain text; a record of the other formats."""

    def fill_fields(self, objective: Objective) -> None:
        """Name the fields of pairs or rated answers by their defaults."""
        for key in _DEFAULT_FIELDS.get(objective, ()):
            setattr(self, key, getattr(self, key) or key)

    def key_uses(self, objective: Objective, streaming: bool) -> list[KeyUse]:
        """Return which keys a run reads of a source whose documents it takes."""
        pairs = "pairs of answers: give data.chosen and data.rejected instead"
        rated = "rated answers: give data.prompt, completion and label instead"
        other_records = f"has no use: train.objective: {objective} trains on {rated if objective == 'kto' else pairs}"
        has_pairs, is_sft = objective in PAIR_OBJECTIVES, objective == "sft"
        has_text, one = self.text_field is not None, "has no use beside text_field or messages: give only one of them"
        both = "give both, which are fields of a record"
        return [
            (
                ("dataset_config", "split"),
                self.dataset is not None,
                "is for data.dataset, and this source is files: leave it out",
            ),
            (
                ("dataset",),
                not streaming,
                "has no use: data.streaming reads files: give path (hf://datasets/OWNER/NAME)",
            ),
            (("chosen", "rejected"), has_pairs, "is for pairs of answers: set train.objective, for example to dpo"),
            (("label",), objective == "kto", "is for rated answers: set train.objective to kto"),
            (("text_field", "messages"), is_sft, other_records),
            (("completion",), not has_pairs, other_records),
            (("messages",), not is_sft or not has_text, one),
            (("prompt", "completion"), not is_sft or not (has_text or self.messages is not None), one),
            (("prompt",), not is_sft or self.completion is not None, f"needs completion: {both}"),
            (("completion",), not is_sft or self.prompt is not None, f"needs prompt: {both}"),
        ]

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path or [])


class NamedSection(RecordsSection):
    """A data source with a name, in a list of data sources."""

    name: str = Field(pattern=_NAME)
    """The source's name in metrics and reports."""

    @model_validator(mode="after")
    def check_source(self) -> Self:
        refuse(
            (
                (self.path is None) == (self.dataset is None),
                f"source {self.name}: give exactly one of path and dataset",
            )
        )
        return self


class SourceSection(NamedSection):
    """A data source in a mixture for training, with the source's share."""

    weight: PositiveFloat | None = None
    """The source's share of the tokens, relative to other sources. Default: shares by their numbers of tokens."""
    repeat: bool = True
    """After its last document begin again, shuffled anew; false: the source ends, other sources go on."""

    def key_uses(self, objective: Objective, streaming: bool) -> list[KeyUse]:
        why = "needs the length of a source, which data.streaming does not know: leave it out"
        return [*super().key_uses(objective, streaming), (("repeat",), not streaming, why)]


class DataSection(RecordsSection):
    sources: list[SourceSection] | None = None
    """Several sources instead of `path`: a list of the keys above, with `name` and `weight`."""
    train_on: Literal["completions", "last_turn", "all"] = "completions"
    """completions: the loss is on answers alone, if records have answers; last_turn: of a chat, on the answers after
    the last question; all: on all tokens."""
    roles_to_train: list[Literal["assistant", "user", "system", "tool"]] = Field(["assistant"], min_length=1)
    """The roles of a chat's messages whose words are learned, unless `train_on` is `all`."""
    chat_template: Annotated[str | None, PATH] = None
    """The name of a chat template (`chatml`, `gemma`, `llama3`, `mistral`, `qwen`, `zephyr`), or a Jinja template, or
    the path of one, instead of the tokenizer's; `none`: prompts and completions without a template."""
    chat_template_date: date | None = None
    """The day that a chat template takes for today. Default: the day on which the run began, which the run directory
    records."""
    special_tokens_in_text: Literal["encode", "text"] | None = None
    """Spellings of special tokens in texts, like `<|eot_id|>` in a user's message. encode: as the special token; text:
    as ordinary letters. Default: text for records that go through a chat template, encode for all others."""
    add_bos: bool | None = None
    """Begin each document with bos. Default: the model's convention."""
    add_eos: bool | None = None
    """End each document with eos. Default: true if the tokenizer has eos."""
    tokenizer: Annotated[str | None, PATH] = None
    """Directory, tokenizer.json or hub id. Default: the model's own. A tokenizer.json alone names no bos and eos: put
    its tokenizer_config.json into the same directory."""
    tokenizer_vocab_size: PositiveInt | None = None
    """Train a byte-level BPE tokenizer of this size on the training text instead."""
    sequence_length: PositiveInt = Field(1024, ge=2, le=1 << 24)
    """Tokens of a sequence, into which documents are packed. Default: 1024, or the model's limit if it is lower."""
    packing: bool = True
    """Pack documents into sequences, with attention inside each document only. false: a document is a sequence, padded
    only where AMX needs micro-batches of few different lengths."""
    streaming: bool = False
    """Begin to train when the first data of each source of files are tokenised, and tokenise the rest during training;
    needs train.max_steps. The order is shuffled within segments of `shuffle_buffer` documents."""
    shuffle_buffer: PositiveInt = 10_000
    """With streaming: the number of documents that are tokenised, packed and shuffled together."""
    eval_path: Annotated[str | list[str] | None, PATH] = None
    """Files to evaluate on, given like data.path."""
    eval_split: str | None = None
    """A split of data.dataset to evaluate on."""
    eval_fraction: float = Field(0.0, ge=0.0, le=MOST_HELD_OUT)
    """Hold out this fraction of each source for evaluation, instead of eval_path or eval_split."""
    eval_sources: list[NamedSection] = Field([])
    """Several evaluation sets, with a loss for each: a list of `name` and the keys of a source."""
    num_proc: PositiveInt | None = None
    """Processes that tokenise. Default: the physical cores; with streaming, 1 for each source. Records with
    answers of megabytes take 1 GiB of memory in each process."""
    cache_directory: Annotated[Path | None, PATH] = None
    """Default: $ALIQUOT_CACHE, else ~/.cache/aliquot."""

    @model_validator(mode="after")
    def check_sources(self) -> Self:
        names = [("sources", source.name) for source in self.sources or []]
        names += [("eval_sources", source.name) for source in self.eval_sources]
        refuse(
            (
                sum(source is not None for source in (self.path, self.dataset, self.sources)) != 1,
                "give exactly one of data.path (local files), data.dataset (datasets.load_dataset) and data.sources",
            ),
            (self.sources == [], "data.sources is empty"),
            (
                len({source.weight is None for source in self.sources or []}) > 1,
                "data.sources: give all of them a weight, or none",
            ),
            *(
                (names.count((key, name)) > 1, f"data.{key}: two sources are called {name}: rename one")
                for key, name in names
            ),
        )
        return self

    def check_use(self, objective: Objective) -> None:
        """Name the fields of records by their defaults, and raise ValueError for a key that the run does not read."""
        refuse_unused(self, "data.", self._key_uses(objective))
        for key, sources in (("sources", self.sources or []), ("eval_sources", self.eval_sources)):
            streaming = self.streaming and key == "sources"
            for source in sources:
                refuse_unused(source, f"data.{key}, {source.name}: ", source.key_uses(objective, streaming))
                source.fill_fields(objective)
        if self.sources is None or self.eval_path:
            self.fill_fields(objective)

    def _key_uses(self, objective: Objective) -> list[KeyUse]:
        evaluated = _DEFAULT_FIELDS.get(objective, ()) if self.eval_path else ()
        fields = sorted(RecordsSection.model_fields.keys() - {"path", "dataset", *evaluated})
        elsewhere: KeyUse = (fields, False, "belongs in each entry of data.sources")
        no_stream, trains_all, one = not self.streaming, self.train_on == "all", "give only one of the two"
        return [
            *(self.key_uses(objective, self.streaming) if self.sources is None else [elsewhere]),
            (("streaming",), objective == "sft", "has no use: preferences need a reference of all data before step 1"),
            (("shuffle_buffer",), self.streaming, "is for data.streaming: true"),
            (("eval_fraction",), no_stream, "has no use: data.streaming holds out no data: give data.eval_path"),
            (
                ("tokenizer_vocab_size",),
                no_stream,
                "has no use: data.streaming trains no tokenizer: give data.tokenizer",
            ),
            (("tokenizer_vocab_size",), self.tokenizer is None, f"has no use beside data.tokenizer: {one}"),
            (("eval_split",), self.dataset is not None, "is for data.dataset; with data.path give data.eval_path"),
            (("eval_split", "eval_fraction"), self.eval_path is None, f"has no use beside data.eval_path: {one}"),
            (("eval_fraction",), self.eval_split is None, f"has no use beside data.eval_split: {one}"),
            (("roles_to_train",), not trains_all, "has no use with data.train_on: all, which learns all messages"),
            (
                ("train_on",),
                objective != "kto" or not trains_all,
                "has no use: train.objective: kto compares answers to other prompts: leave out data.train_on: all,"
                " which treats prompts as answers",
            ),
            (("chat_template_date",), self.chat_template != "none", "has no use with data.chat_template: none"),
        ]

    @property
    def chat_template_path(self) -> str | None:
        """The path of the file that `chat_template` names; None for a name, for a template and for `none`."""
        template = self.chat_template
        is_path = template is not None and template not in ("none", *CHAT_TEMPLATES) and "{" not in template
        return template if is_path else None

    @property
    def has_evaluation(self) -> bool:
        """Whether the section sets any evaluation data."""
        return bool(self.eval_path or self.eval_split or self.eval_fraction or self.eval_sources)

    @property
    def source_count(self) -> int:
        return len(self.sources or [self])

    def every_path(self) -> Iterator[tuple[str, str]]:
        """Yield (key, path) of all local data that the section names."""
        yield from (("data.path", path) for path in self.paths)
        evaluated = [self.eval_path] if isinstance(self.eval_path, str) else self.eval_path or []
        yield from (("data.eval_path", path) for path in evaluated)
        for key, sources in (("sources", self.sources or []), ("eval_sources", self.eval_sources)):
            yield from ((f"data.{key}", path) for source in sources for path in source.paths)

    def datasets(self) -> list[str]:
        """Return the names of all datasets of the section."""
        sources: list[RecordsSection] = [self, *(self.sources or []), *self.eval_sources]
        return [source.dataset for source in sources if source.dataset is not None]
