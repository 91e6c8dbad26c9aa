"""Shutdown: the first signal asks, a second one ends the process; once all is saved the first one does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGTERM

import pytest

from aliquot.core.errors import TrainingError
from aliquot.distributed.rank_errors import ERROR_LOG
from aliquot.run.shutdown import Shutdown
from tests.tools import warm

RANK = """
import os, signal, sys, time
from aliquot.run import shutdown
from aliquot.run.shutdown import Phase, Shutdown
shutdown.REPEAT_S = 0.5
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[2] == "background" else signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup, which ignores it
with Shutdown(grace_s=float(sys.argv[1]), speaks=True, describe_loss=lambda: "losing 3 steps") as stop:
    stop.enter({"saved": Phase.EXPORT}.get(sys.argv[2], Phase.STEPS), 5)
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print(stop.requested, flush=True)
    while sys.argv[2] != "obeys":
        time.sleep(0.01)
print("over", flush=True)
if stop.requested:  # the same one, told once more while the process says what was saved, and one that is not the same
    time.sleep(0.2)
    signal.raise_signal(signal.SIGTERM)
    time.sleep(0.4)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
given_back = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
assert given_back == [signal.SIG_DFL, signal.default_int_handler]
"""

LOSS = '"losing 3 steps"'
COPYING = RANK.replace("    print(stop.requested", "    stop.enter(Phase.COPYING, 5)\n    print(stop.requested")
BEFORE_ITS_FIRST_STEP = RANK.replace("stop.enter(", "print, (")


@contextlib.contextmanager
def started(grace_s: float, how: str, program: str = RANK) -> Iterator[subprocess.Popen[str]]:
    with warm.popen("-c", program, str(grace_s), how, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()  # one that has not obeyed


def wait_for(process: subprocess.Popen[str], number: signal.Signals) -> None:
    assert process.stdout is not None and process.stdout.readline() == f"{int(number)}\n"


def ended(grace_s: float, how: str, *numbers: signal.Signals, program: str = RANK) -> tuple[int, str, str]:
    """Send signals, the second one when the process has heard the first; return its exit code, stdout and stderr."""
    with started(grace_s, how, program) as process:
        for earlier, number in zip((None, *numbers), numbers, strict=False):
            if earlier is not None:
                wait_for(process, earlier)
                time.sleep(0.6)  # until one more signal counts as another
            process.send_signal(number)
        output, errors = process.communicate(timeout=20)
    return process.returncode, output, errors


@pytest.mark.parametrize("number", [SIGTERM, pytest.param(SIGINT, marks=pytest.mark.long)])
def test_first_signal_asks_and_second_ends(number: signal.Signals) -> None:
    with started(60, "hangs") as process:
        process.send_signal(number)
        wait_for(process, number)
        process.send_signal(number)  # the same one, told by another: a launcher, whose whole control group is stopped
        time.sleep(0.6)
        assert process.poll() is None
        process.send_signal(SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + SIGINT
    assert errors.splitlines() == [
        f"aliquot: {number.name}: the run saves and stops; a second signal ends it at once, losing 3 steps",
        "aliquot: the second signal: ended at once, losing 3 steps",
    ]


@pytest.mark.parametrize(
    ("grace_s", "how", "program", "numbers", "code", "words"),
    [
        (0.1, "hangs", RANK, [SIGINT], 1, ["not saved within checkpoint.grace_s = 0.1 s of SIGINT"]),
        (0.3, "hangs", COPYING, [SIGTERM], 143, ["stopped by SIGTERM after step 5, which is saved"]),
        (60, "hangs", COPYING, [SIGTERM, SIGINT], 130,
         ["\naliquot: the second signal: ended after step 5, which is saved: start again to continue\n"]),
        (60, "hangs", BEFORE_ITS_FIRST_STEP, [SIGTERM], 143, ["before the first step was done: nothing is lost"]),
        (60, "saved", RANK, [SIGTERM], 143,
         ["after step 5, the last, which is saved: start again for the rest [terminated]"]),
        # The run directory does not answer.
        pytest.param(
         4, "hangs", RANK.replace(LOSS, "time.sleep(600)"), [SIGTERM], 1,
         ["the run saves and stops; a second signal ends it at once, losing an unknown number of steps",
          "not saved within checkpoint.grace_s = 4 s"], marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_end_says_what_is_saved_and_what_is_lost(
    grace_s: float, how: str, program: str, numbers: list[signal.Signals], code: int, words: list[str]
) -> None:
    exit_code, _, errors = ended(grace_s, how, *numbers, program=program)
    assert exit_code == code and all(text in errors for text in words), errors
    assert ("not saved" in errors) == (code == 1)


def test_signal_after_the_failure_of_a_rank_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "errors").write_text("the error of another rank")
    monkeypatch.setenv(ERROR_LOG, str(tmp_path / "errors"))
    assert "saves and stops" not in ended(60, "obeys", SIGTERM)[2]


def test_rank_of_a_round_ignores_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIQUOT_ROUND", "1")
    code, _, errors = ended(1, "hangs", SIGTERM, SIGTERM)
    assert code == 1 and "not saved within checkpoint.grace_s = 1 s" in errors  # it lived until then


@pytest.mark.parametrize("number", [SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_shutdown_restores_the_signal_handlers(number: signal.Signals) -> None:
    code, output, errors = ended(60, "obeys", number)
    assert code == 0 and "Assertion" not in errors
    assert output.splitlines() == [str(int(number)), "over", "interrupted"]


@pytest.mark.long
def test_shutdown_obeys_with_a_full_stderr() -> None:
    with started(0.5, "hangs") as process:
        assert process.stderr is not None
        with contextlib.suppress(BlockingIOError):  # fill the pipe
            descriptor = os.open(f"/proc/self/fd/{process.stderr.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
            while True:
                os.write(descriptor, bytes(1 << 16))
        process.send_signal(SIGTERM)
        wait_for(process, SIGTERM)
        assert process.wait(timeout=20) == 1, "after its grace"
        os.close(descriptor)


def test_shutdown_needs_the_main_thread() -> None:
    raised: list[Exception] = []

    def inside() -> None:
        try:
            Shutdown(1, True, lambda: "")
        except TrainingError as error:
            raised.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_ctrl_c_is_ignored_in_the_background() -> None:
    with started(60, "background") as process:
        process.send_signal(SIGINT)
        process.send_signal(SIGTERM)
        wait_for(process, SIGTERM)


def test_signal_ends_process_whose_main_thread_blocks() -> None:
    """The main thread blocks as while a library trains a tokenizer. The other nodes hear of the end, too."""
    never = "import ctypes; lock = ctypes.CDLL(None).pthread_mutex_lock; mutex = bytes(64); lock(mutex); lock(mutex)"
    program = BEFORE_ITS_FIRST_STEP.replace("as stop", ", announce_end=print) as stop")
    program = program.replace('"losing 3 steps")', '"losing 3 steps"').replace("time.sleep(0.01)", never, 1)
    code, output, errors = ended(60, "hangs", SIGINT, program=program)
    assert code == 130 and "stopped by SIGINT before the first step was done" in errors
    assert output == "stopped by SIGINT\n"


@pytest.mark.long
def test_disarmed_shutdown_has_no_deadline() -> None:
    """Reports and dashboards may take longer than the grace period, because all is saved."""
    program = RANK.replace("    while sys.argv[2] !=", "    stop.disarm()\n    time.sleep(1)\n    while sys.argv[2] !=")
    _, output, errors = ended(0.5, "obeys", SIGTERM, program=program)
    assert output == f"{int(SIGTERM)}\nover\n" and "not saved" not in errors
