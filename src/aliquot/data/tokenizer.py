"""Load or train the tokenizer of a run, and find the tokens that the model expects before and after a document."""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from aliquot.config.data_section import CHAT_TEMPLATES, NO_TOKENIZER, DataSection, fitting_templates
from aliquot.core.errors import MissingToolError, ModelFilesError, TokenizerError, UnsupportedModelError, reason_of
from aliquot.core.small_files import (
    hub_advice,
    pointer_message,
    read_small_file,
    resolve_link,
    with_home,
)
from aliquot.data.cache import cached, digest_of_directory
from aliquot.data.cuts import Cut, cut_of, pieces
from aliquot.data.formats import words
from aliquot.data.sources import Source
from aliquot.models.model_files import save_tokenizer
from aliquot.models.untrusted_code import check_files, without_code
from aliquot.tensor_io.bytemap import scratch_advice

BOS, EOS = "<|bos|>", "<|eos|>"
_FILES = {"qwen": "chatml"}  # named chat templates in a file of another name
# Texts that show whether two tokenizers with the same vocabulary split words in the same way.
_SAMPLE_TEXTS = (
    "It's 12345 o'clock,\n\n  isn't it?\tYES!  ",
    "def f(x):\n    return x**2 # caf\u00e9 \u00bd \uff21 \u338f \u65e5\u672c\u8a9e",
    " a  b\r\n\r\nc",
)


def load_tokenizer(name: str | Path) -> Any:
    """Load a transformers tokenizer from a directory, a tokenizer.json file or a hub id. Raises UserError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = with_home(name)
    if not path.exists() and (path.is_absolute() or str(name).startswith(".") or str(name).count("/") > 1):
        raise TokenizerError("no such tokenizer file or directory", name)  # a hub id is `name` or `owner/name`
    if path.name == "tokenizer.json" and path.with_name("tokenizer_config.json").exists():
        path = path.parent  # the config names bos and eos
    starts: dict[Path, bytes] = {}
    try:
        if path.is_dir():
            starts = check_files(path)
            with _without_marks(path, starts) as directory:
                tokenizer = without_code(AutoTokenizer.from_pretrained)(directory)
            # For some model types, transformers makes a tokenizer without words if there are no files.
            if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
                raise ValueError(
                    "there is no vocabulary, such as tokenizer.json: complete the directory, or set data.tokenizer"
                )
            return tokenizer
        if path.exists():
            starts[path] = read_small_file(path, links="anywhere")
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        return without_code(AutoTokenizer.from_pretrained)(str(name))
    except (ModelFilesError, UnsupportedModelError) as error:  # the message names the file or the directory
        raise TokenizerError(str(error)) from error
    except Exception as error:  # tokenizers raises plain Exception
        for file, start in starts.items():
            if (message := pointer_message(start)) is not None:
                raise TokenizerError(message, file) from error
        if path.is_dir() and not any(path.glob("tokenizer*")):
            raise TokenizerError(
                "no tokenizer here: set data.tokenizer to a directory, a tokenizer.json or a hub id"
                f"{scratch_advice(path)}",
                name,
            ) from error
        if path.is_dir() and _needs_sentencepiece(path, starts):
            raise MissingToolError(
                f"{name}: the tokenizer is a sentencepiece model without a tokenizer.json next to it, and the package"
                " sentencepiece is not installed: pip install sentencepiece"
            ) from error
        advice = "" if path.exists() else f". {hub_advice(str(name))}"
        raise TokenizerError(f"cannot load a tokenizer: {reason_of(error)}{advice}", name) from error


def _needs_sentencepiece(directory: Path, starts: Mapping[Path, bytes]) -> bool:
    """Return whether loading the tokenizer in `directory` needs the package sentencepiece, which is not installed.

    A .model file of tiktoken, whose lines are base64 and a rank, does not need sentencepiece.
    """
    if (directory / "tokenizer.json").exists() or importlib.util.find_spec("sentencepiece") is not None:
        return False
    models = [start for file, start in starts.items() if file.suffix == ".model"]
    return any(re.match(rb"[A-Za-z0-9+/=]+ \d+\s", start) is None for start in models)


@contextmanager
def _without_marks(directory: Path, starts: Mapping[Path, bytes]) -> Iterator[Path]:
    """Yield `directory`, or a temporary copy without byte order marks, which transformers rejects in JSON files."""
    if not any(start.startswith(codecs.BOM_UTF8) for start in starts.values()):
        yield directory
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in starts:
            if file.suffix != ".safetensors":
                copy = Path(folder) / file.relative_to(directory)
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(
                    read_small_file(resolve_link(file, directory), links="none").removeprefix(codecs.BOM_UTF8)
                )
        yield Path(folder)


def trained_tokenizer(
    sources: Sequence[Source],
    vocab_size: int,
    root: Path,
    progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> Any:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens on `sources`, or load it from the data cache.

    The tokenizer puts `<|bos|>` in front of a text, as Llama's does, and has an `<|eos|>` token. Training on the same
    documents gives the same tokenizer. `root`: the directory of the data cache.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    digests = "\0".join(source.digest for source in sources)
    key = hashlib.sha256(f"byte-level BPE, format 1\0{vocab_size}\0{digests}".encode()).hexdigest()

    def train(directory: Path) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS, EOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_texts(sources, cut_of(tokenizer.to_str()), progress), trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS).save_pretrained(directory)

    return load_tokenizer(cached(root / "trained" / key, train))


def _texts(sources: Sequence[Source], cut: Cut | None, progress: Callable[[int, int], None]) -> Iterator[str]:
    """Yield all texts in pieces, because BPE training needs tens of bytes of memory per character of a text."""
    before_bytes, total_bytes = 0, sum(source.total_bytes for source in sources)
    for source in sources:
        for document in source.documents():
            for text in words(document.text, document.kind):
                yield from pieces(text, cut)
            progress(before_bytes + document.done_bytes, total_bytes)
        before_bytes += source.total_bytes


def configured_tokenizer(
    section: DataSection,
    model_dir: Path | None,
    sources: Sequence[Source],
    root: Path,
    progress: Callable[[int, int], None],
) -> Any:
    """Return the tokenizer that `data.tokenizer` or `data.tokenizer_vocab_size` sets, else the model's tokenizer."""
    if section.tokenizer_vocab_size is not None:
        return trained_tokenizer(sources, section.tokenizer_vocab_size, root, progress)
    if section.tokenizer is not None:
        return load_tokenizer(section.tokenizer)
    if model_dir is None:
        raise TokenizerError(NO_TOKENIZER)
    return load_tokenizer(model_dir)


def give_template(tokenizer: Any, section: DataSection) -> None:
    """Set the chat template of `tokenizer` that `data.chat_template` names or contains.

    Raises UserError if the template cannot be read, or if the tokenizer lacks a special token of a named template.
    """
    template, path = section.chat_template, section.chat_template_path
    if template is None or template == "none":
        return
    if path is not None:
        try:
            template = read_small_file(Path(path), links="anywhere").decode("utf-8")
        except (OSError, ValueError) as error:
            reason = "not a text file" if isinstance(error, ValueError) else error.strerror or error
            raise TokenizerError(
                f"data.chat_template cannot be read: {reason}. Give a file, a template or one of"
                f" {', '.join(CHAT_TEMPLATES)}",
                path,
            ) from error
    elif template in CHAT_TEMPLATES:
        template = _named_template(tokenizer, template)
    tokenizer.chat_template = template


def _named_template(tokenizer: Any, name: str) -> str:
    added = tokenizer.get_added_vocab()
    if missing := [token for token in CHAT_TEMPLATES[name] if token not in added]:
        raise TokenizerError(
            f"data.chat_template: {name} writes {', '.join(missing)}, which this tokenizer would split into pieces: a"
            f" model learns them badly. Add them with model.add_special_tokens={json.dumps(missing)}, or choose"
            f" {fitting_templates(added)}, whose special tokens this tokenizer has"
        )
    text = files("aliquot.data").joinpath("templates", f"{_FILES.get(name, name)}.jinja").read_text(encoding="utf-8")
    if "eos_token" in text and tokenizer.eos_token is None:
        raise TokenizerError(f"data.chat_template: {name} ends answers with eos, which the tokenizer does not have")
    return text


def publish_tokenizer(tokenizer: Any, root: Path) -> Path:
    """Save `tokenizer` in the data cache and return its directory, whose name is the hash of the saved files."""
    with tempfile.TemporaryDirectory() as scratch:
        save_tokenizer(tokenizer, Path(scratch))
        directory = root / "tokenizers" / digest_of_directory(Path(scratch))
    return cached(directory, lambda partial: save_tokenizer(tokenizer, partial))


def as_loaded_with(tokenizer: Any, config: Mapping[str, Any]) -> Any:
    """Return `tokenizer` as users of the export will load it: by AutoTokenizer, next to a config.json of these fields.

    Training must use the returned tokenizer. For some model types, transformers builds a tokenizer of a special class
    from the vocabulary, and this class splits words differently from tokenizer.json.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as directory:
        save_tokenizer(tokenizer, Path(directory))
        Path(directory, "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        try:
            loaded = without_code(AutoTokenizer.from_pretrained)(directory)
        except Exception as error:  # tokenizers raises plain Exception
            raise TokenizerError(
                f"transformers cannot load this tokenizer for a {config.get('model_type')} model: {reason_of(error)}"
            ) from error
    same = all(tokenizer.encode(text) == loaded.encode(text) for text in _SAMPLE_TEXTS)
    return tokenizer if same and len(tokenizer) == len(loaded) else loaded


@dataclass(frozen=True)
class Convention:
    """The token ids before and after each document, and the id for padding.

    `pad_id` may also occur in documents, because padding is masked by position, not by id.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad_id: int


def convention_of(
    tokenizer: Any, add_bos: bool | None, add_eos: bool | None, trained: Sequence[int] | None = None
) -> Convention:
    """Return the tokens that the model expects around a document, unless `add_bos` or `add_eos` override them.

    The prefix is `trained`, the prefix in the model's training, or else the tokens that the tokenizer puts in front of
    a text. eos ends each document, even if the tokenizer does not add eos (Llama), because a model learns to end a
    document only from documents that end with eos.
    """
    probe = "a b"
    bare = list(tokenizer.encode(probe, add_special_tokens=False))
    dressed = list(tokenizer.encode(probe, add_special_tokens=True))
    at = next((i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), 0)
    prefix = tuple(dressed[:at] if trained is None else trained)
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    if add_bos and not prefix:
        if bos is None:
            raise TokenizerError("data.add_bos is true, but the tokenizer has no bos token")
        prefix = (bos,)
    if add_eos and eos is None:
        raise TokenizerError("data.add_eos is true, but the tokenizer has no eos token")
    return Convention(
        prefix=() if add_bos is False else prefix,
        suffix=() if add_eos is False or eos is None else (eos,),
        pad_id=next((token for token in (pad, eos) if token is not None), 0),
    )
