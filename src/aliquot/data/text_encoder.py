"""Encode the text of one record as token ids, with a loss mask for given spans of the text.

Special tokens that the author of a record spelled out are distinguished from special tokens of the chat template.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from aliquot.core.errors import TokenizerError
from aliquot.data.chat_template import ChatTemplate, LeftOut, Messages, Span

AS_TEXT = "a record whose texts hold special tokens, encoded as text"
AS_TOKENS = "a record with special tokens in its texts, encoded as special tokens"
_MARKS = "\ue000\ue001"  # private-use characters, put around special tokens that the author spelled out


@dataclass(frozen=True)
class EncoderSpec:
    """How to encode texts: the tokenizer, the tokens around a document, and the tokens to learn."""

    tokenizer: str  # a directory that save_pretrained wrote
    fast: bool  # whether a tokenizer.json exists, which is used without transformers
    prefix: tuple[int, ...]  # token ids before each document
    suffix: tuple[int, ...]  # token ids after each document
    drop_before: str | None = None  # see `Cut.drop_before` in cuts.py
    answers: bool = False  # whether texts are records with answers, in the JSON of record_answers.py
    pairs: bool = False  # whether each record is a pair of answers
    rated: bool = False  # whether each record is a rated answer
    templated: bool = False  # whether the tokenizer's chat template renders the records
    train_on: Literal["completions", "last_turn", "all"] = "completions"
    roles: tuple[str, ...] = ("assistant",)  # of the messages to learn
    special_tokens_as_text: bool = False  # for special tokens spelled out in texts, not for the template's
    day: str | None = None  # the date that a chat template writes, in ISO 8601


class TextEncoder:
    """Encodes the text of one record. `record` is the JSON of the record, which is searched for special tokens.

    If `as_text` is true, special tokens that the record's author spelled out are encoded as ordinary text.
    """

    def __init__(self, tokenizer: Any, record: str, as_text: bool) -> None:
        self._tokenizer = tokenizer
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._ids, self._special = special.keys(), _pattern(tuple(special.values()))
        written = self._special.search(record)
        self._as_text = as_text and written is not None and tokenizer.is_fast
        self.notes = {} if written is None else {AS_TEXT if self._as_text else AS_TOKENS: repr(written[0])}

    def without_special(self, text: str) -> str:
        """Return `text` without special tokens."""
        return self._special.sub("", text)

    def ends(self, ids: list[int], mask: list[int]) -> bool:
        """Return whether a learned stretch ends with a special token. White space after the token does not count."""
        words_follow = False
        for number, bit in zip(reversed(ids), reversed(mask), strict=True):
            if not bit or words_follow:
                words_follow = words_follow and bool(bit)
            elif number in self._ids:
                return True
            else:
                words_follow = bool(self._tokenizer.decode([number]).strip())
        return False

    def encode(self, text: str, spans: list[Span] | None) -> tuple[list[int], list[int]]:
        """Return (token ids, mask) of a text that no chat template rendered."""
        return self._encode(text, spans, [(0, len(text))] if self._as_text else [])

    def encode_chat(
        self, text: str, spans: list[Span] | None, template: ChatTemplate, messages: Messages
    ) -> tuple[list[int], list[int]]:
        """Return (token ids, mask) of `text`, the rendering of `messages` by `template`."""
        return self._encode(text, spans, self._stretches(text, template, messages) if self._as_text else [])

    def _stretches(self, text: str, template: ChatTemplate, messages: Messages) -> list[Span]:
        """Return the spans of `text` to encode as ordinary text.

        Such a span lies between special tokens of the template, and holds a special token that the author spelled out.
        """

        def marked(value: Any) -> Any:
            as_json = json.dumps(value, ensure_ascii=False)
            return json.loads(self._special.sub(f"{_MARKS[0]}\\g<0>{_MARKS[1]}", as_json))

        marked_text = (
            replace(template, tools=marked(template.tools), values=marked(template.values)).attempt(marked(messages))
            or ""
        )
        if re.sub(f"[{_MARKS}]", "", marked_text) != text:
            raise LeftOut(
                "a record of which the chat template changes the special tokens in its texts, left out: see"
                " data.special_tokens_in_text"
            )
        authors, at, inside = [], 0, False
        for letter in marked_text:
            if letter in _MARKS:
                inside = letter == _MARKS[0]
                authors += [at] if inside else []
            else:
                at += 1
        bounds = [0, len(text)]
        for match in self._special.finditer(text):
            bounds[-1:-1] = [] if match.start() in authors else match.span()
        edges = zip(bounds[::2], bounds[1::2], strict=True)
        return [(start, stop) for start, stop in edges if any(start <= author < stop for author in authors)]

    def _encode(self, text: str, spans: list[Span] | None, stretches: list[Span]) -> tuple[list[int], list[int]]:
        """Return (token ids, mask) of `text`. The mask is 1 at tokens that overlap `spans`; at all tokens for None.

        Special tokens inside `stretches` are encoded as ordinary text.
        """
        if spans is None and not self._tokenizer.is_fast:
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            return ids, [1] * len(ids)
        if not self._tokenizer.is_fast:
            raise TokenizerError("answers need a fast tokenizer, one with a tokenizer.json")
        ids, places, at = [], [], 0
        with _whole_offsets(self._tokenizer):
            for start, stop in [*stretches, (len(text), len(text))]:
                for begin, end, as_text in ((at, start, False), (start, stop, True)):
                    encoded = self._piece(text[begin:end], as_text, begin > 0) if begin < end else []
                    ids += [number for number, _ in encoded]
                    places += [(begin + low, begin + high) for _, (low, high) in encoded]
                at = stop
        if spans is None:
            return ids, [1] * len(ids)
        starts, stops = zip(*sorted(span for span in spans if span[0] < span[1]), (math.inf, math.inf), strict=True)
        # Spans are disjoint and sorted: a token can only overlap the first span that ends after the token begins.
        reaches = [starts[bisect_right(stops, begin)] < end for begin, end in places]
        return ids, [int(bit) for bit in reaches]

    def _piece(self, text: str, as_text: bool, inside: bool) -> list[tuple[int, Span]]:
        """Return (token id, (start, stop) in `text`) of each token.

        `as_text`: encode special tokens as ordinary text. Such text `inside` a longer text is encoded after a newline
        if the newline is a separate token. Some tokenizers (SentencePiece) would otherwise add a space in front.
        """
        for before in ["\n", ""] if inside and as_text else [""]:
            encoded = self._tokenizer(
                before + text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=as_text
            )
            pairs = list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))
            if not before:
                break
            placed = [(number, (low - 1, high - 1)) for number, (low, high) in pairs if high > 1]
            if all(low >= 0 for _, (low, _) in placed):
                return placed
        return pairs


@lru_cache(maxsize=8)
def _pattern(contents: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches any of `contents`, and prefers longer matches."""
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or "(?!)")


@contextmanager
def _whole_offsets(tokenizer: Any) -> Iterator[None]:
    """Disable the post-processor of a tokenizer inside the `with` block.

    The post-processor may trim spaces from token offsets. A token of spaces would then have an empty span.
    """
    backend = tokenizer.backend_tokenizer
    processor, backend.post_processor = backend.post_processor, None
    try:
        yield
    finally:
        backend.post_processor = processor
