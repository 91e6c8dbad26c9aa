"""A conversation becomes tokens, and a mask of those that the assistant says: the loss is on them alone."""

from __future__ import annotations

import json
import re
from typing import Any

from aliquot.errors import TokenizerError, UserError

GENERATION_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")


def encode_chat(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """(token ids, mask) of `text`, a JSON list of messages, rendered with the tokenizer's own chat template.

    The mask is 1 at tokens of assistant turns. Where the template marks what it generates, by those marks; else an
    assistant turn is what rendering one message more adds after the prompt for it. Raises UserError where the
    template fails, or where an earlier turn is rendered differently once later ones are there.
    """
    messages: list[dict[str, Any]] = json.loads(text)
    try:
        if GENERATION_MARKER.search(tokenizer.get_chat_template()):
            encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            return list(encoded["input_ids"]), list(encoded["assistant_masks"])
        return _encode_by_prefixes(tokenizer, messages)
    except UserError:
        raise
    except Exception as error:  # a template is a program of the model's author
        raise TokenizerError(f"the chat template fails ({error})", _name(messages)) from error


def _encode_by_prefixes(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    if not tokenizer.is_fast:
        raise TokenizerError("chat needs a fast tokenizer, or a chat template with {% generation %} marks")
    whole = _render(tokenizer, messages)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            # A template may refuse to render a conversation that is still empty.
            before = _render(tokenizer, messages[:index]) if index else ""
            asked = _render(tokenizer, messages[:index], add_generation_prompt=True) if index else ""
            after = _render(tokenizer, messages[: index + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise TokenizerError(
                    "the chat template renders earlier turns differently once later ones are there;"
                    " mark what the assistant says with {% generation %} in the template",
                    _name(messages),
                )
            spans.append((len(asked) if after.startswith(asked) else len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(start <= at < stop for start, stop in spans)) for at, _ in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), mask


def _render(tokenizer: Any, messages: list[dict[str, Any]], **options: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _name(messages: list[dict[str, Any]]) -> str:
    return f"conversation that begins {str(messages[0].get('content'))[:40]!r}"
