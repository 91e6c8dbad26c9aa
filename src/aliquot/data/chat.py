"""A record with an answer becomes tokens, and a mask of those that are learned: the answer's, and nothing else."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

from aliquot.errors import TokenizerError, UserError

if TYPE_CHECKING:
    from aliquot.data.encoder import EncoderSpec

GENERATION_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")

NO_ANSWER = "a record without an answer, left out"
NOTHING_LEARNED = "a record in which nothing is learned, left out"
TEMPLATE_LEAVES_OUT = "a record with words that the chat template leaves out"

Messages = list[dict[str, Any]]

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
    record: dict[str, Any] = json.loads(text)
    everything = spec.train_on == "all"
    if spec.templated:
        (messages, context), tools = _messages(record), record.get("tools")
        if not everything and not any(_answers(message) for message in messages[context:]):
            return [], [], NO_ANSWER
        rendered, ids, mask = encode_chat(tokenizer, messages, context, everything, tools)
        left_out = any(message["content"].strip() not in rendered for message in messages)
        left_out |= any(_tool_name(tool) not in rendered for tool in tools or [])
        reason = TEMPLATE_LEAVES_OUT if left_out else None
        if spec.prefix and tuple(ids[: len(spec.prefix)]) != spec.prefix:
            ids, mask = [*spec.prefix, *ids], [0] * len(spec.prefix) + mask
        if spec.suffix and tuple(ids[-len(spec.suffix) :]) != spec.suffix:
            ids, mask = [*ids, *spec.suffix], mask + mask[-1:] * len(spec.suffix)
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
    `everything`: no mask is asked for. `tools`: what the assistant may call, for the template. Raises as
    `encode_record` does.
    """
    said = [{key: part for key, part in message.items() if key != "weight"} for message in messages]
    learned = [index >= context and _answers(message) for index, message in enumerate(messages)]
    options: dict[str, Any] = {} if tools is None else {"tools": tools}
    try:
        whole = _render(tokenizer, said, **options)
        if everything:
            return whole, *_encode(tokenizer, whole, None)
        if GENERATION_MARKER.search(tokenizer.get_chat_template()):
            encoded = tokenizer.apply_chat_template(
                said, return_dict=True, return_assistant_tokens_mask=True, **options
            )
            wanted = [own for own, message in zip(learned, messages, strict=True) if message["role"] == "assistant"]
            return whole, list(encoded["input_ids"]), _of_turns(encoded["assistant_masks"], wanted, said)
        turns = [index for index, own in enumerate(learned) if own]
        return whole, *_encode(tokenizer, whole, _turns(tokenizer, said, whole, turns, options))
    except UserError:
        raise
    except Exception as error:  # a template is a program of the model's author
        raise TokenizerError(f"the chat template fails ({error})", _name(messages)) from error


def _of_turns(mask: list[int], wanted: list[bool], messages: Messages) -> list[int]:
    """`mask` without the turns of the assistant that are not `wanted`."""
    if all(wanted):
        return list(mask)
    stretches = [(bit, len(list(bits))) for bit, bits in groupby(mask)]
    if sum(bit for bit, _ in stretches) != len(wanted):
        raise TokenizerError(
            "the chat template does not mark each of the assistant's turns as one, so that some cannot be left out",
            _name(messages),
        )
    turn = iter(wanted)
    return [kept for bit, length in stretches for kept in [int(bit and next(turn))] * length]


def _turns(
    tokenizer: Any, messages: Messages, whole: str, turns: list[int], options: dict[str, Any]
) -> list[tuple[int, int]]:
    """Where each of the assistant's `turns` stands in the whole text."""
    spans = []
    for index in turns:
        # A template may refuse to render a conversation that is still empty.
        before = _render(tokenizer, messages[:index], **options) if index else ""
        asked = _render(tokenizer, messages[:index], add_generation_prompt=True, **options) if index else ""
        after = _render(tokenizer, messages[: index + 1], **options)
        if not (whole.startswith(after) and after.startswith(before)):
            raise TokenizerError(
                "the chat template renders earlier turns differently once later ones are there;"
                " mark what the assistant says with {% generation %} in the template",
                _name(messages),
            )
        spans.append((len(asked) if after.startswith(asked) else len(before), len(after)))
    return spans


def _encode(tokenizer: Any, text: str, spans: list[tuple[int, int]] | None) -> tuple[list[int], list[int]]:
    """Tokens of `text`, and a mask of those that reach into one of `spans`; without spans, of all."""
    if spans is None:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids, [1] * len(ids)
    if not tokenizer.is_fast:
        raise TokenizerError("answers need a fast tokenizer, or a chat template with {% generation %} marks")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    reaches = [any(begin < stop and start < end for start, stop in spans) for begin, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), [int(each) for each in reaches]


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
            "the records hold messages, but the tokenizer has no chat template: give it one, data.chat_template"
        )
    if "prompt" in record:
        return record["prompt"], record["completion"]
    given = record["input"]
    paired = ", paired with an input that provides further context" if given else ""
    prompt = _ALPACA.format(
        paired=paired, instruction=record["instruction"], input=f"### Input:\n{given}\n\n" if given else ""
    )
    return f"{record['system']}\n\n{prompt}" if "system" in record else prompt, record["output"]


def _tool_name(tool: Any) -> str:
    """Of a function as OpenAI's and as plain schemas have it; empty where neither does."""
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _answers(message: dict[str, Any]) -> bool:
    """Whether it is an answer to learn; `weight` is OpenAI's key, 0 for a turn that is not."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _render(tokenizer: Any, messages: Messages, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _name(messages: Messages) -> str:
    return f"conversation that begins {str(messages[0].get('content'))[:40]!r}"
