"""Causes and echoes: what a rank records, and which of several dead ranks is shown."""

from __future__ import annotations

import errno
import json
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from aliquot.errors import StorageError, TrainingError, UserError, writing
from aliquot.launch import rank_errors
from aliquot.launch.rank_errors import LOG_DIRECTORY, RankError, classify, read_error, record_error, report_error
from aliquot.launch.rank_failures import explain, explain_stop


@dataclass
class Dead:
    exitcode: int
    timestamp: int = 100


def raised_from(cause: BaseException) -> Exception:
    try:
        raise OSError("wrapped") from cause
    except OSError as error:
        return error


GLOO = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("x"), "user"),
        (TrainingError("x"), "training"),
        (ValueError("Connection closed by peer"), "crash"),
        (MemoryError(), "crash"),
        (RuntimeError("size mismatch"), "crash"),
        (GLOO, "peer_lost"),
        (raised_from(GLOO), "peer_lost"),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), "peer_lost"),
        (ConnectionResetError(104, "Connection reset by peer"), "peer_lost"),
        (DistNetworkError("failed to recv"), "peer_lost"),
        (DistStoreError("wait timeout"), "peer_lost"),
    ],
)
def test_kinds(error: Exception, kind: str) -> None:
    assert classify(error) == kind


@pytest.mark.parametrize(
    "what",
    [
        "Connection closed by peer [10.77.0.2]:8582. This is typically caused by a remote worker crashing.",
        "Read error [10.77.0.2]:47324: Connection reset by peer. This is typically caused by a remote worker hanging.",
    ],
)
def test_what_gloo_knows_of_a_lost_rank_is_its_address(what: str) -> None:
    message = f"RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] {what}"
    line = RankError(3, "peer_lost", message, "", 0.0).line
    assert line == "rank 3 lost the connection to a rank at 10.77.0.2, which may say why [peer-lost]"


def record(directory: Path, rank: int, kind: rank_errors.Kind, time: float, message: str = "what happened") -> None:
    found = RankError(rank, kind, message, "", time, 2 if kind == "user" else 1, uptime=time)
    rank_errors.publish_text(rank_errors.error_file(directory, rank), json.dumps(asdict(found)))


def first_line(directory: Path, failures: dict[int, Dead]) -> str:
    return explain(failures, directory, 5)[0][0]


def test_cause_comes_before_echo_and_before_the_launchers_own_signal(tmp_path: Path) -> None:
    record(tmp_path, 0, "peer_lost", 100.1)
    record(tmp_path, 2, "crash", 100.4)
    failures = {0: Dead(1), 1: Dead(-signal.SIGTERM), 2: Dead(1), 3: Dead(-signal.SIGABRT)}
    assert first_line(tmp_path, failures) == "aliquot: rank 2 failed: what happened [crash]"
    failures[1] = Dead(-signal.SIGSEGV)
    assert first_line(tmp_path, failures) == "aliquot: rank 1 was killed by SIGSEGV [killed]"


def test_a_run_that_saved_because_another_node_was_stopped_ends_as_one_that_was(tmp_path: Path) -> None:
    terminated = RankError(0, "training", "saved [terminated]", "", 7.0, 143, uptime=7.0)
    rank_errors.publish_text(rank_errors.error_file(tmp_path, 0), json.dumps(asdict(terminated)))
    assert explain({0: Dead(143)}, tmp_path, 0) == (["aliquot: rank 0: saved [terminated]"], 143, "training")
    assert explain_stop(signal.SIGTERM, tmp_path, 5) == (["aliquot: rank 0: saved [terminated]"], 143)
    assert explain_stop(signal.SIGTERM, tmp_path, 8) == (["aliquot: stopped by SIGTERM"], 143)  # of an earlier start
    elsewhere = replace(terminated, rank=3, message="of another machine", boot="another", exit_code=1)
    rank_errors.publish_text(rank_errors.error_file(tmp_path, 3), json.dumps(asdict(elsewhere)))
    record(tmp_path, 1, "training", 9.0, "no space left [disk]")
    record(tmp_path, 2, "peer_lost", 6.0)
    assert explain_stop(signal.SIGTERM, tmp_path, 5) == (["aliquot: rank 1: no space left [disk]"], 1)


def test_of_two_causes_the_earlier_is_shown(tmp_path: Path) -> None:
    record(tmp_path, 0, "training", 100.2)
    record(tmp_path, 1, "training", 100.1, "loss is nan")
    assert first_line(tmp_path, {0: Dead(1), 1: Dead(1)}) == "aliquot: rank 1: loss is nan"
    # A rank that had to be killed half a minute later did not start it.
    assert first_line(tmp_path, {0: Dead(1), 5: Dead(-signal.SIGKILL, 130)}) == "aliquot: rank 0: what happened"


def test_the_cause_of_an_echo_is_looked_for_in_ranks_that_torch_does_not_tell_of(tmp_path: Path) -> None:
    record(tmp_path, 0, "peer_lost", 100.1)
    record(tmp_path, 1, "training", 4.0, "of an earlier start")
    assert "lost the connection" in first_line(tmp_path, {0: Dead(1)})
    record(tmp_path, 2, "crash", 100.4)
    assert first_line(tmp_path, {0: Dead(1)}) == "aliquot: rank 2 failed: what happened [crash]"
    assert first_line(tmp_path, {3: Dead(-signal.SIGKILL, 130)}).startswith("aliquot: rank 3 was killed by SIGKILL")


def test_silent_deaths(tmp_path: Path) -> None:
    assert explain({1: Dead(3)}, tmp_path, 0) == (["aliquot: rank 1 ended with exit code 3 [crash]"], 1, "killed")
    assert explain({1: Dead(-40)}, tmp_path, 0) == (["aliquot: rank 1 was killed by signal 40 [killed]"], 1, "killed")
    assert explain({0: Dead(-signal.SIGTERM)}, tmp_path, 0) == (
        ["aliquot: rank 0 was killed by SIGTERM [killed]"],
        1,
        "killed",
    )


def test_bad_input_is_code_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text("text")
    record(tmp_path, 1, "user", 100.0)
    assert explain({1: Dead(2)}, tmp_path, 0) == (["aliquot: what happened"], 2, "user")


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 2), (errno.EACCES, 2), (errno.ESTALE, 1), (errno.EIO, 1)])
def test_a_file_server_in_trouble_is_no_bad_input(number: int, code: int) -> None:
    with pytest.raises(StorageError) as caught, writing(Path("model.bin")):
        raise OSError(number, "of the file system")
    assert str(caught.value) == "model.bin: cannot write: of the file system"
    assert report_error(caught.value) == code


def test_what_is_recorded_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RankError(3, "crash", 'KeyError: "ö"', "Traceback ...\n", 12.5)
    assert not record_error(error)
    monkeypatch.setenv(LOG_DIRECTORY, str(tmp_path))
    assert record_error(error)
    assert read_error(tmp_path, 3) == error and read_error(tmp_path, 4) is None
    assert (tmp_path / "rank-3.log").read_text() == "Traceback ...\n"


def test_what_cannot_be_recorded_goes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    monkeypatch.setenv(LOG_DIRECTORY, str(tmp_path))
    assert report_error(StorageError("cannot write: No space left on device", "model.bin")) == 2
    assert capsys.readouterr().err == "aliquot: model.bin: cannot write: No space left on device [disk]\n"
    assert read_error(tmp_path, 0) is None


def test_without_our_launcher_one_line_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(UserError("no such key", "run.yaml:3")) == 2
    assert report_error(TrainingError("loss is nan at step 3")) == 1
    assert (
        capsys.readouterr().err
        == "aliquot: run.yaml:3: no such key [input]\naliquot: rank 0: loss is nan at step 3 [training]\n"
    )
    assert report_error(ValueError("a bug\nof ours")) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert report_error(ValueError("a bug\nof ours"), debug=True) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "aliquot: rank 0 failed: ValueError: a bug [crash]" and "ValueError: a bug" in lines[1:]
