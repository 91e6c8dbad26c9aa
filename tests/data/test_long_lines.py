"""A line may be as long as a disk, and an archive of kilobytes may hold it: memory is bounded all the same."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aliquot.config.data_section import RecordsSection
from aliquot.core.errors import UserError
from aliquot.data import data_files, documents, json_records, table_records
from aliquot.data.documents import PART_BYTES, Document, Unit, text_documents
from aliquot.data.file_source import record_documents


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
    for module in (data_files, json_records, table_records):
        monkeypatch.setattr(module, "LONGEST_RECORD", 1 << 20)
    text = "a" * (3 << 20)
    lines = {"jsonl": json.dumps({"text": text}), "json": json.dumps([{"text": text}]), "csv": f"text\n{text}\n"}
    with gzip.open(tmp_path / name, "wt") as file:
        file.write(lines[name.split(".")[1]])
    with pytest.raises(UserError, match="a record of more than 1 MiB") as error:
        list(record_documents(tmp_path / name, RecordsSection(text_field="text")))
    assert "\n" not in error.value.line


DICTIONARY = {"text": ["a" * 40_000] * 100, "messages": [[{"role": "user", "content": "a" * 40_000}] * 2] * 100}


@pytest.mark.parametrize(
    "write", [pyarrow.parquet.write_table, pyarrow.feather.write_feather], ids=["parquet", "arrow"]
)
@pytest.mark.parametrize("field", DICTIONARY)
def test_a_table_that_repeats_a_long_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None], field: str
) -> None:
    """It is kilobytes on disk; its rows are read a few at once, and a long row is refused before it is in memory."""
    table = pyarrow.table(DICTIONARY)
    if write is pyarrow.feather.write_feather:
        table = table.set_column(0, "text", table["text"].dictionary_encode())
    path = tmp_path / ("t.parquet" if write is pyarrow.parquet.write_table else "t.arrow")
    write(table, path, compression="zstd")
    monkeypatch.setattr(table_records, "_BATCH_BYTES", 1 << 17)
    section = RecordsSection(text_field="text") if field == "text" else RecordsSection(messages="messages")
    before, most = pyarrow.total_allocated_bytes(), 0
    for document in record_documents(path, section):
        most = max(most, pyarrow.total_allocated_bytes() - before)
        assert document.where.endswith(f"row {document.where.split()[-1]}")
    assert most < 1 << 20 or path.suffix == ".arrow"
    monkeypatch.setattr(table_records, "LONGEST_RECORD", 39_000)
    with pytest.raises(UserError, match=r"t\.\w+, row 1: a record of more than"):
        list(record_documents(path, section))


def test_sizes_of_rows() -> None:
    text = pyarrow.array(["ab", None, "abc", "ab"])
    for array in (text.dictionary_encode(), text.cast(pyarrow.string_view()), text.cast(pyarrow.large_string())):
        assert table_records._row_bytes(array[1:]).tolist() == [0, 3, 2]
    lists = pyarrow.array([["zz"], None, [], [["ab", "c"], ["d"]][0]])
    for kind in (pyarrow.list_, pyarrow.large_list):
        assert table_records._row_bytes(lists.cast(kind(pyarrow.string()))[1:]).tolist() == [0, 0, 3]
    rows = pyarrow.array([{"a": "abc", "b": 1}, None, {"a": "x", "b": 2}])
    assert table_records._row_bytes(rows)[[0, 2]].tolist() == [11, 9]
    assert table_records._row_bytes(pyarrow.array([["a", "bc"]], pyarrow.list_(pyarrow.string(), 2))).tolist() == [3]
