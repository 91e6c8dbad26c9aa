"""SIGTERM (a spot reclaim, a pod's deletion) asks a rank to stop at the end of a step, with a deadline."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Self

from aliquot.errors import TrainingError
from aliquot.launch.rank_errors import report_error

EXIT_CODE = 128 + signal.SIGTERM


class Terminated(TrainingError, id="terminated"):
    """The run stopped because it was told to, with all saved."""

    exit_code = EXIT_CODE


class StopSignal:
    """`requested` once SIGTERM has come. `grace_s` later the process ends, saved or not; a second one ends it at once.

    A context on the main thread, which gives the signal its former meaning back.
    """

    def __init__(self, grace_s: float) -> None:
        self.requested = False
        self._grace_s = grace_s
        self._deadline: threading.Timer | None = None
        self._former = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._deadline = threading.Timer(self._grace_s, _end, [self._grace_s])
        self._deadline.daemon = True
        self._deadline.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        signal.signal(signal.SIGTERM, self._former)


def _end(grace_s: float) -> None:
    report_error(TrainingError(f"not saved within checkpoint.grace_s = {grace_s:g} s of SIGTERM"))
    os._exit(TrainingError.exit_code)
