"""Where a long text may be cut so that its pieces, encoded one by one, give exactly the tokens of the whole.

Encoding takes hundreds of bytes of memory a character, so a document of many megabytes must be cut. That is
exact for two families of tokenizers; any other text is left whole.

- byte-level BPE whose pre-tokenizer splits by one of the patterns below: in `x\\ny`, with x and y ASCII letters, the
  newline is always a word of its own under each of them, and no word looks further than one character ahead. In `x y`,
  with any letters, a word ends at x, and the next one begins with the space.
- sentencepiece-style BPE with byte fallback whose vocabulary has no newline but the byte token: nothing merges across
  a newline. A piece begins with its newline, so the "▁" that is put in front of each encoded text stands alone there
  and is dropped (`Cut.drop`). Where no token has a "▁" behind another character, nothing merges across `x y` either:
  the next piece is without the space, and the "▁" that is put in front stands for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PIECE_CHARACTERS = 1 << 16
_LETTER = r"[^\W\d_]"

_WORDS = (
    # Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Qwen 2, 2.5, 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Cut:
    """A cut is a match of `pattern`, which is no part of any piece; a piece that begins with a newline then has `drop`
    tokens too many."""

    pattern: re.Pattern[str]
    drop: int


def cut_of(tokenizer: str) -> Cut | None:
    """The cut that is exact for a tokenizer, given as its tokenizer.json; None: do not cut."""
    spec: dict[str, Any] = json.loads(tokenizer)
    model, normalizer, splitter = spec["model"], spec["normalizer"], spec["pre_tokenizer"]
    plain = all(
        "\n" not in token["content"]
        and not (token["lstrip"] or token["rstrip"] or token["single_word"])
        and not token["content"][-1:].isalpha()
        for token in spec["added_tokens"]
    )
    spaces = not any(" " in token["content"] for token in spec["added_tokens"])
    if model.get("type") != "BPE" or model.get("dropout") or not plain:
        return None
    if _is_byte_level(splitter) and (normalizer is None or normalizer["type"] == "NFC"):
        return _cut(r"(?<=[A-Za-z]\n)(?=[A-Za-z])", rf"(?<={_LETTER})(?= {_LETTER})" if spaces else None, drop=0)
    if _is_sentencepiece(normalizer, splitter) and _has_barrier(model):
        spaces = spaces and not any("▁" in token.lstrip("▁") for token in model["vocab"])
        return _cut(r"(?<=[A-Za-z])(?=\n)", rf"(?<={_LETTER}) (?={_LETTER})" if spaces else None, drop=1)
    return None


def _cut(newline: str, space: str | None, drop: int) -> Cut:
    return Cut(re.compile(newline if space is None else f"{newline}|{space}"), drop)


def pieces(text: str, cut: Cut | None, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """`text` in pieces of a little over so many `characters`, or whole where no cut is exact."""
    start = 0
    while cut is not None and len(text) - start > characters:
        match = cut.pattern.search(text, start + max(1, characters))
        if match is None:
            break
        yield text[start : match.start()]
        start = match.end()
    yield text[start:] if start else text


def _is_byte_level(splitter: dict[str, Any] | None) -> bool:
    if splitter is None:
        return False
    if splitter["type"] == "ByteLevel":
        return bool(splitter["use_regex"]) and not splitter["add_prefix_space"]
    if splitter["type"] != "Sequence" or [step["type"] for step in splitter["pretokenizers"]] != ["Split", "ByteLevel"]:
        return False
    split, level = splitter["pretokenizers"]
    known = split["pattern"].get("Regex") in _WORDS and split["behavior"] == "Isolated" and not split["invert"]
    return known and not level["use_regex"] and not level["add_prefix_space"]


def _is_sentencepiece(normalizer: dict[str, Any] | None, splitter: dict[str, Any] | None) -> bool:
    if splitter is None and normalizer is not None:
        return normalizer == {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
    return normalizer is None and splitter == {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }


def _has_barrier(model: dict[str, Any]) -> bool:
    """Whether a newline is always the byte token, with which nothing merges."""
    affixes = model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]
    vocabulary = model["vocab"]
    return model["byte_fallback"] and not affixes and "<0x0A>" in vocabulary and not any("\n" in t for t in vocabulary)
