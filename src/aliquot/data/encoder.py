"""Encode texts as token ids, in this process or in a worker process."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.core.errors import TrainingError, UserError
from aliquot.core.python_command import Worker, requests
from aliquot.data.text_encoder import EncoderSpec, encode_records
from aliquot.models.untrusted_code import without_code

AT_ONCE_CHARACTERS = 1 << 16
HOLDS_SPECIAL = "a text or a piece of a text with special tokens, encoded as special tokens"


@dataclass(frozen=True)
class Texts:
    """A batch of texts to encode: documents or pieces of documents.

    `first` and `last` mark the first and the last piece of each document.
    """

    texts: list[str]
    first: npt.NDArray[np.bool_]  # [texts]
    last: npt.NDArray[np.bool_]  # [texts]


Note = tuple[int, int, str]  # (number of texts with this remark, index of the first such text, details about it)


@dataclass(frozen=True)
class Encoded:
    """The token ids of a batch of texts, concatenated."""

    counts: npt.NDArray[np.int64]  # [texts], tokens of each text, or [2 x texts] for pairs; 0 if it is left out
    ids: npt.NDArray[np.uint32]  # [sum of counts]
    mask: npt.NDArray[np.uint8]  # [sum of counts] for records with answers, else empty
    text_bytes: int | None  # UTF-8 bytes of the text of all tokens except each document's first token; None: unknown
    notes: dict[str, Note] = field(default_factory=dict)  # remarks on texts, by reason
    # For rated answers [texts]: uint8, whether each is desirable, and uint64, a hash of each prompt.
    desirable: npt.NDArray[np.uint8] | None = None
    prompts: npt.NDArray[np.uint64] | None = None


class Encoder:
    """Encodes batches of texts as `spec` says, with the tokenizer that it loads from files."""

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec
        if spec.fast and not spec.answers:
            from tokenizers import Tokenizer

            self.tokenizer: Any = Tokenizer.from_file(str(Path(spec.tokenizer, "tokenizer.json")))
            self.tokenizer.no_truncation()  # a tokenizer.json may turn on truncation and padding
            self.tokenizer.no_padding()
            self.tokenizer.encode_special_tokens = spec.special_tokens_as_text
            added = self.tokenizer.get_added_tokens_decoder()
        else:
            from transformers import AutoTokenizer

            self.tokenizer = without_code(AutoTokenizer.from_pretrained)(spec.tokenizer, model_max_length=sys.maxsize)
            self.tokenizer.split_special_tokens = spec.special_tokens_as_text and not spec.answers
            added = self.tokenizer.added_tokens_decoder
        self.special = frozenset(number for number, token in added.items() if token.special)

    def encode(self, batch: Texts) -> Encoded:
        """Encode a batch of texts. Raises UserError if a conversation cannot be rendered."""
        if self.spec.answers:
            return self._encode_answers(batch.texts)
        return _joined([self._encode_texts(group) for group in _groups(batch)])

    def _encode_texts(self, batch: Texts) -> Encoded:
        prefix, suffix = list(self.spec.prefix), list(self.spec.suffix)
        text_bytes = sum(len(text.encode()) for text in batch.texts)
        if not self.spec.fast:
            rows = [self.tokenizer.encode(text, add_special_tokens=False) for text in batch.texts]
        elif prefix or not batch.first.any():
            rows = [row.ids for row in self.tokenizer.encode_batch_fast(batch.texts, add_special_tokens=False)]
        else:
            encodings = self.tokenizer.encode_batch(
                batch.texts, add_special_tokens=False
            )  # slower, but returns offsets
            rows = [row.ids for row in encodings]
            text_bytes -= sum(
                len(text[: row.token_to_chars(0)[1]].encode())
                for text, first, row in zip(batch.texts, batch.first.tolist(), encodings, strict=True)
                if first and len(row)
            )
        with_special = [index for index, row in enumerate(rows) if not self.special.isdisjoint(row)]
        for index, (first, last) in enumerate(zip(batch.first.tolist(), batch.last.tolist(), strict=True)):
            row = rows[index]
            if not first and self.spec.drop_before is not None:
                if batch.texts[index][0] in self.spec.drop_before:
                    row = row[1:]
                else:  # the cut removed a space, which the first token represents
                    text_bytes += 1
            if row or not first:  # the last piece of a document may be blank
                rows[index] = (prefix if first else []) + row + (suffix if last else [])
        encoded = _encoded(rows, [], text_bytes if self.spec.fast or prefix else None)
        return (
            replace(encoded, notes={HOLDS_SPECIAL: (len(with_special), with_special[0], "")})
            if with_special
            else encoded
        )

    def _encode_answers(self, texts: list[str]) -> Encoded:
        rows: list[list[int]] = []
        masks: list[list[int]] = []
        notes: dict[str, Note] = {}
        for index, (documents, remarks) in enumerate(encode_records(self.tokenizer, texts, self.spec)):
            for reason, detail in remarks.items():
                count, first, first_detail = notes.get(reason, (0, index, detail))
                notes[reason] = (count + 1, first, first_detail)
            rows += [ids for ids, _ in documents]
            masks += [mask for _, mask in documents]
        encoded = replace(_encoded(rows, masks, None), notes=notes)
        if not self.spec.rated:
            return encoded
        records = [json.loads(text) for text in texts]
        desirable = np.array([record["label"] for record in records], np.uint8)
        return replace(encoded, desirable=desirable, prompts=np.array(list(map(prompt_hash, records)), np.uint64))


def prompt_hash(record: dict[str, Any]) -> int:
    """Return a hash of a rated answer without the answer and the rating, which is equal for answers to one prompt.

    The text is hashed, because a token may span the end of a prompt and the beginning of an answer.
    """
    asked = {key: value for key, value in record.items() if key not in ("completion", "output", "label", "left_out")}
    if "messages" in asked:
        asked["messages"] = asked["messages"][: asked["context"]]
    return int.from_bytes(hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=8).digest())


def _groups(batch: Texts) -> Iterator[Texts]:
    """Yield groups of about AT_ONCE_CHARACTERS, because a tokenizer needs hundreds of bytes per character."""
    start = characters = 0
    for index, text in enumerate(batch.texts):
        characters += len(text)
        if characters >= AT_ONCE_CHARACTERS or index == len(batch.texts) - 1:
            stop = index + 1
            yield Texts(batch.texts[start:stop], batch.first[start:stop], batch.last[start:stop])
            start, characters = stop, 0


def _joined(parts: list[Encoded]) -> Encoded:
    """Concatenate the results of several groups of texts without answers."""
    counts, ids = ([getattr(part, name) for part in parts] for name in ("counts", "ids"))
    sizes = [part.text_bytes for part in parts if part.text_bytes is not None]
    known = len(sizes) == len(parts)
    notes: dict[str, Note] = {}
    for part, before in zip(parts, accumulate(map(len, counts), initial=0), strict=False):
        for reason, (count, index, detail) in part.notes.items():
            earlier, first, first_detail = notes.get(reason, (0, before + index, detail))
            notes[reason] = (earlier + count, first, first_detail)
    mask, text_bytes = np.empty(0, np.uint8), sum(sizes) if known else None
    return Encoded(np.concatenate(counts), np.concatenate(ids), mask, text_bytes, notes)


def _encoded(rows: list[list[int]], masks: list[list[int]], text_bytes: int | None) -> Encoded:
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.fromiter((token for row in rows for token in row), np.uint32, int(counts.sum()))
    mask = np.fromiter((bit for row in masks for bit in row), np.uint8, int(counts.sum()) if masks else 0)
    return Encoded(counts, ids, mask, text_bytes)


class EncoderProcess(Worker):
    """An Encoder in a worker process. For one batch at a time: call `send`, wait for `connection`, call `receive`."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__(f"{__name__}:serve", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
        self.send(spec)  # does not block: the spec fits into the pipe's buffer

    def ended(self, exit_code: int) -> TrainingError:
        return TrainingError(
            f"a tokenising process ended (exit code {exit_code}); perhaps for lack of memory: lower data.num_proc"
        )


def serve(connection: Connection) -> None:
    """Run the worker process: receive the spec, then encode batches until the parent closes the pipe or dies."""
    encoder = Encoder(connection.recv())
    for batch in requests(connection):
        try:
            connection.send(encoder.encode(batch))
        except UserError as error:
            connection.send(error)
