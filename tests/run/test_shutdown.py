"""Shutdown: the first signal asks, a second one ends the process; once all is saved the first one does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aliquot.core.errors import TrainingError
from aliquot.distributed.rank_errors import ERROR_LOG
from aliquot.run.shutdown import _POLICIES, Phase, Shutdown

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

BEFORE_ITS_FIRST_STEP = RANK.replace("stop.enter(", "print, (")


@contextlib.contextmanager
def started(grace_s: float, how: str, program: str = RANK) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-uc", program, str(grace_s), how]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()  # one that has not obeyed


def test_every_phase_has_a_policy() -> None:
    assert set(_POLICIES) == set(Phase)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_asks_and_second_ends(number: signal.Signals) -> None:
    with started(60, "hangs") as process:
        process.send_signal(number)
        assert process.stdout is not None and process.stdout.readline() == f"{int(number)}\n"
        process.send_signal(number)  # the same one, told by another: a launcher, whose whole control group is stopped
        time.sleep(0.6)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert errors.splitlines() == [
        f"aliquot: {number.name}: the run saves and stops after this step; a second signal ends it at once, losing 3"
        " steps",
        "aliquot: SIGINT is the second signal: ended, losing 3 steps",
    ]


def test_grace_over_while_copying_reports_saved_step() -> None:
    saved = "    stop.enter(Phase.COPYING, 5)\n"
    program = RANK.replace("    print(stop.requested", f"{saved}    print(stop.requested")
    with started(0.3, "hangs", program) as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "stopped by SIGTERM after step 5, which is saved" in errors and "not saved" not in errors


def test_second_signal_while_copying_reports_saved_step() -> None:
    saved = "    stop.enter(Phase.COPYING, 5)\n"
    with started(60, "hangs", RANK.replace("    print(stop.requested", f"{saved}    print(stop.requested")) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
        time.sleep(0.6)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    ended = "ended after step 5, which is saved: start again to continue"
    assert errors.splitlines()[1] == f"aliquot: SIGINT is the second signal: {ended}"


def test_signal_is_obeyed_though_run_directory_does_not_answer() -> None:
    program = RANK.replace('describe_loss=lambda: "losing 3 steps"', "describe_loss=lambda: time.sleep(600)")
    with started(4, "hangs", program) as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "not saved within checkpoint.grace_s = 4 s" in errors
    assert (
        "the run saves and stops after this step; a second signal ends it at once, losing an unknown number of steps"
        in errors
    )


def test_signal_after_the_failure_of_a_rank_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "errors").write_text("the error of another rank")
    monkeypatch.setenv(ERROR_LOG, str(tmp_path / "errors"))
    with started(60, "obeys") as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert "saves and stops" not in errors


def test_rank_of_a_round_ignores_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIQUOT_ROUND", "1")
    with started(1, "hangs") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "not saved within checkpoint.grace_s = 1 s" in errors  # it lived until then


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_shutdown_restores_the_signal_handlers(number: signal.Signals) -> None:
    with started(60, "obeys") as process:
        process.send_signal(number)
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "Assertion" not in errors
    assert output.splitlines() == [str(int(number)), "over", "interrupted"]


def test_shutdown_obeys_with_a_full_stderr() -> None:
    with started(0.5, "hangs") as process:
        assert process.stderr is not None
        with contextlib.suppress(BlockingIOError):  # fill the pipe
            descriptor = os.open(f"/proc/self/fd/{process.stderr.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
            while True:
                os.write(descriptor, bytes(1 << 16))
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
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
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
        process.kill()


def test_signal_before_the_first_step_ends_at_once() -> None:
    with started(60, "hangs", BEFORE_ITS_FIRST_STEP) as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 143 and "before the first step was done: nothing is lost" in errors


def test_signal_ends_process_whose_main_thread_blocks() -> None:
    """The main thread blocks as while a library trains a tokenizer. The other nodes hear of the end, too."""
    never = "import ctypes; lock = ctypes.CDLL(None).pthread_mutex_lock; mutex = bytes(64); lock(mutex); lock(mutex)"
    program = BEFORE_ITS_FIRST_STEP.replace("as stop", ", announce_end=print) as stop")
    program = program.replace('"losing 3 steps")', '"losing 3 steps"').replace("time.sleep(0.01)", never, 1)
    with started(60, "hangs", program) as process:
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "stopped by SIGINT before the first step was done" in errors
    assert output == "stopped by SIGINT\n"


def test_end_of_the_grace_period_says_what_is_lost() -> None:
    with started(0.1, "hangs") as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "not saved within checkpoint.grace_s = 0.1 s of SIGINT" in errors


def test_disarmed_shutdown_has_no_deadline() -> None:
    """Reports and dashboards may take longer than the grace period, because all is saved."""
    program = RANK.replace("    while sys.argv[2] !=", "    stop.disarm()\n    time.sleep(1)\n    while sys.argv[2] !=")
    with started(0.5, "obeys", program) as process:
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=20)
    assert output == f"{int(signal.SIGTERM)}\nover\n" and "not saved" not in errors


def test_signal_after_the_last_save_ends_at_once() -> None:
    with started(60, "saved") as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "after step 5, the last, which is saved: start again for the rest [terminated]" in errors
