"""Checkpoints in a store: never seen before they are complete, copied by all ranks, found again; stores that fail."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from aliquot.checkpoint import mirror
from aliquot.checkpoint.background_task import SaveEvents
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.directories import complete_directories
from aliquot.checkpoint.mirror import Uploader, fetch_newer, fetch_replacement
from aliquot.checkpoint.remote_checkpoint import complete_steps, fetched_weights
from aliquot.checkpoint.retention import Retention, retain
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import DamagedCheckpoint, ResumeError, StorageError
from aliquot.core.on_rank_0 import SingleRank
from aliquot.stores.store import Store, open_store
from aliquot.tensor_io.manifest import verify
from tests.checkpoint.saving import save
from tests.stores.s3_server import BUCKET, S3Server, is_part
from tests.tensor_io.world import FakeStore, MemoryStore, Tensors, combine_gathered

SMALL = [("a.weight", (7, 3)), ("b.weight", (20, 22))]
LARGE = [("a.weight", (7, 3)), ("b.weight", (2000, 2200))]  # 17.6 MB: two parts


def store_of(value: float, tensors: Tensors) -> MemoryStore:
    """Parts of known values, to which `value` is added."""
    return MemoryStore({part: values + value for part, values in FakeStore(tensors).values.items()})


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, told: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(told)
        self._told, self._barrier = told, barrier

    def gather(self, value: Any) -> list[Any]:
        self._told[self.rank] = json.dumps(value)
        self._barrier.wait()
        told = [json.loads(text) for text in self._told]
        self._barrier.wait()
        return told

    def combine(self, values: Any, operation: str) -> Any:
        return combine_gathered(self.gather(values.tolist()), operation)


def as_ranks(world_size: int, work: Callable[[Threads], None]) -> None:
    """Raises what a rank raised."""
    told, barrier, raised = [None] * world_size, threading.Barrier(world_size, timeout=60), []

    def run(rank: int) -> None:
        try:
            work(Threads(rank, told, barrier))
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


URL = f"s3://{BUCKET}/checkpoints/run"


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/there/run"
    request.getfixturevalue("s3")
    return URL


def saved(root: Path, step: int, keep: int = 2, tensors: Tensors = SMALL) -> Path:
    files = {"config.json": b"{}", "empty.txt": b""}
    return save(
        root, step, store_of(float(step), tensors), CheckpointSpec(tensors, files), {"step": step}, SingleRank(), keep
    )


def copy(
    root: Path, url: str, *steps: int, ranks: Any = None, warned: list[str] | None = None, **settings: Any
) -> None:
    """All of `steps` at once, and wait."""
    section = CheckpointSection.model_validate({"on_error": "stop" if warned is None else "warn", **settings})
    told: list[str] = []
    events = SaveEvents((warned if warned is not None else []).append, told.append)
    mirror = Uploader(url, root, ranks or SingleRank(), section, events)
    for step in steps:
        mirror.start(step)
    mirror.finish()
    assert mirror.protected_steps == []


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def in_store(url: str, folder: str) -> dict[str, bytes]:
    store = open_store(url)
    with_step = {name: size for name, size in store.list().items() if name.startswith(f"{folder}/")}
    return {name.partition("/")[2]: store.read(name, 0, size) for name, size in with_step.items()}


def test_three_ranks_upload_one_checkpoint(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    local = saved(tmp_path / "here", 7, tensors=LARGE)
    as_ranks(3, lambda ranks: copy(tmp_path / "here", url, 7, ranks=ranks))
    assert in_store(url, local.name) == files_of(local)
    assert complete_steps(open_store(url)) == ["step-00000007"]


def test_parts_come_once_and_the_manifest_last(tmp_path: Path, s3: S3Server) -> None:
    local = saved(tmp_path, 7, tensors=LARGE)
    as_ranks(2, lambda ranks: copy(tmp_path, URL, 7, ranks=ranks))
    written = [line for line in s3.seen if line.startswith("PUT") and f"{local.name}/" in line]
    assert len(written) == len(set(written)) == len(list(local.iterdir())) + 3  # three files have two parts
    assert "manifest.json" in written[-1]
    assert sum("manifest.json" in line for line in written) == 1
    assert in_store(URL, local.name) == files_of(local)


def copied(folder: Path, url: str) -> tuple[Path, Store]:
    """The checkpoint of step 7 in `folder`, and the store with its copy."""
    local = saved(folder, 7)
    copy(folder, url, 7)
    return local, open_store(url)


def test_upload_skips_equal_copy_and_replaces_another(tmp_path: Path, url: str) -> None:
    local, store = copied(tmp_path / "here", url)
    store.put("step-00000003/model.safetensors", b"of a copy that was killed")
    store.put("readme.txt", b"a person's own")
    copy(tmp_path / "here", url, 7)
    shutil.rmtree(local)
    save(tmp_path / "here", 7, store_of(0.5, SMALL), CheckpointSpec(SMALL), {"step": 7}, SingleRank(), 2)
    copy(tmp_path / "here", url, 7)
    assert in_store(url, local.name) == files_of(local)
    assert {name.partition("/")[0] for name in store.list()} == {local.name, "readme.txt"}


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_incomplete_copy_is_uploaded_again(tmp_path: Path, url: str, name: str) -> None:
    local, store = copied(tmp_path / "here", url)
    for damage in (b"cut off", None):
        store.remove([f"{local.name}/{name}"])
        if damage is not None:
            store.put(f"{local.name}/{name}", damage)
        copy(tmp_path / "here", url, 7)
        assert in_store(url, local.name) == files_of(local)


def test_new_checkpoint_replaces_the_copy_of_its_step(tmp_path: Path, url: str) -> None:
    """A run that passed over what is damaged there comes to the same step with the same manifest."""
    local, store = copied(tmp_path / "here", url)
    name = f"{local.name}/model.safetensors"
    store.put(name, b"x" + store.read(name, 1, store.list()[name]))
    mirror = Uploader(url, tmp_path / "here", SingleRank(), CheckpointSection(), SaveEvents(print, print))
    mirror.start(7, just_saved=True)
    mirror.finish()
    assert in_store(url, local.name) == files_of(local)


def test_mirror_retention_and_newest_upload_first(tmp_path: Path, url: str) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path / "here", step, keep=9)
    copy(tmp_path / "here", url, 1, 2, 3, keep=9)
    assert complete_steps(open_store(url)) == ["step-00000001", "step-00000003"]
    copy(tmp_path / "here", url, 4, keep=2)
    assert complete_steps(open_store(url)) == ["step-00000003", "step-00000004"]
    assert {name.partition("/")[0] for name in open_store(url).list()} == {"step-00000003", "step-00000004"}
    assert [path.name for path in complete_directories(tmp_path / "here")] == ["step-00000003", "step-00000004"]


def test_a_hiccup_of_the_file_system_here_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    url = f"file://{tmp_path}/there"
    saved(tmp_path / "here", 1, keep=9)
    instance = Uploader(url, tmp_path / "here", SingleRank(), CheckpointSection(), SaveEvents(print, print))
    monkeypatch.setattr(mirror, "retain", stale)
    instance.start(1)
    instance.finish()
    assert complete_steps(open_store(url)) == ["step-00000001"]
    assert "leftovers of earlier saves could not be removed" in caplog.text


def test_retention_spares_checkpoints_that_wait_for_upload(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    root = tmp_path / "here"
    for step in (1, 2):
        saved(root, step, keep=9)
    mirror = Uploader(url, root, SingleRank(), CheckpointSection(keep=1), SaveEvents(print, print))
    mirror.start(1)
    mirror.start(2)
    saved(root, 3, keep=9)
    retain(
        root, root / "step-00000003", Retention(1, protected_steps=mirror.protected_steps)
    )  # as the end of a save does
    assert len(complete_directories(root)) == 3
    mirror.finish()
    assert complete_steps(open_store(url)) == ["step-00000002"]
    assert [path.name for path in complete_directories(root)] == ["step-00000003"]


def test_server_errors_leave_no_complete_copy(tmp_path: Path, s3: S3Server) -> None:
    for step, tensors in (1, SMALL), (2, LARGE), (3, SMALL):
        saved(tmp_path, step, 9, tensors)
    copy(tmp_path, URL, 1, keep=9)
    s3.fault = lambda environ: "500 Oops" if is_part(environ) and "partNumber=2" in environ["QUERY_STRING"] else None
    warned: list[str] = []
    as_ranks(2, lambda ranks: copy(tmp_path, URL, 2, ranks=ranks, warned=warned, keep=9))
    assert len(warned) == 2
    assert "checkpoint.mirror: step 2 could not be copied, the local checkpoint is complete: rank " in warned[0]
    assert "UploadPart: " in warned[0]
    assert complete_steps(open_store(URL)) == ["step-00000001"]
    with pytest.raises(StorageError, match="step 2 could not be copied"):
        copy(tmp_path, URL, 2, keep=9)
    verify(tmp_path / "step-00000002")
    s3.fault = lambda environ: None
    copy(tmp_path, URL, 3, keep=9)
    assert {name.partition("/")[0] for name in open_store(URL).list()} == {"step-00000001", "step-00000003"}
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=BUCKET)


def test_dying_server_does_not_delay_steps(tmp_path: Path, s3: S3Server) -> None:
    saved(tmp_path, 1, tensors=LARGE)
    dies = threading.Event()

    def die(environ: dict[str, Any]) -> str | None:
        if is_part(environ):
            dies.set()
            time.sleep(0.5)
            return "503 Gone"
        return None

    s3.fault = die
    warned: list[str] = []
    settings = CheckpointSection.model_validate({"on_error": "warn"})
    mirror = Uploader(URL, tmp_path, SingleRank(), settings, SaveEvents(warned.append, print))
    mirror.start(1)
    steps = 0
    while not warned:
        mirror.poll([mirror.report()])
        steps += 1
        time.sleep(0.001)
        if dies.is_set() and s3.running:
            s3.stop()
    assert steps > 100
    verify(tmp_path / "step-00000001")


def test_damaged_checkpoint_is_not_uploaded(tmp_path: Path, url: str) -> None:
    local = saved(tmp_path / "here", 1)
    with (local / "model.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"x")
    with pytest.raises(StorageError, match=r"model\.safetensors: the block at byte 0 differs from the saved block"):
        copy(tmp_path / "here", url, 1)
    assert complete_steps(open_store(url)) == []


def test_newer_remote_checkpoint_is_downloaded_by_all_ranks(tmp_path: Path, url: str) -> None:
    lost, here, warned = tmp_path / "lost", tmp_path / "here", []
    for step in (5, 6):
        saved(lost, step)
        copy(lost, url, step)
    saved(here, 4)

    def fetch(settings: CheckpointSection = CheckpointSection()) -> None:  # noqa: B008
        as_ranks(2, lambda ranks: fetch_newer(settings, url, here, ranks, warned.append))

    fetch()
    assert [path.name for path in complete_directories(here)] == ["step-00000004", "step-00000006"]
    assert files_of(here / "step-00000006") == files_of(lost / "step-00000006")
    fetch()  # nothing is newer
    with pytest.raises(ResumeError, match=r"`never`, and .* holds step-00000006; choose another run.name"):
        fetch(CheckpointSection(resume="never"))
    assert warned == []
    shutil.rmtree(here / "step-00000006")
    store = open_store(url)
    name = "step-00000006/exp_avg.safetensors"
    store.put(name, b"x" + store.read(name, 1, store.list()[name]))
    fetch()
    assert [path.name for path in complete_directories(here)] == ["step-00000004", "step-00000005"]
    assert any("skipping a damaged checkpoint" in line and "exp_avg.safetensors" in line for line in warned)
    assert sorted(path.name for path in here.iterdir()) == ["step-00000004", "step-00000005"]


def test_damaged_mirror_does_not_restart_a_run(tmp_path: Path, url: str) -> None:
    saved(tmp_path / "lost", 5)
    copy(tmp_path / "lost", url, 5)
    store, name = open_store(url), "step-00000005/exp_avg.safetensors"
    store.put(name, b"x" + store.read(name, 1, store.list()[name]))
    warned: list[str] = []
    with pytest.raises(ResumeError, match=r"no checkpoint in .* is complete and undamaged"):
        as_ranks(2, lambda ranks: fetch_newer(CheckpointSection(), url, tmp_path / "here", ranks, warned.append))
    assert any("skipping a damaged checkpoint" in line for line in warned)


def test_unreachable_mirror_does_not_restart_a_run(tmp_path: Path, s3: S3Server) -> None:
    s3.stop()
    warned: list[str] = []
    with pytest.raises(StorageError, match=r"checkpoint.mirror: .*cannot be reached"):
        fetch_newer(CheckpointSection(on_error="warn"), URL, tmp_path, SingleRank(), warned.append)
    saved(tmp_path, 4)
    fetch_newer(CheckpointSection(on_error="warn"), URL, tmp_path, SingleRank(), warned.append)
    assert "resuming from" in warned[0]


def test_a_url_to_begin_from_and_weights_for_an_export(tmp_path: Path, url: str) -> None:
    local = saved(tmp_path / "first", 5)
    copy(tmp_path / "first", url, 5)
    begin = CheckpointSection(resume=f"{url}/step-00000005")
    fetch_newer(begin, None, tmp_path / "second", SingleRank(), print)
    assert files_of(tmp_path / "second/step-00000005") == files_of(local)
    with fetched_weights(f"{url}/step-00000005", tmp_path / "out", all_files=False) as directory:
        assert (directory / "model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()
        assert (directory / "exp_avg.safetensors").stat().st_blocks == 0
    assert not list(tmp_path.glob(".out*"))
    with pytest.raises(DamagedCheckpoint, match="step-00000009: no complete checkpoint there"):
        fetch_newer(CheckpointSection(resume=f"{url}/step-00000009"), None, tmp_path / "third", SingleRank(), print)


def test_damaged_download_is_fetched_again(tmp_path: Path, url: str) -> None:
    here, warned = tmp_path / "here", []
    for step in (3, 5, 6):
        saved(tmp_path / "whole", step, keep=9)
        copy(tmp_path / "whole", url, step, keep=9)
    for step in (4, 5, 6):
        saved(here, step, keep=9)
    whole = files_of(here / "step-00000006")
    damaged = here / "step-00000006" / "exp_avg.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")

    def fetch(directory: Path, on_error: str = "warn") -> list[Path | None]:
        settings, found = CheckpointSection.model_validate({"on_error": on_error}), []
        as_ranks(2, lambda ranks: found.append(fetch_replacement(settings, url, directory, ranks, warned.append)))
        return found

    assert fetch(here / "step-00000006") == [here / "step-00000006"] * 2
    assert files_of(here / "step-00000006") == whole
    shutil.rmtree(here / "step-00000005")
    store = open_store(url)
    store.remove(["step-00000006/state.json"])
    assert fetch(here / "step-00000006") == [here / "step-00000005"] * 2, "which is newer than what is whole here"
    assert any("step-00000006/state.json" in line and "is not there" in line for line in warned)
    store.remove(["step-00000005/state.json"])
    shutil.rmtree(here / "step-00000005")
    assert fetch(here / "step-00000006") == [None, None]
    assert fetch_replacement(CheckpointSection(), None, damaged.parent, SingleRank(), warned.append) is None


def test_initial_path_with_no_complete_remote_checkpoint(tmp_path: Path, url: str) -> None:
    """As the error without one says."""
    saved(tmp_path / "lost", 5)
    copy(tmp_path / "lost", url, 5)
    open_store(url).remove(["step-00000005/state.json"])
    with pytest.raises(ResumeError, match=r"or a checkpoint\.resume: PATH"):
        fetch_newer(CheckpointSection(), url, tmp_path / "here", SingleRank(), print)
    fetch_newer(CheckpointSection(resume=str(tmp_path)), url, tmp_path / "here", SingleRank(), print)
