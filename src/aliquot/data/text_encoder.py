"""Encode records with answers as token ids, with a loss mask that is 1 at the tokens of answers.

chat.py lays out the text of each record and finds the spans of the answers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import call, itemgetter
from typing import Any, Literal

from aliquot.core.errors import TokenizerError
from aliquot.core.template_process import in_template_process
from aliquot.data.chat import ANSWERS_NOT_WRITTEN, TEMPLATE_LEAVES_OUT, Notes, RecordLayout, lay_out
from aliquot.data.chat_template import LeftOut, Span, TokenizerFacts

NO_END = "a record in which no answer ends with a special token: nothing in it teaches a model to stop"


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


def encode_records(
    tokenizer: Any, texts: list[str], spec: EncoderSpec
) -> Iterator[tuple[list[tuple[list[int], list[int]]], Notes]]:
    """Yield (documents, notes) of each record; `texts` are JSON objects that record_answers.py made of records.

    A record is one document, a pair one for each of its two answers. A document is (token ids, mask); the mask is 1 at
    tokens to learn. Notes say why a record has no tokens, which parts of the record the tokens omit, and which parts
    were changed. If one answer of a pair is left out, both are.
    """
    encoder, facts = TextEncoder(tokenizer, spec), TokenizerFacts.of(tokenizer)
    # Without a template, no program of a stranger runs.
    run = in_template_process if spec.templated else call
    for layouts in run(lay_out, texts, facts, spec):
        try:
            yield encoder.encode_layouts(layouts)
        except LeftOut as error:
            yield [([], [])] * (2 if spec.pairs else 1), {error.reason: error.detail}


class TextEncoder:
    """Encodes the texts of records, which `lay_out` has rendered."""

    def __init__(self, tokenizer: Any, spec: EncoderSpec) -> None:
        self._tokenizer, self._spec = tokenizer, spec
        self._ids = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}

    def encode_layouts(self, layouts: list[RecordLayout] | LeftOut) -> tuple[list[tuple[list[int], list[int]]], Notes]:
        """Return (documents, notes) of a record. Raises LeftOut if the record is left out."""
        if isinstance(layouts, LeftOut):
            raise layouts
        encoded = [self._encode_layout(layout) for layout in layouts]
        documents = [(ids, mask) for ids, mask, _ in encoded]
        if self._spec.pairs:
            if documents[0] == documents[1]:
                raise LeftOut("a pair of two equal answers, left out")
            # The first token of a document is no label, because nothing precedes it.
            documents = [(ids, [0, *mask[1:]]) for ids, mask in documents]
        return documents, {reason: detail for _, _, notes in encoded for reason, detail in notes.items()}

    def _encode_layout(self, layout: RecordLayout) -> tuple[list[int], list[int], Notes]:
        spec, notes = self._spec, dict(layout.notes)
        ids, mask = self.encode(layout.text, layout.learned, layout.as_text)
        # A chat template may write the prefix or the suffix itself.
        if not spec.templated or tuple(ids[: len(spec.prefix)]) != spec.prefix:
            ids, mask = [*spec.prefix, *ids], [0] * len(spec.prefix) + mask
        if not spec.templated or tuple(ids[-len(spec.suffix) :]) != spec.suffix:
            ids, mask = [*ids, *spec.suffix], mask + [int(layout.learns_end)] * len(spec.suffix)
        if spec.train_on == "all":
            mask = [1] * len(ids)
        elif not self.ends(ids, mask):
            notes[NO_END] = ""
        if not any(mask[1:]):
            raise LeftOut(
                ANSWERS_NOT_WRITTEN
                if TEMPLATE_LEAVES_OUT in notes
                else "a record in which nothing is learned, left out"
            )
        return ids, mask, notes

    def ends(self, ids: list[int], mask: list[int]) -> bool:
        """Return whether a learned stretch ends with a special token. White space after the token does not count."""
        for bit, stretch in groupby(zip(mask, ids, strict=True), key=itemgetter(0)):
            tokens = (number for _, number in reversed(list(stretch)) if bit)
            last = next((number for number in tokens if number in self._ids or self._is_word(number)), None)
            if last in self._ids:
                return True
        return False

    def _is_word(self, number: int) -> bool:
        return bool(self._tokenizer.decode([number]).strip())

    def encode(self, text: str, spans: list[Span] | None, stretches: list[Span]) -> tuple[list[int], list[int]]:
        """Return (token ids, mask) of `text`. The mask is 1 at tokens that overlap `spans`; at all tokens for None.

        Special tokens inside `stretches` are encoded as ordinary text.
        """
        if spans is None and not self._tokenizer.is_fast:
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            return ids, [1] * len(ids)
        if not self._tokenizer.is_fast:
            raise TokenizerError("answers need a fast tokenizer, one with a tokenizer.json")
        ids, places, at = [], [], 0
        # The post-processor may trim spaces from token offsets. A token of spaces would then have an empty span.
        backend = self._tokenizer.backend_tokenizer
        processor, backend.post_processor = backend.post_processor, None
        try:
            for start, stop in [*stretches, (len(text), len(text))]:
                for begin, end, as_text in ((at, start, False), (start, stop, True)):
                    encoded = self._piece(text[begin:end], as_text, begin > 0) if begin < end else []
                    ids += [number for number, _ in encoded]
                    places += [(begin + low, begin + high) for _, (low, high) in encoded]
                at = stop
        finally:
            backend.post_processor = processor
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
