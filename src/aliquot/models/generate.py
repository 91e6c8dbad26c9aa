"""Continue prompts and chats with a model directory, through transformers alone."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, TextIteratorStreamer

from aliquot.config.adapter_section import ADAPTER_CONFIG, adapter_base_model
from aliquot.core.errors import ModelFilesError, TokenizerError, UsageError
from aliquot.models.bounded_rendering import bounded_rendering
from aliquot.models.export import STATE, export_checkpoint
from aliquot.models.model_files import joined_ends, trained_ends, trained_prefix
from aliquot.models.remote_code import without_code
from aliquot.models.source import local_directory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig


Messages = Sequence[Mapping[str, str]]
_COLD = 1e-4  # logits over less are infinite
# Of a model's generation_config.json: where a text ends; of which tokens one is drawn; and what makes some tokens less
# likely or leaves them out, with the value that does nothing.
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DRAWN_FROM = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_LESS_LIKELY: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
}


@dataclass(frozen=True)
class Sampling:
    """How many tokens to generate, and how to draw each of them. Temperature 0: the likeliest token each time."""

    max_new_tokens: int
    temperature: float = 0.8
    seed: int = 42

    def options(self, max_new_tokens: int) -> dict[str, Any]:
        """Options of transformers' `generate`; the model's generation config gives the others."""
        if self.temperature < _COLD:
            return {"max_new_tokens": max_new_tokens, "do_sample": False, **_LESS_LIKELY}
        return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": self.temperature}


@dataclass(frozen=True)
class Loaded:
    """A model directory in memory. `prefix`: what training put before each document, `chat_prefix`: before each chat;
    None: nothing says so."""

    model: Any
    tokenizer: Any
    prefix: Sequence[int] | None
    chat_prefix: Sequence[int] | None

    @property
    def room(self) -> int | None:
        """The tokens that it can read, where that has an end."""
        found: int | None = getattr(self.model.config, "max_position_embeddings", None)
        return found if found is not None and found > 0 else None


def load(directory: Path, base: str | None = None) -> Loaded:
    """A model, or an adapter and its model, which lies at `base` if it has moved. Raises UserError
    where `directory` holds none with a tokenizer."""
    if not directory.is_dir():
        raise ModelFilesError("no such directory", directory)
    if not any((directory / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ModelFilesError(
            "no config.json here; give an export, an adapter or a Hugging Face model directory", directory
        )
    if (directory / ADAPTER_CONFIG).is_file() and (directory / STATE).is_file():
        with tempfile.TemporaryDirectory() as folder:  # transformers knows adapters by the names of their exports
            export_checkpoint(directory, Path(folder) / "export", "float32")
            return load(Path(folder) / "export", base)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    adapts = (directory / ADAPTER_CONFIG).is_file()
    if base is not None and not adapts:
        raise UsageError("--base: this is no adapter, and only an adapter has a base model: leave it out", directory)
    whole = local_directory(adapter_base_model(directory, base)) if adapts else directory
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        tokenizer = without_code(AutoTokenizer.from_pretrained)(directory)
        model = without_code(AutoModelForCausalLM.from_pretrained)(whole, dtype="auto")
        if whole != directory:
            model.load_adapter(str(directory))
    except Exception as error:  # safetensors, tokenizers and transformers each have their own
        if not any(directory.glob("*token*")):
            raise ModelFilesError("no tokenizer here: it belongs beside the model", directory) from error
        raise ModelFilesError(
            f"transformers cannot load this model: {' '.join(str(error).split())}", directory
        ) from error
    model.generation_config = _one_by_one(model.generation_config)
    if (ids := joined_ends(model.generation_config.eos_token_id, trained_ends(directory))) is not None:
        model.generation_config.eos_token_id = ids  # beside an adapter lies no generation config
    return Loaded(model, tokenizer, trained_prefix(directory), trained_prefix(directory, "chat_prefix"))


def _one_by_one(of_model: GenerationConfig) -> GenerationConfig:
    """Without beams, assistants, lengths and forms of output: one text is made, token by token, and streamed."""
    from transformers import GenerationConfig

    kept = GenerationConfig()
    for name in (*_ENDS, *_DRAWN_FROM, *_LESS_LIKELY):
        if (value := getattr(of_model, name, None)) is not None:
            setattr(kept, name, value)
    return kept


def generate(
    directory: Path, prompts: Sequence[str], max_new_tokens: int, temperature: float, seed: int, base: str | None = None
) -> Iterator[str]:
    """Each prompt and its continuation, which does not depend on the other prompts. Raises UserError as `load` does."""
    found, sampling = load(directory, base), Sampling(max_new_tokens, temperature, seed)
    for prompt in prompts:
        yield continuation(found.model.generate, found.tokenizer, prompt, found.prefix, found.room, sampling)


def continuation(
    generate: Callable[..., Tensor],
    tokenizer: Any,
    prompt: str,
    prefix: Sequence[int] | None,
    room: int | None,
    sampling: Sampling,
    chat: bool = False,
) -> str:
    """The prompt and what `generate`, transformers' or an engine's, adds; temperature 0: the likeliest token each time.

    `prefix`: what training put before each document, or chat; None: what the tokenizer puts there. `room`: the tokens
    that the model can read, where all ends. `chat`: the prompt is what a user says, in the chat template. The seed
    makes all ranks of an engine draw the same tokens. Raises UserError for a prompt of no token, or of too many.
    """
    import torch

    check_text(prompt)
    if chat:
        asked = chat_ids(tokenizer, [{"role": "user", "content": prompt}], prefix)
    elif prefix is None:
        asked = tokenizer.encode(prompt)
    else:
        asked = [*prefix, *tokenizer.encode(prompt, add_special_tokens=False)]
    if not asked:
        raise UsageError("an empty prompt, and training put no token before a document: there is nothing to continue")
    if room is not None and len(asked) >= room:
        raise UsageError(f"the prompt has {len(asked)} tokens, and this model can read {room}: a shorter one")
    count = sampling.max_new_tokens
    options = sampling.options(count if room is None else min(count, room - len(asked)))
    options |= ends_of_turn(tokenizer) if chat else {}
    torch.manual_seed(sampling.seed)
    with torch.no_grad():
        ids = generate(torch.tensor([asked]), **options)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def check_text(text: str) -> None:
    """Raises UserError for bytes of no text: Python passes them on as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text[:60]!r} is not UTF-8 text") from None


def chat_ids(tokenizer: Any, messages: Messages, prefix: Sequence[int] | None) -> list[int]:
    """A conversation up to where the assistant speaks, with `prefix` before it unless the template puts it there."""
    text = _rendered(tokenizer, messages, add_generation_prompt=True)
    ids, before = tokenizer.encode(text, add_special_tokens=False), list(prefix or ())
    return list(ids) if ids[: len(before)] == before else [*before, *ids]


def ends_of_turn(tokenizer: Any) -> dict[str, Any]:
    """Where `generate` ends: at eos, and at the special token that the template puts behind what the assistant says."""
    said = _rendered(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "qzq"}])
    behind = tokenizer.encode(said.rpartition("qzq")[2], add_special_tokens=False)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    found = [tokenizer.eos_token_id, *(token for token in behind[:1] if token in special)]
    ends = list(dict.fromkeys(token for token in found if token is not None))
    return {"eos_token_id": ends, "pad_token_id": ends[0]} if ends else {}


def _rendered(tokenizer: Any, messages: Messages, **options: bool) -> str:
    if not tokenizer.chat_template:
        raise TokenizerError("the tokenizer has no chat template; `aliquot generate` continues a text without one")
    try:
        with bounded_rendering():
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # a template is a program of the model's author
        raise TokenizerError(f"the chat template fails: {' '.join(str(error).split())}") from error


class Chat:
    """What was said so far, and what the model makes of it."""

    def __init__(self, loaded: Loaded, max_new_tokens: int, temperature: float, seed: int) -> None:
        """Raises UserError where the tokenizer has no chat template."""
        self._loaded = loaded
        self._messages: list[dict[str, str]] = []
        self._options = {
            **Sampling(max_new_tokens, temperature).options(max_new_tokens),
            **ends_of_turn(loaded.tokenizer),
        }
        self._max_new_tokens = max_new_tokens
        torch.manual_seed(seed)

    def reset(self) -> None:
        self._messages.clear()

    def reply(self, text: str) -> Generator[str, None, None]:
        """Pieces of the reply to `text`. Closed before its end, it stops, and what was said until then is kept.

        Raises UserError where the conversation has grown longer than the model can read, or `text` is none; it is not
        kept then.
        """
        check_text(text)
        asked = [*self._messages, {"role": "user", "content": text}]
        ids = chat_ids(self._loaded.tokenizer, asked, self._loaded.chat_prefix)
        room = self._loaded.room
        if room is not None and len(ids) + self._max_new_tokens > room:
            raise UsageError(
                f"the conversation has {len(ids)} tokens, and with {self._max_new_tokens} new ones it is longer than"
                f" the {room} that this model can read: /reset, or a smaller --max-new-tokens"
            )
        streamer = TextIteratorStreamer(self._loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop, failed = _Stop(), []

        def generate() -> None:
            try:
                with torch.no_grad():
                    self._loaded.model.generate(
                        torch.tensor([ids]), streamer=streamer, stopping_criteria=[stop], **self._options
                    )
            except Exception as error:  # told by the thread that reads, which would wait for ever
                failed.append(error)
                streamer.end()

        thread = threading.Thread(target=generate, name="aliquot-chat", daemon=True)
        said: list[str] = []
        thread.start()
        try:
            for piece in streamer:
                said.append(piece)
                yield piece
        finally:
            stop.wanted = True
            thread.join()
            self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        if failed:
            raise failed[0]


class _Stop(StoppingCriteria):  # type: ignore[misc]
    wanted = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.wanted, dtype=torch.bool)
