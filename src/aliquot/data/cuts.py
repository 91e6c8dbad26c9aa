"""Where a long text may be cut so that its pieces, encoded one by one, give exactly the tokens of the whole.

Encoding takes hundreds of bytes of memory a character, so a document of many megabytes must be cut. That is
exact for two families of tokenizers. Any other text stays whole up to 262,144 characters, and so does a stretch of
letters alone, the bases of a genome for example; what is longer is cut all the same, before a space or a newline if one
is near. A token or two there may be others than those of the whole, with a space too many where "▁" is put in front of
letters: nobody has the memory for a gigabyte in one line.

- byte-level BPE whose pre-tokenizer splits by one of the patterns below. No word of theirs looks further than one
  character ahead. Where a letter follows a newline that follows no space, a word begins with it. In `x y`, with any
  letters, and in `x.y` and `x1`, a word ends at x.
- BPE over whole texts with byte fallback, as sentencepiece's: what its merges never put behind a letter ends what is
  before it. That is so for the newline, mostly for digits and for the marks of Chinese and Japanese, and for a space
  where no token has a "▁" behind another character. Where "▁" is put in front of each encoded text (Llama 2, not
  Gemma), it stands alone before these, too, and is dropped (`Cut.drop_before`), and a piece after a space is without
  it: the "▁" that is put in front stands for it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

PIECE_CHARACTERS = 1 << 16
LONGEST_CHARACTERS = 1 << 18  # without a place where a cut is exact
_BEYOND = 8  # characters behind a place that a pattern looks at, and more
_NEAR = 1 << 12
_LETTER = r"[^\W\d_]"
_STABLE = "[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]"  # letters that no normalization changes
_MARKS = '\n0123456789.,;:!?()"/+=<>。，、；：！？（）「」《》'  # noqa: RUF001

# How words are split, and by what beside them.
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


@dataclass(frozen=True)
class Cut:
    """A cut is a match of `pattern`, which is no part of any piece. Where that is a space, `drop_before` is no None: a
    later piece that begins with one of its characters has a token in front that the whole has not."""

    pattern: re.Pattern[str]
    drop_before: str | None = None


def cut_of(tokenizer: str) -> Cut | None:
    """The cut that is exact for a tokenizer, given as its tokenizer.json; None: do not cut."""
    spec: dict[str, Any] = json.loads(tokenizer)
    model, normalizer, splitter = spec["model"], spec["normalizer"], spec["pre_tokenizer"]
    # Added tokens are looked for in normalized text, too, where their spaces are "▁".
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
    marks = set(_MARKS) - _behind_letters(added)
    if _is_byte_level(splitter) and normalizer in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        # Composed letters are taken apart where Unicode says so, and end in no letter then.
        before = _LETTER if normalizer is None or normalizer["type"] != "NFC" else _STABLE
        digits, others = _of(marks, str.isdigit), _of(marks, lambda mark: not mark.isspace() and not mark.isdigit())
        places = [
            rf"(?<=\S\n)(?={_LETTER})",
            # Some numbers are no digits, and letters to Python: a word has both.
            rf"(?<=[A-Za-z])(?=[{digits}])" if digits else "",
            rf"(?<={before})(?=[{others}])" if others else "",
            rf"(?<={_LETTER})(?= {_LETTER})" if spaces else "",
        ]
        return Cut(_either(places))
    begun = _is_sentencepiece(normalizer, splitter)
    if not (begun or _is_without_prefix(normalizer, splitter)) or not _falls_back_to_bytes(model):
        return None
    merged = [pair.replace(" ", "") if isinstance(pair, str) else "".join(pair) for pair in model["merges"]]
    if any("<0x" in token for token in merged):
        return None
    firsts = {token[:1] for token in added}  # nothing is put in front of an added token
    ends = _of(marks - _behind_letters(merged) - firsts, lambda _: True)
    spaces = spaces and not any("▁" in token.lstrip("▁") for token in merged)
    spaces = spaces and not (begun and any(re.fullmatch(_LETTER, first) for first in firsts))
    space = rf"(?<={_LETTER}) (?={_LETTER})" if begun else rf"(?<={_LETTER})(?= {_LETTER})"
    places = [rf"(?<={_LETTER})(?=[{ends}])" if ends else "", space if spaces else ""]
    return Cut(_either(places), ends if begun else None) if any(places) else None


def _either(places: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(place for place in places if place))


def _of(marks: set[str], wanted: Callable[[str], bool]) -> str:
    """As the inside of a character class, which none of `_MARKS` has a meaning in."""
    return "".join(sorted(filter(wanted, marks)))


def _behind_letters(tokens: Iterable[str]) -> set[str]:
    """Those of `_MARKS` that are in a token behind a letter or the "▁" that stands for a space."""
    behind = re.compile(rf"(?:{_LETTER}|▁)([{_MARKS}])")
    return {mark for token in tokens for mark in behind.findall(token)}


def pieces(
    text: str,
    cut: Cut | None,
    characters: int = PIECE_CHARACTERS,
    searched: int = 0,
    longest: int = LONGEST_CHARACTERS,
    forced: Callable[[], None] = lambda: None,
) -> Iterator[str]:
    """`text` in pieces of a little over so many `characters`, of a little over `longest` where no cut is exact.
    `searched`: characters at its beginning of which is known that there is none; `forced` is called for each other
    cut."""
    start = 0
    while len(text) - start > characters:
        match, most = None, start + longest
        if cut is not None:
            match = cut.pattern.search(text, max(start + max(1, characters), searched), most + _BEYOND)
        if match is not None:
            stop, then = match.span()
        elif len(text) > most + _BEYOND:
            forced()
            stop, then = _near(text, max(start + 1, most - _NEAR), most, None if cut is None else cut.drop_before)
        else:
            break
        yield text[start:stop]
        start = then
    yield text[start:] if start else text


def _near(text: str, first: int, last: int, drop_before: str | None) -> tuple[int, int]:
    """Where to cut, and where the next piece begins: as `last` as can be without cutting a word, else there."""
    for at in range(last, first - 1, -1):
        if drop_before is None:
            if text[at] in " \n":
                return at, at
        elif text[at] in drop_before:  # the "▁" that is put in front is dropped
            return at, at
        elif text[at] == " " and text[at + 1] not in drop_before:  # it stands for the space
            return at, at + 1
    return last, last


def _is_byte_level(splitter: dict[str, Any] | None) -> bool:
    if splitter is None:
        return False
    *before, level = splitter["pretokenizers"] if splitter.get("pretokenizers") else [splitter]
    if level["type"] != "ByteLevel" or level["add_prefix_space"]:
        return False
    splits = [step["pattern"].get("Regex") for step in before if _isolates(step)]
    digits = sum(step["type"] == "Digits" for step in before)
    known = len(splits) + digits == len(before) and set(splits) <= {*_WORDS, *_BESIDE_WORDS}
    return known and (level["use_regex"] or not set(splits).isdisjoint(_WORDS))


def _isolates(step: dict[str, Any]) -> bool:
    return step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]


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


def _is_without_prefix(normalizer: dict[str, Any] | None, splitter: dict[str, Any] | None) -> bool:
    """Gemma's: spaces are "▁" before the splitter looks for them."""
    at_spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return splitter in (None, at_spaces) and normalizer == {
        "type": "Replace",
        "pattern": {"String": " "},
        "content": "▁",
    }


def _falls_back_to_bytes(model: dict[str, Any]) -> bool:
    """Whether a character without a token becomes bytes, with which nothing merges, and a "▁" is one token."""
    affixes = model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]
    needed = {"▁", *(f"<0x{byte:02X}>" for byte in range(256))}
    return model["byte_fallback"] and not affixes and needed <= model["vocab"].keys()
