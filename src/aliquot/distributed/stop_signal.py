"""SIGTERM (a spot reclaim, a pod's deletion), Ctrl-C or SIGHUP (its terminal goes) asks a rank to stop at the end of a
step, with a deadline.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Self

from aliquot.core.errors import TrainingError
from aliquot.distributed.bounded_call import within_a_moment
from aliquot.distributed.leader_lease import ROUND
from aliquot.distributed.rank_errors import report_error

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Whoever stops a whole control group (systemd, scancel) tells each rank and the launcher, which tells the ranks again.
SAME_S = 2.0
_HEARD_S = 30.0


class Terminated(TrainingError, id="terminated"):
    """The run stopped because signal `number` told it to, with all saved."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {message}")
        self.exit_code = 128 + number


class StopSignal:
    """`requested` is the number of the signal that has come, or 0. `grace_s` later the process ends, saved or not; a
    second signal, which is not the first one told again, ends it at once, but for a rank of a round: there a node and
    the leader may both tell it. While `nothing_to_save` says why there is nothing to wait for the first one does,
    whatever the main thread is doing; `ending` is told of it meanwhile.

    A context on the main thread, which gives the signals their former meaning back.
    """

    def __init__(
        self, grace_s: float, tells: bool, kept: Callable[[], str], ending: Callable[[str], None] = lambda _: None
    ) -> None:
        """`tells`: this rank says that a signal has come, and by `kept`, which names the last checkpoint, what another
        one would lose."""
        if threading.current_thread() is not threading.main_thread():
            raise TrainingError("signals come to the main thread alone: train there")
        self.requested = 0
        self.nothing_to_save: str | None = "before the first step was done: nothing is lost"
        self.saved: str | None = None  # what is, where what is left to do is not needed to continue
        self._lost = "and what is lost by that cannot be told: the run directory does not answer"
        self._grace_s = grace_s
        self._tells = tells
        self._kept = kept
        self._ending = ending
        self._deadline: threading.Timer | None = None
        self._ends = False
        self._asked_at = math.inf
        # Ctrl-C is not meant for what a shell has put into the background: it is ignored there, and stays so.
        self._former = {
            number: signal.getsignal(number)
            for number in STOP_SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        # A handler would not run before what the main thread waits for is over, a library that trains a tokenizer for
        # example. So a thread does what is to be done: the interpreter writes the numbers of signals into this pipe.
        read, self._told = os.pipe()
        os.set_blocking(self._told, False)
        self._former_told = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read,), name="aliquot-signals", daemon=True).start()
        for number in self._former:
            signal.signal(number, _heard)

    def _listen(self, pipe: int) -> None:
        while told := os.read(pipe, 1):
            if (number := told[0]) not in self._former:
                continue
            if self.nothing_to_save is not None:
                self._ends = True
                error = Terminated(number, self.nothing_to_save)
                within_a_moment(partial(report_error, error))
                within_a_moment(partial(self._ending, f"stopped by {signal.Signals(number).name}"))
                os._exit(error.exit_code)
            if not self.requested:
                self._ask(number)
            elif ROUND not in os.environ and time.monotonic() > self._asked_at + SAME_S:
                ended = f"ended, {self._lost}" if self.saved is None else f"ended {self.saved}"
                self._tell(f"{signal.Signals(number).name}, told to stop again: {ended}")
                os._exit(128 + number)
        os.close(pipe)

    def _ask(self, number: int) -> None:
        self.requested, self._asked_at = number, time.monotonic()
        self._deadline = threading.Timer(self._grace_s, self._end, [number])
        self._deadline.daemon = True
        self._deadline.start()
        if self._tells:
            within_a_moment(self._look_what_is_lost)
        once_more = "" if ROUND in os.environ else f"; once more ends the run at once, {self._lost}"
        self._tell(
            f"{signal.Signals(number).name}: it saves and stops once all ranks have finished the step{once_more}"
        )

    def _look_what_is_lost(self) -> None:
        self._lost = self._kept()

    def _tell(self, text: str) -> None:
        if self._tells:
            # Whatever was being printed when the signal came.
            within_a_moment(partial(os.write, 2, f"aliquot: {text}\n".encode()))

    def _end(self, number: int) -> None:
        error: TrainingError
        if self.saved is not None:
            error = Terminated(number, self.saved)
        else:
            name = signal.Signals(number).name
            error = TrainingError(f"not saved within checkpoint.grace_s = {self._grace_s:g} s of {name}")
        within_a_moment(partial(report_error, error))
        os._exit(error.exit_code)

    @property
    def left_s(self) -> float:
        """Until the process ends, saved or not; infinite while nobody has asked."""
        return self._asked_at + self._grace_s - time.monotonic()

    def obeyed(self) -> None:
        """Nothing more will be saved: what is still told, to a report and to dashboards, has limits of its own."""
        if self._deadline is not None:
            self._deadline.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends:  # an error now is that others have heard of it
            time.sleep(_HEARD_S)
        if self._deadline is not None:
            self._deadline.cancel()
        for number, former in self._former.items():
            signal.signal(number, self._told_again if self.requested else former)
        signal.set_wakeup_fd(self._former_told)
        os.close(self._told)

    def _told_again(self, number: int, _frame: FrameType | None) -> None:
        """The handler after this context: the same signal, told once more, is no reason not to say what was saved."""
        if time.monotonic() > self._asked_at + SAME_S:
            for each, former in self._former.items():
                signal.signal(each, former)
            signal.raise_signal(number)


def _heard(_number: int, _frame: FrameType | None) -> None:
    """What is to be done when a signal comes is done by the thread that reads of it."""
