"""Cut a long text into pieces that, encoded one by one, give the same tokens as the whole text.

Encoding needs hundreds of bytes of memory per character, so that a document of many megabytes must be cut. Cuts are
exact, which means that they do not change the tokens, for the two families of tokenizers below. For other tokenizers,
and in long stretches without an exact cut, a text is cut every 262,144 characters, before a space or a newline if one
is near. One or two tokens at an inexact cut may differ from the tokens of the whole text. If the tokenizer puts "▁" in
front of letters, an inexact cut may also add a space.

- Byte-level BPE whose pre-tokenizer splits words by one of the patterns below. These patterns look at most one
  character beyond a word. If a newline does not follow white space and a letter follows the newline, a word begins at
  this letter. In `x y`, where x and y are any letters, and in `x.y` and `x1`, a word ends after x.
- BPE over whole texts with byte fallback (sentencepiece): a token ends before a character that no merge puts after a
  letter. The newline and usually digits and Chinese and Japanese punctuation are such characters. The space is one if
  no token has a "▁" after another character. Some tokenizers put "▁" in front of each encoded text (Llama 2, not
  Gemma). Before the characters above, this "▁" is a separate token, which the encoder drops (`Cut.drop_before`). After
  a cut at a space, the next piece begins after the space, because the "▁" in front represents the space.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

PIECE_CHARACTERS = 1 << 16
LONGEST_CHARACTERS = 1 << 18  # a piece without an exact cut ends near this length
_BEYOND = 8  # the patterns examine at most this many characters after a cut
_NEAR = 1 << 12
_LETTER = r"[^\W\d_]"
_STABLE = "[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]"  # letters that normalization leaves unchanged
_MARKS = '\n0123456789.,;:!?()"/+=<>。，、；：！？（）「」《》'  # noqa: RUF001

# Patterns by which pre-tokenizers split words (_WORDS), and patterns of further splits (_BESIDE_WORDS).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (
    # Llama 3; Qwen 2, 2.5 and 3
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACE}",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACE}",
    # Qwen 3.5
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACE}",
    # gpt-oss and Llama 4; Mistral's from Nemo on
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACE}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACE}",
    # DeepSeek 3
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _SPACE,
)
_BESIDE_WORDS = (r"\p{N}{1,3}", r"\p{N}", "[一-龥぀-ゟ゠-ヿ]+")  # noqa: RUF001

_SPACES_TO_MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}  # a normalizer


@dataclass(frozen=True)
class Cut:
    """The exact cuts of a tokenizer are the matches of `pattern`. Matched characters belong to no piece.

    A piece that is not the first of its document, and begins with a character of `drop_before`, gets an additional
    first token, which must be dropped. `drop_before` is None for tokenizers that add no first token.
    """

    pattern: re.Pattern[str]
    drop_before: str | None = None


def cut_of(tokenizer: str) -> Cut | None:
    """Return the exact cuts of a tokenizer; None if the tokenizer has none. `tokenizer`: the text of tokenizer.json."""
    spec: dict[str, Any] = json.loads(tokenizer)
    model, normalizer, splitter = spec["model"], spec["normalizer"], spec["pre_tokenizer"]
    # Tokenizers also search for added tokens in the normalized text, in which spaces are "▁".
    added = [unicodedata.normalize("NFC", token["content"]).replace("▁", " ") for token in spec["added_tokens"]]
    plain = all(
        "\n" not in token["content"]
        and not (token["lstrip"] or token["rstrip"] or token["single_word"])
        and not re.fullmatch(_LETTER, token["content"][-1:])
        for token in spec["added_tokens"]
    )
    if model.get("type") != "BPE" or model.get("dropout") or not plain:
        return None
    spaces = not any(" " in token for token in added)
    marks = set(_MARKS) - _marks_after_letters(added)
    if _is_byte_level(splitter) and normalizer in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        # NFC never composes a few letters, such as U+0958: it writes them as a letter and a mark. The normalized text
        # then ends in a mark, not a letter.
        before = _LETTER if normalizer is None or normalizer["type"] != "NFC" else _STABLE
        digits = _character_class(marks, str.isdigit)
        signs = _character_class(marks, lambda mark: not mark.isspace() and not mark.isdigit())
        places = [
            rf"(?<=\S\n)(?={_LETTER})",
            # Only ASCII letters are safe here: Python counts some numbers as letters, and a word may hold both.
            rf"(?<=[A-Za-z])(?=[{digits}])" if digits else "",
            rf"(?<={before})(?=[{signs}])" if signs else "",
            rf"(?<={_LETTER})(?= {_LETTER})" if spaces else "",
        ]
        return Cut(re.compile("|".join(filter(None, places))))
    has_prefix = _is_sentencepiece(normalizer, splitter)
    if not (has_prefix or _is_without_prefix(normalizer, splitter)) or not _falls_back_to_bytes(model):
        return None
    merged = [pair.replace(" ", "") if isinstance(pair, str) else "".join(pair) for pair in model["merges"]]
    if any("<0x" in token for token in merged):
        return None
    firsts = {token[:1] for token in added}  # tokenizers put no "▁" in front of an added token
    ends = _character_class(marks - _marks_after_letters(merged) - firsts, lambda _: True)
    begins_with_letter = has_prefix and any(re.fullmatch(_LETTER, first) for first in firsts)
    spaces = spaces and not begins_with_letter and not any("▁" in token.lstrip("▁") for token in merged)
    space = rf"(?<={_LETTER}) (?={_LETTER})" if has_prefix else rf"(?<={_LETTER})(?= {_LETTER})"
    places = [rf"(?<={_LETTER})(?=[{ends}])" if ends else "", space if spaces else ""]
    return Cut(re.compile("|".join(filter(None, places))), ends if has_prefix else None) if any(places) else None


def _character_class(marks: set[str], selects: Callable[[str], bool]) -> str:
    """Return the selected marks for use inside [] in a regular expression, where none of `_MARKS` is special."""
    return "".join(sorted(filter(selects, marks)))


def _marks_after_letters(tokens: Iterable[str]) -> set[str]:
    """Return those characters of `_MARKS` that follow a letter or a "▁" (a space) in any of `tokens`."""
    pattern = re.compile(rf"(?:{_LETTER}|▁)([{_MARKS}])")
    return {mark for token in tokens for mark in pattern.findall(token)}


def pieces(
    text: str,
    cut: Cut | None,
    characters: int = PIECE_CHARACTERS,
    searched: int = 0,
    longest: int = LONGEST_CHARACTERS,
    forced: Callable[[], None] = lambda: None,
) -> Iterator[str]:
    """Yield `text` in pieces that end at the first exact cut after `characters`, or near `longest` if there is none.

    Args:
        searched: number of characters at the beginning of the text that are known to hold no exact cut.
        forced: called for each inexact cut.
    """
    start = 0
    while len(text) - start > characters:
        first, limit = max(start + max(1, characters), searched), start + longest
        match = None if cut is None else cut.pattern.search(text, first, limit + _BEYOND)
        if match is not None:
            stop, next_start = match.span()
        elif len(text) > limit + _BEYOND:
            forced()
            stop, next_start = _near(
                text, max(start + 1, limit - _NEAR), limit, None if cut is None else cut.drop_before
            )
        else:
            break
        yield text[start:stop]
        start = next_start
    yield text[start:] if start else text


def _near(text: str, first: int, last: int, drop_before: str | None) -> tuple[int, int]:
    """Return (end of this piece, start of the next piece) of an inexact cut.

    The cut is between two words, at the last such index in [first, last], else at `last`.
    """
    for at in range(last, first - 1, -1):
        if drop_before is None:
            if text[at] in " \n":
                return at, at
        elif text[at] in drop_before:  # the encoder drops the "▁" in front of the next piece
            return at, at
        elif text[at] == " " and text[at + 1] not in drop_before:  # the next piece gets a "▁" instead of the space
            return at, at + 1
    return last, last


def _is_byte_level(splitter: dict[str, Any] | None) -> bool:
    if splitter is None:
        return False
    *before, level = splitter["pretokenizers"] if splitter.get("pretokenizers") else [splitter]
    if level["type"] != "ByteLevel" or level["add_prefix_space"]:
        return False
    splits = [
        step["pattern"].get("Regex")
        for step in before
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    ]
    digits = sum(step["type"] == "Digits" for step in before)
    known = len(splits) + digits == len(before) and set(splits) <= {*_WORDS, *_BESIDE_WORDS}
    return known and (level["use_regex"] or not set(splits).isdisjoint(_WORDS))


def _is_sentencepiece(normalizer: dict[str, Any] | None, splitter: dict[str, Any] | None) -> bool:
    steps = [{"type": "Prepend", "prepend": "▁"}, _SPACES_TO_MARKS]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return (normalizer, splitter) in [({"type": "Sequence", "normalizers": steps}, None), (None, metaspace)]


def _is_without_prefix(normalizer: dict[str, Any] | None, splitter: dict[str, Any] | None) -> bool:
    """Return whether spaces become "▁" before splitting, without a "▁" in front of the text (Gemma)."""
    at_spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return splitter in (None, at_spaces) and normalizer == _SPACES_TO_MARKS


def _falls_back_to_bytes(model: dict[str, Any]) -> bool:
    """Return whether "▁" is a token, and a character without a token becomes bytes, which do not merge."""
    affixes = model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]
    needed = {"▁", *(f"<0x{byte:02X}>" for byte in range(256))}
    return model["byte_fallback"] and not affixes and needed <= model["vocab"].keys()
