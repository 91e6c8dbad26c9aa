from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.checkpoint import restore as restore_module
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.directories import complete_directories, newest, step_of
from aliquot.checkpoint.restore import restore, restore_newest
from aliquot.checkpoint.retention import Retention, retain
from aliquot.core.errors import DamagedCheckpoint, ResumeError, StorageError, UserError, WeightsFileError
from aliquot.core.on_rank_0 import SingleRank
from aliquot.run.resolved_run import recorded_choices, resumed_state
from aliquot.tensor_io.checksums import BLOCK_BYTES
from aliquot.tensor_io.manifest import read_manifest, read_state, verify
from aliquot.tensor_io.parts import Part
from tests.checkpoint.saving import PROGRESS, save
from tests.examples import examples
from tests.tensor_io.world import SMALL, Died, FakeStore, PipedRanks, Tensors, run_world

CONFIGURED = {
    "model": {"dtype": "auto"}, "data": {}, "train": {"precision": "fp32", "compile": "layers"},
    "checkpoint": {"every": 40},
}  # fmt: skip
STATE = PROGRESS | {"step": 100, "rng": [1, 2, 3], "config": CONFIGURED}
CONFIG = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}


def save_small(root: Path, step: int = 100, ranks: Any = None, keep: int = 9, tensors: Tensors = SMALL) -> Path:
    ranks = ranks or SingleRank()
    return save(
        root,
        step,
        FakeStore(tensors, ranks.rank, ranks.world_size),
        CheckpointSpec(tensors, CONFIG),
        STATE,
        ranks,
        keep,
    )


def restore_small(directory: Path, ranks: Any = None, tensors: Tensors = SMALL) -> dict[str, Any]:
    ranks = ranks or SingleRank()
    store = FakeStore(tensors, ranks.rank, ranks.world_size, zeros=True)
    state = restore(directory, store, CheckpointSpec(tensors), ranks)
    assert store.is_original()
    return state


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@settings(max_examples=examples(12))
@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, found: list[Any], savers: int, restorers: int) -> None:
    tensors: Tensors = [(f"t{i}", shape) for i, shape in enumerate(found)]
    root = tmp_path_factory.mktemp("root")
    run_world(savers, lambda ranks: save_small(root, ranks=ranks, tensors=tensors))
    directory = root / "step-00000100"
    verify(directory)
    assert run_world(restorers, lambda ranks: restore_small(directory, ranks, tensors)) == [STATE] * restorers


def test_tensors_of_several_blocks(tmp_path: Path) -> None:
    large: Tensors = [("a", (3, 700_001)), ("b", (5,)), ("c", (2_500_001, 1))]
    assert run_world(2, lambda ranks: save_small(tmp_path, ranks=ranks, tensors=large).name) == ["step-00000100"] * 2
    directory = tmp_path / "step-00000100"
    assert len(verify(directory).files["model.safetensors"].crc32) == 2
    assert run_world(3, lambda ranks: restore_small(directory, ranks, large)) == [STATE] * 3
    flip(directory / "exp_avg_sq.safetensors", 8 * (BLOCK_BYTES + 5))
    with pytest.raises(DamagedCheckpoint, match=f"exp_avg_sq.safetensors: .*byte {BLOCK_BYTES} "):
        restore_small(directory, tensors=large)


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


FILES = [
    "model.safetensors",
    "exp_avg.safetensors",
    "exp_avg_sq.safetensors",
    "state.json",
    "config.json",
    "tokenizer.json",
]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_flipped_bit_anywhere_is_damage(name: str, tmp_path: Path) -> None:
    """And not another model, where it leaves a header that is valid: a run goes back one checkpoint."""
    before, directory = save_small(tmp_path, 99), save_small(tmp_path)
    file, store, draw = directory / name, FakeStore(SMALL, zeros=True), random.Random(name)
    size_bits = 8 * file.stat().st_size
    header_bits = 8 * min(file.stat().st_size, 8 + int.from_bytes(file.read_bytes()[:8], "little"))
    bits = {0, size_bits - 1, *(draw.randrange(header_bits) for _ in range(examples(25))), draw.randrange(size_bits)}
    for bit in bits:
        flip(file, bit)
        with pytest.raises(DamagedCheckpoint):
            verify(directory)
        assert restore_newest(tmp_path, store, CheckpointSpec(SMALL), SingleRank()) == (before, STATE), f"bit {bit}"
        flip(file, bit)
    assert restore_small(directory) == STATE


@pytest.mark.parametrize(
    "fields",
    [
        {"step": "100"}, {"tokens": None}, {"position": {"epoch": 1}}, {"position": [1, 2]}, {"determinants": []},
        {"config": {"model": {}, "data": {}}}, {"config": 5},
        {"config": CONFIGURED | {"model": {"dtype": 1}}}, {"sizes": [1]}, {"evaluations": {"best_step": "1"}},
    ],
)  # fmt: skip
def test_state_of_another_shape_is_damage(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Although the manifest fits, for example because a program rewrote both."""
    before = save_small(tmp_path, 99)
    directory = save(tmp_path, 100, FakeStore(SMALL), CheckpointSpec(SMALL), STATE | fields, SingleRank(), 9)
    with pytest.raises(DamagedCheckpoint, match=rf"step-00000100/state\.json: {next(iter(fields))}"):
        read_state(directory)
    assert restore_newest(tmp_path, FakeStore(SMALL), CheckpointSpec(SMALL), SingleRank()) == (before, STATE)
    assert recorded_choices(resumed_state(tmp_path, "auto")) == {"train.compile": "layers", "checkpoint.every": 40}
    assert recorded_choices({"config": {"train": {}, "checkpoint": {"every": 0}}}) == {}


def test_all_ranks_hear_of_damage(tmp_path: Path) -> None:
    directory = save_small(tmp_path)
    flip(directory / "exp_avg.safetensors", 8 * (directory / "exp_avg.safetensors").stat().st_size - 1)
    answers = run_world(3, lambda ranks: restore_small(directory, ranks))
    assert [type(answer) for answer in answers] == [DamagedCheckpoint] * 3
    assert len({str(answer) for answer in answers}) == 1 and "exp_avg.safetensors" in str(answers[0])


@pytest.mark.parametrize(("number", "damaged"), [(errno.EACCES, False), (errno.ESTALE, False), (errno.EIO, True)])
def test_read_errors_of_a_node_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, damaged: bool
) -> None:
    """Or a run would go back to an older checkpoint, and replace a good one."""
    directory = save_small(tmp_path)
    read = restore_module.fill

    def fails(store: Any, entries: Any, checksums: Any) -> int:
        try:
            raise OSError(number, os.strerror(number), "exp_avg.safetensors")
        except OSError as error:
            raise WeightsFileError(f"cannot read: {error.strerror}") from error

    monkeypatch.setattr(restore_module, "fill", fails)
    told = (
        "no checkpoint here is complete and undamaged"
        if damaged
        else "cannot read this checkpoint, which need not be damaged"
    )
    with pytest.raises(ResumeError, match=told):
        restore_newest(tmp_path, FakeStore(SMALL, zeros=True), CheckpointSpec(SMALL), SingleRank())
    monkeypatch.setattr(restore_module, "fill", read)
    assert restore_small(directory) == STATE


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_missing_file_makes_checkpoint_incomplete(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = save_small(tmp_path, 5), save_small(tmp_path, 6)
    (new / name).unlink()
    assert newest(tmp_path) == old
    assert complete_directories(tmp_path) == [old]
    assert "skipping a damaged checkpoint" in caplog.text and name in caplog.text
    with pytest.raises(DamagedCheckpoint):
        restore_small(new)


def test_restore_newest_falls_back_to_a_good_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore(SMALL, zeros=True)
    assert restore_newest(tmp_path / "absent", store, CheckpointSpec(SMALL), SingleRank()) is None
    for step in (5, 6, 7):
        save_small(tmp_path, step)
    flip(tmp_path / "step-00000007" / "model.safetensors", 8 * 600)  # found only by reading
    (tmp_path / "step-00000006" / "manifest.json").write_text("{}")

    def work(ranks: PipedRanks) -> tuple[Any, bool]:
        logging.disable()
        store = FakeStore(SMALL, ranks.rank, ranks.world_size, zeros=True)
        return restore_newest(tmp_path, store, CheckpointSpec(SMALL), ranks), store.is_original()

    assert run_world(2, work) == [((tmp_path / "step-00000005", STATE), True)] * 2
    (tmp_path / "step-00000005" / "state.json").unlink()
    with pytest.raises(UserError, match="no checkpoint here is complete and undamaged"):
        restore_newest(tmp_path, store, CheckpointSpec(SMALL), SingleRank())
    assert "step-00000007/model.safetensors: damaged" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("limit", "name", "read", "cause"),
    [
        (
            partial(resource.setrlimit, resource.RLIMIT_NOFILE, (3, 3)),
            "",
            lambda root: read_manifest(root / "step-00000006"),
            "too many open files",
        ),
        (partial(os.setuid, 65534), "", newest, "step-00000006/manifest.json: cannot read: Permission denied"),
        (partial(os.setuid, 65534), "manifest.json", newest, "manifest.json: cannot read: Permission denied"),
        (
            partial(os.setuid, 65534),
            "state.json",
            lambda root: read_state(root / "step-00000006"),
            "state.json: cannot read: Permission denied",
        ),
    ],
)
def test_checkpoint_that_cannot_be_read_is_not_called_damaged(
    limit: Callable[[], object], name: str, read: Callable[[Path], object], cause: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for step in (5, 6):
            save_small(Path(folder), step)
        Path(folder).chmod(0o755)
        (Path(folder) / "step-00000006" / name).chmod(0o600)
        (error,) = run_world(1, lambda _: (limit(), read(Path(folder))))
    assert isinstance(error, ResumeError) and "need not be damaged" in str(error) and cause in str(error), error


def test_replacement_of_a_damaged_checkpoint_is_tried_once(tmp_path: Path) -> None:
    """Where it lies on a disk that damages what it is given, the one before is taken."""
    store, asked = FakeStore(SMALL, zeros=True), []
    for step in (5, 6, 7):
        save_small(tmp_path, step)
    flip(tmp_path / "step-00000007" / "model.safetensors", 8 * 600)

    def the_same(directory: Path) -> Path:
        asked.append(directory.name)
        return directory

    found = restore_newest(tmp_path, store, CheckpointSpec(SMALL), SingleRank(), replace_damaged=the_same)
    assert found == (tmp_path / "step-00000006", STATE) and asked == ["step-00000007"]

    def mended(directory: Path) -> Path:
        flip(directory / "model.safetensors", 8 * 600)
        return directory

    assert restore_newest(tmp_path, store, CheckpointSpec(SMALL), SingleRank(), replace_damaged=mended) == (
        tmp_path / "step-00000007",
        STATE,
    )


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    directory = save_small(tmp_path)
    other = [("new", (3,)), *((name, (1,) if name == "model.scale" else shape) for name, shape in SMALL[1:])]
    answers = run_world(2, lambda ranks: restore(directory, FakeStore(other), CheckpointSpec(other), ranks))
    assert [type(answer) for answer in answers] == [WeightsFileError] * 2
    for part in ("missing: new", "not of this model: model.embed_tokens.weight", "model.scale is [] instead of [1]"):
        assert part in str(answers[0])


def test_retention(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_small(tmp_path, step, keep=2)
    assert [step_of(path) for path in complete_directories(tmp_path)] == [3, 4]
    (tmp_path / "step-00000004" / "state.json").unlink()
    save_small(tmp_path, 5, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005"]
    (tmp_path / "step-00000005" / "state.json").unlink()
    (tmp_path / "notes").mkdir()
    retain(tmp_path, tmp_path / "absent", Retention(1))  # nothing complete: nothing goes
    save_small(tmp_path, 3, keep=1)  # older than a damaged one: both stay
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000003", "step-00000005"]
    assert newest(tmp_path) == tmp_path / "step-00000003"


def test_retention_keeps_the_checkpoint_just_saved(tmp_path: Path) -> None:
    for step in (8, 9, 4):
        save_small(tmp_path, step, keep=1)
    assert [step_of(path) for path in complete_directories(tmp_path)] == [4, 9]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    directory = save_small(tmp_path)
    (directory / "state.json").write_text("damaged")
    save_small(tmp_path)
    assert restore_small(directory) == STATE
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000100"]


def test_disk_failure_after_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails once a checkpoint has its name: before that is known to be kept, and when others are tidied."""
    save_small(tmp_path, 1)

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error", str(tmp_path))

    with monkeypatch.context() as broken:
        broken.setattr("aliquot.tensor_io.publish.sync", lambda path: fails() if path == tmp_path else None)
        for step in (2, 1):  # a new one, and one in the place of another
            with pytest.raises(StorageError, match="Input/output error"):
                save_small(tmp_path, step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert restore_small(tmp_path / "step-00000001") == STATE
    with monkeypatch.context() as broken:
        broken.setattr("aliquot.checkpoint.save.tidy", fails)
        save_small(tmp_path, 3, keep=1)
    assert [step_of(path) for path in complete_directories(tmp_path)] == [1, 3]
    save_small(tmp_path, 4, keep=1)
    assert [step_of(path) for path in complete_directories(tmp_path)] == [4]


def test_reserved_file_names_are_refused(tmp_path: Path) -> None:
    for name in ("state.json", "manifest.json", "../config.json", "model.safetensors"):
        with pytest.raises(ValueError, match="beside the weights"):
            save(tmp_path, 1, FakeStore(SMALL), CheckpointSpec(SMALL, {name: b""}), STATE, SingleRank(), 1)
    assert list(tmp_path.iterdir()) == []


def test_parts_with_gaps_are_refused(tmp_path: Path) -> None:
    first_of_two = FakeStore(SMALL, rank=0, world_size=2)
    with pytest.raises(ValueError, match="the parts of all ranks"):
        save(tmp_path, 1, first_of_two, CheckpointSpec(SMALL, CONFIG), STATE, SingleRank(), 1)
    assert list(tmp_path.iterdir()) == []


class HookedStore(FakeStore):
    """Does something when its first moments are to be written."""

    def __init__(self, tensors: Tensors, ranks: PipedRanks, hook: Any) -> None:
        super().__init__(tensors, ranks.rank, ranks.world_size)
        self.hook = hook

    def read(self, part: Part, start: int, out: torch.Tensor) -> None:
        if part.kind == "exp_avg":
            self.hook()
        super().read(part, start, out)


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_in_a_save_leaves_no_complete_checkpoint(victim: int, tmp_path: Path) -> None:
    save_small(tmp_path, 5)

    def work(ranks: PipedRanks) -> None:
        def die() -> None:
            if ranks.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        save(tmp_path, 6, HookedStore(SMALL, ranks, die), CheckpointSpec(SMALL, CONFIG), STATE, ranks, 9)

    assert [type(answer) for answer in run_world(2, work)] == [Died, Died]
    assert newest(tmp_path) == tmp_path / "step-00000005"
    assert any(path.name.startswith(".step-00000006.partial-") for path in tmp_path.iterdir())
    save_small(tmp_path, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000007"]


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_any_moment_of_saving_and_retention(tmp_path: Path, stride: int) -> None:
    """The process dies before its n-th change of the file system, n rising by `stride` until a save survives."""
    changes = {"os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree", "open"}
    save_small(tmp_path, 1, keep=1)
    for n in range(1, 1000, stride):

        def work(ranks: PipedRanks, n: int = n) -> str:
            left = [n]

            def die(event: str, arguments: tuple[Any, ...]) -> None:
                if event in changes and not isinstance(arguments[0], int):  # a descriptor is open already
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(die)
            return save_small(tmp_path, 1 + n, keep=1).name

        answer = run_world(1, work)[0]
        found = newest(tmp_path)
        assert found is not None and found in complete_directories(tmp_path)
        assert restore_small(found) == STATE
        verify(found)
        if not isinstance(answer, Died):
            assert [path.name for path in tmp_path.iterdir()] == [answer], "and the next save cleans up"
            return
    raise AssertionError("no save survived")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(command, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def error_of(answers: list[Any]) -> str:
    """The one UserError that all ranks got."""
    assert [type(answer) for answer in answers] == [StorageError] * len(answers), answers
    assert len({str(answer) for answer in answers}) == 1
    return str(answers[0])


def test_a_disk_too_small(small_disk: Path) -> None:
    old = save_small(small_disk, 5)
    large: Tensors = [("a", (200, 1000))]
    message = error_of(run_world(2, lambda ranks: save_small(small_disk, ranks=ranks, tensors=large)))
    assert message.startswith(str(small_disk))
    assert re.search(r"needs [\d.]+ [GM]B and [\d.]+ [GM]B are free", message)
    assert list(small_disk.iterdir()) == [old]
    assert restore_small(old) == STATE


def test_save_on_a_full_disk(small_disk: Path) -> None:
    old = save_small(small_disk, 5)
    large: Tensors = [("a", (40, 1000))]

    def work(ranks: PipedRanks) -> None:
        def fill_up() -> None:
            if ranks.rank == 1:
                other = (small_disk / "other").open("wb", buffering=0)
                with contextlib.suppress(OSError), other:
                    while other.write(bytes(4096)):
                        pass

        save(small_disk, 6, HookedStore(large, ranks, fill_up), CheckpointSpec(large, CONFIG), STATE, ranks, 9)

    message = error_of(run_world(2, work))
    # The rank is named unless both met the full disk in the same file.
    assert re.fullmatch(rf"(rank \d: )?{re.escape(str(small_disk))}/.*: No space left on device", message)
    assert sorted(path.name for path in small_disk.iterdir()) == ["other", "step-00000005"]
    assert restore_small(old) == STATE


def test_checkpoint_root_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    message = error_of(run_world(2, lambda ranks: save_small(tmp_path / "root", ranks=ranks)))
    assert str(tmp_path / "root") in message
