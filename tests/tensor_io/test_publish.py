from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aliquot.core.errors import DamagedCheckpoint, StorageError, TrainingError, UserError
from aliquot.core.on_rank_0 import SingleRank, gather_results, run_on_rank_0
from aliquot.tensor_io.publish import (
    check_names,
    check_space,
    clean_leftovers,
    commit,
    publish_together,
    remove_directory,
    restore_former,
    write_file,
)
from tests.tensor_io.world import Died, PipedRanks, run_world


def publish(target: Path, ranks: Any, fails: str | None = None, rank: int = 0, replace: bool = False) -> None:
    def stage(name: str) -> None:
        if name == fails and ranks.rank == rank:
            raise OSError(28, "No space left on device", str(target))

    def write(partial: Path) -> list[int]:
        stage("write")
        write_file(partial / f"of-{ranks.rank}", b"data")
        return [ranks.rank]

    def finish(partial: Path, written: list[int]) -> None:
        stage("finish")
        write_file(partial / "written", str(written).encode())

    def combine(written: list[int]) -> list[int]:
        return [rank for ranks_written in ranks.gather(written) for rank in ranks_written]

    keep_former = (lambda former: False) if replace else None
    publish_together(target, ranks, lambda partial: stage("prepare"), write, finish, combine, keep_former)


def test_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    assert run_world(2, lambda ranks: publish(target, ranks)) == [None, None]
    assert sorted(path.name for path in target.iterdir()) == ["of-0", "of-1", "written"]
    assert (target / "written").read_text() == "[0, 1]"
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.few(2)
@pytest.mark.parametrize(("stage", "rank"), [("prepare", 0), ("write", 0), ("write", 1), ("finish", 0)])
def test_an_error_reaches_all_and_leaves_nothing(tmp_path: Path, stage: str, rank: int) -> None:
    answers = run_world(2, lambda ranks: publish(tmp_path / "out", ranks, stage, rank))
    assert [type(answer) for answer in answers] == [StorageError, StorageError]
    assert str(answers[0]) == str(answers[1])
    assert str(tmp_path / "out") in str(answers[0]) and "No space left" in str(answers[0])
    assert (f"rank {rank}: " in str(answers[0])) == (stage == "write")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_content_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    publish(tmp_path / "out", SingleRank())  # empty: taken
    with pytest.raises(UserError, match="not empty"):
        publish(tmp_path / "out", SingleRank())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_disk_has_all_of_it_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(f"{path.name} becomes {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    publish(tmp_path / "out", SingleRank())
    named = next(at for at, event in enumerate(events) if event.endswith(" becomes out"))
    partial = events[named].partition(" ")[0]
    assert set(events[:named]) == {"of-0", "written", partial}
    assert events[named - 1] == partial  # the directory last: it names what is in it
    assert events[named + 1 :] == [tmp_path.name]


def fails_for_names(directory: Path) -> Callable[[Path], None]:
    def sync(path: Path) -> None:
        if path == directory:
            raise OSError(5, "Input/output error", str(path))

    return sync


def test_what_the_disk_may_not_have_named_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aliquot.tensor_io.publish.sync", fails_for_names(tmp_path))
    with pytest.raises(UserError, match="Input/output error"):
        publish(tmp_path / "out", SingleRank())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", ["prepare", "write", "finish", "sync"])
def test_what_is_to_be_replaced_stays_until_the_new_one_is_whole(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "former").write_bytes(b"")
    with monkeypatch.context() as patched:
        if stage == "sync":
            patched.setattr("aliquot.tensor_io.publish.sync", fails_for_names(tmp_path))
        with pytest.raises(StorageError):
            publish(target, SingleRank(), stage, replace=True)
    assert [path.name for path in target.iterdir()] == ["former"]
    publish(target, SingleRank(), replace=True)
    assert sorted(path.name for path in target.iterdir()) == ["of-0", "written"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_to_be_replaced_goes_first_where_only_that_makes_room(tmp_path: Path) -> None:
    former, partial = tmp_path / "out", tmp_path / ".out.partial-00112233"
    for directory in (former, partial):
        directory.mkdir()
    (former / "weights").write_bytes(b"x" * (8 << 20))
    os.sync()  # blocks are counted once they lie on the disk
    found = os.statvfs(tmp_path)
    free_bytes = found.f_bavail * found.f_frsize
    with pytest.raises(StorageError, match="are free"):
        check_space(partial, 2 * free_bytes, instead_of=former)
    check_space(partial, free_bytes // 2, instead_of=former)
    assert former.exists()
    check_space(partial, free_bytes + (4 << 20), instead_of=former)
    assert not former.exists()


def test_leftovers(tmp_path: Path) -> None:
    for name in (".step-1.partial-00112233", ".step-1.trash-00112233", ".other.partial-00112233", "step-2", ".step-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"")
    remove_directory(tmp_path / "step-2")
    remove_directory(tmp_path / "absent")
    clean_leftovers(tmp_path, re.compile(r"step-\d"))
    clean_leftovers(tmp_path / "absent", re.compile(r"step-\d"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.partial-00112233", ".step-3"]


def test_what_was_being_replaced_by_a_process_that_was_killed_is_put_back(tmp_path: Path) -> None:
    """Between the two names that replacing takes there is neither."""
    killed = """
import os, pathlib, sys
from aliquot.tensor_io.publish import commit
rename = pathlib.Path.rename
def dies(path, target):
    return os._exit(9) if ".partial-" in path.name else rename(path, target)
pathlib.Path.rename = dies
commit(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), replace=True)
"""
    target, partial = tmp_path / "step-1", tmp_path / ".step-1.partial-00112233"
    for directory, content in ((target, "old"), (partial, "new")):
        directory.mkdir()
        (directory / "file").write_text(content)
    assert subprocess.run([sys.executable, "-c", killed, partial, target], check=False).returncode == 9
    assert not target.exists()
    restore_former(tmp_path)
    assert (target / "file").read_text() == "old"
    restore_former(tmp_path / "absent")
    commit(partial, target, replace=True)
    assert (target / "file").read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_names() -> None:
    check_names(["config.json", "tokenizer.json"], taken={"state.json"})
    for name in ("../config.json", "a/b", "", "state.json", "model.safetensors", "model.safetensors.index.json"):
        with pytest.raises(ValueError, match="beside the weights"):
            check_names([name], taken={"state.json"})


def test_together_gives_all_answers() -> None:
    answers = run_world(
        3, lambda ranks: (gather_results(ranks, lambda: ranks.rank * 10), run_on_rank_0(ranks, lambda: "first"))
    )
    assert answers == [([0, 10, 20], "first")] * 3


def test_kinds_of_errors() -> None:
    def work(ranks: PipedRanks) -> None:
        if ranks.rank == 1:
            raise DamagedCheckpoint("damaged", "file")

    answers = run_world(2, lambda ranks: gather_results(ranks, lambda: work(ranks)))
    assert [(type(answer), str(answer)) for answer in answers] == [(DamagedCheckpoint, "rank 1: file: damaged")] * 2

    def alike(ranks: PipedRanks) -> None:
        raise UserError("bad", "file")

    answers = run_world(2, lambda ranks: gather_results(ranks, lambda: alike(ranks)))
    assert [str(answer) for answer in answers] == ["file: bad"] * 2

    def bug(ranks: PipedRanks) -> int:
        return 1 // ranks.rank

    zero, one = run_world(2, lambda ranks: gather_results(ranks, lambda: bug(ranks)))
    assert isinstance(zero, ZeroDivisionError)
    assert isinstance(one, TrainingError) and str(one).startswith("rank 0: ZeroDivisionError")


def test_the_harness_notices_a_dead_rank() -> None:
    def work(ranks: PipedRanks) -> list[int]:
        if ranks.rank == 1:
            os._exit(1)
        return ranks.gather(0)

    assert [type(answer) for answer in run_world(2, work)] == [Died, Died]
