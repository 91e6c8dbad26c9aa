"""Every store keeps the same promises: files from parts of several writers, nothing of a small one or all of it."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import boto3
import fsspec
import pytest
from fsspec import AbstractFileSystem

from aliquot.core.errors import StorageError, UserError
from aliquot.stores.s3_store import S3Store
from aliquot.stores.store import FileChangedError, FsspecStore, LocalStore, Store, open_store
from tests.stores.s3_server import BUCKET, STALL, S3Server, is_part

MIB = 1 << 20


@pytest.fixture(params=["file", "s3", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return open_store(f"s3://{BUCKET}/some/where/")
    return open_store(f"file://{tmp_path}/there" if request.param == "file" else f"memory://{tmp_path.name}")


def test_open_store_chooses_by_url(store: Store, request: pytest.FixtureRequest) -> None:
    kinds = {"file": LocalStore, "s3": S3Store, "memory": FsspecStore}
    assert type(store) is kinds[request.node.callspec.params["store"]]


def test_two_writers_write_one_file(store: Store) -> None:
    data = bytes(range(256)) * (18 * MIB // 256)
    assert store.list() == {}
    token = store.begin("step-00000001/big", len(data))
    length = store.part_bytes(len(data))
    starts = range(0, len(data), length)
    other = store  # a token and receipts are all that writers share
    sent = {
        index: (store if index % 2 else other).put_part(
            "step-00000001/big", token, index, start, iter([data[start : start + 4], data[start + 4 : start + length]])
        )
        for index, start in reversed(list(enumerate(starts)))
    }
    store.complete("step-00000001/big", token, [sent[index] for index in sorted(sent)])
    store.put("step-00000001/small", b"abc")
    assert store.list() == {"step-00000001/big": len(data), "step-00000001/small": 3}
    assert store.read("step-00000001/big", 17 * MIB, 17 * MIB + 5) == data[17 * MIB :][:5]
    assert store.read("step-00000001/big", 18 * MIB - 2, 18 * MIB + 2) == data[-2:]
    store.put("step-00000001/small", b"defg")
    assert store.read("step-00000001/small", 0, 99) == b"defg"
    store.remove(["step-00000001/small", "step-00000001/big", "step-00000001/never"])
    assert store.list() == {}


def test_part_that_the_disk_cuts_short_is_an_error(tmp_path: Path) -> None:
    """One write then tells of fewer bytes, and the next one why."""
    store, before = open_store(f"file://{tmp_path}/there"), resource.getrlimit(resource.RLIMIT_FSIZE)
    token = store.begin("big", 2 * MIB)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 1, before[1]))
    try:
        with pytest.raises(StorageError, match="big: cannot write: File too large"):
            store.put_part("big", token, 0, 0, [bytes(2 * MIB)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_empty_file(store: Store) -> None:
    token = store.begin("empty", 0)
    store.complete("empty", token, [store.put_part("empty", token, 0, 0, iter([]))])
    assert store.list() == {"empty": 0}
    assert store.read("empty", 0, 0) == b""


def test_s3_hides_and_aborts_unfinished_uploads(s3: S3Server) -> None:
    store = open_store(f"s3://{BUCKET}/a")
    token = store.begin("big", 17 * MIB)
    store.put_part("big", token, 0, 0, [bytes(16 * MIB)])
    assert store.list() == {}
    other = open_store(f"s3://{BUCKET}/b")
    others = other.begin("big", 17 * MIB)
    store.abort()
    left = boto3.client("s3").list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [upload["UploadId"] for upload in left] == [others]
    with pytest.raises(StorageError, match="UploadPart"):
        store.put_part("big", token, 1, 16 * MIB, [bytes(MIB)])


def test_s3_part_has_its_checksum_and_is_sent_again(s3: S3Server) -> None:
    seen: list[str] = []

    def once(environ: dict[str, str]) -> str | None:
        if is_part(environ):
            seen.append(environ["HTTP_X_AMZ_CHECKSUM_CRC32"])
        return "500 Oops" if len(seen) == 1 and is_part(environ) else None

    s3.fault = once
    store = open_store(f"s3://{BUCKET}/a")
    store.put_part("big", store.begin("big", 17 * MIB), 0, 0, [b"123456789"])
    assert seen == ["y/Q5Jg==", "y/Q5Jg=="]  # 0xcbf43926, the check value of CRC-32


def test_s3_refusal_or_dead_server_is_one_line(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"^s3://nobodys/x: ListObjectsV2: NoSuchBucket: ") as refused:
        open_store("s3://nobodys/x").list()
    assert refused.value.exit_code == 2
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3.fault = lambda environ: "503 Slow Down"
    with pytest.raises(StorageError, match=r"^s3://models/x: ListObjectsV2: ") as failed:
        open_store(f"s3://{BUCKET}/x").list()
    monkeypatch.setattr("aliquot.stores.s3_store._SILENT_S", 0.05)
    s3.fault = lambda environ: STALL if environ["REQUEST_METHOD"] == "GET" else None
    open_store(f"s3://{BUCKET}/x").put("part", b"data")
    with pytest.raises(StorageError, match=r"^s3://models/x/part: cannot be reached: Read timeout on ") as stalled:
        open_store(f"s3://{BUCKET}/x").read("part", 0, 4)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"^s3://models/x: cannot be reached: .*127\.0\.0\.1:9") as gone:
        open_store("s3://models/x").put("a", b"")
    assert [each.value.exit_code for each in (failed, stalled, gone)] == [1, 1, 1]  # a job tries again
    with pytest.raises(UserError, match=r"^nowhere://x: Protocol not known: nowhere"):
        open_store("nowhere://x")


def test_file_url_needs_three_slashes(tmp_path: Path) -> None:
    for number, beginning in enumerate((f"file://{tmp_path}", f"file://localhost{tmp_path}")):
        open_store(f"{beginning}/a%20b%25{number}").put("x", b"")
        assert (tmp_path / f"a b%{number}" / "x").exists()
    for wrong in ("file://there/run", "file://run", "file://./run"):
        with pytest.raises(UserError, match=r"has three slashes, file:///DIRECTORY; '(there|run|\.)' is a host$"):
            open_store(wrong)


def test_missing_file(store: Store) -> None:
    store.put("other", b"abc")
    with pytest.raises(FileNotFoundError, match="never"):
        store.read("never", 0, 3)


@pytest.mark.parametrize("later", [b"another", b"sho", b"and longer than before"])
def test_file_that_changes_after_it_was_listed(store: Store, later: bytes) -> None:
    store.put("some/file", b"content")
    (version,) = store.find("some/file").values()
    assert store.find()["some/file"] == version
    assert store.read("some/file", 2, 5, version) == b"nte"
    time.sleep(0.01)  # a file system's clock may be coarse
    store.put("some/file", later)
    with pytest.raises(FileChangedError):
        store.read("some/file", 2, 5, version)
    assert store.read("some/file", 2, 5) == later[2:5]


def test_incomplete_fsspec_address_is_one_line() -> None:
    with pytest.raises(StorageError, match=r"reference://there: TypeError: .*missing"):
        open_store("reference://there")


def test_missing_boto3_names_the_extra() -> None:
    script = (
        "import sys; sys.modules['boto3'] = None\nfrom aliquot.stores.store import open_store\nopen_store('s3://x')"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr
    assert "s3://x needs boto3: pip install 'aliquot[s3]'" in told


class SilentFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A server that accepts a request and sends so little that no timeout between two bytes ends the request."""

    protocol = "silent"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        time.sleep(600)
        return b""

    def find(self, path: str, **_: object) -> dict[str, dict[str, object]]:
        raise TimeoutError("told by the server") if path.endswith("told") else TimeoutError(self.cat_file(path))


@pytest.mark.parametrize(
    "request_, message",
    [
        (
            lambda: open_store("silent://there").read("corpus.txt", 0, 9),
            "there/corpus.txt: TimeoutError: no answer within 0.1 s",
        ),
        (lambda: open_store("silent://there").find(), "there: TimeoutError: no answer within 0.1 s"),
        (lambda: open_store("silent://there/told").find(), "told: TimeoutError: told by the server"),
    ],
)
def test_silent_server_is_given_up(
    monkeypatch: pytest.MonkeyPatch, request_: Callable[[], object], message: str
) -> None:
    fsspec.register_implementation("silent", SilentFileSystem, clobber=True)
    monkeypatch.setattr("aliquot.stores.store._READ_LIMIT_S", 0.1)
    with pytest.raises(StorageError, match=message):
        request_()
