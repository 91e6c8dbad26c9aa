"""Data in object stores give the same documents as local files, are copied once, and fail with one line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import pytest

from aliquot.config.schema import DataSection
from aliquot.core.errors import DataError, UserError
from aliquot.data.data_files import CARD, HIDDEN
from aliquot.data.file_source import FileSource
from aliquot.data.remote_files import find_remote
from aliquot.data.sources import source_of
from aliquot.stores.store import open_store
from tests import runs
from tests.stores.http_server import Handler, serving
from tests.stores.s3_server import BUCKET, S3Server

FILES = {
    "README.md": "# A corpus",
    "b.jsonl": '{"text": "first"}\n{"text": "second"}\n',
    "deep/a.jsonl": '{"text": "third"}\n',
    "deep/.hidden.jsonl": '{"text": "hidden"}\n',
    "deep/picture.png": "\0",
}


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The objects of a bucket in a server on this machine, which answers the requests of gcsfs that only read."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks another service for the kind of a bucket
    pytest.importorskip("gcsfs")
    objects: dict[str, bytes] = {}

    def facts(name: str) -> dict[str, object]:
        generation = hashlib.sha1(objects[name]).hexdigest()
        return {"name": name, "bucket": BUCKET, "size": str(len(objects[name])), "generation": generation}

    class Server(Handler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            asked, (_, _, name) = parse_qs(url.query), unquote(url.path).partition(f"/b/{BUCKET}/o")
            if url.path.startswith("/download/"):
                start, stop = self.headers["Range"].removeprefix("bytes=").split("-")
                self.answer(objects[name[1:]][int(start) : int(stop) + 1], 206)
            elif name:
                is_there = name[1:] in objects
                self.answer(facts(name[1:]) if is_there else {}, 200 if is_there else 404)
            else:
                listed = [facts(found) for found in sorted(objects) if found.startswith(asked.get("prefix", [""])[0])]
                self.answer({"items": listed})

    with serving(Server) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        yield objects


@pytest.fixture(params=["s3", "memory", "file", "hf", "gs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    files = {name: content.encode() for name, content in FILES.items()}
    if request.param == "hf":
        request.getfixturevalue("hub").files |= files
        return "hf://datasets/owner/name"
    if request.param == "gs":
        request.getfixturevalue("gcs").update({f"corpus/{name}": data for name, data in files.items()})
        return f"gs://{BUCKET}/corpus"
    if request.param == "s3":
        request.getfixturevalue("s3")
    root = {"s3": f"s3://{BUCKET}/corpus", "memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/there"}
    store = open_store(root[request.param])
    for name, data in files.items():
        store.put(name, data)
    return root[request.param]


def source(path: str | list[str], cache: Path) -> FileSource:
    found = source_of(DataSection(path=path), cache)
    assert isinstance(found, FileSource)
    return found


def texts(path: str | list[str], cache: Path) -> list[str]:
    return [document.text for document in source(path, cache).documents() if not document.blank]


def test_directory_glob_and_file_of_a_url(url: str, tmp_path: Path) -> None:
    whole = source(f"{url}/", tmp_path)
    assert texts(f"{url}/", tmp_path) == ["first", "second", "third"]
    assert {reason: count for reason, count in whole.left_out.items() if reason in (CARD, HIDDEN)} == {
        CARD: 1, HIDDEN: 1,
    }  # fmt: skip
    assert texts(f"{url}/*.jsonl", tmp_path) == ["first", "second"]
    assert texts(f"{url}/**/[ab].jsonl", tmp_path) == ["first", "second", "third"]
    assert texts([f"{url}/deep/a.jsonl", f"{url}/b.jsonl"], tmp_path) == ["third", "first", "second"]
    local = tmp_path / "local"
    (local / "deep").mkdir(parents=True)
    for name, content in FILES.items():
        (local / name).write_text(content)
    assert whole.digest == source(str(local), tmp_path).digest
    assert whole.total_bytes == source(str(local), tmp_path).total_bytes
    for missing, reason in [("never.jsonl", "no such file"), ("never*.jsonl", "no file matches")]:
        with pytest.raises(UserError, match=rf"^{url}/{missing.replace('*', '.')}: data.path: {reason}"):
            source(f"{url}/{missing}", tmp_path)


def test_file_is_copied_once_until_it_changes(s3: S3Server, tmp_path: Path) -> None:
    store, path = open_store(f"s3://{BUCKET}/corpus"), f"s3://{BUCKET}/corpus/long.jsonl"
    lines = [json.dumps({"text": f"{number} {'x' * 1000}"}) for number in range(20_000)]  # more than one range

    def reads() -> int:
        return sum(line.startswith(f"GET /{BUCKET}/corpus/long.jsonl") for line in s3.seen)

    store.put("long.jsonl", "\n".join(lines).encode())
    reports: list[tuple[str, int, int]] = []
    first = source_of(DataSection(path=path), tmp_path, report=lambda *report: reports.append(report))
    assert first.digest == source(path, tmp_path).digest
    assert [document.text for document in first.documents()] == [json.loads(line)["text"] for line in lines]
    assert reads() == len(reports) == 2
    assert reports[-1] == (f"copying {path}", first.total_bytes, first.total_bytes)
    store.put("long.jsonl", "\n".join(lines[:9]).encode())
    assert len(texts(path, tmp_path)) == 9
    assert reads() == 3


def test_fault_of_an_object_store_is_one_line(s3: S3Server, tmp_path: Path) -> None:
    open_store(f"s3://{BUCKET}").put("a.jsonl", b'{"text": "one"}\n')
    for path, message in {
        "s3://nobodys/a.jsonl": r"^s3://nobodys: ListObjectsV2: NoSuchBucket: ",
        "oci://bucket/a.jsonl": "^oci://bucket: .*ocifs",
        f"s3://{BUCKET}/**a.jsonl": r"data.path: not a pattern of files",
    }.items():
        with pytest.raises(UserError, match=message) as refused:
            source(path, tmp_path)
        assert refused.value.exit_code == 2
    (file,) = find_remote(f"s3://{BUCKET}/a.jsonl", "data.path", {}, tmp_path)  # type: ignore[arg-type]
    open_store(f"s3://{BUCKET}").put("a.jsonl", b"{}")
    with pytest.raises(UserError, match=r"a\.jsonl: has changed since the start of this run: start again$"):
        file.fetch(lambda *_: None)
    open_store(f"s3://{BUCKET}").remove(["a.jsonl"])
    with pytest.raises(DataError, match=r"a\.jsonl: this file of the data is no longer there: start again$"):
        file.fetch(lambda *_: None)
    assert not list(tmp_path.glob("remote/*/*"))
    open_store(f"s3://{BUCKET}").put("a.jsonl", b"{}")
    s3.fault = lambda environ: "403 Forbidden"
    with pytest.raises(UserError, match=r"^s3://models: ListObjectsV2: InternalError: injected$"):
        source(f"s3://{BUCKET}/a.jsonl", tmp_path)
    fsspec.filesystem("memory").pipe_file("/corpus/..", b"x")
    with pytest.raises(UserError, match=r"corpus/\.\.: this name cannot be the name of a local copy"):
        find_remote("memory://corpus/*", "data.path", {}, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("damaged", [b"", b'{"text": "first"}\n', b'{"text": "First"}\n{"text": "second"}\n'])
def test_damaged_copy_is_copied_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes) -> None:
    path = f"memory://{tmp_path.name}/b.jsonl"
    open_store(path.removesuffix("/b.jsonl")).put("b.jsonl", FILES["b.jsonl"].encode())
    (copy,) = source(path, tmp_path).remote
    assert texts(path, tmp_path) == ["first", "second"]
    before = source(path, tmp_path).digest
    copy.write_bytes(damaged)
    assert source(path, tmp_path).digest == before
    assert texts(path, tmp_path) == ["first", "second"]
    (warning,) = caplog.messages
    assert warning == f"data cache: {copy.parent}: b.jsonl is damaged; it is made again"


@pytest.mark.long
def test_run_on_data_in_s3_is_the_run_on_local_data(s3: S3Server, tmp_path: Path) -> None:
    config = runs.write_config(tmp_path)
    open_store(f"s3://{BUCKET}/corpus").put("text.txt", (tmp_path / "text.txt").read_bytes())
    shown = [runs.command("data", "show", config, *path) for path in ([], [f"data.path=s3://{BUCKET}/corpus/*.txt"])]
    local, remote = ([line for line in run.stdout.splitlines() if not line.endswith("%")] for run in shown)
    assert remote == local != [], shown[1].stderr
    assert [line for line in shown[1].stdout.splitlines() if line.endswith("%")] == [
        f"copying s3://{BUCKET}/corpus/text.txt: 100 %"  # the tokens are those of the local file
    ]
