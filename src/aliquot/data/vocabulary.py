"""Fit the tokenizer of a run and the vocabulary of its model to each other: added tokens, and the rows of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aliquot.config.schema import DataSection, RunConfig
from aliquot.core.errors import TokenizerError
from aliquot.core.small_files import with_home
from aliquot.data.token_store import TokenStore
from aliquot.data.tokenizer import as_loaded_with, give_template, load_tokenizer
from aliquot.models.source import CONFIG_FILES, ModelSource, resolve

SMALLEST_VOCABULARY = 256 + 2  # every byte, bos and eos


@dataclass(frozen=True)
class TokenizerChanges:
    """Changes of a model's tokenizer."""

    added_tokens: Sequence[str] = ()
    added_special_tokens: Sequence[str] = ()
    adapter: Path | None = None  # a trained adapter, whose prefix of documents overrides the model's

    @classmethod
    def from_config(cls, config: RunConfig) -> TokenizerChanges:
        adapter = None if config.adapter is None else config.adapter.directory
        return cls(config.model.add_tokens, config.model.add_special_tokens, adapter)


NO_CHANGES = TokenizerChanges()


def fit_tokenizer(
    tokenizer: Any,
    section: DataSection,
    model_dir: Path | None,
    rows: int,
    config: Mapping[str, Any] | None,
    changes: TokenizerChanges,
) -> tuple[Any, int, bool]:
    """Add the tokens and the chat template of a run to its tokenizer. Raises UserError if the model does not fit it.

    Returns the tokenizer, the rows of the model's embedding, which added tokens extend, and whether every token has a
    row. The other arguments are those of `prepare`.
    """
    tokens_before = len(tokenizer)
    tokenizer.add_tokens(list(changes.added_tokens))
    tokenizer.add_tokens(list(changes.added_special_tokens), special_tokens=True)
    is_own_tokenizer = section.tokenizer is None and section.tokenizer_vocab_size is None
    if config is not None and not is_own_tokenizer:  # the model's own tokenizer was loaded with its config.json
        tokenizer = as_loaded_with(tokenizer, config)
    give_template(tokenizer, section)
    has_more = len(tokenizer) > tokens_before
    if has_more and model_dir is not None:  # the rows of added tokens follow the rows of the model's tokens
        rows = (max(rows, tokens_before) if is_own_tokenizer else rows) + len(tokenizer) - tokens_before
    return tokenizer, rows, check_vocabulary(tokenizer, rows, is_own_tokenizer and not has_more)


def adopt_tokenizer(config: RunConfig, source: ModelSource, tokenizer: Any) -> Any:
    """Give the model the vocabulary and special tokens of `tokenizer`, and return it. Raises UserError if unfit."""
    model = config.model
    source.adopt_tokenizer(tokenizer, largest_token(tokenizer), bool(model.add_tokens or model.add_special_tokens))
    # This is the second check, because the padding token may have changed.
    source.check_length(config.data.sequence_length, config.train.answers)
    return tokenizer


def planned_vocabulary(config: RunConfig) -> int | None:
    """Return the embedding rows that the run will have by its tokenizer, without data. Raises the errors of the run.

    None: the model's configuration decides, or only the pods of the config's cluster have the tokenizer.
    """
    source, section = resolve(config.model, CONFIG_FILES), config.data
    check_trained_size(section, source.largest_vocabulary)
    if section.tokenizer is None or (config.cluster is not None and not with_home(section.tokenizer).exists()):
        return section.tokenizer_vocab_size
    tokenizer, _, _ = fit_tokenizer(
        load_tokenizer(section.tokenizer), section, source.directory, source.largest_vocabulary,
        source.config.to_dict(), TokenizerChanges.from_config(config),
    )  # fmt: skip
    adopt_tokenizer(config, source, tokenizer)
    return int(source.config.vocab_size)


def check_trained_size(section: DataSection, rows: int) -> None:
    """Raise TokenizerError if data.tokenizer_vocab_size is too small, or larger than an embedding of `rows`."""
    size = section.tokenizer_vocab_size
    if size is not None and size > rows:
        raise TokenizerError(f"data.tokenizer_vocab_size is {size}, but the model's embedding has only {rows} rows")
    if size is not None and size < SMALLEST_VOCABULARY:
        raise TokenizerError(f"data.tokenizer_vocab_size is {size}; every byte, bos and eos need {SMALLEST_VOCABULARY}")


def largest_token(tokenizer: Any) -> int:
    """Return the largest token id. It may exceed the number of tokens, because ids may have gaps."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return max(len(tokenizer) - 1, *vocabulary.values())


def check_vocabulary(tokenizer: Any, vocab_size: int, is_models_own: bool = False) -> bool:
    """Return whether every token has a row in the model's embedding, which has `vocab_size` rows.

    Raises UserError for tokens without a row. Added tokens of the model's own tokenizer (`is_models_own`) may lack a
    row: the last token of Gemma 3 does, and occurs in no text.
    """
    needed = largest_token(tokenizer) + 1
    outside = {token for token, number in tokenizer.get_vocab().items() if number >= vocab_size}
    if is_models_own and outside <= tokenizer.get_added_vocab().keys():
        return not outside
    if needed > vocab_size:
        raise TokenizerError(
            f"the tokenizer has {needed} tokens and the model's embedding only {vocab_size} rows:"
            " take the model's own tokenizer, or a model.config with a larger vocab_size"
        )
    return True


def check_ids(stores: Iterable[str], tokenizer: Any, vocab_size: int) -> None:
    """Raise UserError if a token store holds a token without a row in the model's embedding (`vocab_size` rows)."""
    for store in stores:
        largest = int(TokenStore.open(Path(store)).tokens.max(initial=0))
        if largest >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise TokenizerError(
                f"documents hold {token!r}, which the tokenizer has as token {largest}, and the model's embedding has"
                f" only {vocab_size} rows: remove this token from the texts"
            )
