"""The first documents of a source as a model sees them, with what is learned of them marked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from aliquot.data.streams import TrainStore

_EXAMPLES = 2
_LEARNED, _READ = "learned > ", "        | "


def examples(
    source: TrainStore, tokenizer: Any, most_characters: int | None = None, text: bool = False
) -> Iterator[str]:
    """Lines, those of what is learned marked; of plain text, all of which is learned, none unless `text`.

    `most_characters` of a stretch are shown.
    """
    store = source.store
    if store.mask is None and not text:
        return
    name = f" of {source.name}" if source.name else ""
    for document in range(min(_EXAMPLES, store.documents)):
        start, stop = int(store.offsets[document]), int(store.offsets[document + 1])
        ids = store.tokens[start:stop].tolist()
        mask = [1] * len(ids) if store.mask is None else store.mask[start:stop].tolist()
        mask[0] = 0  # nothing comes before it
        yield f"example {document + 1}{name}: {len(ids):,} tokens, {sum(mask):,} are learned"
        at = 0
        for bit, stretch in groupby(mask):
            length = len(list(stretch))
            said = tokenizer.decode(ids[at : at + length], skip_special_tokens=False)
            at += length
            yield from (f"{_LEARNED if bit else _READ}{line}" for line in _shortened(said, most_characters).split("\n"))


def _shortened(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
