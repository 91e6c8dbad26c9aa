"""A text encoded in pieces gives the tokens of the whole, for every tokenizer that is cut at all."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from aliquot.data.cuts import Cut, cut_of, pieces
from tests.data.stores import TEXT, byte_level, sentencepiece_like
from tests.examples import examples

TOKENIZERS = {"byte level": byte_level, "sentencepiece": sentencepiece_like}
# Everything that a cut could get wrong: runs of spaces and newlines, contractions, digits, specials, other scripts.
BITS = ["a", "Fox", "dog", "'s", "'", "1", "23", " ", "  ", "\n", "\n\n", "\r\n", "\t", "é", "e\u0301", "語", "🙂"]
BITS += ["</s>", "<s>", ".", "(", "x\ny", "the\nlazy", "now:\n", "\u0301", "x y", "the lazy", "a  b", "s It's", "다 그"]
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
    drops = [0, *(cut.drop if part.startswith("\n") else 0 for part in parts[1:])]
    missing = sum(not part.startswith("\n") for part in parts[1:]) if cut.drop else 0  # spaces
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


def test_what_is_not_known_to_be_exact_is_not_cut() -> None:
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
    across = {**spec["model"], "vocab": {**spec["model"]["vocab"], "a▁": 999}}
    assert list(pieces("x y x\ny", cut_of(json.dumps({**spec, "model": across})), 1)) == ["x y x", "\ny"]
    merged = {**spec["model"], "vocab": {**spec["model"]["vocab"], "a\n": 999}}
    assert cut_of(json.dumps({**spec, "model": merged})) is None
    assert cut_of(json.dumps({**spec, "model": {**spec["model"], "ignore_merges": True}})) is None
