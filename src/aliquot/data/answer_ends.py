"""The tokens that end learned answers: an export names them, so that other programs stop where answers end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.data.token_store import TokenStore

_READ_TOKENS = 1 << 24  # of a store, from its beginning; a token that ends answers ends them there, too


def answer_ends(stores: Iterable[TokenStore], tokenizer: Any, learns_all: bool) -> tuple[int, ...]:
    """Return the added tokens (and eos) that are learned as the last token of an answer, in ascending order.

    White space behind the token belongs to the answer (ChatML's newline). A token that also stands inside learned
    answers does not end them: GPT-OSS ends its thoughts, too. Of a text without answers only eos counts.

    Args:
        stores: the training documents.
        learns_all: whether the masks span whole chats, so that the end of one turn stands inside.
    """
    added = {tokenizer.eos_token_id, *tokenizer.added_tokens_decoder} - {None}
    ends: set[int] = set()
    for store in stores:
        tokens, is_learned, last = _answers(store)
        last = _before_blanks(tokens, is_learned, last, tokenizer)
        found = set(np.unique(tokens[last]).tolist())
        if store.mask is None:
            ends |= found & {tokenizer.eos_token_id}
            continue
        is_learned[last] = False
        inside = np.bincount(tokens[is_learned], minlength=max(added, default=0) + 1)
        ends |= {token for token in found & added if learns_all or inside[token] == 0}
    return tuple(sorted(ends))


def _answers(store: TokenStore) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """(tokens, whether each is learned, index of the last token of each answer) of the first documents."""
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
