"""The first documents as a model sees them: what is learned is marked, and long ones are shortened."""

from __future__ import annotations

from dataclasses import replace

from aliquot.data.batches import Batches
from aliquot.data.data_order import TrainStore
from aliquot.data.data_summary import examples, header
from aliquot.data.formats import IMPLICIT_PROMPT
from aliquot.data.micro_batch_rows import SequenceFormat
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
    assert "learned > d [... 1 character ...] g" in short
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


def test_summary_begins_at_the_example_that_is_asked_for() -> None:
    tokenizer = byte_level()
    store = memory_store([tokenizer.encode(text) for text in ("one", "two", "three")])
    shown = list(examples(TrainStore(store), tokenizer, text=True, first=3))
    assert shown[0].startswith("example 3: ") and shown[-1].endswith("three")


def test_the_header_counts_epochs_as_the_metrics_do() -> None:
    """The last step of the run is smaller: three epochs of five sequences are four steps of four."""
    source = TrainStore(memory_store([[1, 2, 3]] * 5))
    format = SequenceFormat(8, 0, packed=False)
    batches = Batches([source], format, seed=1, global_batch_size=4, micro_batch_size=1, epochs=3.0)
    steps = batches.total_steps(None)
    assert steps == 4 and header(batches, steps, {})[-1].endswith("this run: 3 epochs")
    assert batches.step_batch(steps - 1, 0, 1).epoch == 3.0


def test_one_is_singular_in_the_header() -> None:
    format = SequenceFormat(8, 0, packed=False)
    for left_out, more in (
        ({}, ""),
        ({IMPLICIT_PROMPT: 2}, "; the prompt of 2 pairs is the common beginning of their answers"),
    ):
        source = TrainStore(replace(memory_store([[1, 2, 3]]), left_out=left_out))
        batches = Batches([source], format, seed=1, global_batch_size=1, micro_batch_size=1, epochs=1.0)
        first, *_, last = header(batches, 1, {})
        assert first == f"1 document, 3 tokens; 1 step of 1 sequence of 8, a document each{more}"
    assert last == "an epoch: 1 sequence, 1 step; this run: 1 epoch"
