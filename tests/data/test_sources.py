"""Files, directories, globs, records and the standard library become documents; bad input gets one line."""

from __future__ import annotations

import gzip
import json
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from aliquot.config.schema import DataSection
from aliquot.data.sources import HeldOut, eval_source, train_source
from aliquot.errors import UserError


def texts(path: Path | str | list[str], **settings: object) -> list[str]:
    section = DataSection(path=path if isinstance(path, list) else str(path), **settings)
    return [document.text for document in train_source(section).documents()]


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


def test_a_directory_is_read_in_the_order_of_its_relative_names(folder: Path) -> None:
    assert texts(folder) == ["a = 1\n", "# z", "one\ntwo\n\n \nthree\n", "first", "last é"]


def test_globs_lists_and_repeated_files(folder: Path) -> None:
    assert texts(folder / "**" / "*.md") == ["# z"]
    assert texts([str(folder / "a.py"), str(folder / "*.py"), str(folder / "a")]) == ["a = 1\n", "# z"]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("file", ["one\ntwo\n\n \nthree\n"]),
        ("line", ["one", "two", "three"]),
        ("block", ["one\ntwo", "three"]),
    ],
)
def test_what_a_document_of_plain_text_is(folder: Path, unit: str, expected: list[str]) -> None:
    assert texts(folder / "b.txt", document=unit) == expected


def test_parquet_rows(tmp_path: Path) -> None:
    rows = [f"row {n}" for n in range(1500)] + ["", None, "  "]
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(1503)), "body": rows}), tmp_path / "p.parquet")
    assert texts(tmp_path / "p.parquet", text_field="body") == rows[:1500]
    with pytest.raises(UserError, match=r"p\.parquet: no field 'text'; there are id, body"):
        texts(tmp_path / "p.parquet")


def test_messages_are_documents(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes é"}]
    pyarrow.parquet.write_table(pyarrow.table({"messages": [chat, [], None]}), tmp_path / "c.parquet")
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat}) + '\n{"messages": []}\n')
    for name in ("c.parquet", "c.jsonl"):
        section = DataSection(path=str(tmp_path / name), text_field="messages")
        documents = list(train_source(section).documents())
        assert [(json.loads(document.text), document.chat) for document in documents] == [(chat, True)]


def test_stdlib_is_pythons_own_source_without_tests_packages_and_tables() -> None:
    source = train_source(DataSection(path="stdlib"))
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(root).as_posix() for file in source.files]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    left_out = {"test", "tests", "site-packages", "encodings", "pydoc_data"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    documents = list(source.documents())
    assert len(documents) > 300
    assert documents[-1].done_bytes <= source.total_bytes


def test_a_dataset_by_name_is_the_same_documents(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(600)))
    (tmp_path / "set" / "test.jsonl").write_text('{"text": "held"}\n{"text": " "}\n')
    section = DataSection(dataset=str(tmp_path / "set"), eval_split="test")
    source = train_source(section)
    assert [document.text for document in source.documents()] == [f"row {n}" for n in range(600)]
    held = eval_source(section)
    assert held is not None
    assert [document.text for document in held.documents()] == ["held"]
    assert held.digest != source.digest == train_source(section).digest
    for wrong, message in {
        "split": (section.model_copy(update={"split": "nope"}), r"split nope: cannot load the dataset: .*nope"),
        "field": (section.model_copy(update={"text_field": "body"}), "no field 'body'; there are text"),
        "unit": (section.model_copy(update={"document": "line"}), "document: line is for plain text"),
        "name": (section.model_copy(update={"dataset": str(tmp_path / "absent")}), "cannot load the dataset"),
    }.values():
        with pytest.raises(UserError, match=message) as caught:
            train_source(wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("absent.txt", {}, "absent.txt: data.path: no such file or directory"),
        ("*.absent", {}, r"\*.absent: data.path: no file matches"),
        ("pictures", {}, "pictures: data.path: no .jsonl, .md, .parquet, .py, .txt file in this directory"),
        ("latin.txt", {}, r"latin.txt: not UTF-8 text \(invalid continuation byte at byte 3\)"),
        ("latin.txt", {"document": "line"}, r"latin.txt:1: not UTF-8 text"),
        ("packed.txt", {}, "packed.txt: a gzip archive, not text: unpack it first"),
        ("packed.txt", {"document": "line"}, "packed.txt:1: a gzip archive, not text: unpack it first"),
        ("packed.jsonl", {}, "packed.jsonl:1: a gzip archive, not text: unpack it first"),
        ("plain.txt", {"document": "field"}, "plain.txt: data.document: field is for .jsonl and .parquet"),
        ("bad.jsonl", {"document": "line"}, "bad.jsonl: data.document: line is for plain text"),
        ("bad.jsonl", {}, r"bad.jsonl:2: not a JSON record \(.*\); write one record a line"),
        ("deep.jsonl", {}, r"deep.jsonl:1: not a JSON record \(.*\); write one record a line"),
        ("list.jsonl", {}, "list.jsonl:1: a record must be a JSON object, not list"),
        ("field.jsonl", {}, "field.jsonl:1: no field 'text'; there are body, id: set data.text_field"),
        ("number.jsonl", {}, "number.jsonl:1: field 'text' holds int, not text or a list of messages"),
        ("half.jsonl", {}, "half.jsonl:1: field 'text' holds half of a surrogate pair"),
        ("roles.jsonl", {}, "roles.jsonl:1: field 'text' is a list, but not one of messages"),
        ("parts.jsonl", {}, "parts.jsonl:1: a message's `content` must be text"),
        ("bytes.jsonl", {}, "bytes.jsonl:1: not UTF-8 text"),
        ("broken.parquet", {}, "broken.parquet: not a readable parquet file"),
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
        "packed.jsonl": gzip.compress(b'{"text": "some"}'),
        "plain.txt": b"plain",
        "bad.jsonl": b'{"text": "good"}\n{"text": \n',
        "deep.jsonl": b"[" * 100_000,
        "list.jsonl": b"[1]\n",
        "field.jsonl": b'{"body": "x", "id": 1}\n',
        "number.jsonl": b'{"text": 1}\n',
        "half.jsonl": b'{"text": "\\ud800"}\n',
        "roles.jsonl": b'{"text": ["hello"]}\n',
        "parts.jsonl": b'{"text": [{"role": "user", "content": [{"type": "image"}]}]}\n',
        "bytes.jsonl": b'{"text": "\xff"}\n',
        "broken.parquet": b"PAR1 and then nothing",
    }.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        texts(path, **settings)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    source = train_source(DataSection(path=str(tmp_path / "a.txt")))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(No such file"):
        list(source.documents())
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(No such file"):
        print(source.digest)


def test_eval_sources_are_given_once_and_fit() -> None:
    assert eval_source(DataSection(path="stdlib")) is None
    with pytest.raises(UserError, match=r"only one of data.eval_path and data.eval_split"):
        eval_source(DataSection(dataset="x", eval_path="stdlib", eval_split="test"))
    with pytest.raises(UserError, match=r"eval_split is a split of data.dataset"):
        eval_source(DataSection(path="stdlib", eval_split="test"))
    with pytest.raises(UserError, match=r"data.eval_path: no such file"):
        eval_source(DataSection(path="stdlib", eval_path="absent"))


def test_documents_are_held_out_by_their_content(tmp_path: Path) -> None:
    lines = [f"document {n % 300}" for n in range(400)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("\n".join(reversed(lines[:200])))

    def sides(name: str) -> tuple[list[str], list[str]]:
        source = train_source(DataSection(path=str(tmp_path / name), document="line"))
        rest, held = HeldOut(source, 0.2, "rest"), HeldOut(source, 0.2, "held out")
        assert len({source.digest, rest.digest, held.digest}) == 3
        return [d.text for d in rest.documents()], [d.text for d in held.documents()]

    rest, held = sides("a.txt")
    assert sorted(rest + held) == sorted(lines)
    assert not set(rest) & set(held)
    assert 0.1 < len(held) / len(lines) < 0.3
    assert set(sides("b.txt")[1]) == set(held) & set(lines[:200])


def test_a_digest_is_of_content_and_unit(tmp_path: Path) -> None:
    def digest(name: str, **settings: object) -> str:
        return train_source(DataSection(path=str(tmp_path / name), **settings)).digest

    (tmp_path / "a.txt").write_text("same\n")
    (tmp_path / "b.txt").write_text("same\n")
    assert digest("a.txt") == digest("b.txt") != digest("a.txt", document="line")
    before = digest("a.txt")
    (tmp_path / "a.txt").write_text("Same\n")
    assert digest("a.txt") != before
    (tmp_path / "r.jsonl").write_text('{"text": "x", "body": "y"}\n')
    assert digest("r.jsonl") != digest("r.jsonl", text_field="body")
