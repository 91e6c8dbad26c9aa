"""Files, directories, globs, records and the standard library become documents; bad input gets one line."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sysconfig
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from aliquot.config.schema import DataSection
from aliquot.core.errors import UserError
from aliquot.core.small_files import cache_root
from aliquot.data.data_files import CARD, HIDDEN, NO_FILE
from aliquot.data.documents import (
    HOLDS_NUL,
    MISSING_FIELD,
    NO_RECORD,
    UNKNOWN_ROLE,
    UNUSABLE_FLAG,
    WRONG_TYPE,
)
from aliquot.data.file_source import FileSource
from aliquot.data.sources import HeldOut, source_of, sources_of


def texts(path: Path | str | list[str], **settings: object) -> list[str]:
    return [document.text for document in source(path, **settings).documents() if not document.blank]


def source(path: Path | str | list[str], **settings: object) -> FileSource:
    section = DataSection(path=path if isinstance(path, list) else str(path), **settings)
    return FileSource.find(section, cache_root(None), "data.path")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "b.txt": "\ufeffone\r\ntwo\r\n\r\n \r\nthree\r\n",
        "a/z.md": "# z",
        "a.py": "a = 1\n",
        "blank.txt": " \n\u3000\n",
        "picture.png": "\0",
        ".hidden.txt": "hidden",
        ".git/config.txt": "hidden",
        "r.jsonl": '{"text": "first", "n": 1}\n\n{"text": ""}\n{"text": null}\n{"text": "last \\u00e9"}\n',
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode())
    return tmp_path


def test_directory_is_read_in_relative_name_order(folder: Path) -> None:
    assert texts(folder) == ["a = 1\n", "# z", "one\ntwo\n\n \nthree\n", "first", "last é"]


def test_globs_and_lists(folder: Path) -> None:
    assert texts(folder / "**" / "*.md") == ["# z"]
    assert texts([str(folder / "*.py"), str(folder / "a")]) == ["a = 1\n", "# z"]


def test_duplicate_files_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for paths in (["a.py"] * 7, ["a.py", "*.py"], ["a.py", str(folder / "a.py")]):
        times = 7 if len(paths) == 7 else 2
        with pytest.raises(
            UserError, match=rf"data.path names a.py {times} times: name the file once; .* data.sources"
        ):
            source(paths)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("file", ["one\ntwo\n\n \nthree\n"]),
        ("line", ["one", "two", "three"]),
        ("block", ["one\ntwo", "three"]),
    ],
)
def test_plain_text_units(folder: Path, unit: str, expected: list[str]) -> None:
    assert texts(folder / "b.txt", document=unit) == expected


def test_parquet_rows(tmp_path: Path) -> None:
    rows = [f"row {n}" for n in range(1500)] + ["", None, "  "]
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(1503)), "body": rows}), tmp_path / "p.parquet")
    assert texts(tmp_path / "p.parquet", text_field="body") == rows[:1500]
    with pytest.raises(UserError, match=r"p\.parquet: no known field; there are id, body"):
        texts(tmp_path / "p.parquet")


def test_invalid_utf_8_in_parquet_is_named(tmp_path: Path) -> None:
    column = pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "p.parquet")
    with pytest.raises(UserError, match=r"p\.parquet, after row 0: not UTF-8 text"):
        texts(tmp_path / "p.parquet")


def test_tools_follow_their_record(tmp_path: Path) -> None:
    """A table gives each structure the keys of all others."""
    calls = [{"name": "weather", "arguments": {"city": "Seoul"}}, {"name": "add", "arguments": {"a": 1, "b": 2}}]
    rows = [
        {
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "tool_calls": [call]}],
            "tools": [{"name": call["name"], "parameters": call["arguments"]}],
        }
        for call in calls
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    as_text = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in as_text))
    for name in ("c.jsonl", "c.parquet", "t.jsonl"):
        found = [json.loads(text) for text in texts(tmp_path / name)]
        assert found == [{"messages": row["messages"], "context": 0, "tools": row["tools"]} for row in rows], name


def test_arrow_files_and_streams(tmp_path: Path) -> None:
    """The cache of `datasets` holds streams."""
    rows: list[dict[str, object]] = [
        {"id": n, "prompt": f"{n}?", "completion": "x" * (n if n < 3 else 50_000), "tools": [] if n % 2 else None}
        for n in range(700)
    ]
    table = pyarrow.Table.from_pylist(rows)
    for name, new in {"file": pyarrow.ipc.new_file, "stream": pyarrow.ipc.new_stream}.items():
        with new(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=600)
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    before, most, expected = pyarrow.total_allocated_bytes(), 0, texts(tmp_path / "table.parquet")
    for name in ("file", "stream"):
        documents = list(source(tmp_path / f"{name}.arrow").documents())
        most = max(most, pyarrow.total_allocated_bytes() - before)
        assert [document.text for document in documents] == expected
        assert documents[-1].done_bytes > documents[0].done_bytes > 0
        assert documents[-1].where == f"{tmp_path / name}.arrow, row 700"
    assert most < 1 << 20  # the tables are mapped, not read
    assert len(texts(tmp_path)) == 3 * 700
    whole = (tmp_path / "stream.arrow").read_bytes()
    (tmp_path / "stream.arrow").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "file.arrow").write_bytes(b"ARROW1" + bytes(100))
    for name in ("file", "stream"):
        with pytest.raises(UserError, match=rf"{name}\.arrow: (not a readable Arrow file|cannot be read) \("):
            texts(tmp_path / f"{name}.arrow")


def test_messages_are_documents(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes é"}]
    pyarrow.parquet.write_table(pyarrow.table({"messages": [chat, [], None]}), tmp_path / "c.parquet")
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat}) + '\n{"messages": []}\n')
    for name in ("c.parquet", "c.jsonl"):
        documents = [each for each in source(tmp_path / name, text_field="messages").documents() if not each.blank]
        assert [(json.loads(each.text), each.kind) for each in documents] == [
            ({"messages": chat, "context": 0}, "messages")
        ]


@pytest.mark.long
def test_stdlib_is_python_source_without_tests_and_packages() -> None:
    found = source("stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(root).as_posix() for file in found.files]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    left_out = {"test", "tests", "site-packages", "encodings", "pydoc_data"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    documents = list(found.documents())
    assert len(documents) > 300
    assert documents[-1].done_bytes <= found.total_bytes


def test_a_dataset_by_name_is_the_same_documents(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(600)))
    (tmp_path / "set" / "test.jsonl").write_text('{"text": "held"}\n{"text": " "}\n')
    section = DataSection(dataset=str(tmp_path / "set"), eval_split="test")
    (train,), (held,) = (found.values() for found in sources_of(section, tmp_path))
    assert [document.text for document in train.documents()] == [f"row {n}" for n in range(600)]
    assert [document.text for document in held.documents() if not document.blank] == ["held"]
    assert held.digest != train.digest == source_of(section, tmp_path).digest
    copy = shutil.copytree(tmp_path / "set", tmp_path / "elsewhere")
    os.utime(copy / "train.jsonl", (1, 1))
    assert source_of(section.model_copy(update={"dataset": str(copy)}), tmp_path).digest == train.digest
    (copy / "train.jsonl").write_text("".join(f'{{"text": "now {n}"}}\n' for n in range(600)))
    assert source_of(section.model_copy(update={"dataset": str(copy)}), tmp_path).digest != train.digest
    for wrong, message in {
        "split": (section.model_copy(update={"split": "nope"}), r"split nope: cannot load the dataset: .*nope"),
        "field": (section.model_copy(update={"text_field": "body"}), "no field 'body'; there are text: set"),
        "unused": (section.model_copy(update={"unused_fields": ["tex"]}), "no field 'tex'; there are text .*: set"),
        "unit": (section.model_copy(update={"document": "line"}), "document: line is for plain text"),
        "name": (section.model_copy(update={"dataset": str(tmp_path / "absent")}), "cannot load the dataset"),
    }.values():
        with pytest.raises(UserError, match=message) as caught:
            source_of(wrong, tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("absent.txt", {}, "absent.txt: data.path: no such file or directory"),
        ("~nobody-has-this-name/a.txt", {}, "~nobody-has-this-name/a.txt: data.path: no such file or directory"),
        ("*.absent", {}, r"\*.absent: data.path: no file matches"),
        (
            "pictures",
            {},
            "pictures: data.path: no .arrow, .csv, .json, .jsonl, .md, .parquet, .py, .txt file in this directory",
        ),
        ("latin.txt", {}, r"latin.txt: not UTF-8 text \(invalid continuation byte at byte 3\)"),
        ("latin.txt", {"document": "line"}, r"latin.txt:1: not UTF-8 text"),
        ("packed.txt", {}, "packed.txt: a gzip archive, not text: let its name end with .gz, or"),
        ("packed.txt", {"document": "line"}, "packed.txt: a gzip archive, not text: let its name end with .gz, or"),
        ("windows.txt", {}, "windows.txt: UTF-16 text, not UTF-8: convert it first .iconv -f UTF-16 -t UTF-8"),
        ("windows.csv.gz", {}, "windows.csv.gz: UTF-16 text, not UTF-8: convert it first"),
        (
            "little.txt",
            {"document": "line"},
            "little.txt: UTF-16LE text, not UTF-8: convert it first .iconv -f UTF-16LE",
        ),
        ("big.jsonl", {}, "big.jsonl: UTF-16BE text, not UTF-8: convert it first"),
        ("packed.jsonl", {}, "packed.jsonl: a gzip archive, not text: let its name end with .gz, or"),
        ("plain.txt", {"document": "field"}, r"plain.txt: data.document: field is for records \(.jsonl,"),
        ("bad.jsonl", {"document": "line"}, "bad.jsonl: data.document: line is for plain text"),
        ("bad.jsonl", {}, r"bad.jsonl:2: not a JSON record \(.*\); write one record a line"),
        ("deep.jsonl", {}, r"deep.jsonl:1: not a JSON record \(.*\); write one record a line"),
        ("list.jsonl", {}, "list.jsonl:1: a record must be a JSON object, not list"),
        ("field.jsonl", {}, "field.jsonl:1: no known field; there are body, id: set data.text_field"),
        ("number.jsonl", {}, "number.jsonl:1: field 'text' holds int, not text or a list of messages"),
        ("half.jsonl", {}, "half.jsonl:1: a field holds half of a surrogate pair"),
        ("roles.jsonl", {}, "roles.jsonl:1: field 'text' is a list, but not one of messages"),
        ("parts.jsonl", {}, "parts.jsonl:1: a message's `content` must be text"),
        ("bytes.jsonl", {}, "bytes.jsonl:1: not UTF-8 text"),
        ("emoji.jsonl", {}, "emoji.jsonl:1: not UTF-8 text"),
        ("broken.parquet", {}, "broken.parquet: not a readable parquet file"),
        (
            "packed.parquet.gz",
            {},
            "packed.parquet.gz: parquet is read in any order, which an archive is not: unpack it",
        ),
        ("mixed.jsonl", {}, "mixed.jsonl:2: no field 'messages', which the first record has, but 'prompt': give"),
        ("empty.csv", {}, "empty.csv: no fields: an empty file, or no header"),
        *(
            (
                f"unused.{kind}",
                {"unused_fields": ["title", "titel"]},
                rf"^data.path unused.{kind}: no field 'titel'; there are .*text.* \(did you mean 'title'\?\): set"
                " data.unused_fields$",
            )
            for kind in ("jsonl", "csv", "parquet")
        ),
        ("table.tsv", {}, "table.tsv: tables of this format are not read: convert the file into one of .jsonl"),
    ],
)
def test_bad_input_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, settings: dict[str, str], message: str
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\0")
    for name, content in {
        "latin.txt": "caf\u00e9s".encode("latin-1"),
        "packed.txt": gzip.compress(b"some text"),
        "windows.txt": "some text".encode("utf-16"),
        "windows.csv.gz": gzip.compress("text\nsome".encode("utf-16")),
        "little.txt": "some text\nand caf\u00e9".encode("utf-16-le"),
        "big.jsonl": '{"text": "some"}'.encode("utf-16-be"),
        "packed.jsonl": gzip.compress(b'{"text": "some"}'),
        "plain.txt": b"plain",
        "bad.jsonl": b'\n{"text": \n',
        "deep.jsonl": b"[" * 100_000,
        "list.jsonl": b"[1]\n",
        "field.jsonl": b'{"body": "x", "id": 1}\n',
        "number.jsonl": b'{"text": 1}\n',
        "half.jsonl": b'{"text": "\\ud800"}\n',
        "roles.jsonl": b'{"text": ["hello"]}\n',
        "parts.jsonl": b'{"text": [{"role": "user", "content": [{"type": "image"}]}]}\n',
        "bytes.jsonl": b'{"text": "\xff"}\n',
        "emoji.jsonl": b'{"text": "a\xed\xa0\xbd\xed\xb8\x80"}\n',  # as two surrogates, which Java writes
        "broken.parquet": b"PAR1 and then nothing",
        "mixed.jsonl": b'{"messages": []}\n{"prompt": "a", "completion": "b"}\n',
        "packed.parquet.gz": gzip.compress(b"PAR1"),
        "empty.csv": b"",
        "unused.jsonl": b'{"text": "one"}\n{"title": "two", "text": "three"}\n',  # a field may be optional
        "unused.csv": b"text,title\none,two\n",
        "table.tsv": b"a\tb\n",
    }.items():
        (tmp_path / name).write_bytes(content)
    rows = pyarrow.table({"text": ["one"], "title": ["two"]})
    pyarrow.parquet.write_table(rows, tmp_path / "unused.parquet")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        texts(path, **settings)
    assert "\n" not in str(caught.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    found = source(tmp_path / "a.txt")
    (tmp_path / "a.txt").unlink()
    for read in (lambda: list(found.documents()), lambda: found.digest):
        with pytest.raises(UserError, match=r"a\.txt: cannot be read \(No such file"):
            read()


def test_evaluation_data_may_lack_the_unused_fields_of_training_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "title": "two"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n')
    section = DataSection(path=str(tmp_path / "a.jsonl"), eval_path=str(tmp_path / "b.jsonl"), unused_fields=["title"])
    for sources in sources_of(section, tmp_path):
        assert len(list(sources[""].documents())) == 1


def test_eval_path_must_exist(folder: Path, tmp_path: Path) -> None:
    assert sources_of(DataSection(path=str(folder)), tmp_path)[1] == {}
    with pytest.raises(UserError, match=r"data.eval_path: no such file"):
        sources_of(DataSection(path=str(folder), eval_path="absent"), tmp_path)


def test_sources_hold_out_a_fraction(folder: Path) -> None:
    sources = [{"name": name, "path": str(folder / file), "document": "line"} for name, file in
               (("one", "b.txt"), ("two", "a.py"))]  # fmt: skip
    train, held_out = sources_of(DataSection(sources=sources, eval_fraction=0.5), folder)
    assert list(train) == list(held_out) == ["one", "two"]
    both = [each.text for of in (train, held_out) for each in of["one"].documents()]
    assert sorted(both) == ["one", "three", "two"]
    again = [{"name": "two", "path": str(folder / "b.txt")}]
    with pytest.raises(UserError, match=r"data\.eval_fraction holds out a part of two, which has this name already"):
        sources_of(DataSection(sources=sources, eval_fraction=0.5, eval_sources=again), folder)
    assert list(sources_of(DataSection(sources=sources, eval_sources=again), folder)[1]) == ["two"]


def test_documents_are_held_out_by_their_content(tmp_path: Path) -> None:
    lines = [f"document {n % 300}" for n in range(400)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("\n".join(reversed(lines[:200])))

    def sides(name: str) -> tuple[list[str], list[str]]:
        whole = source(tmp_path / name, document="line")
        rest, held = HeldOut(whole, 0.2, "rest"), HeldOut(whole, 0.2, "held out")
        assert len({whole.digest, rest.digest, held.digest}) == 3
        return [d.text for d in rest.documents()], [d.text for d in held.documents()]

    rest, held = sides("a.txt")
    assert sorted(rest + held) == sorted(lines)
    assert not set(rest) & set(held)
    assert 0.1 < len(held) / len(lines) < 0.3
    assert set(sides("b.txt")[1]) == set(held) & set(lines[:200])


def test_a_digest_is_of_content_and_unit(tmp_path: Path) -> None:
    def digest(name: str, **settings: object) -> str:
        return source(tmp_path / name, **settings).digest

    (tmp_path / "a.txt").write_text("same\n")
    (tmp_path / "b.txt").write_text("same\n")
    assert digest("a.txt") == digest("b.txt") != digest("a.txt", document="line")
    before = digest("a.txt")
    (tmp_path / "a.txt").write_text("Same\n")
    assert digest("a.txt") != before
    (tmp_path / "r.jsonl").write_text('{"text": "x", "body": "y"}\n')
    assert digest("r.jsonl") != digest("r.jsonl", text_field="body")


def test_cards_beside_records_are_left_out_and_counted(tmp_path: Path) -> None:
    for name in ("README.md", "docs/README.md", "dataset_info.json", "data/a.json", "data/LICENSE.txt", "data/b.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('[{"text": "first"}]' if name == "data/a.json" else "a card")
    found = list(source(tmp_path).documents())
    assert [document.text for document in found if not document.blank] == ["first", "a card", "a card"]
    assert [document.reason for document in found if document.blank] == [CARD] * 3
    assert texts(tmp_path / "docs") == texts(tmp_path / "README.md") == ["a card"], "nothing that it describes"


def test_skipped_files_are_counted_by_reason(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.tsv", "c.jsonl.bz2", "data", ".hidden/x.jsonl", ".git", "sub/d.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "first"}')
    os.mkfifo(tmp_path / "pipe.jsonl")
    found = Counter(document.reason for document in source(tmp_path).documents())
    kinds = {".tsv": 2, ".bz2": 1, "no suffix": 1}
    others = {f"a file of a kind that is not read ({kind}), left out": count for kind, count in kinds.items()}
    assert found == {None: 1, HIDDEN: 2, NO_FILE: 1, **others}
    (tmp_path / "sub.jsonl").mkdir()
    found = Counter(document.reason for document in source(f"{tmp_path}/*.jsonl").documents())
    assert found == {None: 1, NO_FILE: 1, "a directory that a pattern matches, left out": 1}


def test_dangling_link_is_missing_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "first"}')
    (tmp_path / "b.jsonl").symlink_to("../gone/b")
    for path in (tmp_path, f"{tmp_path}/*.jsonl", tmp_path / "b.jsonl"):
        with pytest.raises(UserError, match=r"b.jsonl: a link to \.\./gone/b, which is not there: data are missing"):
            source(path)


def test_saved_dataset_loads_through_data_dataset(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["one", "two", "three"]})
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    with pytest.raises(UserError, match=r"saved: a dataset that save_to_disk has written: .* data.dataset$"):
        source(tmp_path)
    section = DataSection(dataset=str(tmp_path / "saved"), split="train")
    assert [document.text for document in source_of(section, tmp_path).documents()] == ["one", "two", "three"]


@pytest.mark.parametrize("name", ["{outside}", "../outside.jsonl", "http://127.0.0.1:9/a.jsonl"])
@pytest.mark.parametrize(
    "file, content",
    [
        ("state.json", '{{"_data_files": [{{"filename": "{name}"}}]}}'),
        ("README.md", "---\nconfigs:\n- config_name: default\n  data_files: {name}\n---\n"),
        (
            ".huggingface.yaml",
            "configs:\n- config_name: a\n  data_files:\n  - split: train\n    path: [{name}]\n",
        ),
    ],
)
def test_a_dataset_directory_that_names_files_outside(tmp_path: Path, file: str, content: str, name: str) -> None:
    (tmp_path / "outside.jsonl").write_text('{"text": "secret"}\n')
    name = name.format(outside=tmp_path / "outside.jsonl")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "set" / file).write_text(content.format(name=name))
    with pytest.raises(UserError, match="is named in it, but lies outside"):
        source_of(DataSection(dataset=str(tmp_path / "set"), split="train"), tmp_path / "cache")


CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}'
ROLE, FLAG = (CHAT.replace('"role": "user"', role) for role in ('"role": "narrator"', '"role": "user", "train": 1'))


@pytest.mark.parametrize(
    ("name", "content", "settings", "reason", "place"),
    [
        ("a.txt", "one\nt\0o\nthree\n", {"document": "line"}, HOLDS_NUL, "a.txt:2: a NUL byte"),
        ("a.txt", "one\n\nt\no\0\n\nthree\n", {"document": "block"}, HOLDS_NUL, "a.txt:4: a NUL byte"),
        ("a.csv", "text\none\nt\0o\nthree\n", {}, HOLDS_NUL, "a.csv:3: a NUL byte"),
        (
            "a.csv",
            "text\none\nt,o\nthree\n",
            {},
            "a row with more or fewer values than the header has names, left out",
            "a.csv:3: 2 values, but the first line",
        ),
        ("a.jsonl", '{"text": 1}\n{"text": "one"}\n{"text": "three"}', {}, WRONG_TYPE, "a.jsonl:1: field 'text' holds"),
        ("a.jsonl", '{"body": 1}\n{"text": "one"}\n{"text": "three"}', {}, MISSING_FIELD, "a.jsonl:1: no known field"),
        ("a.jsonl", '{"text": "one"}\n{"text"}\n{"text": "three"}', {}, NO_RECORD, "a.jsonl:2: not a JSON record"),
        ("a.jsonl", '{"text": "one"}\n{"text": "three"}\nnone', {}, NO_RECORD, "a.jsonl:3: not a JSON record"),
        (
            "a.jsonl",
            '{"text": "one"}\n{"text": "\\ud800"}\n{"text": "three"}',
            {},
            "a record with half of a surrogate pair, left out",
            "a.jsonl:2: a f",
        ),
        (
            "a.json",
            '[{"text": "one"}, {"text": 1, "text": "b"}, {"text": "three"}]',
            {},
            "a record in which a key stands twice, left out",
            "a.json, record 2:",
        ),
        ("a.json", '[{"text": "one"}, {"text": "three"}, 7]', {}, NO_RECORD, "a.json, record 3: a record must be"),
        ("a.jsonl", f"{CHAT}\n{ROLE}\n{CHAT}\n", {}, UNKNOWN_ROLE, "a.jsonl:2: a message's role is 'narrator'; known"),
        ("a.jsonl", f"{CHAT}\n{FLAG}\n{CHAT}\n", {}, UNUSABLE_FLAG, "a.jsonl:2: a message of role 'user' has `train`"),
    ],
)
def test_a_bad_record_among_others_is_left_out(
    tmp_path: Path, name: str, content: str, settings: dict[str, str], reason: str, place: str
) -> None:
    (tmp_path / name).write_text(content)
    documents = list(source(tmp_path / name, **settings).documents())
    (bad,) = (document for document in documents if document.blank)
    assert (len(documents), bad.reason) == (3, reason)
    assert bad.where.startswith(f"{tmp_path}/{place}")


def test_bad_rows_of_tables_and_datasets_are_left_out(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": role, "content": "hi"}]} for role in ("user", "narrator", "assistant")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    dataset = source_of(DataSection(dataset=str(tmp_path)), tmp_path)
    for found in (source(tmp_path / "a.parquet"), dataset):
        first, bad, last = found.documents()
        assert (first.blank, bad.reason, last.blank) == (False, UNKNOWN_ROLE, False)
        assert ", row 2: a message's role is 'narrator'" in bad.where


def test_files_without_good_records_are_refused(tmp_path: Path) -> None:
    good, bad = '{"text": "one"}\n', '{"text": 1}\n'
    for name, content in {"a.jsonl": good, "b.jsonl": bad, "c.json": '{\n"text": 1\n}', "d.txt": "\0"}.items():
        (tmp_path / name).write_text(content)
    found = Counter(document.reason for document in source(tmp_path).documents())
    assert found == {None: 1, WRONG_TYPE: 2, HOLDS_NUL: 1}
    (tmp_path / "b.jsonl").write_text(bad * 2)
    with pytest.raises(UserError, match=r"b\.jsonl:1: field 'text' holds int"):
        texts(tmp_path)
    (tmp_path / "b.jsonl").write_text(bad)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UserError, match=r"b\.jsonl:1: field 'text' holds int"):
        texts(tmp_path)


def test_lookalikes_of_other_formats_are_read(tmp_path: Path) -> None:
    for name, content in {"a.txt": "PAR1 is a region", "b.json": '{\n"text": "one\\u0000record"\n}'}.items():
        (tmp_path / name).write_text(content)
    assert texts(tmp_path) == ["PAR1 is a region", "one\0record"]


def test_linked_directories_are_read_once(tmp_path: Path) -> None:
    for name in ("elsewhere", "corpus/sub"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(f"of {name}")
    corpus = tmp_path / "corpus"
    for name, target in {"link": "elsewhere", "sub/again": "elsewhere", "sub/round": "corpus"}.items():
        (corpus / name).symlink_to(tmp_path / target)
    assert sorted(texts(corpus)) == ["of corpus/sub", "of elsewhere"]
