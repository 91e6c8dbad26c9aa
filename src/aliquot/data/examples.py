"""The first documents of a source as a model sees them, with what is learned of them marked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from aliquot.data.streams import TrainStore

_EXAMPLES = 2
_MOST_TOKENS = 8192  # of an example: a file of any size may be one
_MOST_STRETCHES = 8  # of one that is shortened
_LEARNED, _READ = "learned > ", "        | "


def examples(
    source: TrainStore, tokenizer: Any, most_characters: int | None = None, text: bool = False
) -> Iterator[str]:
    """Lines, those of what is learned marked; of plain text, all of which is learned, none unless `text`.

    `most_characters` of a stretch are shown, and the first stretches alone; None: nearly everything.
    """
    store = source.store
    if store.mask is None and not text:
        return
    name = f" of {source.name}" if source.name else ""
    for document in range(min(_EXAMPLES, store.documents)):
        start, stop = int(store.offsets[document]), int(store.offsets[document + 1])
        # Before the first token there is nothing that it could be learned from.
        learned = stop - start - 1 if store.mask is None else int(store.mask[start + 1 : stop].sum())
        yield f"example {document + 1}{name}: {stop - start:,} tokens, {learned:,} are learned"
        ids = store.tokens[start : min(stop, start + _MOST_TOKENS)].tolist()
        mask = [0] + ([1] * (len(ids) - 1) if store.mask is None else store.mask[start + 1 : start + len(ids)].tolist())
        at, stretches = 0, [(bit, len(list(stretch))) for bit, stretch in groupby(mask)]
        for bit, length in stretches if most_characters is None else stretches[:_MOST_STRETCHES]:
            said = tokenizer.decode(ids[at : at + length], skip_special_tokens=False)
            at += length
            yield from (f"{_LEARNED if bit else _READ}{line}" for line in _shortened(said, most_characters).split("\n"))
        if at < stop - start:
            yield f"{_READ}[... {stop - start - at:,} more tokens ...]"


def _shortened(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
