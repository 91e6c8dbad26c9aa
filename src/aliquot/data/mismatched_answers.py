"""Mismatched answers for KTO: each prompt with the answer to another prompt, from which the divergence is estimated.

The choice depends on the records alone, so that the log-probability of a mismatched answer before training is computed
only once, and is the same at any world size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from aliquot.data.token_store import TokenStore


def answers_to_other_prompts(prompts: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return for each record another record, whose prompt differs. At least two of `prompts` must differ.

    With the records of a prompt as neighbours, the other record is half the records further on. If more than half of
    the records share a prompt, it is as many records further on, and their mismatched answers are all others in turn.
    """
    _, first_records, numbers = np.unique(prompts, return_index=True, return_inverse=True)
    first_record = first_records[numbers]  # of the same prompt
    order = np.argsort(first_record, kind="stable")
    begins = np.searchsorted(first_record[order], first_record[order])  # where the neighbours of a prompt begin
    most = int(np.bincount(numbers).max())
    nth = np.arange(len(prompts)) - begins
    places = (begins + max(most, len(prompts) // 2) + nth % (len(prompts) - most)) % len(prompts)
    others = np.empty(len(prompts), np.int64)
    others[order] = order[places]
    return others


def mismatched(store: TokenStore, starts: Iterable[int], longest: int) -> TokenStore:
    """Return a store, in private memory, of the prompts of rated answers, each with the answer to another prompt.

    Args:
        starts: the first tokens of the documents whose prompts are used.
        longest: cut off longer documents after so many tokens, which is always behind the prompt.
    """
    assert store.mask is not None
    documents = np.searchsorted(store.offsets, np.fromiter(starts, np.int64))
    tokens, mask = [], []
    for document, other in zip(documents, store.other_documents[documents], strict=True):
        prompt, answer = _prompt_and_answer(store, document)[0], _prompt_and_answer(store, other)[1]
        tokens.append(np.concatenate([store.tokens[prompt], store.tokens[answer]])[:longest])
        mask.append(np.concatenate([np.zeros_like(store.mask[prompt]), store.mask[answer]])[:longest])
    return replace(
        store,
        tokens=np.concatenate(tokens),
        mask=np.concatenate(mask),
        offsets=np.cumsum([0, *map(len, tokens)]),
        reference=None if store.reference is None else store.reference[2 * documents + 1].repeat(2),
        desirable=None,
    )


def _prompt_and_answer(store: TokenStore, document: int) -> tuple[slice, slice]:
    """Return the tokens of a document before its first label, and the tokens from there on."""
    assert store.mask is not None
    start, stop = store.offsets[document : document + 2].tolist()
    first = start + 1 + int(np.argmax(store.mask[start + 1 : stop] > 0))
    return slice(start, first), slice(first, stop)
