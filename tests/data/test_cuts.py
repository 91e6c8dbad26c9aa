"""A text encoded in pieces gives the tokens of the whole, for every tokenizer that is cut at all."""

from __future__ import annotations

import base64
import json
import random
import re
import unicodedata
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aliquot.config.data_section import DataSection
from aliquot.data.cuts import _BESIDE_WORDS, _WORDS, Cut, cut_of, pieces
from aliquot.data.sources import sources_of
from aliquot.data.tokenizer import trained_tokenizer
from tests.data.stores import TEXT, byte_level, gemma_like, sentencepiece_like
from tests.examples import examples


def splitting(*steps: str | None) -> PreTrainedTokenizerFast:
    """Byte level BPE whose words are split by patterns one after the other; None: digits, then as GPT-2 does."""
    splits = [
        pre_tokenizers.Digits(individual_digits=True)
        if step is None
        else pre_tokenizers.Split(Regex(step), behavior="isolated")
        for step in steps
    ]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=None in steps)
    whole = byte_level()
    whole.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    return whole


TOKENIZERS = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece_like,
    "gemma": gemma_like,
    "smollm": partial(splitting, None),
    "deepseek": partial(splitting, r"\p{N}{1,3}", _BESIDE_WORDS[-1], _WORDS[-1]),
    **{f"words {number}": partial(splitting, words) for number, words in enumerate(_WORDS[:-1])},
}
# Everything that a cut could get wrong: runs of spaces and newlines, contractions, digits, specials, other scripts.
BITS = ["a", "Fox", "dog", "'s", "'", "1", "23", " ", "  ", "\n", "\n\n", "\r\n", "\t", "é", "e\u0301", "語", "🙂"]
BITS += ["</s>", "<s>", ".", "(", "x\ny", "the\nlazy", "now:\n", "\u0301", "x y", "the lazy", "a  b", "s It's", "다 그"]
BITS += ["x1", "½1", "1½", "語。", "a+b", 'x"', "。\nq", "<\u0338", "x\u0338", "\x1c\nx", "x<s>", "。\u0301"]
BITS += ["語\uff0c中", "a/b\n/c", "xY", "it'sx", "१\nx"]
texts = st.lists(st.sampled_from(BITS), max_size=40).map("".join)


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    return TOKENIZERS[name]()


@cache
def cut_by(tokenizer: PreTrainedTokenizerFast) -> Cut:
    cut = cut_of(tokenizer.backend_tokenizer.to_str())
    assert cut is not None
    return cut


def in_pieces(tokenizer: PreTrainedTokenizerFast, text: str, characters: int) -> list[int]:
    cut = cut_by(tokenizer)
    parts = list(pieces(text, cut, characters))
    rows = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
    begun = cut.drop_before is not None
    drops = [0, *(int(begun and part[0] in (cut.drop_before or "")) for part in parts[1:])]
    missing = sum(part[0] not in (cut.drop_before or "") for part in parts[1:]) if begun else 0  # spaces
    assert len("".join(parts)) == len(text) - missing
    return [token for row, drop in zip(rows, drops, strict=True) for token in row[drop:]]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.hypothesis
def test_pieces_have_the_tokens_of_the_whole(name: str) -> None:
    @settings(max_examples=examples(300))
    @given(texts, st.integers(0, 20))
    def check(text: str, characters: int) -> None:
        whole = tokenizer(name).encode(text, add_special_tokens=False)
        assert in_pieces(tokenizer(name), text, characters) == whole

    check()
    parts = list(pieces(TEXT * 9, cut_of(tokenizer(name).backend_tokenizer.to_str()), 50))
    assert len(parts) > 5


@pytest.mark.parametrize("path", ["models/stories15M", "models/stories260K", "tokenizers/llama3"])
def test_real_tokenizers_and_text(shared: Path, path: str) -> None:
    real = PreTrainedTokenizerFast(tokenizer_file=str(shared / path / "tokenizer.json"))
    for name in ("tinyshakespeare.txt", "wikitext2-raw-train-head.txt"):
        text = (shared / "data" / name).read_text()[:20_000]
        for each in (text, text.replace("\n", " ")):  # the second has no line at all
            assert len(list(pieces(each, cut_by(real), 200))) > 50
            assert in_pieces(real, each, 200) == real.encode(each, add_special_tokens=False)
    assert in_pieces(real, TEXT * 20, 30) == real.encode(TEXT * 20, add_special_tokens=False)


def test_unproven_tokenizers_are_not_cut() -> None:
    spec = json.loads(tokenizer("byte level").backend_tokenizer.to_str())
    lower = {"type": "Lowercase"}
    newline = {**spec["added_tokens"][0], "content": "x\ny"}
    greedy = {**spec["added_tokens"][0], "lstrip": True}
    unknown = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"[a-z\n]+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}  # fmt: skip
    for change in (
        {"normalizer": lower},
        {"pre_tokenizer": None},
        {"pre_tokenizer": unknown},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
        {"pre_tokenizer": {**spec["pre_tokenizer"], "add_prefix_space": True}},
        {"added_tokens": [newline]},
        {"added_tokens": [greedy]},
        {"model": {**spec["model"], "type": "Unigram"}},
        {"model": {**spec["model"], "dropout": 0.1}},
    ):
        assert cut_of(json.dumps({**spec, **change})) is None, change
    assert list(pieces(TEXT, None, 5)) == [TEXT]
    spaced = {**spec["added_tokens"][0], "content": "<|a b|>"}
    cut = cut_of(json.dumps({**spec, "added_tokens": [spaced]}))
    assert list(pieces("x y x\ny <|a b|>", cut, 1)) == ["x y x\n", "y <|a b|>"]
    spec = json.loads(tokenizer("sentencepiece").backend_tokenizer.to_str())

    def with_token(left: str, right: str) -> Cut | None:
        model = spec["model"]
        vocabulary = {**model["vocab"], left: 998, right: 999, left + right: 1000}
        merges = [*model["merges"], [left, right]]
        return cut_of(json.dumps({**spec, "model": {**model, "vocab": vocabulary, "merges": merges}}))

    assert list(pieces("x y x\ny", with_token("a", "▁"), 1)) == ["x y x", "\ny"]
    for mark in ("\n", "。", "7"):
        assert list(pieces(f"xyx{mark}y", with_token("a", "b"), 1)) == ["xyx", f"{mark}y"]
        assert list(pieces(f"xyx{mark}y", with_token("a", mark), 1)) == [f"xyx{mark}y"]
        assert list(pieces(f"xyx{mark}y", with_token("▁", mark), 1)) == [f"xyx{mark}y"]
    assert with_token("a", "<0x0A>") is None, "a byte that merges"
    without = [{name: at for name, at in spec["model"]["vocab"].items() if name != gone} for gone in ("▁", "<0xE2>")]
    for change in ({"ignore_merges": True}, *({"vocab": vocabulary} for vocabulary in without)):
        assert cut_of(json.dumps({**spec, "model": {**spec["model"], **change}})) is None


def test_text_without_cut_places_is_cut_at_the_limit() -> None:
    def cut(text: str, cut: Cut | None) -> tuple[list[str], int]:
        forced: list[None] = []
        parts = list(pieces(text, cut, 10, longest=200, forced=lambda: forced.append(None)))
        return parts, len(forced)

    letters = "acgt" * 120
    parts, forced = cut(letters, None)
    assert [len(part) for part in parts] == [200, 200, 80] and "".join(parts) == letters and forced == 2
    assert cut(letters[:205], None) == ([letters[:205]], 0)
    parts, forced = cut(TEXT * 20, None)
    assert "".join(parts) == TEXT * 20 and len(parts) == forced + 1 > 3
    assert all(len(part) <= 200 and part[0] in " \n" for part in parts[1:-1])
    mixed = letters + " the lazy dog. " * 30 + letters  # a place, but not everywhere
    for name in ("byte level", "gemma"):
        parts, forced = cut(mixed, cut_by(tokenizer(name)))
        assert "".join(parts) == mixed and max(map(len, parts)) <= 210 and 3 <= forced < len(parts) - 1
    begun = tokenizer("sentencepiece")
    nowhere = Cut(re.compile("(?!)"), cut_by(begun).drop_before)
    parts, forced = cut("the lazy dog " * 60, nowhere)
    assert forced == len(parts) - 1 > 2 and not any(part.startswith(" ") for part in parts)
    found = [token for part in parts for token in begun.encode(part, add_special_tokens=False)]
    assert found == begun.encode("the lazy dog " * 60, add_special_tokens=False)
    # A space before what the "▁" in front is dropped for stays in the piece before.
    numbers = "12 345 6 " * 60
    parts, forced = cut(numbers, nowhere)
    assert "".join(parts) == numbers and forced == len(parts) - 1 > 1
    assert all(part[0] in (nowhere.drop_before or "") for part in parts[1:])


def test_decomposed_letters_stay_with_their_successors() -> None:
    whole = splitting(_WORDS[1])
    plain = cut_by(whole)
    whole.backend_tokenizer.normalizer = normalizers.NFC()
    composed = cut_of(whole.backend_tokenizer.to_str())
    assert composed is not None
    apart = [each for each in map(chr, range(0x11000)) if each.isalpha() and unicodedata.normalize("NFC", each) != each]
    assert "\u095c" in apart, "a letter and a mark, to Hindi"
    for letter in apart:
        assert plain.pattern.search(f"{letter}.") and not composed.pattern.search(f"{letter}.")
    assert composed.pattern.search("語。") and composed.pattern.search("x.")


@pytest.mark.parametrize("added", ["foo>", "½>", "\u2039½", "m²", "x▁y>", "a.b>", "<e\u0301.>", "a\u037e"])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("name", ["sentencepiece", "gemma", "byte level"])
def test_added_tokens_keep_their_surroundings(added: str, normalized: bool, name: str) -> None:
    whole = TOKENIZERS[name]()
    whole.backend_tokenizer.add_tokens([AddedToken(added, normalized=normalized)])
    if cut_of(whole.backend_tokenizer.to_str()) is None:
        return
    for text in (f"the {added} quick", f"a{added}the", f"{added} then", f"fox.{added}", f"fox\n{added}\nit {added}."):
        assert in_pieces(whole, text, 0) == whole.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("path", ["models/stories15M", "tokenizers/llama3"])
def test_text_without_a_space_is_cut(shared: Path, path: str) -> None:
    real = PreTrainedTokenizerFast(tokenizer_file=str(shared / path / "tokenizer.json"))
    drawn = random.Random(0)
    coded = base64.b64encode(drawn.randbytes(6000)).decode()
    chinese = "".join(
        drawn.choices("的一是不了人我在有他这中大来上个国到说们为子和你地出道也时年得就那要下以生会自着去之", k=3000)
    )
    chinese = "".join(drawn.choice("，。、") + each if not index % 20 else each for index, each in enumerate(chinese))  # noqa: RUF001
    minified = "".join(f'{{"{word}":"{word[::-1]}"}},' for word in TEXT.split() * 30)
    for text in (coded, chinese, minified if path == "tokenizers/llama3" else coded[::-1]):
        assert len(list(pieces(text, cut_by(real), 100))) > 10
        assert in_pieces(real, text, 100) == real.encode(text, add_special_tokens=False)


def test_a_tokenizer_learns_the_same_from_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.txt"
    file.write_text((TEXT + "日本語、x1+y ").replace("\n", " ") * 40 + TEXT * 40)
    source = sources_of(DataSection(path=str(file)), tmp_path / "cache")[0][""]
    spec = []
    for characters in (1 << 20, 30):
        monkeypatch.setattr("aliquot.data.tokenizer.pieces", partial(pieces, characters=characters))
        trained = trained_tokenizer([source], 330, tmp_path / str(characters))
        spec.append(trained.backend_tokenizer.to_str())
    assert spec[0] == spec[1]
