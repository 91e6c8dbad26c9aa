"""A record with an answer becomes tokens, and a mask of those that are learned: the answer's, and nothing else."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aliquot.data.answer_spans import Messages, Span, is_marked, of_turns, render, render_marked, rendered_spans
from aliquot.data.rendered_words import calls, has_words, is_silent, leaves_out
from aliquot.errors import TokenizerError, UserError

if TYPE_CHECKING:
    from aliquot.data.encoder import EncoderSpec

ENCODING = 3  # changes whenever other tokens or another mask come of a record

# An answer is found in the whole text, so that a record is not cut, and a tokenizer takes some 170 bytes of memory a
# letter, 400 where each is a token: 0.7 GiB for one that is so long, or 1.6.
LONGEST_BYTES = 4 << 20
TOO_LONG = f"a record with answers of more than {LONGEST_BYTES >> 20} MiB, left out"
NO_ANSWER = "a record without an answer, left out"
NOTHING_LEARNED = "a record in which nothing is learned, left out"
TEMPLATE_LEAVES_OUT = "a record with words that the chat template leaves out"
EMPTY_ANSWER = "a record with an empty answer, which is not learned"

# Of Stanford Alpaca, for tokenizers without a chat template: what models that learned from such data were taught with.
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


def encode_record(tokenizer: Any, text: str, spec: EncoderSpec) -> tuple[list[int], list[int], str | None]:
    """(token ids, mask, reason) of a record that formats.py has written as `text`.

    The mask is 1 at tokens that are learned. `reason`: why there are no tokens, or what of the record is not among
    them; None where all is. Raises UserError where the template fails, where an earlier turn is rendered differently
    once later ones are there, and for a chat without a template.
    """
    if len(text.encode()) > LONGEST_BYTES:
        return [], [], TOO_LONG
    record: dict[str, Any] = json.loads(text)
    everything = spec.train_on == "all"
    if spec.templated:
        (messages, context), tools = _messages(record), record.get("tools")
        if not everything and not any(_answers(message) for message in messages[context:]):
            return [], [], NO_ANSWER
        rendered, ids, mask = encode_chat(tokenizer, messages, context, everything, tools)
        empty = any(message["role"] == "assistant" and not has_words(message) for message in messages[context:])
        reason = EMPTY_ANSWER if empty and not everything else None
        if leaves_out(messages, tools or [], rendered):
            reason = TEMPLATE_LEAVES_OUT
        if spec.prefix and tuple(ids[: len(spec.prefix)]) != spec.prefix:
            ids, mask = [*spec.prefix, *ids], [0] * len(spec.prefix) + mask
        if spec.suffix and tuple(ids[-len(spec.suffix) :]) != spec.suffix:
            ends = int(len(messages) > context and _answers(messages[-1]))
            ids, mask = [*ids, *spec.suffix], mask + [ends] * len(spec.suffix)
    else:
        prompt, completion = _prompt_and_completion(record)
        if not everything and not completion.strip():
            return [], [], NO_ANSWER
        bare, learned = _encode(tokenizer, prompt + completion, [(len(prompt), len(prompt + completion))])
        ids, mask, reason = [*spec.prefix, *bare, *spec.suffix], [0] * len(spec.prefix), None
        mask += learned + [1] * len(spec.suffix)
    if everything:
        mask = [1] * len(ids)
    return (ids, mask, reason) if any(mask[1:]) else ([], [], NOTHING_LEARNED)


def encode_chat(
    tokenizer: Any,
    messages: Messages,
    context: int = 0,
    everything: bool = False,
    tools: list[Any] | None = None,
) -> tuple[str, list[int], list[int]]:
    """(text, token ids, mask) of `messages`, rendered with the tokenizer's own chat template.

    The mask is 1 at tokens of assistant turns behind the first `context` messages. Where the template marks what it
    generates, by those marks; else an assistant turn is what rendering one message more adds after the prompt for it.
    A turn without words is not learned, nor is one of calls that the template does not know. `everything`: no mask is
    asked for. `tools`: what the assistant may call, for the template. Raises as `encode_record` does.
    """
    said = [{key: part for key, part in message.items() if key != "weight"} for message in messages]
    learned = [index >= context and _answers(message) for index, message in enumerate(messages)]
    try:
        try:
            whole, spans = _rendered(tokenizer, said, learned, everything, tools)
        except TypeError:
            if not any(calls(message) for message in said):
                raise
            whole, spans = _rendered(tokenizer, _with_text_arguments(said), learned, everything, tools)
        return whole, *_encode(tokenizer, whole, spans)
    except UserError:
        raise
    except Exception as error:  # a template is a program of the model's author
        raise TokenizerError(f"the chat template fails ({error})", _name(messages)) from error


def _rendered(
    tokenizer: Any, messages: Messages, learned: list[bool], everything: bool, tools: list[Any] | None
) -> tuple[str, list[Span] | None]:
    """The whole text, and where in it the messages stand that are learned; None: all of it."""
    options: dict[str, Any] = {} if tools is None else {"tools": tools}
    if everything:
        return render(tokenizer, messages, **options), None
    turns = [index for index, own in enumerate(learned) if own]
    if is_marked(tokenizer):
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        whole, marks = render_marked(tokenizer, messages, tools)
        each = of_turns(marks, len(assistants))
        if each is None:
            if any(has_words(messages[index]) and not learned[index] for index in assistants):
                raise TokenizerError(
                    "the chat template does not mark each of the assistant's turns as one, so that some cannot be left"
                    " out",
                    _name(messages),
                )
            return whole, marks
        spans = [span for index, span in zip(assistants, each, strict=True) if learned[index]]
    else:
        whole = render(tokenizer, messages, **options)
        spans = rendered_spans(tokenizer, messages, whole, turns, options, _name(messages))
    heard = zip(turns, spans, strict=True)
    return whole, [span for index, span in heard if not is_silent(messages[index], whole[slice(*span)])]


def _with_text_arguments(messages: Messages) -> Messages:
    """For templates (DeepSeek's) that take the arguments of a call as JSON alone."""

    def as_text(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if "function" in call:
            return {**call, "function": as_text(call["function"])}
        given = call.get("arguments")
        return {**call, "arguments": json.dumps(given, ensure_ascii=False)} if isinstance(given, dict) else call

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _encode(tokenizer: Any, text: str, spans: list[Span] | None) -> tuple[list[int], list[int]]:
    """Tokens of `text`, and a mask of those that reach into one of `spans`; without spans, of all."""
    if spans is None:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids, [1] * len(ids)
    if not tokenizer.is_fast:
        raise TokenizerError("answers need a fast tokenizer, one with a tokenizer.json")
    with _whole_offsets(tokenizer):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, stops = zip(*sorted(span for span in spans if span[0] < span[1]), (math.inf, math.inf), strict=True)
    # Spans lie one after the other: a token reaches into the first one that ends behind its beginning, or into none.
    reaches = [starts[bisect_right(stops, begin)] < end for begin, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), [int(each) for each in reaches]


@contextmanager
def _whole_offsets(tokenizer: Any) -> Iterator[None]:
    """Without what adds special tokens, and takes spaces off the offsets of others (trim_offsets): a token that is
    nothing but spaces would lie nowhere."""
    backend = tokenizer.backend_tokenizer
    dresses = backend.post_processor
    backend.post_processor = None
    try:
        yield
    finally:
        backend.post_processor = dresses


def _messages(record: dict[str, Any]) -> tuple[Messages, int]:
    """The record as a chat, and how many of its messages are not learned whoever says them."""
    if "messages" in record:
        return record["messages"], record["context"]
    if "prompt" in record:
        asked, answer = record["prompt"], record["completion"]
    else:
        asked, answer = "\n\n".join(filter(None, (record["instruction"], record["input"]))), record["output"]
    system = [{"role": "system", "content": record["system"]}] if "system" in record else []
    answers = [{"role": "assistant", "content": answer}] if answer.strip() else []
    return [*system, {"role": "user", "content": asked}, *answers], 0


def _prompt_and_completion(record: dict[str, Any]) -> tuple[str, str]:
    if "messages" in record:
        raise TokenizerError(
            "the records hold messages, but the tokenizer has no chat template, or is to use none: data.chat_template"
        )
    system = f"{record['system']}\n\n" if "system" in record else ""
    if "prompt" in record:
        return system + record["prompt"], record["completion"]
    given = record["input"]
    paired = ", paired with an input that provides further context" if given else ""
    prompt = _ALPACA.format(
        paired=paired, instruction=record["instruction"], input=f"### Input:\n{given}\n\n" if given else ""
    )
    return system + prompt, record["output"]


def _answers(message: dict[str, Any]) -> bool:
    """Whether it is an answer to learn; `weight` is OpenAI's key, 0 for a turn that is not."""
    return message["role"] == "assistant" and message.get("weight") != 0 and has_words(message)


def _name(messages: Messages) -> str:
    return f"conversation that begins {str(messages[0].get('content'))[:40]!r}"
