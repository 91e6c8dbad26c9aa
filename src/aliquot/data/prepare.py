"""The story of the data, once a node: sources -> tokenizer -> tokens in the cache. Then any rank opens them by path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from aliquot.config.schema import DataSection
from aliquot.core.errors import DataError, TokenizerError
from aliquot.core.on_rank_0 import gather_results, run_on_rank_0
from aliquot.core.paths import cache_root
from aliquot.data.cache import publishing
from aliquot.data.chat import ENCODING
from aliquot.data.chat_template import writes_date
from aliquot.data.cuts import cut_of
from aliquot.data.sources import Source, joined, sources_of
from aliquot.data.text_encoder import EncoderSpec
from aliquot.data.token_store import FORMAT, TokenStore, counted, token_dtype
from aliquot.data.tokenize import Progress, tokenize
from aliquot.data.tokenizer import (
    Convention,
    as_loaded_with,
    check_ids,
    check_vocabulary,
    configured_tokenizer,
    convention_of,
    give_template,
    largest_token,
    load_tokenizer,
    publish_tokenizer,
)
from aliquot.distributed.ranks import Ranks
from aliquot.models.model_files import trained_prefix

NamedProgress = Callable[[str, int, int], None]  # (what is being made, bytes of the source done, of how many)


@dataclass(frozen=True)
class Prepared:
    """Where everything lies; small enough to send to other ranks as JSON."""

    train: dict[str, str]  # directories of token stores by the names of their sources; one of no name is called ""
    eval: dict[str, str]
    tokenizer: str  # a directory that save_pretrained wrote
    pad_id: int
    prefix: tuple[int, ...]  # before each document
    chat_prefix: tuple[int, ...]  # before each with answers, which a template may begin itself
    day: str | None  # ISO 8601, what the chat template of records with answers takes for today; None: it does not ask

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Prepared:
        values = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("prefix", "chat_prefix")})

    def open_train(self) -> dict[str, TokenStore]:
        return {name: TokenStore.open(Path(store)) for name, store in self.train.items()}

    def open_eval(self) -> dict[str, TokenStore]:
        return {name: TokenStore.open(Path(store)) for name, store in self.eval.items()}

    def load_tokenizer(self) -> Any:
        """The transformers tokenizer, as it is exported with the model."""
        return load_tokenizer(self.tokenizer)


@dataclass(frozen=True)
class AddedTokens:
    """Tokens that a configuration adds to a model's tokenizer."""

    plain: Sequence[str] = ()
    special: Sequence[str] = ()


def prepare(
    section: DataSection,
    model_dir: Path | None,
    vocab_size: int,
    progress: NamedProgress | None = None,
    config: Mapping[str, Any] | None = None,
    added: AddedTokens = AddedTokens(),
    adapter_dir: Path | None = None,
) -> Prepared:
    """Find the tokens of `section` in the cache, or make them.

    `model_dir` holds the model's own tokenizer; None: from scratch. `adapter_dir`: of an adapter that was trained
    already, whose way to begin a document goes before the model's. `config`: the fields of the config.json that the
    tokenizer will lie beside. `vocab_size` is the number of rows of the model's embedding, which those `added` extend.
    `progress(what, done_bytes, total_bytes)` is told while something is made, and never where all is cached.
    Raises UserError for whatever is wrong with sources, tokenizer or cache; TrainingError where a process dies.
    """
    if section.tokenizer_vocab_size is not None and section.tokenizer_vocab_size > vocab_size:
        raise TokenizerError(
            f"data.tokenizer_vocab_size is {section.tokenizer_vocab_size}, but the model's embedding"
            f" has only {vocab_size} rows"
        )
    root = cache_root(section.cache_directory)
    train, evaluated = sources_of(section, root)
    told = progress or (lambda what, done_bytes, total_bytes: None)
    everything = joined(list(train.values()))
    tokenizer = configured_tokenizer(section, model_dir, everything, root, partial(told, "training the tokenizer"))
    before = len(tokenizer)
    tokenizer.add_tokens(list(added.plain))
    tokenizer.add_tokens(list(added.special), special_tokens=True)
    own = section.tokenizer is None and section.tokenizer_vocab_size is None
    if config is not None and not own:  # the model's own was loaded from beside its config.json
        tokenizer = as_loaded_with(tokenizer, config)
    give_template(tokenizer, section.chat_template)
    has_more = len(tokenizer) > before
    rows = vocab_size
    if has_more and model_dir is not None:  # rows for them come behind those of all that the model's own has
        rows = (max(vocab_size, before) if own else vocab_size) + len(tokenizer) - before
    all_have_rows = check_vocabulary(tokenizer, rows, own and not has_more)
    directory = publish_tokenizer(tokenizer, root)
    # Beside the tokenizer: of another one the numbers that an export names are other tokens.
    beside = [adapter_dir, model_dir] if own else [Path(section.tokenizer)] if section.tokenizer else []
    known = (trained_prefix(each) for each in beside if each is not None)
    trained = next((prefix for prefix in known if prefix is not None), None)
    builder = _Builder(section, tokenizer, directory, root, trained)
    convention = builder.convention(answers=False)

    def stores(sources: Mapping[str, Source], what: str) -> dict[str, str]:
        return {
            name: str(builder.store(source, partial(told, f"{what} {name}".strip())))
            for name, source in sources.items()
        }

    # The smaller first: where it comes to nothing, that is said before all else is tokenised.
    held_out = stores(evaluated, "tokenising what is held out")
    learned = stores(train, "tokenising")
    made = [*learned.values(), *held_out.values()]
    if not all_have_rows:
        check_ids(made, tokenizer, rows)
    return Prepared(
        train=learned,
        eval=held_out,
        tokenizer=str(directory),
        pad_id=convention.pad_id if convention.pad_id < rows else 0,
        prefix=convention.prefix,
        chat_prefix=builder.convention(answers=True).prefix,
        day=builder.day if any(TokenStore.open(Path(each)).mask is not None for each in made) else None,
    )


def prepare_together(ranks: Ranks, prepare_node: Callable[[], Prepared]) -> Prepared:
    """Call `prepare_node` once a node. Collective.

    Rank 0 prepares first; then one rank of each further node, which finds the results of rank 0 in a shared cache.
    """

    def build() -> str:
        with ranks.unpinned():
            return prepare_node().to_json()

    first = run_on_rank_0(ranks, build)
    topology = ranks.topology
    node = str(topology.node_rank)
    results = gather_results(ranks, lambda: [node, build() if topology.local_rank == 0 and ranks.rank > 0 else ""])
    return Prepared.from_json(next((result for name, result in results if name == node and result), first))


@dataclass(frozen=True)
class _Builder:
    section: DataSection
    tokenizer: Any
    tokenizer_directory: Path
    root: Path
    trained: list[int] | None  # what the model was trained with before each document, where it says so

    def store(self, source: Source, progress: Progress) -> Path:
        """The directory with the tokens of `source`; made where the cache has none."""
        section = self.section
        conventions = [section.add_bos, section.add_eos, section.train_on, section.chat_template == "none"]
        made_of = [FORMAT, source.digest, self.tokenizer_directory.name, conventions, self.trained]
        as_text = section.special_tokens_in_text
        more_of_text = [] if as_text in (None, "encode") else [as_text]
        more_of_answers = ["answers", ENCODING, as_text, self.day]
        of_text, of_answers = (self._path([*made_of, *more]) for more in (more_of_text, more_of_answers))
        if of_answers.is_dir():
            return of_answers
        if of_text.is_dir() and TokenStore.open(of_text).mask is None:  # older ones hold answers there, too
            return of_text
        return self._make(source, of_text, of_answers, progress)

    def _path(self, made_of: list[Any]) -> Path:
        return self.root / "tokens" / hashlib.sha256(json.dumps(made_of).encode()).hexdigest()

    def _make(self, source: Source, of_text: Path, of_answers: Path, progress: Progress) -> Path:
        first = next((document for document in source.documents() if not document.blank), None)
        if first is None:
            raise DataError(
                "no usable document: nothing but blank text here, or too few documents for data.eval_fraction to divide"
                " (a file is one, unless data.document is line or block)",
                source.label,
            )
        tokenizer_json = self.tokenizer_directory / "tokenizer.json"
        fast = tokenizer_json.is_file()
        answers = first.kind != "text"
        path = of_answers if answers else of_text
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
            templated=templated,
            train_on=self.section.train_on,
            special_tokens_as_text=(as_text or "text" if templated else as_text) == "text",
            day=self.day,
        )

        def written(done_bytes: int) -> None:
            progress(done_bytes, source.total_bytes)

        dtype = token_dtype(largest_token(self.tokenizer) + 1)
        with publishing(path) as beside:
            useful, left_out, firsts = tokenize(
                source.documents(), spec, cut, dtype, beside, self.section.num_proc, written
            )
            if useful == 0:
                reasons = "; ".join(counted(left_out, firsts))
                raise DataError(
                    f"no usable document: none has a token to learn from{f' ({reasons})' if reasons else ''}",
                    source.label,
                )
        written(source.total_bytes)
        return path

    @property
    def day(self) -> str | None:
        """Today, where the chat template writes it."""
        if not self._has_template or not writes_date(self.tokenizer.chat_template):
            return None
        return (self.section.chat_template_date or date.today()).isoformat()

    @property
    def _has_template(self) -> bool:
        return self.section.chat_template != "none" and self.tokenizer.chat_template is not None

    def convention(self, answers: bool) -> Convention:
        """How documents begin and end."""
        add_bos, add_eos = self.section.add_bos, self.section.add_eos
        templated = answers and self._has_template
        if templated:  # it writes bos and eos itself; on explicit request they are added where it does not
            add_bos, add_eos = add_bos is True, add_eos is True
        return convention_of(self.tokenizer, add_bos, add_eos, None if templated else self.trained)
