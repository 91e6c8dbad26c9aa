"""A stream is tokenised in segments: the same sequences at any world size, and where a killed run left off."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aliquot.config.schema import DataSection
from aliquot.core.errors import UserError
from aliquot.data.batch_prefetch import BatchPrefetcher
from aliquot.data.batches import Batches
from aliquot.data.data_summary import StreamedIrregularities
from aliquot.data.documents import Document, text_documents
from aliquot.data.prepare import Prepared, prepare
from aliquot.data.token_stream import Segment, segment_directory
from aliquot.data.workload import BatchSize
from tests.data.stores import byte_level, damage_every_file
from tests.data.test_chat import CHATML

SIZE = BatchSize(total=4, micro=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    byte_level().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Five files of ten documents, all different."""
    (tmp_path / "corpus").mkdir()
    for file in range(5):
        lines = [f"{file} {line} {'x' * ((7 * line + file) % 40)}" for line in range(10)]
        (tmp_path / f"corpus/{file}.txt").write_text("\n".join(lines))
    return tmp_path / "corpus"


def section(path: Path, cache: Path, **settings: object) -> DataSection:
    keys = {"document": "line", "sequence_length": 24, "shuffle_buffer": 12, "add_eos": True, **settings}
    return DataSection(path=str(path), streaming=True, cache_directory=cache, **keys)


def stream(settings: DataSection, model: Path) -> tuple[Prepared, Batches]:
    prepared = prepare(settings, model, 300)
    return prepared, Batches.of(prepared, settings, 5, SIZE, None)


def documents(batches: Batches, steps: range, world_size: int = 1) -> list[str]:
    """The documents of all micro-batches, as text; cut documents in parts."""
    tokenizer, texts = byte_level(), []
    for step in steps:
        for rank in range(world_size):
            for micro in batches.step_batch(step, rank, world_size).micro_batches:
                if micro is not None:
                    pieces = (micro.input_ids[start:stop] for start, stop in pairwise(micro.edges))
                    decoded = (tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces)
                    texts += [text for text in decoded if text]  # padding has none
    return texts


def segments(directory: Path) -> list[Segment]:
    made = (Segment.read(segment_directory(directory, index)) for index in range(99))
    return [segment for segment in made if segment is not None]


@pytest.mark.few(1)
@pytest.mark.parametrize("packing", [True, False])
def test_stream_has_every_document_once_in_each_turn(corpus: Path, model: Path, tmp_path: Path, packing: bool) -> None:
    settings = section(corpus, tmp_path / "cache", packing=packing, sequence_length=64)
    prepared, batches = stream(settings, model)
    directory = prepared.streams[""].directory
    assert len(segments(directory)) == 1, "training may begin"
    lines = [line for file in sorted(corpus.iterdir()) for line in file.read_text().split("\n")]
    batches.wait_for(99)
    first, *_, last = facts = segments(directory)
    assert (len(facts), first.is_last, last.is_last) == (5, False, True)
    turn = sum(segment.sequences for segment in facts)
    steps = range(-(-2 * turn // SIZE.total))
    taken = documents(batches, steps)
    assert set(Counter(text.strip() for text in taken).values()) <= {2, 3}  # the last step begins a third turn
    assert {text.strip() for text in taken} == {line.strip() for line in lines}
    one, two = taken[:50], taken[50:100]
    assert sorted(one) == sorted(two) != one != two, "each turn in another order"
    for number in range(4):  # documents stay in their segment
        assert sorted(one[12 * number : 12 * number + 12]) == sorted(lines[12 * number : 12 * number + 12])
    _, again = stream(settings, model)
    for world_size in (2, 3):
        assert sorted(documents(again, steps, world_size)) == sorted(taken)
        for step in steps:
            whole, share = (each.step_batch(step, 0, world_size) for each in (batches, again))
            assert (whole.predicted, whole.tokens, whole.sequences) == (share.predicted, share.tokens, share.sequences)
    assert again.determinants() == batches.determinants()
    batches.close()
    again.close()


def test_streams_are_mixed_by_weight(corpus: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text("".join(f'{{"text": "more {n} {"y" * (n % 30)}"}}\n' for n in range(60)))
    sources = [
        {"name": "lines", "path": str(corpus), "document": "line", "weight": 3},
        {"name": "records", "path": str(tmp_path / "more.jsonl"), "weight": 1},
    ]
    settings = DataSection(
        sources=sources, streaming=True, shuffle_buffer=12, sequence_length=24, cache_directory=tmp_path / "cache"
    )
    (_, batches), (_, again) = (stream(settings, model) for _ in range(2))
    steps = range(30)
    of_lines, of_records = np.sum([batches.step_batch(step, 0, 1).tokens_of for step in steps], axis=0)
    assert of_lines / of_records == pytest.approx(3, rel=0.2)  # by the first segments
    taken = documents(batches, steps)
    assert sorted(documents(again, steps, world_size=3)) == sorted(taken)
    assert {text.split()[0] for text in taken if "x" in text or "y" in text} > {"more"}
    batches.close()
    again.close()


def test_what_is_left_out_of_later_segments_is_reported(model: Path, tmp_path: Path) -> None:
    records = [json.dumps({"text": f"record {number}"}) for number in range(40)]
    records[3] = records[20] = json.dumps({"text": " "})
    records[17] = records[30] = "no record"
    (tmp_path / "records.jsonl").write_text("\n".join(records))
    settings = section(tmp_path / "records.jsonl", tmp_path / "cache", document=None, unused_fields=["txet"])
    for _ in range(2):  # the second time from the cache
        _, batches = stream(settings, model)
        report = StreamedIrregularities(batches)
        assert list(report.news()) == []
        batches.wait_for(99)
        unknown, news = sorted(report.news())
        assert "1 x a field in data.unused_fields that no record has" in unknown and "did you mean 'text'" in unknown
        assert news.startswith("data: 2 x a line or an element that is no JSON record, left out (the first: ")
        assert "records.jsonl:18: " in news and list(report.news()) == []
        (totals,) = report.totals()
        assert totals.startswith("data: in all segments 2 x a blank record, left out; 2 x a line or an element ")
        batches.close()


def test_chats_are_streamed(tmp_path: Path, model: Path) -> None:
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"it is {n}"}] for n in range(30)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    settings = section(
        tmp_path / "chats.jsonl", tmp_path / "cache", document=None, chat_template=CHATML, sequence_length=99
    )
    _, batches = stream(settings, model)
    learned = [
        byte_level().decode(micro.labels[micro.labels >= 0])
        for step in range(2)
        for micro in batches.step_batch(step, 0, 1).micro_batches
        if micro is not None
    ]
    assert all(f"it is {n}</s>" in "".join(learned) for n in range(12))
    assert "?" not in "".join(learned)
    batches.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files of text in the order in which they are opened."""
    names: list[str] = []

    def noted(path: Path, unit: Any) -> Iterator[Document]:
        names.append(path.name)
        return text_documents(path, unit)

    monkeypatch.setattr("aliquot.data.file_source.text_documents", noted)
    return names


def test_killed_stream_continues_at_its_place(corpus: Path, model: Path, tmp_path: Path, opened: list[str]) -> None:
    """Segments are made a few before they are needed; a later run reads no file before the place of the last one."""
    settings = section(corpus, tmp_path / "cache", shuffle_buffer=4)
    prepared, killed = stream(settings, model)
    killed.step_batch(1, 0, 1)
    killed.close()
    made = segments(prepared.streams[""].directory)
    assert 2 <= len(made) < 9
    _, later = stream(settings, model)
    _, whole = stream(section(corpus, tmp_path / "other", shuffle_buffer=4), model)
    opened.clear()
    texts = documents(later, range(20))
    assert opened == [f"{file}.txt" for file in range(made[-1].place[0], 5)]
    assert texts == documents(whole, range(20))
    later.close()
    whole.close()


def test_damaged_segments_are_made_again(
    corpus: Path, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = section(corpus, tmp_path / "cache", shuffle_buffer=4)
    prepared, batches = stream(settings, model)
    before = documents(batches, range(20))
    batches.close()
    for seed in range(3):
        files = damage_every_file(prepared.streams[""].directory, seed)
        assert {"segment.json", "tokens.bin", "offsets.bin"} < {file.name for file in files}
        caplog.clear()
        prepared, again = stream(settings, model)
        other = Batches.of(Prepared.from_json(prepared.to_json()), settings, 5, SIZE, None)
        assert documents(again, range(20)) == before == documents(other, range(20))
        again.close()
        assert sum("it is made again" in text for text in caplog.messages) == len(segments(files[0].parents[1]))


def test_nodes_that_share_a_cache_take_turns(corpus: Path, model: Path, tmp_path: Path, opened: list[str]) -> None:
    """Each node reads every file once."""
    makers = [
        prepare(section(corpus, tmp_path / cache, shuffle_buffer=4), model, 300).streams[""].maker
        for cache in ("shared", "shared", "alone")
    ]
    opened.clear()
    for index in range(1, 13):
        for maker in (makers[index // 2 % 2], makers[2]):
            assert maker is not None
            maker.make(index)
    assert max(Counter(opened).values()) == 3
    shared, alone = (segments(maker.directory) for maker in makers[1:] if maker is not None)
    assert shared == alone and len(shared) == 13


def test_error_late_in_the_data_ends_training_there(corpus: Path, model: Path, tmp_path: Path) -> None:
    (corpus / "3.txt").write_bytes(b"\xff\n" * 10)
    _, batches = stream(section(corpus, tmp_path / "cache"), model)
    with BatchPrefetcher(batches, 0, 1, first=0, stop=99) as ahead:
        ahead.take(0)
        with pytest.raises(UserError, match=r"3\.txt:1: not UTF-8 text"):
            for step in range(1, 99):
                ahead.take(step)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aliquot-")]


def test_waiting_for_a_segment_ends_with_the_run(corpus: Path, model: Path, tmp_path: Path) -> None:
    prepared, batches = stream(section(corpus, tmp_path / "cache"), model)
    other = Batches.of(Prepared.from_json(prepared.to_json()), section(corpus, tmp_path), 5, SIZE, None)
    with BatchPrefetcher(other, 0, 1, first=30, stop=31):  # a rank that makes no segments
        pass
    batches.close()
