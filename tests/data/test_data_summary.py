"""The first documents as a model sees them: what is learned is marked, and long ones are shortened."""

from __future__ import annotations

from aliquot.data.data_order import TrainStore
from aliquot.data.data_summary import examples
from tests.data.stores import byte_level, memory_store


def test_summary_marks_labels_and_shortens_the_rest() -> None:
    tokenizer = byte_level()
    words = [tokenizer.encode(word, add_special_tokens=False) for word in ("fox\n", "dog", "now ", "stop")]
    ids = [token for word in words for token in word]
    mask = [n % 2 for n, word in enumerate(words) for _ in word]
    source = TrainStore(memory_store([ids * 3, ids, ids], [mask * 3, mask, mask]), "talks")
    whole = list(examples(source, tokenizer))
    assert whole[0] == f"example 1 of talks: {3 * len(ids)} tokens, {3 * sum(mask)} are learned"
    assert whole[1:4] == ["        | fox", "        | ", "learned > dog"]
    assert len([line for line in whole if line.startswith("example")]) == 2
    assert len([line for line in whole if line.startswith("learned > ")]) == 2 * 3 + 2
    short = list(examples(source, tokenizer, max_characters=2))
    assert "learned > d [... 1 characters ...] g" in short
    rest = sum(len(word) for word in words)
    assert f"        | [... {rest} more tokens ...]" in short


def test_summary_shows_plain_text_on_request() -> None:
    tokenizer = byte_level()
    source = TrainStore(memory_store([tokenizer.encode("fox")]))
    assert list(examples(source, tokenizer)) == []
    endless = TrainStore(memory_store([tokenizer.encode("fox ") * 20_000]))
    assert list(examples(endless, tokenizer, text=True))[-1].endswith(" more tokens ...]")
    ids = len(tokenizer.encode("fox"))
    assert list(examples(source, tokenizer, text=True)) == [
        f"example 1: {ids} tokens, {ids - 1} are learned", "        | <s>", "learned > fox"
    ]  # fmt: skip
