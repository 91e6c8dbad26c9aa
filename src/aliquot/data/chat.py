"""Encode a record with answers: its tokens, and a mask that selects the tokens of answers for learning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aliquot.core.errors import TokenizerError
from aliquot.data.answers import has_words, is_silent, leaves_out, marks_of_turns, rendered_spans
from aliquot.data.chat_messages import is_learned
from aliquot.data.chat_template import ChatTemplate, LeftOut, Messages, fit_messages
from aliquot.data.text_encoder import TextEncoder

if TYPE_CHECKING:
    from aliquot.data.text_encoder import EncoderSpec

ENCODING = 4  # changes with every change of the tokens or masks that records become

# A record is encoded whole, because answers are located in the whole text. A tokenizer needs about 170 bytes of memory
# a character, or 400 if every character is a token: 0.7 or 1.6 GiB for the longest record.
LONGEST_BYTES = 4 << 20
TOO_LONG = f"a record with answers of more than {LONGEST_BYTES >> 20} MiB, left out"
NO_ANSWER = "a record without an answer, left out"
NOTHING_LEARNED = "a record in which nothing is learned, left out"
ANSWERS_NOT_WRITTEN = "a record whose answers the chat template does not write, left out"
TEMPLATE_LEAVES_OUT = "a record with words that the chat template leaves out"
NO_END = "a record in which no answer ends with a special token: nothing in it teaches a model to stop"
EMPTY_ANSWER = "a record with an empty answer, which is not learned"

# The prompt of Stanford Alpaca, which instruction data were designed for; used if there is no chat template.
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


Notes = dict[str, str]  # remarks on a record: a reason, in the same words for all such records -> details


def encode_record(tokenizer: Any, text: str, spec: EncoderSpec) -> tuple[list[int], list[int], Notes]:
    """Return (token ids, mask, notes) of a record that formats.py has written as `text`.

    The mask is 1 at learned tokens. Notes say why a record has no tokens, which parts of the record the tokens lack,
    and what was changed. Raises TokenizerError for a chat without a template and for a tokenizer without offsets.
    """
    try:
        return _encode_record(tokenizer, text, spec)
    except LeftOut as error:
        return [], [], {error.reason: error.detail}


def _encode_record(tokenizer: Any, text: str, spec: EncoderSpec) -> tuple[list[int], list[int], Notes]:
    if len(text.encode()) > LONGEST_BYTES:
        raise LeftOut(TOO_LONG)
    record: dict[str, Any] = json.loads(text)
    if "left_out" in record:
        raise LeftOut(record["left_out"])
    everything, notes = spec.train_on == "all", Notes()
    encoder = TextEncoder(tokenizer, text, spec.special_tokens_as_text)
    if spec.templated:
        (messages, context), tools = _messages(record), record.get("tools")
        if not everything and not any(_answers(message) for message in messages[context:]):
            raise LeftOut(NO_ANSWER)
        template = ChatTemplate.of(tokenizer, tools, spec.day)
        rendered, ids, mask, changed = encode_chat(template, messages, context, everything, encoder)
        empty = any(message["role"] == "assistant" and not has_words(message) for message in messages[context:])
        notes |= {changed: ""} if changed else {}
        notes |= {EMPTY_ANSWER: ""} if empty and not everything else {}
        notes |= {TEMPLATE_LEAVES_OUT: ""} if leaves_out(messages, tools or [], rendered) else {}
        if spec.prefix and tuple(ids[: len(spec.prefix)]) != spec.prefix:
            ids, mask = [*spec.prefix, *ids], [0] * len(spec.prefix) + mask
        if spec.suffix and tuple(ids[-len(spec.suffix) :]) != spec.suffix:
            learns_end = int(len(messages) > context and _answers(messages[-1]))
            ids, mask = [*ids, *spec.suffix], mask + [learns_end] * len(spec.suffix)
    else:
        prompt, completion = _prompt_and_completion(record)
        if not everything and not completion.strip():
            raise LeftOut(NO_ANSWER)
        text_ids, text_mask = encoder.encode(prompt + completion, [(len(prompt), len(prompt + completion))])
        ids, mask = [*spec.prefix, *text_ids, *spec.suffix], [0] * len(spec.prefix)
        mask += text_mask + [1] * len(spec.suffix)
    notes |= encoder.notes
    if everything:
        mask = [1] * len(ids)
    elif not encoder.ends(ids, mask):
        notes[NO_END] = ""
    if not any(mask[1:]):
        raise LeftOut(ANSWERS_NOT_WRITTEN if TEMPLATE_LEAVES_OUT in notes else NOTHING_LEARNED)
    return ids, mask, notes


def encode_chat(
    template: ChatTemplate, messages: Messages, context: int, everything: bool, encoder: TextEncoder
) -> tuple[str, list[int], list[int], str | None]:
    """Return (text, token ids, mask, changes) of `messages` as the chat template writes them.

    The mask is 1 at tokens of assistant turns after the first `context` messages. The generation marks of the template
    delimit these turns; without marks a turn extends from the prompt for it to the next message. A turn without words
    is not learned, nor is a turn of which the template writes nothing. With `everything` the mask is not needed.
    Raises LeftOut if the template fails or the place of an answer is ambiguous.
    """
    form, changed = fit_messages(template, messages)
    if everything:
        whole = template.render(form)
        return whole, *encoder.encode_chat(whole, None, template, form), changed
    turns = [index for index, message in enumerate(messages) if index >= context and _answers(message)]
    if template.is_marked:
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        whole, marks = template.render_marked(form)
        spans = marks_of_turns(marks, len(assistants))
        if spans is not None:
            spans = [span for index, span in zip(assistants, spans, strict=True) if index in turns]
        elif all(index in turns or not has_words(messages[index]) for index in assistants):
            return whole, *encoder.encode_chat(whole, marks, template, form), changed
        else:
            raise LeftOut(
                "a record with answers that are excluded from learning, whose chat template does not mark each turn of"
                " the assistant, left out"
            )
    else:
        whole = template.render(form)
        spans = rendered_spans(template, form, whole, turns)
    turn_spans = zip(turns, spans, strict=True)
    spans = [
        span
        for index, span in turn_spans
        if not is_silent(messages[index], whole[slice(*span)], encoder.without_special)
    ]
    return whole, *encoder.encode_chat(whole, spans, template, form), changed


def _messages(record: dict[str, Any]) -> tuple[Messages, int]:
    """Return the record as a chat, and the number of first messages that are context and never learned."""
    if "messages" in record:
        return record["messages"], record["context"]
    if "prompt" in record:
        question, answer = record["prompt"], record["completion"]
    else:
        question, answer = "\n\n".join(filter(None, (record["instruction"], record["input"]))), record["output"]
    system = [{"role": "system", "content": record["system"]}] if "system" in record else []
    answers = [{"role": "assistant", "content": answer}] if answer.strip() else []
    return [*system, {"role": "user", "content": question}, *answers], 0


def _prompt_and_completion(record: dict[str, Any]) -> tuple[str, str]:
    if "messages" in record:
        raise TokenizerError(
            "the records hold messages, but the tokenizer has no chat template, or is to use none: data.chat_template"
        )
    system = f"{record['system']}\n\n" if "system" in record else ""
    if "prompt" in record:
        return system + record["prompt"], record["completion"]
    text = record["input"]
    paired = ", paired with an input that provides further context" if text else ""
    prompt = _ALPACA.format(
        paired=paired, instruction=record["instruction"], input=f"### Input:\n{text}\n\n" if text else ""
    )
    return system + prompt, record["output"]


def _answers(message: dict[str, Any]) -> bool:
    return is_learned(message) and has_words(message)
