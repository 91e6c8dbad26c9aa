"""A token store: a directory with all tokens of a source one after the other, memory-mapped.

tokens.bin is uint16 where the vocabulary has less than 65536 tokens, else uint32; offsets.bin is int64 [documents + 1];
mask.bin, uint8, is there for records with answers alone: 1 where a token is to be predicted; store.json says what the
others hold, of which formats the documents were, and what of them is not here, and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.core.errors import DataCacheError

FORMAT = 3


@dataclass(frozen=True)
class TokenStore:
    path: Path
    tokens: npt.NDArray[Any]  # uint16 or uint32 [tokens]
    offsets: npt.NDArray[np.int64]  # [documents + 1]; document d is tokens[offsets[d] : offsets[d + 1]]
    mask: npt.NDArray[np.uint8] | None  # [tokens]
    # UTF-8 bytes of the text that is predicted: all but the first token of each document, which has no text where it
    # is a bos. None for records with answers.
    text_bytes: int | None = None
    formats: Mapping[str, int] = field(default_factory=dict)  # documents by what they were
    left_out: Mapping[str, int] = field(default_factory=dict)  # records by why they are not here
    inexact_cuts: int = 0  # of documents too long to be encoded whole: a token there may be another
    firsts: Mapping[str, str] = field(default_factory=dict)  # where the first record of each reason is

    @classmethod
    def open(cls, path: Path) -> TokenStore:
        """Map the store in `path`. Raises UserError where it is not there or its files are not as long as they say."""
        try:
            facts = json.loads((path / "store.json").read_text())
            tokens: npt.NDArray[Any] = np.memmap(path / "tokens.bin", facts["dtype"], mode="r")
            offsets: npt.NDArray[np.int64] = np.memmap(path / "offsets.bin", np.int64, mode="r")
            mask = np.memmap(path / "mask.bin", np.uint8, mode="r") if facts["answers"] else None
        except (OSError, ValueError, KeyError) as error:
            raise DataCacheError(f"not a token cache ({error}); remove this directory and start again", path) from error
        sound = len(offsets) == facts["documents"] + 1 and len(tokens) == facts["tokens"] == offsets[-1]
        if not sound or (mask is not None and len(mask) != len(tokens)):
            raise DataCacheError("a damaged token cache; remove this directory and start again", path)
        return cls(
            path, tokens, offsets, mask, facts["text_bytes"], facts["formats"], facts["left_out"],
            facts["inexact_cuts"], facts.get("firsts", {}),
        )  # fmt: skip

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size < 65536 else np.uint32)


def counted(reasons: Mapping[str, int], firsts: Mapping[str, str]) -> Iterator[str]:
    """How many records there are of each reason, and where the first is."""
    for reason, count in reasons.items():
        yield f"{count:,} x {reason}{f' (the first: {firsts[reason]})' if firsts.get(reason) else ''}"
