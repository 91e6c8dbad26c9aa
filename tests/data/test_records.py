"""Compressed files, CSV and JSON arrays are read as their plain counterparts, piece by piece, and never cut short."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.config.data_section import DataSection
from aliquot.core.errors import UserError
from aliquot.data import documents, json_records
from aliquot.data.documents import Document, text_documents
from aliquot.data.file_source import FileSource, record_documents

TALKS = [{"text": f"row {n} \u00e9 {'x' * (n % 7)}"} for n in range(300)]
LINES = "".join(json.dumps(talk) + "\n" for talk in TALKS)


def zstd(data: bytes) -> bytes:
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(data)
    return bytes(packed.getvalue())


def table() -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["id", "text"])
    writer.writerows([n, talk["text"]] for n, talk in enumerate(TALKS))
    return text.getvalue().encode()


def texts(path: Path) -> list[str]:
    source = FileSource.find(DataSection(path=str(path)), path.parent / "cache", "data.path")
    found = list(source.documents())
    assert found[-1].done_bytes <= source.total_bytes
    return [document.text for document in found if not document.blank]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES.encode()),
        ("A.JSONL", LINES.encode()),
        ("a.ndjson.GZ", gzip.compress(LINES.encode())),
        ("a.jsonl.gz", gzip.compress(LINES.encode())),
        ("a.jsonl.zst", zstd(LINES.encode())),
        ("two.jsonl.gz", gzip.compress(LINES.encode()[:100]) + gzip.compress(LINES.encode()[100:])),
        ("array.json", json.dumps(TALKS).encode()),
        ("pretty.json", b"\xef\xbb\xbf \n" + json.dumps(TALKS, indent=2, ensure_ascii=False).encode() + b"\n"),
        ("array.json.zst", zstd(json.dumps(TALKS).encode())),
        ("lines.json", LINES.encode()),
        ("a.csv", table()),
        ("a.csv.gz", gzip.compress(b"\xef\xbb\xbf" + table())),
    ],
)
def test_the_same_documents_however_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    monkeypatch.setattr(json_records, "_BLOCK_CHARACTERS", 100)
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == [talk["text"] for talk in TALKS]
    if ".json" not in Path(name).suffixes:
        assert texts(tmp_path) == [talk["text"] for talk in TALKS], "a directory has them, too"


# What JSON within a table may say, and UTF-8 cannot.
HALF = b'messages\n"[{""role"": ""user"", ""content"": ""hi""}, {""role"": ""assistant"", ""content"": ""\\ud83d""}]"\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl.gz", gzip.compress(LINES.encode())[:-200], r"cut\.jsonl\.gz: cannot be read \(Truncated"),
        ("cut.jsonl.zst", zstd(LINES.encode())[:-20], r"cut\.jsonl\.zst: cannot be read \(Truncated"),
        ("bad.jsonl.gz", b"no archive at all", r"bad\.jsonl\.gz: cannot be read"),
        ("cut.json", json.dumps(TALKS).encode()[:-5], "cut.json: not a JSON array of records .* in record 300"),
        ("bad.json", b'[{"text": "a"}, {"text" "b"}]' + b" " * 100, "bad.json: not a JSON array .* in record 2"),
        ("more.json", b'[{"text": "a"}] {"text": "b"}', "more.json: something follows the array of records"),
        ("number.json", b"[7]", "number.json, record 1: a record must be a JSON object, not int"),
        ("long.json", b'[{"text": "a", "id": ' + b"1" * 5000 + b"}]", "long.json: not a JSON array of records"),
        ("half.json", b'[{"text": "\\ud800"}]', "half.json, record 1: a field holds half of a surrogate pair"),
        ("half.csv", HALF, "half.csv:2: a field holds half of a surrogate pair"),
        ("bytes.json", b'[{"text": "\xff"}]', "bytes.json: not UTF-8 text"),
        ("short.csv", b"text,id\nb\n", "short.csv:2: 1 values, but the first line names 2"),
        ("quote.csv", b'text,id\n"a,1\n', "quote.csv:2: not CSV"),
        ("names.csv", b"body,id\na,1\n", "names.csv: no known field; there are body, id"),
        ("bytes.csv", b"text\ncaf\xe9s\n", "bytes.csv, after line 0: not UTF-8 text"),
        ("empty.csv", b"", "empty.csv: no fields: an empty file, or no header"),
    ],
)
def test_damaged_files_are_named_not_cut_short(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        texts(tmp_path / name)
    assert "\n" not in str(caught.value)


_VALUES = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text() | st.lists(st.integers())


@settings(max_examples=25)
@given(st.lists(st.dictionaries(st.text(), _VALUES), max_size=8), st.sampled_from([None, 1]), st.integers(7, 200))
def test_array_in_blocks_equals_json(records: list[object], indent: int | None, block: int) -> None:
    data = json.dumps(records, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        data.decode()
    except UnicodeDecodeError:
        return

    class Blocks(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(block)

    assert list(json_records._elements(Blocks(data), Path("x"))) == [(record, "") for record in records]


def test_long_file_is_a_document_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "\ufeff" + "one\r\ntwo \u00e9\u8a9e\r\n" * 50
    (tmp_path / "a.txt").write_bytes(whole.encode())
    for size in (1, 3, 7, 10_000):
        monkeypatch.setattr(documents, "PART_BYTES", size)
        found = list(text_documents(tmp_path / "a.txt", "file"))
        assert "".join(part.text for part in found) == whole.removeprefix("\ufeff").replace("\r\n", "\n")
        assert [part.ended for part in found] == [False] * (len(found) - 1) + [True]
    (tmp_path / "bad.txt").write_bytes(b"a" * 20 + b"\xc3(")
    monkeypatch.setattr(documents, "PART_BYTES", 7)
    with pytest.raises(UserError, match=r"bad\.txt: not UTF-8 text \(invalid continuation byte at byte 20\)"):
        list(text_documents(tmp_path / "bad.txt", "file"))


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 1 << 16)
    monkeypatch.setattr(json_records, "_BLOCK_CHARACTERS", 1 << 14)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some words\n" * (1 << 19)))
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 1000}] * 2000))
    seen = 0

    def read(found: Document) -> int:
        return len(found.text)

    tracemalloc.start()
    try:
        seen += sum(map(read, text_documents(tmp_path / "a.txt.gz", "file")))
        seen += sum(map(read, record_documents(tmp_path / "a.json", DataSection(path="x"))))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert seen == 11 * (1 << 19) + 2_000_000
