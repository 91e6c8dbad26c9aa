"""A line may be as long as a disk, and an archive of kilobytes may hold it: memory is bounded all the same.

Compressed files, CSV and JSON arrays are read as their plain counterparts, piece by piece, and never cut short.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aliquot.config.data_section import DataSection, RecordsSection
from aliquot.core.errors import UserError
from aliquot.data import data_files, documents, file_source, record_files, table_files
from aliquot.data.documents import PART_BYTES, Document, Unit, text_documents
from aliquot.data.file_source import FileSource, record_documents
from aliquot.data.record_files import binary_documents
from aliquot.data.sources import source_of
from aliquot.data.table_files import in_table_process, open_arrow


def whole(parts: list[Document]) -> list[str]:
    """The documents that `parts` make, but blank ones."""
    texts = [""]
    for part in parts:
        texts[-1] += part.text
        texts += [""] * part.ended
    return [text for text in texts if text and not text.isspace()]


@example("a\n \na", "block", 1)
@given(st.text("ab \n\u00e4\r", max_size=40), st.sampled_from(["line", "block"]), st.integers(1, 9))
def test_parts_equal_whole_lines(text: str, unit: Unit, size: int) -> None:
    data = text.encode()
    expected = whole(list(documents._lines(io.BytesIO(data), lambda: 0, Path("x"), unit)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PART_BYTES", size)
        parts = list(documents._lines(io.BytesIO(data), lambda: 0, Path("x"), unit))
    found = ["".join(each.split("\r")) for each in whole(parts)]  # one may be cut from its newline
    assert [each.strip() for each in found] == ["".join(each.split("\r")).strip() for each in expected]


def test_lines_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\n \nb\nc\n\nd")
    assert [each.text for each in text_documents(tmp_path / "a.txt", "line")] == ["a", "b", "c", "d"]
    assert [each.text for each in text_documents(tmp_path / "a.txt", "block")] == ["a", "b\nc", "d"]
    (tmp_path / "b.txt").write_bytes(b"a\n\xffb")
    with pytest.raises(UserError, match=r"b.txt:2: not UTF-8 text"):
        list(text_documents(tmp_path / "b.txt", "line"))


@pytest.mark.parametrize("unit", ["line", "block"])
def test_archive_of_one_long_line(tmp_path: Path, unit: Unit) -> None:
    with gzip.open(tmp_path / "bomb.txt.gz", "wb", 1) as file:
        for _ in range(3):
            file.write(b"a" * PART_BYTES)
    parts = list(text_documents(tmp_path / "bomb.txt.gz", unit))
    assert sum(len(part.text) for part in parts) == 3 * PART_BYTES
    assert max(len(part.text) for part in parts) <= PART_BYTES and [part.ended for part in parts].count(True) == 1


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.json.gz", "bomb.csv.gz"])
def test_a_record_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (data_files, record_files):
        monkeypatch.setattr(module, "LONGEST_RECORD", 1 << 20)
    text = "a" * (3 << 20)
    lines = {"jsonl": json.dumps({"text": text}), "json": json.dumps([{"text": text}]), "csv": f"text\n{text}\n"}
    with gzip.open(tmp_path / name, "wt") as file:
        file.write(lines[name.split(".")[1]])
    with pytest.raises(UserError, match="a record of more than 1 MiB") as error:
        list(record_documents(tmp_path / name, RecordsSection(text_field="text")))
    assert "\n" not in error.value.line


LONG = "a" * (8 << 20)
DICTIONARY = {"text": [LONG] * 24, "messages": [[{"role": "user", "content": LONG}]] * 24}


@pytest.fixture
def small_table_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "MEMORY_BYTES", 200 << 20)
    monkeypatch.setattr(table_files, "_idle", [])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for functions of this file


@pytest.mark.usefixtures("small_table_process")
@pytest.mark.parametrize(
    "write", [pyarrow.parquet.write_table, pyarrow.feather.write_feather], ids=["parquet", "arrow"]
)
@pytest.mark.parametrize("field", DICTIONARY)
def test_a_table_that_repeats_a_long_text(tmp_path: Path, write: Callable[..., None], field: str) -> None:
    """It is kilobytes on disk; its rows are read a few at once."""
    table = pyarrow.table({field: DICTIONARY[field]})
    if write is pyarrow.feather.write_feather:
        table = pyarrow.table({"text": table["text"].dictionary_encode()} if field == "text" else table.slice(0, 4))
    path = tmp_path / ("t.parquet" if write is pyarrow.parquet.write_table else "t.arrow")
    write(table, path, compression="zstd")
    section = RecordsSection(text_field="text") if field == "text" else RecordsSection(messages="messages")
    places = [document.where.removeprefix(f"{path}, row ") for document in record_documents(path, section)]
    assert places == [str(row) for row in range(1, table.num_rows + 1)]


def crashing(path: Path) -> Any:
    """Stand for a decoder that a damaged file crashes."""
    os.abort()


@pytest.mark.usefixtures("small_table_process")
@pytest.mark.parametrize(
    "name", [pytest.param("page.parquet", marks=pytest.mark.long), "batch.arrow", "record.arrow", "crash.arrow"]
)
def test_a_table_of_kilobytes_that_expands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = pyarrow.array(["fine", "a" * ((65 if name == "record.arrow" else 240) << 20)])
    table, path = pyarrow.table({"text": text, "id": [1, 2]}), tmp_path / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=1, compression="zstd", use_dictionary=False)
    else:
        pyarrow.feather.write_feather(table, path, compression="zstd", chunksize=1)
    assert path.stat().st_size < 1 << 16
    if name == "crash.arrow":
        monkeypatch.setitem(file_source._DOCUMENTS_BY_SUFFIX, ".arrow", partial(binary_documents, "Arrow", crashing))
    message = {
        "record.arrow": "row 2: a record of more than 64 MiB",
        "crash.arrow": "after row 0: reading its schema needs more than 200 MiB of memory, or the file is damaged",
    }.get(name, "after row 1: reading text needs more than 200 MiB of memory, or the file is damaged: write it again")
    with pytest.raises(UserError, match=f"{re.escape(name)}, {message}") as caught:
        list(record_documents(path, RecordsSection(text_field="text")))
    assert "\n" not in caught.value.line and not table_files._idle


@pytest.mark.parametrize(
    ("mebibytes", "limit", "message"),
    [
        pytest.param(65, 2048, "row 1: a record of more than 64 MiB", marks=pytest.mark.long),
        (240, 200, "after row 0: reading its schema needs more than 200 MiB"),
    ],
)
@pytest.mark.usefixtures("small_table_process")
def test_a_dataset_of_kilobytes_that_expands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mebibytes: int, limit: int, message: str
) -> None:
    monkeypatch.setattr(table_files, "MEMORY_BYTES", limit << 20)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["a" * (mebibytes << 20)]}), tmp_path / "a.parquet", use_dictionary=False
    )
    with pytest.raises(UserError, match=f"split train, {message}.*$"):
        list(source_of(DataSection(dataset=str(tmp_path)), tmp_path).documents())


def failing() -> Any:
    raise ValueError(lambda: "cannot be pickled")


@pytest.mark.usefixtures("small_table_process")
def test_table_process_whose_answers_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"odd: it cannot be read \(ValueError: "), in_table_process(failing, "odd"):
        pass
    pyarrow.feather.write_feather(pyarrow.table({"text": ["fine"]}), tmp_path / "a.arrow")
    for columns in ([], ["text"]):
        with in_table_process(partial(open_arrow, tmp_path / "a.arrow"), "a.arrow") as table:
            records = [record for part, _ in table.read(columns) for record in part] if columns else []
    assert records == [{"text": "fine"}]


def test_sizes_of_rows() -> None:
    text = pyarrow.array(["ab", None, "abc", "ab"])
    for array in (text.dictionary_encode(), text.cast(pyarrow.string_view()), text.cast(pyarrow.large_string())):
        assert table_files._row_bytes(array[1:]).tolist() == [0, 3, 2]
    lists = pyarrow.array([["zz"], None, [], [["ab", "c"], ["d"]][0]])
    for kind in (pyarrow.list_, pyarrow.large_list):
        assert table_files._row_bytes(lists.cast(kind(pyarrow.string()))[1:]).tolist() == [0, 0, 3]
    rows = pyarrow.array([{"a": "abc", "b": 1}, None, {"a": "x", "b": 2}])
    assert table_files._row_bytes(rows)[[0, 2]].tolist() == [11, 9]
    assert table_files._row_bytes(pyarrow.array([["a", "bc"]], pyarrow.list_(pyarrow.string(), 2))).tolist() == [3]


TALKS = [{"text": f"row {n} \u00e9 {'x' * (n % 7)}"} for n in range(300)]
LINES = "".join(json.dumps(talk) + "\n" for talk in TALKS)


def zstd(data: bytes) -> bytes:
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(data)
    return bytes(packed.getvalue())


def parquet(table: pyarrow.Table) -> bytes:
    pyarrow.parquet.write_table(table, stream := pyarrow.BufferOutputStream())
    return bytes(stream.getvalue())


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
    monkeypatch.setattr(record_files, "_BLOCK_CHARACTERS", 100)
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == [talk["text"] for talk in TALKS]
    if ".json" not in Path(name).suffixes:
        assert texts(tmp_path) == [talk["text"] for talk in TALKS], "a directory has them, too"


# What JSON within a table may say, and UTF-8 cannot.
HALF = b'messages\n"[{""role"": ""user"", ""content"": ""hi""}, {""role"": ""assistant"", ""content"": ""\\ud83d""}]"\n'
TAR = b"a.txt".ljust(257, b"\0") + b"ustar" + b"\0" * 250 + b"text"
TWICE = parquet(pyarrow.table([["good"], ["other"]], names=["text", "text"]))


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
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-lfs pointer, not the"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-lfs pointer"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-lfs pointer"),
        ("a.jsonl.gz", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-lfs pointer"),
        ("a.txt", b"/annex/objects/SHA256E-s9--0.txt\n", "a git-annex pointer, not the file itself"),
        ("a.txt", TAR, "a tar archive, not text: unpack it first"),
        ("a.txt", b"PAR1\x15\x04\x00", "a file of the format parquet, not text"),
        ("a.md", b"%PDF-1.7\n", "a file of the format PDF, not text"),
        ("a.txt", b"good " * 2000 + b"\0", r"a NUL byte at byte 10000: no text has any"),
        ("a.csv", b"text\nb\0d\n", "a.csv:2: a NUL byte: no text has any"),
        ("a.csv", b"text,id,text\ngood,1,other\n", "a.csv: the column 'text' stands 2 times: which one is meant"),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', "a.jsonl:1: the key 'text' stands 2 times"),
        ("a.json", b'[{"text": "a", "text": "b"}]', "a.json, record 1: the key 'text' stands 2"),
        ("a.jsonl", b'{"text": "good"}\n{"text": "cu', "a.jsonl:2: the last record is cut off .* missing"),
        ("a.json", b'{\n"text": "a",\n"text": "b"\n}', "a.json: the key 'text' stands 2 times"),
        ("a.json", b'{\n"data": [{"text": "a"}, {"text": "b"}]\n}', "one JSON object with the keys data, of which"),
        ("a.jsonl", b'{"data": [{"text": "a"}, {"text": "b"}]}', "a.jsonl:1: one JSON object with the keys data, of"),
        ("a.jsonl", b'{"chosen": [{"role": "user", "content": "a"}]}\n', "no known field; there are chosen"),
        ("a.json", b'{\n"text": "a"\n}\n{\n"text": "b"\n}', "a.json: JSON objects over several lines: write one"),
        ("a.parquet", TWICE, "a.parquet: the column 'text' stands 2 times"),
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

    assert [record for record, _ in record_files._elements(Blocks(data), Path("x"))] == records


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
    monkeypatch.setattr(record_files, "_BLOCK_CHARACTERS", 1 << 14)
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
