"""Generate continuations of prompts, and replies in a chat, from a model directory with transformers."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, TextIteratorStreamer

from aliquot.config.adapter_section import ADAPTER_CONFIG, adapter_base_model
from aliquot.core.errors import ModelFilesError, TokenizerError, UsageError, reason_of, resource_error
from aliquot.core.template_process import TemplateFailure, in_template_process, render_chat
from aliquot.machine.matmul import faster_precision_here
from aliquot.models.adapter import STEM
from aliquot.models.export import export_checkpoint
from aliquot.models.model_config import model_of_run
from aliquot.models.model_files import joined_ends, trained_tokens
from aliquot.models.source import local_directory
from aliquot.models.untrusted_code import without_code
from aliquot.tensor_io.bytemap import ByteMap
from aliquot.tensor_io.manifest import STATE

Messages = Sequence[Mapping[str, str]]
Tool = Mapping[str, Any]  # a function that the model may call, in OpenAI's format
_COLD = 1e-4  # below this temperature, division would make logits infinite: generate greedily
# The keys of generation_config.json that apply here: special tokens (_ENDS), limits of the set of tokens to sample from
# (_DRAWN_FROM), and penalties of tokens (_LESS_LIKELY) with the values that turn the penalties off.
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
    """How many tokens to generate, and how to sample them. Temperature 0 means greedy decoding."""

    max_new_tokens: int
    temperature: float = 0.8
    seed: int = 42

    def options(self, max_new_tokens: int) -> dict[str, Any]:
        """Return the options of transformers' `generate` that replace values of the model's generation config."""
        if self.temperature < _COLD:
            return {"max_new_tokens": max_new_tokens, "do_sample": False, **_LESS_LIKELY}
        return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": self.temperature}


@dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer, loaded from a directory."""

    model: Any
    tokenizer: Any
    prefix: Sequence[int] | None  # token ids that training put before each document; None: unknown
    chat_prefix: Sequence[int] | None  # token ids that training put before each chat; None: unknown

    @property
    def context_length(self) -> int | None:
        """Return the longest context of the model in tokens; None if the model has no limit."""
        positions: int | None = getattr(self.model.config, "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    @torch.no_grad()
    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        """Return `ids` with new tokens. Raises ModelFilesError for a configuration that transformers cannot use.

        transformers checks most values of config.json and generation_config.json only when it uses them.
        """
        try:
            generated: Tensor = self.model.generate(ids.to(self.model.device), **options)
        except Exception as error:
            if resource_error(error) is not None:
                raise
            raise ModelFilesError(
                f"transformers cannot generate with this model: {reason_of(error)} (see its"
                " config.json and generation_config.json)",
                self.model.name_or_path,
            ) from error
        return generated


def load(directory: Path, base: str | None = None) -> Loaded:
    """Load the model in `directory`, or the adapter in `directory` with its base model, onto the GPU if there is one.

    `base` is the directory of the base model if the base model has moved since training. On a device that multiplies
    faster in fp32 than in bf16, the weights become fp32; otherwise their dtype stays.

    Raises UserError if `directory` holds no model with a tokenizer.
    """
    if not directory.is_dir():
        raise ModelFilesError("no such directory", directory)
    adapts = (directory / ADAPTER_CONFIG).is_file()
    if not adapts and not (directory / "config.json").is_file():
        advice = model_of_run(directory) or "give an export, an adapter or a Hugging Face model directory"
        raise ModelFilesError(f"no config.json here; {advice}", directory)
    if adapts and (directory / STATE).is_file():
        # transformers does not find an adapter under the file names of a checkpoint: export the adapter first.
        with tempfile.TemporaryDirectory() as folder:
            export_checkpoint(directory, Path(folder) / "export", "float32")
            return load(Path(folder) / "export", base)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if base is not None and not adapts:
        raise UsageError(
            "--base: this is no adapter, and only an adapter has a base model: leave --base out", directory
        )
    whole = local_directory(adapter_base_model(directory, base)) if adapts else directory
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    ends = trained_tokens(directory, "ends") or []
    # transformers and peft would unpickle a .bin file if no safetensors file is there.
    ByteMap.from_directory(directory, STEM if adapts else "model")
    try:
        tokenizer = without_code(AutoTokenizer.from_pretrained)(directory)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = "auto" if faster_precision_here(device) == "bf16" else torch.float32
        model = without_code(AutoModelForCausalLM.from_pretrained)(whole, dtype=dtype, use_safetensors=True)
        if whole != directory:
            model.load_adapter(str(directory))
        model.to(device)
        model.generation_config = _one_by_one(model.generation_config)
        if (ids := joined_ends(model.generation_config.eos_token_id, ends)) is not None:
            model.generation_config.eos_token_id = ids  # an adapter has no generation config
    except Exception as error:  # safetensors, tokenizers and transformers each raise their own types of errors
        if not any(directory.glob("*token*")):
            raise ModelFilesError("no tokenizer here: copy it next to the model", directory) from error
        raise ModelFilesError(f"transformers cannot load this model: {reason_of(error, 10_000)}", directory) from error
    return Loaded(model, tokenizer, trained_tokens(directory, "prefix"), trained_tokens(directory, "chat_prefix"))


def _one_by_one(model_config: GenerationConfig) -> GenerationConfig:
    """Return a generation config that generates one text, token by token.

    Of `model_config` it keeps special tokens, sampling limits and penalties. It drops beam search, assistant models,
    lengths and output formats.
    """
    config = GenerationConfig()
    for name in (*_ENDS, *_DRAWN_FROM, *_LESS_LIKELY):
        if (value := getattr(model_config, name, None)) is not None:
            setattr(config, name, value)
    return config


def generate(
    directory: Path | str,
    prompts: Sequence[str],
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    seed: int = 42,
    base: str | None = None,
) -> Iterator[str]:
    """Load a model, and yield each prompt with its continuation.

    The model is loaded at the first iteration. A continuation does not depend on the other prompts.

    Args:
        directory: the directory of a model, for example an export, or of an adapter.
        prompts: the texts to continue, without a chat template.
        max_new_tokens: the most tokens of a continuation.
        temperature: 0 selects the most likely token; 1 samples from the model's distribution.
        seed: of the random numbers for each continuation.
        base: the base model of an adapter, if the base model has moved.

    Raises:
        UserError: the directory holds no model with a tokenizer, or a prompt is empty or too long.
    """
    loaded, sampling = load(Path(directory), base), Sampling(max_new_tokens, temperature, seed)
    for prompt in prompts:
        yield continuation(loaded.generate, loaded.tokenizer, prompt, loaded.prefix, loaded.context_length, sampling)


@torch.no_grad()
def continuation(
    generate: Callable[..., Tensor],
    tokenizer: Any,
    prompt: str,
    prefix: Sequence[int] | None,
    context_length: int | None,
    sampling: Sampling,
    chat: bool = False,
) -> str:
    """Return the prompt with its continuation. Raises UserError if the prompt has no token, or too many tokens.

    Args:
        generate: `generate` of a transformers model, or of an engine.
        prefix: token ids to put before the prompt; None: the special tokens that the tokenizer adds.
        context_length: the longest context of the model, in tokens; generation stops at this length.
        chat: whether the prompt is the message of a user, which the chat template must render.
    """
    check_text(prompt)
    if chat:
        ids_of_prompt = chat_ids(tokenizer, [{"role": "user", "content": prompt}], prefix)
    else:
        ids_of_prompt = [*(prefix or ()), *tokenizer.encode(prompt, add_special_tokens=prefix is None)]
    if not ids_of_prompt:
        raise UsageError("an empty prompt, and training put no token before a document: there is nothing to continue")
    if context_length is not None and len(ids_of_prompt) >= context_length:
        raise UsageError(
            f"the prompt has {len(ids_of_prompt)} tokens, and this model can read {context_length}: shorten the prompt"
        )
    count = sampling.max_new_tokens
    options = sampling.options(count if context_length is None else min(count, context_length - len(ids_of_prompt)))
    options |= ends_of_turn(tokenizer) if chat else {}
    torch.manual_seed(sampling.seed)
    ids = generate(torch.tensor([ids_of_prompt]), **options)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def check_text(text: str) -> None:
    """Raise UserError if `text` comes from bytes that are not UTF-8.

    Python decodes such bytes of an argument to lone surrogates, which no tokenizer accepts.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text[:60]!r} is not UTF-8 text") from None


def chat_ids(
    tokenizer: Any, messages: Messages, prefix: Sequence[int] | None, tools: Sequence[Tool] | None = None
) -> list[int]:
    """Return the token ids of a chat, up to the beginning of the next answer.

    The ids begin with `prefix`, which is not repeated if the chat template writes the prefix itself.
    """
    text = _rendered(tokenizer, messages, add_generation_prompt=True, tools=tools)
    ids, before = tokenizer.encode(text, add_special_tokens=False), list(prefix or ())
    return list(ids) if ids[: len(before)] == before else [*before, *ids]


def ends_of_turn(tokenizer: Any) -> dict[str, Any]:
    """Return options with which `generate` stops at the end of an answer.

    An answer ends at the eos token, or at the special token that the chat template puts after an answer.
    """
    rendered = _rendered(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "qzq"}])
    after_answer = tokenizer.encode(rendered.rpartition("qzq")[2], add_special_tokens=False)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    candidates = [tokenizer.eos_token_id, *(token for token in after_answer[:1] if token in special)]
    ends = list(dict.fromkeys(token for token in candidates if token is not None))
    return {"eos_token_id": ends, "pad_token_id": ends[0]} if ends else {}


def _rendered(tokenizer: Any, messages: Messages, tools: Sequence[Tool] | None = None, **options: bool) -> str:
    if not tokenizer.chat_template:
        raise TokenizerError("the tokenizer has no chat template; `aliquot generate` continues a text without one")
    try:
        source = tokenizer.get_chat_template(tools=tools)
        variables = tokenizer.special_tokens_map
        return str(in_template_process(render_chat, source, list(messages), tools, variables, options)[0])
    except (ValueError, TemplateFailure) as error:  # ValueError: several templates, and none is the default
        raise TokenizerError(f"the chat template fails: {' '.join(str(error).split())}") from error


class Chat:
    """A chat with a loaded model: the messages so far, and replies to them."""

    def __init__(
        self, loaded: Loaded, sampling: Sampling, system: str | None = None, tools: Sequence[Tool] | None = None
    ) -> None:
        """Start a chat with the message `system`, if there is one.

        Raises UserError if the tokenizer has no chat template, or if the template leaves out `system` or `tools`.
        """
        self._loaded, self._tools, self._max_new_tokens = loaded, tools, sampling.max_new_tokens
        self._options = sampling.options(sampling.max_new_tokens) | ends_of_turn(loaded.tokenizer)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()
        if system is not None:
            check_text(system)
        text = _rendered(loaded.tokenizer, [*self._system, {"role": "user", "content": "a"}], tools=tools)
        if system is not None and system.strip() not in text:
            raise UsageError("--system: the chat template leaves out system messages")
        if not all(str(tool.get("function", tool).get("name")) in text for tool in tools or ()):
            raise UsageError("--tools: the chat template leaves out tools")
        torch.manual_seed(sampling.seed)

    def reset(self) -> None:
        """Forget all messages except the system message."""
        self._messages: list[dict[str, str]] = list(self._system)

    def reply(self, text: str) -> Generator[str, None, None]:
        """Yield the reply to `text` in pieces, and add both messages to the chat.

        Closing the generator early stops the reply; the chat keeps the pieces generated so far.

        Raises UserError, before it changes the chat, if the chat is too long for the model or `text` is not UTF-8.
        """
        check_text(text)
        messages = [*self._messages, {"role": "user", "content": text}]
        ids = chat_ids(self._loaded.tokenizer, messages, self._loaded.chat_prefix, self._tools)
        longest, context_length = self._max_new_tokens, self._loaded.context_length
        if context_length is not None:
            longest = min(longest, context_length - len(ids))
        if longest < 1:
            raise UsageError(
                f"the conversation has {len(ids)} tokens, and this model can read {context_length}: type /reset to"
                " begin a new one"
            )
        streamer = TextIteratorStreamer(self._loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop, pieces = _Stop(), []
        options = {"streamer": streamer, "stopping_criteria": [stop], **self._options, "max_new_tokens": longest}

        def generate() -> None:
            try:
                self._loaded.generate(torch.tensor([ids]), **options)
            finally:
                streamer.end()  # after an error, too: the loop below would otherwise wait for ever

        with ThreadPoolExecutor(1, thread_name_prefix="aliquot-chat") as thread:
            generated = thread.submit(generate)
            try:
                for piece in streamer:
                    pieces.append(piece)
                    yield piece
            finally:
                stop.requested = True
                self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        generated.result()


class _Stop(StoppingCriteria):  # type: ignore[misc]
    requested = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.requested, dtype=torch.bool)
