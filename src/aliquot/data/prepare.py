"""Prepare the data of a run, once per node: read sources, get the tokenizer, and write tokens into the data cache.

All ranks of a node then open the tokens by their path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aliquot.config.schema import DataSection
from aliquot.core.errors import DataError
from aliquot.core.on_rank_0 import gather_results, run_on_rank_0
from aliquot.core.small_files import cache_root
from aliquot.data.cache import cached, damage
from aliquot.data.chat import ENCODING
from aliquot.data.chat_template import writes_date
from aliquot.data.cuts import Cut, cut_of
from aliquot.data.file_source import FileSource
from aliquot.data.remote_files import NamedProgress
from aliquot.data.sources import Source, sources_of
from aliquot.data.text_encoder import EncoderSpec
from aliquot.data.token_store import FORMAT, TokenStore, token_dtype, why_unusable
from aliquot.data.token_stream import Segment, SegmentMaker, TokenStream, segment_directory
from aliquot.data.tokenize import EncoderPool, Progress, tokenize
from aliquot.data.tokenizer import Convention, configured_tokenizer, convention_of, load_tokenizer, publish_tokenizer
from aliquot.data.vocabulary import (
    NO_CHANGES,
    TokenizerChanges,
    check_ids,
    check_trained_size,
    fit_tokenizer,
    largest_token,
)
from aliquot.distributed.ranks import Ranks
from aliquot.models.model_files import trained_tokens


@dataclass(frozen=True)
class Prepared:
    """The paths and settings of prepared data, which ranks exchange as JSON."""

    train: dict[str, str]  # name of the source ("" for unnamed data) -> directory of its token store
    eval: dict[str, str]
    labels: dict[str, str] = field(compare=False)  # directory of a token store -> name of the source in error messages
    tokenizer: str  # a directory that save_pretrained wrote
    pad_id: int
    prefix: tuple[int, ...]  # token ids before each document
    chat_prefix: tuple[int, ...]  # token ids before each record with answers, unless the chat template writes them
    day: str | None  # the date that the chat template writes, in ISO 8601; None if it writes none
    positions: int | None = None  # of the model, if they are known and limited
    streams: Mapping[str, TokenStream] = field(default_factory=dict)  # of `train`, which has their first segments

    def to_json(self) -> str:
        values = asdict(replace(self, streams={}))
        return json.dumps(values | {"streams": {name: str(stream.directory) for name, stream in self.streams.items()}})

    @classmethod
    def from_json(cls, text: str) -> Prepared:
        values = json.loads(text)
        streams = {name: TokenStream(Path(directory)) for name, directory in values["streams"].items()}
        return cls(**values | {name: tuple(values[name]) for name in ("prefix", "chat_prefix")} | {"streams": streams})

    def open_train(self) -> dict[str, TokenStore]:
        return self._open(self.train)

    def open_eval(self) -> dict[str, TokenStore]:
        return self._open(self.eval)

    def _open(self, stores: Mapping[str, str]) -> dict[str, TokenStore]:
        return {name: TokenStore.open(Path(path), self.positions, self.labels[path]) for name, path in stores.items()}

    def load_tokenizer(self) -> Any:
        """Return the transformers tokenizer that the run will export."""
        return load_tokenizer(self.tokenizer)


def prepare(
    section: DataSection,
    model_dir: Path | None,
    vocab_size: int,
    progress: NamedProgress | None = None,
    config: Mapping[str, Any] | None = None,
    changes: TokenizerChanges = NO_CHANGES,
    trains: bool = True,
) -> Prepared:
    """Find the tokenizer and the tokens for `section` in the data cache, or create them.

    Args:
        model_dir: the directory with the model's own tokenizer; None for a model from scratch.
        vocab_size: rows of the model's embedding, before added tokens extend it.
        progress: called while data are tokenised or a tokenizer is trained; not called if everything is cached.
        config: the fields of the config.json next to which the tokenizer will be exported.
        trains: False for an evaluation, which takes held-out data for training data, so that only they are tokenised.
    """
    root = cache_root(section.cache_directory)
    report = progress or (lambda what, done_bytes, total_bytes: None)
    train, evaluated = sources_of(section, root, report)
    if not trains:
        train = {name: evaluated.get(name, source) for name, source in train.items()}
    check_trained_size(section, vocab_size)
    tokenizer = configured_tokenizer(
        section, model_dir, list(train.values()), root, partial(report, "training the tokenizer")
    )
    tokenizer, rows, all_have_rows = fit_tokenizer(tokenizer, section, model_dir, vocab_size, config, changes)
    directory = publish_tokenizer(tokenizer, root)
    # An export states its prefix in token ids, which are valid only for the tokenizer in the same directory.
    is_own_tokenizer = section.tokenizer is None and section.tokenizer_vocab_size is None
    exports = [changes.adapter, model_dir] if is_own_tokenizer else [section.tokenizer and Path(section.tokenizer)]
    prefixes = (trained_tokens(export, "prefix") for export in exports if export)
    trained = next((prefix for prefix in prefixes if prefix is not None), None)
    builder = _Builder(section, tokenizer, directory, root, trained)
    convention = builder.convention(answers=False)

    def stores(sources: Mapping[str, Source], what: str) -> dict[str, str]:
        reports = {name: partial(report, f"{what} {name}".strip()) for name in sources}
        return {name: str(builder.store(source, reports[name])) for name, source in sources.items()}

    # Evaluation data come first, because they are smaller: their errors appear before the long work on training data.
    eval_stores = stores(evaluated, "tokenising what is held out")
    makers = {
        name: builder.segment_maker(source, partial(report, f"tokenising the first segment {name}".strip()))
        for name, source in train.items()
        if section.streaming
    }
    first_segments = {name: str(segment_directory(maker.directory, 0)) for name, maker in makers.items()}
    train_stores = first_segments if section.streaming else stores(train, "tokenising")
    labels = {train_stores[name]: source.label for name, source in train.items()}
    labels |= {eval_stores[name]: source.label for name, source in evaluated.items()}
    store_paths = list(labels)
    if not all_have_rows:
        check_ids(store_paths, tokenizer, rows)
        for maker in makers.values():
            maker.check = lambda directory: check_ids([str(directory)], tokenizer, rows)
    return Prepared(
        train=train_stores,
        eval=eval_stores,
        labels=labels,
        tokenizer=str(directory),
        pad_id=convention.pad_id if convention.pad_id < rows else 0,
        prefix=convention.prefix,
        chat_prefix=builder.convention(answers=True).prefix,
        day=builder.day if any(TokenStore.open(Path(path)).mask is not None for path in store_paths) else None,
        streams={name: TokenStream(maker.directory, maker) for name, maker in makers.items()},
    )


def prepare_together(ranks: Ranks, prepare_node: Callable[[], Prepared]) -> Prepared:
    """Call `prepare_node` once per node, and return its result on every rank. Collective.

    Rank 0 runs first, then one rank of each other node. On a shared cache, these ranks find the results of rank 0.
    """

    streams: dict[str, TokenStream] = {}  # with their makers, in the rank that prepares the data of its node

    def build() -> str:
        with ranks.unpinned():
            prepared = prepare_node()
        streams.update(prepared.streams)
        return prepared.to_json()

    first = run_on_rank_0(ranks, build)
    topology = ranks.topology
    node = str(topology.node_rank)
    results = gather_results(ranks, lambda: [node, build() if topology.local_rank == 0 and ranks.rank > 0 else ""])
    prepared = Prepared.from_json(next((result for name, result in results if name == node and result), first))
    return replace(prepared, streams=streams or prepared.streams)


@dataclass(frozen=True)
class _Builder:
    section: DataSection
    tokenizer: Any
    tokenizer_directory: Path
    root: Path
    trained: list[int] | None  # prefix of documents in the model's training; None: unknown

    def store(self, source: Source, progress: Progress) -> Path:
        """Return the token store of `source`; create it if the cache has none."""
        section = self.section
        ingredients, as_text = self._ingredients(source.digest), section.special_tokens_in_text
        text_path = self._path([*ingredients, *([] if as_text in (None, "encode") else [as_text])])
        answers_path = self._path([*ingredients, *self._answer_ingredients])
        for path in (answers_path, text_path):
            if damage(path) is None:
                return path
        spec, cut = self._encoding(source)

        def report_written(done_bytes: int) -> None:
            progress(done_bytes, source.total_bytes)

        def write(directory: Path) -> None:
            with closing(EncoderPool(spec, section.num_proc)) as encoders:
                writer = tokenize(source.documents(), cut, self._dtype, directory, encoders, report_written)
            if writer.useful == 0:
                raise DataError(why_unusable(writer.documents, writer.left_out, writer.firsts), source.label)
            report_written(source.total_bytes)

        return cached(answers_path if spec.answers else text_path, write)

    def segment_maker(self, source: Source, progress: Progress) -> SegmentMaker:
        """Return the maker of the token stream of `source`, after it has made the first segment."""
        section = self.section
        assert isinstance(source, FileSource), "data.streaming reads files"
        layout = (section.shuffle_buffer, section.sequence_length, section.packing)
        ingredients = [*self._ingredients(source.stream_digest), *self._answer_ingredients]
        directory = self._path([*ingredients, "segments", *layout])
        spec, cut = self._encoding(source)
        maker = SegmentMaker(directory, source, cut, self._dtype, EncoderPool(spec, section.num_proc or 1), layout)
        maker.make(0, lambda done_bytes: progress(done_bytes, source.total_bytes))
        first = Segment.read(segment_directory(directory, 0))
        if first is None or first.tokens == 0:
            reasons = ({}, {}) if first is None else (first.left_out, first.firsts)
            raise DataError(why_unusable(0, *reasons), source.label)
        return maker

    def _ingredients(self, digest: str) -> list[Any]:
        section = self.section
        conventions = [section.add_bos, section.add_eos, section.train_on, section.chat_template == "none"]
        return [FORMAT, digest, self.tokenizer_directory.name, conventions, self.trained]

    @property
    def _answer_ingredients(self) -> list[Any]:
        roles = self.section.roles_to_train if self.section.roles_to_train != ["assistant"] else []
        return ["answers", ENCODING, self.section.special_tokens_in_text, self.day, *roles]

    def _path(self, ingredients: list[Any]) -> Path:
        return self.root / "tokens" / hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()

    def _encoding(self, source: Source) -> tuple[EncoderSpec, Cut | None]:
        """Return how to encode the documents of `source`, of which the first one decides whether they have answers."""
        if source.total_bytes == 0:
            raise DataError(
                "no usable document: there are 0 bytes. Check the path, or fetch the data again", source.label
            )
        first = next((document.kind for document in source.documents() if not document.blank), "text")
        tokenizer_json = self.tokenizer_directory / "tokenizer.json"
        fast, answers = tokenizer_json.is_file(), first != "text"
        templated = answers and self._has_template
        cut = cut_of(tokenizer_json.read_text()) if fast and not answers else None
        convention, as_text = self.convention(answers), self.section.special_tokens_in_text
        spec = EncoderSpec(
            tokenizer=str(self.tokenizer_directory),
            fast=fast,
            prefix=convention.prefix,
            suffix=convention.suffix,
            drop_before=cut.drop_before if cut is not None else None,
            answers=answers,
            pairs=first == "preference",
            rated=first == "rated",
            templated=templated,
            train_on=self.section.train_on,
            roles=tuple(self.section.roles_to_train),
            special_tokens_as_text=(as_text or "text" if templated else as_text) == "text",
            day=self.day,
        )
        return spec, cut

    @property
    def _dtype(self) -> np.dtype[Any]:
        return token_dtype(largest_token(self.tokenizer) + 1)

    @property
    def day(self) -> str | None:
        """The date that the chat template writes; None if it writes no date."""
        if not self._has_template or not writes_date(self.tokenizer.chat_template):
            return None
        return (self.section.chat_template_date or date.today()).isoformat()

    @property
    def _has_template(self) -> bool:
        return self.section.chat_template != "none" and self.tokenizer.chat_template is not None

    def convention(self, answers: bool) -> Convention:
        """Return the tokens before and after each document; `answers`: for records with answers."""
        add_bos, add_eos = self.section.add_bos, self.section.add_eos
        templated = answers and self._has_template
        if templated:  # the template writes bos and eos itself; an explicit setting adds missing ones
            add_bos, add_eos = add_bos is True, add_eos is True
        return convention_of(self.tokenizer, add_bos, add_eos, None if templated else self.trained)
