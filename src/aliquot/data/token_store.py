"""Write and read token stores: a token store is a directory with all tokens of a source, in memory-mapped files.

tokens.bin is uint16 for vocabularies of less than 65536 tokens, else uint32. offsets.bin is int64 [documents + 1].
mask.bin is uint8 and 1 at tokens to learn; it exists only for records with answers. store.json describes the other
files, the formats of the documents, and the records that are left out, by reason. A pair of answers is two documents:
the prompt with the chosen answer, then the prompt with the rejected answer. For rated answers, desirable.bin is uint8
[documents], and prompts.bin is uint64 [documents], hashes of the prompts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.core.decode import read_json_object
from aliquot.core.errors import DataCacheError, reading
from aliquot.core.number_format import count_of
from aliquot.data.encoder import Encoded
from aliquot.data.mismatched_answers import answers_to_other_prompts

# Log-probabilities of answers before training: [documents] of pairs, or [2 x documents] of rated answers, of which each
# is followed by the mismatched answer, which is to another prompt.
Reference = npt.NDArray[np.float32]
FORMAT = 3
_READ_TOKENS = 1 << 24  # `answer_ends` examines only this many tokens, at the beginning of a store


@dataclass(frozen=True)
class TokenStore:
    """The tokens of a source, in memory-mapped files."""

    path: Path
    tokens: npt.NDArray[Any]  # uint16 or uint32 [tokens]
    offsets: npt.NDArray[np.int64]  # [documents + 1]; document d is tokens[offsets[d] : offsets[d + 1]]
    mask: npt.NDArray[np.uint8] | None  # [tokens], 1 at tokens to learn
    # UTF-8 bytes of the text to predict, without each document's first token (a bos has no text). None for records with
    # answers.
    text_bytes: int | None = None
    formats: Mapping[str, int] = field(default_factory=dict)  # format -> number of documents
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason -> number of records that are left out
    firsts: Mapping[str, str] = field(default_factory=dict)  # reason -> place of the first such record
    pairs: bool = False  # whether the documents are pairs of answers
    reference: Reference | None = None
    desirable: npt.NDArray[np.uint8] | None = None  # [documents], for rated answers
    prompts: npt.NDArray[np.uint64] | None = None  # [documents], hashes of the prompts of rated answers
    positions: int | None = None  # of the model, which an answer with its prompt must not exceed
    label: str | Path = ""  # the name of the source in error messages
    first: str = ""  # the place of the first record in the store

    @classmethod
    def open(cls, path: Path, positions: int | None = None, label: str | Path = "") -> TokenStore:
        """Map the files of the token store in directory `path`, which `cache.cached` has verified.

        `label` names the source in error messages.

        Raises StorageError if a file cannot be read, and DataCacheError if a file has been damaged since.
        """
        try:
            with reading(path):
                facts = read_json_object(path / "store.json")
                tokens: npt.NDArray[Any] = np.memmap(path / "tokens.bin", facts["dtype"], mode="r")
                offsets: npt.NDArray[np.int64] = np.memmap(path / "offsets.bin", np.int64, mode="r")
                mask = np.memmap(path / "mask.bin", np.uint8, mode="r") if facts["answers"] else None
                desirable = np.memmap(path / "desirable.bin", np.uint8, mode="r") if facts.get("rated") else None
                prompts = np.memmap(path / "prompts.bin", np.uint64, mode="r") if facts.get("rated") else None
        except (ValueError, KeyError) as error:
            raise DataCacheError(
                f"damaged since the start of this run ({error}): start again, and it is made again", path
            ) from error
        return cls(
            path, tokens, offsets, mask, facts["text_bytes"], facts["formats"], facts["left_out"],
            facts.get("firsts", {}), facts.get("pairs", False),
            desirable=desirable, prompts=prompts, positions=positions, label=label or path,
            first=facts.get("first", ""),
        )  # fmt: skip

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def labels(self) -> int:
        """The number of tokens to learn in a store with a mask."""
        assert self.mask is not None
        return int(self.mask.sum(dtype=np.int64))

    @property
    def keeps_whole(self) -> bool:
        """Whether documents are pairs of answers or rated answers: none is cut, and the loss is a mean over them."""
        return self.pairs or self.desirable is not None

    @property
    def references(self) -> int:
        """The length of `reference`."""
        return self.documents if self.pairs else 2 * self.documents

    def places(self, starts: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the index in `reference` of the answers whose documents begin at tokens `starts`."""
        documents = np.searchsorted(self.offsets, np.asarray(starts))
        return documents if self.pairs else 2 * documents

    def too_long(self, sequence_length: int, first: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]:
        """Return which of the pairs or rated answers [first, stop) are left out because of their length.

        A pair must fit into a sequence, and each of its answers, with the prompt, into the positions of the model.
        """
        answers = 2 if self.pairs else 1
        end = None if stop is None else answers * stop + 1
        lengths = np.diff(self.offsets[answers * first : end]).reshape(-1, answers)
        too_long: npt.NDArray[np.bool_] = lengths.sum(1) > sequence_length
        return too_long if self.positions is None else too_long | (lengths.max(1) > self.positions)

    def length_note(self, sequence_length: int, place: str = "") -> str | None:
        """Return how many pairs or rated answers are too long, and what to do; None if all fit."""
        if not self.keeps_whole or not (count := int(self.too_long(sequence_length).sum())):
            return None
        what = count_of(count, *(("pair is", "pairs are") if self.pairs else ("answer is", "answers are")))
        limited = self.positions is not None and self.positions < sequence_length
        ending = (
            f", or an answer than the model's {self.positions} positions, left out"
            if limited
            else ", left out: raise it"
        )
        return f"{what} longer than data.sequence_length {sequence_length}{place}{ending}"

    def why_unusable(self, sequence_length: int) -> str:
        """Return why no sequence of `sequence_length` tokens has a token to learn."""
        place = f" (the first: {self.first})" if self.first else ""
        return why_unusable(self.documents, self.left_out, self.firsts, self.length_note(sequence_length, place))

    @cached_property
    def other_documents(self) -> npt.NDArray[np.int64]:
        """The document [documents] whose answer is the mismatched answer to the prompt of each rated answer."""
        assert self.prompts is not None
        return answers_to_other_prompts(self.prompts)

    @property
    def unit_offsets(self) -> npt.NDArray[np.int64]:
        """The offsets of what stays together in a packed sequence: of documents, or of pairs of documents."""
        return self.offsets[::2] if self.pairs else self.offsets


class StoreWriter(ExitStack):
    """Write the files of a token store, document after document."""

    def __init__(
        self, directory: Path, dtype: np.dtype[Any], answers: bool, pairs: bool = False, rated: bool = False
    ) -> None:
        super().__init__()
        self.directory, self.dtype, self.answers, self.pairs, self.rated = directory, dtype, answers, pairs, rated
        self.formats: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.firsts: dict[str, str] = {}  # reason -> place of the first such record, with details
        self.tokens = self.documents = 0
        self.first = ""
        self.useful = 0  # number of documents with a token to predict
        self.end = 0  # index of the token after the last complete document
        self.text_bytes: int | None = 0
        names = ["tokens", "offsets", *(["mask"] if answers else []), *(["desirable", "prompts"] if rated else [])]
        self.files = {name: self.enter_context((directory / f"{name}.bin").open("wb")) for name in names}
        self.files["offsets"].write(np.zeros(1, np.int64).tobytes())

    def leave_out(self, reason: str, count: int, first: str) -> None:
        """Count `count` records that are left out for `reason`; `first` is the place of the first one."""
        self.left_out[reason] += count
        if first:
            self.firsts.setdefault(reason, first)

    def write(self, encoded: Encoded, last: npt.NDArray[np.bool_], places: list[str]) -> None:
        """Append the tokens of a batch of texts. A document without tokens is not stored.

        `last` [texts] marks texts that end a document. `places`: the file and line of each text that is a record.
        """
        ends = self.tokens + np.cumsum(encoded.counts)[last]
        lengths = np.diff(ends, prepend=self.end)
        if self.answers and self.documents == 0 and (lengths > 0).any():
            self.first = places[int(np.argmax(lengths > 0)) // (2 if self.pairs else 1)]
        ends = ends[lengths > 0]
        self.useful += int((lengths > 1).sum())
        self.files["tokens"].write(encoded.ids.astype(self.dtype).tobytes())
        self.files["offsets"].write(ends.astype(np.int64).tobytes())
        for reason, (count, index, detail) in encoded.notes.items():
            self.leave_out(reason, count, ": ".join(filter(None, (places[index], detail))))
        if self.answers:
            self.files["mask"].write(encoded.mask.tobytes())
        if encoded.desirable is not None and encoded.prompts is not None:
            self.files["desirable"].write(encoded.desirable[lengths > 0].tobytes())
            self.files["prompts"].write(encoded.prompts[lengths > 0].tobytes())
        self.tokens += len(encoded.ids)
        self.documents += len(ends)
        if self.text_bytes is not None:
            self.text_bytes = None if encoded.text_bytes is None else self.text_bytes + encoded.text_bytes
        self.end = int(ends[-1]) if len(ends) else self.end

    def finish(self) -> None:
        """Write store.json; call this after the other files are closed."""
        names: tuple[str, ...] = (
            "documents", "tokens", "text_bytes", "answers", "formats", "left_out", "firsts", "first",
        )  # fmt: skip
        names += tuple(name for name in ("pairs", "rated") if getattr(self, name))
        facts = {"dtype": self.dtype.name, **{name: getattr(self, name) for name in names}}
        (self.directory / "store.json").write_text(json.dumps(facts))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size < 65536 else np.uint32)


def counted(reasons: Mapping[str, int], firsts: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each reason: the number of records, and the place of the first one if known."""
    for reason, count in reasons.items():
        yield f"{count:,} x {reason}{f' (the first: {firsts[reason]})' if firsts.get(reason) else ''}"


def why_unusable(
    documents: int, left_out: Mapping[str, int], firsts: Mapping[str, str], note: str | None = None
) -> str:
    """Return the error about a source in which nothing is learned. `note`: why not, if its documents have labels."""
    note = note or (f"{count_of(documents, 'document')} without a token to learn" if documents else None)
    return (
        f"no usable document: {'; '.join([*([note] if note else []), *counted(left_out, firsts)]) or 'there is none'}"
    )


def answer_ends(stores: Iterable[TokenStore], tokenizer: Any, learns_all: bool) -> tuple[int, ...]:
    """Return the token ids with which a trained model ends an answer, in ascending order.

    These are the added tokens, or eos, that the training documents teach as the last token of an answer. White space
    after such a token is skipped (ChatML's newline). A token that also occurs inside learned answers is excluded:
    GPT-OSS ends its reasoning with such a token. In a text without answers, only eos counts.

    Args:
        stores: the training documents.
        learns_all: whether masks cover whole chats. Tokens that occur inside are then not excluded, because each turn
            but the last ends inside.
    """
    added = {tokenizer.eos_token_id, *tokenizer.added_tokens_decoder} - {None}
    ends: set[int] = set()
    for store in stores:
        tokens, is_learned, last = _answers(store)
        last = _before_blanks(tokens, is_learned, last, tokenizer)
        last_tokens = set(np.unique(tokens[last]).tolist())
        if store.mask is None:
            ends |= last_tokens & {tokenizer.eos_token_id}
            continue
        is_learned[last] = False
        inside = np.bincount(tokens[is_learned], minlength=max(added, default=0) + 1)
        ends |= {token for token in last_tokens & added if learns_all or inside[token] == 0}
    return tuple(sorted(ends))


def _answers(store: TokenStore) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return (tokens, whether each is learned, index of each answer's last token) of the first documents of a store."""
    documents = max(1, int(np.searchsorted(store.offsets, _READ_TOKENS, side="right")) - 1)
    offsets = np.asarray(store.offsets[: documents + 1])
    tokens = np.asarray(store.tokens[: offsets[-1]])
    if store.mask is None:
        return tokens, np.ones(len(tokens), np.bool_), offsets[1:] - 1
    is_learned = np.asarray(store.mask[: offsets[-1]]).astype(np.bool_)
    goes_on = np.append(is_learned[1:], False)
    goes_on[offsets[1:] - 1] = False
    return tokens, is_learned, np.flatnonzero(is_learned & ~goes_on)


def _before_blanks(
    tokens: npt.NDArray[Any], is_learned: npt.NDArray[np.bool_], last: npt.NDArray[np.int64], tokenizer: Any
) -> npt.NDArray[np.int64]:
    while True:
        blank = [token for token in np.unique(tokens[last]).tolist() if not tokenizer.decode([token]).strip()]
        moves = np.isin(tokens[last], blank) & (last > 0) & is_learned[last - 1]
        if not moves.any():
            return last
        last = last - moves
