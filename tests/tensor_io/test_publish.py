"""Directories and files appear whole under their final names; transfers move each piece of a part once."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aliquot.core.errors import DamagedCheckpoint, StorageError, TrainingError, UserError
from aliquot.core.on_rank_0 import SingleRank, gather_results, run_on_rank_0
from aliquot.tensor_io.bytemap import ByteMap
from aliquot.tensor_io.file_layout import FilesLayout
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
from aliquot.tensor_io.range_io import BUFFER_BYTES, RangeReader, TargetFile
from aliquot.tensor_io.transfer import drain, fill
from tests.examples import examples
from tests.tensor_io.world import SMALL, Died, FakeStore, PipedRanks, Tensors, layout_of, run_world, value_of
from tests.tools import warm


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


def test_what_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(former: Path) -> bool:
        raise PermissionError("Permission denied")

    for _ in range(2):
        publish_together(tmp_path / "out", SingleRank(), print, print, lambda *_: None, keep_former=refuses)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
    clean_leftovers(tmp_path, re.compile("out"))
    (former,) = tmp_path.glob(".out.former-*")
    assert [record.message.startswith(str(former)) for record in caplog.records] == [True, True]
    assert "Permission denied" in caplog.text and "takes up space" in caplog.text


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
    assert warm.run("-c", killed, partial, target).returncode == 9
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


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
models = st.lists(shapes, min_size=1, max_size=6).map(lambda found: [(f"t{i}", shape) for i, shape in enumerate(found)])


def written(directory: Path, tensors: Tensors, dtype: torch.dtype, limit: int, world_size: int) -> FilesLayout:
    """The weights of a FakeStore, written by `world_size` ranks one after the other."""
    layout = layout_of(tensors, dtype, limit, "model")
    layout.create_files(directory)
    for rank in range(world_size):
        store = FakeStore(tensors, rank, world_size)
        drain(store, {"weight": layout.byte_map(directory).entries})
    return layout


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


@settings(max_examples=examples(60))
@given(models, st.sampled_from(FLOATS), st.integers(1, 200), st.integers(1, 4), st.integers(1, 4))
def test_round_trip(tensors: Tensors, dtype: torch.dtype, limit: int, writers: int, readers: int) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        layout = written(Path(one), tensors, dtype, limit, 1)
        written(Path(many), tensors, dtype, limit, writers)
        assert digests(Path(one)) == digests(Path(many))

        found = ByteMap.from_directory(Path(many))
        assert found == layout.byte_map(Path(many)), "what is on disk is what was laid out"
        loaded = {}
        for file in layout.files:
            loaded |= load_file(Path(many) / file.name)
        for part in FakeStore(tensors, kinds=["weight"]).parts():
            assert torch.equal(loaded[part.name].flatten(), value_of(part).to(dtype)), "rounded as torch rounds"

        read_bytes = 0
        for rank in range(readers):
            store = FakeStore(tensors, rank, readers, kinds=["weight"], zeros=True)
            read_bytes += fill(store, {"weight": found.entries})
            assert store.is_original(dtype)
        assert read_bytes == sum(entry.numel * entry.itemsize for entry in found.entries.values()), "once, all ranks"


def test_shards_as_transformers_writes_them(tmp_path: Path) -> None:
    layout = layout_of(SMALL, torch.float32, 400, "model")
    split = split_torch_state_dict_into_shards(
        {name: torch.zeros(shape) for name, shape in SMALL},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=400,
    )
    assert len(layout.files) > 1
    assert {file.name: [tensor.name for tensor in file.tensors] for file in layout.files} == split.filename_to_tensors
    layout.create_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*split.filename_to_tensors, "model.safetensors.index.json"}


@pytest.mark.few(8)
@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_any_dtype_to_any_other(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    numel = BUFFER_BYTES // 8 * 2 + 3  # more than one buffer of the widest
    values = torch.randn(numel).to(stored)
    values[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-30]).to(stored)
    save_file({"head": torch.zeros(3, dtype=stored), "x": values}, tmp_path / "model.safetensors")
    out = torch.empty(numel - 7, dtype=wanted)
    with RangeReader() as reader:
        reader.read(ByteMap.from_directory(tmp_path).entries["x"], 2, out)
    assert torch.equal(out[2:], values[4:-5].to(wanted)) and out[0] == values[2]


def test_bf16_ties_round_to_even(tmp_path: Path) -> None:
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=torch.int32).view(torch.float32)
    layout = layout_of([("x", (4,))], torch.bfloat16, 1 << 30, "model")
    layout.create_files(tmp_path)
    store = FakeStore([("x", (4,))], kinds=["weight"])
    store.values = dict.fromkeys(store.values, ties)
    drain(store, {"weight": layout.byte_map(tmp_path).entries})
    stored = load_file(tmp_path / "model.safetensors")["x"].view(torch.int16)
    assert stored.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


def test_values_of_one_byte(tmp_path: Path) -> None:
    values = torch.arange(5_000_000).remainder(100).to(torch.uint8).view(torch.float8_e5m2)  # all finite
    save_file({"x": values}, tmp_path / "model.safetensors")
    store = FakeStore([("x", (5_000_000,))], kinds=["weight"], zeros=True)
    fill(store, {"weight": ByteMap.from_directory(tmp_path).entries})
    (held,) = store.values.values()
    assert torch.equal(held, values.float())


def test_a_range_outside_the_tensor_is_refused(tmp_path: Path) -> None:
    written(tmp_path, SMALL, torch.float32, 1 << 30, 1)
    entry = ByteMap.from_directory(tmp_path).entries["lm_head.weight"]
    before = digests(tmp_path)
    for start in (-1, entry.numel - 1):
        with RangeReader() as reader, pytest.raises(ValueError, match="lm_head"):
            reader.read(entry, start, torch.empty(2))
        file = TargetFile(entry.file)
        with pytest.raises(ValueError, match="lm_head"):
            file.write(entry, start, torch.empty(2))
        file.sync_and_close()
    assert digests(tmp_path) == before


def test_a_file_that_changes_after_its_header_was_read(tmp_path: Path) -> None:
    written(tmp_path, SMALL, torch.float32, 1 << 30, 1)
    entry = ByteMap.from_directory(tmp_path).entries["lm_head.weight"]
    path = tmp_path / "model.safetensors"
    with RangeReader() as reader:
        reader.read(entry, 0, torch.empty(2))
        with path.open("r+b") as file:
            file.truncate(entry.offset + 8)
        with pytest.raises(UserError, match=r"model.safetensors: .*shorter"):
            reader.read(entry, 0, torch.empty(4))
    with RangeReader() as reader, pytest.raises(UserError, match="bytes where its header"):
        reader.read(entry, 0, torch.empty(2))
    path.unlink()
    with RangeReader() as reader, pytest.raises(UserError, match="No such file"):
        reader.read(entry, 0, torch.empty(2))
