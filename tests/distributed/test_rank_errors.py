"""Errors of ranks: what a rank records, and which of several dead ranks a person sees."""

from __future__ import annotations

import errno
import json
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError, DistStoreError

from aliquot.core.errors import StorageError, TrainingError, UserError, writing
from aliquot.distributed import rank_errors
from aliquot.distributed.rank_errors import (
    ERROR_LOG,
    LOG_DIRECTORY,
    Ended,
    ErrorLog,
    RankError,
    classify,
    explain_failure,
    explain_stop,
    record_error,
    report_error,
)

NO_LOGS = Path("/nowhere")


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
def test_lost_gloo_peer_is_named_by_its_address(what: str) -> None:
    message = f"RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] {what}"
    line = RankError(3, "peer_lost", message, "", 0.0).line
    assert line == "rank 3 lost the connection to a rank at 10.77.0.2, which may say why [peer-lost]"


def said(rank: int, kind: rank_errors.Kind, time: float, message: str = "what happened") -> RankError:
    return RankError(rank, kind, message, "", time, 2 if kind == "user" else 1)


def first_line(failures: dict[int, Dead], *words: RankError) -> str:
    return explain_failure(failures, words, NO_LOGS).lines[0]


def test_cause_precedes_echo_and_signals_of_the_launcher() -> None:
    words = said(0, "peer_lost", 100.1), said(2, "crash", 100.4)
    failures = {0: Dead(1), 1: Dead(-signal.SIGTERM), 2: Dead(1), 3: Dead(-signal.SIGABRT)}
    assert first_line(failures, *words) == "aliquot: rank 2 failed: what happened [crash]"
    failures[1] = Dead(-signal.SIGSEGV)
    assert first_line(failures, *words) == "aliquot: rank 1 was killed by SIGSEGV [killed]"


def test_run_stopped_through_another_node_exits_with_143() -> None:
    saved = [RankError(0, "training", "saved [terminated]", "", 7.0, 143)]
    assert explain_failure({0: Dead(143)}, saved, NO_LOGS) == Ended(
        143, ("aliquot: rank 0: saved [terminated]",), "training"
    )
    assert explain_stop(signal.SIGTERM, saved) == Ended(143, ("aliquot: rank 0: saved [terminated]",), "stopped")
    assert explain_stop(signal.SIGTERM, []) == Ended(
        143, ("aliquot: stopped by SIGTERM",), "stopped"
    )  # before there was anything
    words = [*saved, said(1, "training", 9.0, "no space left [disk]"), said(2, "peer_lost", 6.0)]
    assert explain_stop(signal.SIGTERM, words) == Ended(1, ("aliquot: rank 1: no space left [disk]",), "stopped")


def test_earlier_of_two_causes_is_shown_despite_clocks() -> None:
    words = said(1, "training", 160.1, "loss is nan"), said(0, "training", 100.2)  # it was set back between them
    assert first_line({0: Dead(1), 1: Dead(1)}, *words) == "aliquot: rank 1: loss is nan"
    # A rank that had to be killed half a minute later did not start it.
    assert first_line({0: Dead(1), 5: Dead(-signal.SIGKILL, 200)}, *words) == "aliquot: rank 0: what happened"


def test_cause_is_found_in_ranks_that_torch_does_not_name() -> None:
    echo, cause = said(0, "peer_lost", 100.1), said(2, "crash", 100.4)
    assert "lost the connection" in first_line({0: Dead(1)}, echo)
    assert first_line({0: Dead(1)}, echo, cause) == "aliquot: rank 2 failed: what happened [crash]"
    assert first_line({3: Dead(-signal.SIGKILL, 130)}, echo).startswith("aliquot: rank 3 was killed by SIGKILL")


def test_silent_deaths() -> None:
    assert explain_failure({1: Dead(3)}, [], NO_LOGS) == Ended(
        1, ("aliquot: rank 1 ended with exit code 3 [crash]",), "killed"
    )
    assert explain_failure({1: Dead(-40)}, [], NO_LOGS) == Ended(
        1, ("aliquot: rank 1 was killed by signal 40 [killed]",), "killed"
    )
    assert explain_failure({0: Dead(-signal.SIGTERM)}, [], NO_LOGS) == Ended(
        1, ("aliquot: rank 0 was killed by SIGTERM [killed]",), "killed"
    )


def test_bad_input_is_code_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text("text")
    assert explain_failure({1: Dead(2)}, [said(1, "user", 100.0)], tmp_path) == Ended(
        2, ("aliquot: what happened",), "user"
    )


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 2), (errno.EACCES, 2), (errno.ESTALE, 1), (errno.EIO, 1)])
def test_a_file_server_in_trouble_is_no_bad_input(number: int, code: int) -> None:
    with pytest.raises(StorageError) as caught, writing(Path("model.bin")):
        raise OSError(number, "of the file system")
    assert str(caught.value) == "model.bin: cannot write: of the file system"
    assert report_error(caught.value) == code


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory: Cannot allocate memory. Raise the limit"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: [Errno 12] Cannot allocate memory. Raise"),
        (RuntimeError("[enforce] can't allocate: Error code 12 (Cannot allocate memory)\nmore"), "out of memory: [enf"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 23.64 GiB. Try this"),
            "CUDA out of memory. Tried to allocate 2.00 GiB. A run needs less memory with train.gradient_checkpointing",
        ),
        (OSError(errno.EFBIG, "File too large"), "a file or shared memory would be larger than"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device [disk]"),
    ],
)
def test_refusal_of_the_system_is_one_line_with_its_cause(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error) == 2
    assert capsys.readouterr().err.startswith(f"aliquot: {message}")
    assert report_error(RuntimeError("of our own")) == 1
    assert "RuntimeError: of our own [crash]" in capsys.readouterr().err


def test_recorded_error_reaches_launcher_and_log_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RankError(3, "crash", 'KeyError: "ö"', "Traceback ...\n", 12.5)
    assert not record_error(error)
    words = ErrorLog()
    monkeypatch.setenv(ERROR_LOG, words.path)
    monkeypatch.setenv(LOG_DIRECTORY, str(tmp_path))
    assert record_error(error) and record_error(replace(error, rank=4))
    assert words.read() == [error, replace(error, rank=4)]
    assert RankError(**json.loads((tmp_path / "rank-3.error.json").read_text())) == error
    assert (tmp_path / "rank-3.log").read_text() == "Traceback ...\n"
    words.close()


def test_long_words_of_many_ranks_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ErrorLog()
    monkeypatch.setenv(ERROR_LOG, words.path)
    errors = [RankError(rank, "crash", "x", f"{rank}" * 50_000, 1.0) for rank in range(8)]

    def record(error: RankError) -> None:
        for _ in range(20):
            record_error(error)

    threads = [threading.Thread(target=record, args=[error]) for error in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read_errors = words.read()
    assert len(read_errors) == 160 and set(read_errors) == set(errors)
    words.close()


def test_launcher_gets_errors_despite_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    monkeypatch.setenv(LOG_DIRECTORY, str(tmp_path))
    full, line = StorageError("cannot write: No space left on device", "model.bin"), "model.bin: cannot write: No space"
    assert report_error(full) == 2
    assert capsys.readouterr().err.startswith(f"aliquot: {line}")
    words = ErrorLog()
    monkeypatch.setenv(ERROR_LOG, words.path)
    assert report_error(full) == 2
    ended = explain_failure({0: Dead(2)}, words.read(), tmp_path)
    assert not capsys.readouterr().err and (ended.code, ended.kind, ended.id) == (2, "user", "disk")
    words.close()


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
