"""Encode texts as token ids, in this process or in a worker process."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    notes: dict[str, Note]  # remarks on texts, by reason
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
        return self._encode_answers(batch.texts) if self.spec.answers else self._encode_texts(batch)

    def _encode_texts(self, batch: Texts) -> Encoded:
        prefix, suffix = list(self.spec.prefix), list(self.spec.suffix)
        text_bytes = sum(len(text.encode()) for text in batch.texts)
        rows, with_special = [], []
        texts = zip(batch.texts, batch.first.tolist(), batch.last.tolist(), self._token_ids(batch), strict=True)
        for index, (text, first, last, (ids, context_bytes)) in enumerate(texts):
            text_bytes -= context_bytes
            if not self.special.isdisjoint(ids):
                with_special.append(index)
            if not first and self.spec.drop_before is not None:
                if text[0] in self.spec.drop_before:
                    ids = ids[1:]
                else:  # the cut removed a space, which the first token represents
                    text_bytes += 1
            if ids or not first:  # the last piece of a document may be blank
                ids = (prefix if first else []) + ids + (suffix if last else [])
            rows.append(np.array(ids, np.uint32))
        notes = {HOLDS_SPECIAL: (len(with_special), with_special[0], "")} if with_special else {}
        return _encoded(rows, [], text_bytes if self.spec.fast or prefix else None, notes)

    def _token_ids(self, batch: Texts) -> Iterator[tuple[list[int], int]]:
        """Yield the token ids of each text, and how many bytes of it are no text to predict: those of the first token.

        About AT_ONCE_CHARACTERS are encoded at once, because a tokenizer needs hundreds of bytes per character.
        """
        start = characters = 0
        for stop, text in enumerate(batch.texts, 1):
            characters += len(text)
            if characters < AT_ONCE_CHARACTERS and stop < len(batch.texts):
                continue
            texts, first = batch.texts[start:stop], batch.first[start:stop]
            if not self.spec.fast:
                yield from ((self.tokenizer.encode(text, add_special_tokens=False), 0) for text in texts)
            elif self.spec.prefix or not first.any():
                encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                yield from ((row.ids, 0) for row in encoded)
            else:  # slower, but returns offsets
                encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
                for text, begins, row in zip(texts, first.tolist(), encoded, strict=True):
                    yield row.ids, len(text[: row.token_to_chars(0)[1]].encode()) if begins and len(row) else 0
            start, characters = stop, 0

    def _encode_answers(self, texts: list[str]) -> Encoded:
        answers: list[tuple[list[int], list[int]]] = []
        notes: dict[str, Note] = {}
        for index, (documents, remarks) in enumerate(encode_records(self.tokenizer, texts, self.spec)):
            for reason, detail in remarks.items():
                count, first, first_detail = notes.get(reason, (0, index, detail))
                notes[reason] = (count + 1, first, first_detail)
            answers += documents
        encoded = _encoded([ids for ids, _ in answers], [mask for _, mask in answers], None, notes)
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


def _encoded(
    rows: Sequence[Sequence[int] | npt.NDArray[np.uint32]],
    masks: list[list[int]],
    text_bytes: int | None,
    notes: dict[str, Note],
) -> Encoded:
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.concatenate([np.empty(0, np.uint32), *(np.asarray(row, np.uint32) for row in rows)])
    mask = np.fromiter((bit for row in masks for bit in row), np.uint8, int(counts.sum()) if masks else 0)
    return Encoded(counts, ids, mask, text_bytes, notes)


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
