"""The source of a model: a Hugging Face directory, a hub id, or a configuration alone (from scratch)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from aliquot.config.schema import ModelSection
from aliquot.core.errors import ConfigError, ModelFilesError
from aliquot.core.small_files import hub_advice, limit_hub_time, looks_local, with_home
from aliquot.models.model_config import modules_beside_nf4, parse_config, read_fields, without_quantization
from aliquot.models.untrusted_code import model_from_config

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# The files of a hub repository that a run downloads; never code, pickles or weights of other frameworks.
DESCRIPTION_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # config and tokenizer
HUB_FILES = [*DESCRIPTION_FILES, "*.safetensors"]
_OTHER_FORMS = ["consolidated*.safetensors", "*/*.safetensors"]  # the same weights in formats for other programs
CONFIG_FILES = ["config.json"]
_SHAPES = Path(__file__).parent / "shapes"  # the config.json of well-known models, for plans without network
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# Model types derived from RoBERTa, whose first position is the id of the padding token plus 1.
_FROM_PADDING = {
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip


@dataclass(frozen=True)
class ModelSource:
    """A model's configuration, and the directory of its weights and tokenizer."""

    config: PretrainedConfig
    directory: Path | None  # directory of weights and tokenizer; None: the model is trained from scratch
    dtype: torch.dtype | None  # dtype in config.json; building a model overwrites the dtype in `config`
    configured_keys: frozenset[str] = frozenset()  # keys of `model.config` that the user set
    # If the files store weights in nf4: the modules whose weights they store in 16 bits
    beside_nf4: tuple[str, ...] | None = None

    @property
    def from_scratch(self) -> bool:
        return self.directory is None

    @property
    def largest_vocabulary(self) -> int:
        """Return the number of embedding rows, or an upper bound if the tokenizer determines the number."""
        return 1 << 31 if self._vocabulary_is_open else int(self.config.vocab_size)

    @property
    def _vocabulary_is_open(self) -> bool:
        return self.from_scratch and "vocab_size" not in self.configured_keys

    def adopt_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None, largest: int, added: bool) -> None:
        """Set the vocabulary size and the special tokens that the config of a model from scratch omits.

        The vocabulary of a pretrained model grows only if the user has added tokens. Otherwise a token without an
        embedding row, such as the last token of Gemma 3, occurs in no text.

        Args:
            tokenizer: None if only its size is known, for a plan; the model then has no special tokens.
            largest: the largest token id, which may exceed the number of tokens because ids may have gaps.
            added: whether the user has added tokens.
        """
        if not self.from_scratch:
            if added:
                self._grow(largest + 1)
            return
        if self._vocabulary_is_open:
            self.config.vocab_size = -(-(largest + 1) // 64) * 64  # the multiple for which products are fastest
        for key in SPECIAL:
            is_set = key in self.configured_keys or self._adopt(key, getattr(tokenizer, key, None))
            if not is_set and tokenizer is not None:
                raise ModelFilesError(
                    f"{self.config.model_type} needs {key}, and the tokenizer has none: set {key} in model.config",
                    "model.config",
                )

    def _adopt(self, key: str, token: int | None) -> bool:
        """Set a special token. Return False if a model of this type needs the token and the tokenizer has none."""
        if token is None and key == "pad_token_id" and self.config.model_type in _FROM_PADDING:
            return False
        try:
            setattr(self.config, key, token)
        except Exception:  # each configuration refuses values in its own way
            return False
        return True

    def _grow(self, size: int) -> None:
        for config in (self.config, self.config.get_text_config(decoder=True)):
            if getattr(config, "vocab_size", size) < size:
                config.vocab_size = size

    @cached_property
    def fingerprint(self) -> str | None:
        """Fingerprint of the weight files, computed at the first access; None for a model from scratch."""
        from aliquot.models.stored_weights import fingerprint

        return None if self.directory is None else fingerprint(self.directory)

    @property
    def _positions_key(self) -> str:
        return "max_seq_len" if self.config.model_type == "mpt" else "max_position_embeddings"

    @property
    def positions(self) -> int | None:
        """Return the maximum sequence length of the model; None if the model has no limit."""
        positions = getattr(self.config, self._positions_key, None)
        if positions is not None and self.config.model_type in _FROM_PADDING:
            positions -= (self.config.pad_token_id or 0) + 1
        return positions if positions is not None and positions > 0 else None

    def check_length(self, sequence_length: int, answers: int = 1) -> None:
        """Raise UserError if sequences have more tokens than the model has positions.

        `answers`: 2 if a sequence may be a pair of answers, whose positions both begin at 0.
        """
        if (positions := self.positions) is not None and answers * positions < sequence_length:
            raise ConfigError(
                f"data.sequence_length is {sequence_length}, but the model has {positions} positions"
                f" ({self._positions_key}): set data.sequence_length to {answers * positions} or less"
            )


def import_models() -> None:
    """Import the modules that building a model needs, which takes seconds.

    Ranks call `resolve` one after another, so they import the modules before, all at the same time.
    """
    importlib.import_module("transformers.modeling_utils")


def resolve(section: ModelSection, hub_files: Sequence[str] = HUB_FILES) -> ModelSource:
    """Read the model configuration that `model.path` or `model.config` names.

    If `model.path` is a hub id, the files that match the patterns `hub_files` are downloaded.

    Raises UserError if the configuration does not exist, is not of a causal language model of transformers, or is of a
    type of model that aliquot does not train.
    """
    if section.path is not None:
        directory = local_directory(section.path, hub_files)
        file = directory / "config.json"
        config = parse_config(read_fields(file, "model.path"), str(file))
        modules = modules_beside_nf4(config, str(file))
        return ModelSource(without_quantization(config), directory, config.dtype, beside_nf4=modules)
    assert section.config is not None  # the schema demands one of the two
    values, where = section.config, "model.config"
    if isinstance(values, Path):
        values, where = read_fields(values, where), str(values)
    config = parse_config(values, where)
    return ModelSource(without_quantization(config), None, None, frozenset(values))


def model_on_meta(directory: Path) -> PreTrainedModel:
    """Build the model of the config.json in `directory` on the meta device. Raises UserError as `resolve` does."""
    import torch

    file = directory / "config.json"
    config = without_quantization(parse_config(read_fields(file, "config.json"), str(file)))
    with torch.device("meta"):
        return model_from_config(config)


def local_directory(path: str, hub_files: Sequence[str] = HUB_FILES) -> Path:
    """Return the local directory of a model; `path` is a directory or a hub id.

    For a hub id, this is the cached snapshot of the repository, downloaded if needed. If `hub_files` are only
    CONFIG_FILES, well-known models need neither network nor access. Raises ModelFilesError.
    """
    directory = with_home(path)
    if directory.is_dir():
        return directory
    if directory.is_file():
        raise ModelFilesError(
            f"model.path {path}: a file, not the directory or hub id of a model. To train from scratch,"
            f" write model.config: {path} instead of model.path"
        )
    # A copy on a cluster has the name of its hub repository, and tuned variants have the shape of the base.
    shipped = _SHAPES / Path(path).name.removesuffix("-Instruct").removesuffix("-Base")
    if list(hub_files) == CONFIG_FILES and shipped.is_dir():
        return shipped
    if looks_local(path):
        elsewhere = ". If only the pods see it, copy its config.json here, and set cluster.model_directory"
        raise ModelFilesError(
            f"model.path {path}: no such directory, and no hub id, which has the form owner/name"
            f"{elsewhere if list(hub_files) == CONFIG_FILES else ''}"  # in `aliquot plan` and `aliquot cluster render`
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        limit_hub_time()
        return Path(snapshot_download(path, allow_patterns=list(hub_files), ignore_patterns=_OTHER_FORMS))
    except Exception as error:  # the client raises errors of its own, and of its HTTP and download libraries
        no_answer = isinstance(error, LocalEntryNotFoundError)
        line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        reason = "no network, or HF_HUB_OFFLINE is set, and the cache has no copy" if no_answer else line
        raise ModelFilesError(
            f"model.path {path}: no such directory, and the hub could not serve it: {reason}. {hub_advice(path)}"
        ) from error
