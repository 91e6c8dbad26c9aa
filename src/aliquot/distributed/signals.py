"""Stop signals: a thread that receives them, and signal handlers for launchers.

Python runs a signal handler in the main thread, and only after the thread's current native call has returned. Such a
call may take long, for example training a tokenizer or waiting for ranks. So another thread handles signals: the
interpreter writes the number of each signal into a pipe, which the thread reads. run/shutdown.py decides how a rank
reacts, and distributed/elastic.py how a launcher reacts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import NoReturn

from aliquot.core.errors import TrainingError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# systemd and scancel signal every process of a control group: the ranks, and the launcher, which forwards the signal to
# the ranks. So a signal within this time after the first signal counts as the same request.
REPEAT_S = 2.0


class Terminated(TrainingError, id="terminated"):
    """The run stopped because of signal `number`; `message` says what is saved."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {message}")
        self.exit_code = 128 + number


class SignalListener:
    """A thread that calls `handle` with the number of each stop signal of this process, until `close`.

    Create it on the main thread only. The caller must install Python handlers for the signals, which may do nothing.
    """

    def __init__(self, handle: Callable[[int], None]) -> None:
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._former = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read, handle), name="aliquot-signals", daemon=True).start()

    @staticmethod
    def _listen(pipe: int, handle: Callable[[int], None]) -> None:
        while numbers := os.read(pipe, 1):
            if numbers[0] in STOP_SIGNALS:
                handle(numbers[0])
        os.close(pipe)

    def close(self) -> None:
        """Stop listening. The thread ends after it has read the remaining signals from the pipe."""
        signal.set_wakeup_fd(self._former)
        os.close(self._write)


@contextmanager
def first_and_second_signal(on_first: Callable[[str], None], on_second: Callable[[str], None]) -> Iterator[None]:
    """Call `on_first` with the name of the first stop signal, and `on_second` with the name of any later stop signal.

    After the first Ctrl-C, ranks finish a step and save; at the second Ctrl-C, a launcher ends its ranks at once. A
    repetition of the first signal within REPEAT_S does not count. The caller installs Python handlers for the signals.
    """
    first_at: float | None = None

    def handle(number: int) -> None:
        nonlocal first_at
        name = signal.Signals(number).name
        if first_at is None:
            first_at = time.monotonic()
            on_first(name)
        elif time.monotonic() > first_at + REPEAT_S:
            on_second(name)

    with closing(SignalListener(handle)):
        yield


@contextmanager
def exit_on_sigterm(when: str) -> Iterator[None]:
    """End this process on SIGTERM within the block, because process 1 of a container ignores SIGTERM without a handler.

    `when` is the end of the line on the console, for example "before the nodes had met".
    """

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        print(f"aliquot: stopped by {signal.Signals(number).name} {when}", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def raise_on_stop_signals() -> None:
    """Raise SignalException on a stop signal, as torch's elastic agent does once it has started ranks."""
    from torch.distributed.elastic.multiprocessing import SignalException

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        raise SignalException("told to stop", signal.Signals(number))

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
