"""How a run reacts to a stop signal in each of its phases.

SIGTERM (a spot reclaim, the deletion of a pod), SIGINT (Ctrl-C) and SIGHUP (the terminal closes) have the same effect.
After the first signal, the run finishes the current work, saves, and gives up the remaining work, as the table says.

| phase       | finishes                        | saves           | gives up                | exit code    |
|-------------|---------------------------------|-----------------|-------------------------|--------------|
| SETUP       | nothing: ends at once           | nothing         | what was read and built | 128 + signal |
| STEPS       | the micro-batch on all ranks    | a checkpoint    | the step, an evaluation | 128 + signal |
| COPYING     | the copies to the mirror        | is saved        | nothing                 | 128 + signal |
| EXPORT      | nothing: ends at once           | is saved        | export and sample       | 128 + signal |
| SOLE_EXPORT | the file that is being written  | a checkpoint    | export and sample       | 128 + signal |
| UNSAVED     | nothing: ends at once           | cannot be saved | the sample              | 128 + signal |
| DONE        | nothing: ends at once           | is exported     | the sample              | 128 + signal |

When `checkpoint.grace_s` have passed since the first signal, the process ends in any case: with code 1 if work is lost,
otherwise with 128 + signal. A second signal ends the process at once with 128 + signal. `_AT_ONCE` and `_IF_CUT` have
the messages for the user.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from types import FrameType
from typing import Self

from aliquot.core.errors import TrainingError
from aliquot.distributed.leader_lease import ROUND
from aliquot.distributed.rank_errors import bounded_call, bounded_value, has_failed_rank, report_error
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.signals import REPEAT_S, STOP_SIGNALS, SignalListener, Terminated
from aliquot.run.training_progress import TrainingProgress

_POLL_INTERVAL_S = 1.0
_MAX_GROWTH = 4  # the number of micro-batches between two polls grows at most by this factor
_ANNOUNCE_S = 30.0  # longer than it takes to report an error and to announce the end to other nodes


class Phase(Enum):
    """The phases of a run, which differ in the work that would be lost if the process ended at once."""

    SETUP = auto()  # before the first optimizer step of this process
    STEPS = auto()  # optimizer steps and evaluations: some work is in no checkpoint
    COPYING = auto()  # the newest step is in a checkpoint, which may not be in the mirror yet
    EXPORT = auto()  # all steps are done and saved; export and sample remain
    SOLE_EXPORT = auto()  # all steps are done, and only the export will hold them (checkpoint.last: false)
    UNSAVED = auto()  # all steps are done, could not be saved, and there is no export
    DONE = auto()  # the export is complete; the sample remains


_IS_SAVED = "after step {step}, which is saved{mirror}: start again to continue"
IS_EXPORTED = "after step {step}, the last, which is exported"
# The outcome of a stop signal, as the end of a message for the user, in the phases in which the first signal ends the
# process at once; in other phases, the run first saves.
_AT_ONCE = {
    Phase.SETUP: "before the first step was done: nothing is lost",
    Phase.EXPORT: "after step {step}, the last, which is saved: start again for the rest",
    Phase.UNSAVED: "after step {step}, the last, which could not be saved",
    Phase.DONE: IS_EXPORTED,
}
# The outcome if the grace period ends or a second signal arrives; in other phases, work is then lost.
_IF_CUT = {Phase.COPYING: _IS_SAVED, Phase.EXPORT: _IS_SAVED, Phase.DONE: IS_EXPORTED}


def saved_outcome(progress: TrainingProgress, obstacle: str = "it could not be saved") -> str:
    """Return the outcome of a run that ends after the last finished step; `obstacle`: why this step may be unsaved."""
    if progress.is_saved:
        return _IS_SAVED.format(step=progress.step, mirror="")
    newest = f"saved is step {progress.saved_step}" if progress.saved_step else "nothing is saved"
    return f"after step {progress.step}; {newest}, because {obstacle}: start again to continue"


class Shutdown:
    """A context manager for the main thread that handles stop signals. Call `enter` when the run enters a phase.

    `requested` is the number of the first signal, or 0. In a round of an elastic run, a second signal does not end the
    process, because the node's launcher and the leader may both send the first signal. At the end of the block, the
    signals get their former handlers back.
    """

    def __init__(
        self,
        grace_s: float,
        speaks: bool,
        describe_loss: Callable[[], str],
        announce_end: Callable[[str], None] = lambda _: None,
        has_mirror: bool = False,
        notify: Callable[[str], object] = lambda text: os.write(2, f"{text}\n".encode()),
        restore_terminal: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to handle signals.

        Args:
            grace_s: seconds from the first signal to the end of the process, saved or not.
            speaks: whether this rank prints that a signal has arrived.
            describe_loss: returns what a second signal would lose; reads the last checkpoint in the run directory.
            announce_end: called with the reason before the process ends at once, to tell the other nodes.
            has_mirror: whether checkpoints are copied to `checkpoint.mirror`.
            notify: shows a line at once; called in another thread, which must not wait for the main thread.
            restore_terminal: called before the process ends at once, because a live view hides the cursor.
        """
        if threading.current_thread() is not threading.main_thread():
            raise TrainingError("signals come to the main thread alone: train there")
        self.requested = 0
        self.on_request: Callable[[], None] = lambda: None  # called in another thread when the first signal arrives
        self._state = (Phase.SETUP, 0)  # phase and last step; one tuple, because another thread reads both
        self._loss = "losing an unknown number of steps: the run directory does not answer"
        self._grace_s = grace_s
        self._speaks = speaks
        self._describe_loss = describe_loss
        self._announce_end = announce_end
        self._notify, self._restore_terminal = notify, restore_terminal
        self._mirror = ", but not in checkpoint.mirror yet" if has_mirror else ""
        self._deadline = threading.Timer(grace_s, self._end_late)
        self._deadline.daemon = True
        self._is_ending = False
        self._requested_at = math.inf
        # Ignored signals stay ignored: a shell ignores Ctrl-C for background processes, and nohup ignores SIGHUP.
        self._former = {
            number: signal.getsignal(number)
            for number in STOP_SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._listener = SignalListener(self._handle)
        for number in self._former:
            signal.signal(number, lambda *_: None)  # the listener's thread does the work

    @property
    def phase(self) -> Phase:
        return self._state[0]

    def enter(self, phase: Phase, step: int) -> None:
        """Record that the run has entered `phase`. `step` is the last finished optimizer step."""
        self._state = (phase, step)

    @property
    def left_s(self) -> float:
        """Seconds until the process ends, saved or not; infinite before the first signal."""
        return self._requested_at + self._grace_s - time.monotonic()

    def disarm(self) -> None:
        """End the grace period: nothing more will be saved, and reports and dashboards have their own time limits."""
        self._deadline.cancel()

    def stopped(self, number: int, outcome: str) -> Terminated:
        """Return the error that ends the run after a stop signal, when nothing more will be saved.

        Signal `number` may have arrived at another rank.
        """
        self.disarm()
        return Terminated(number, outcome)

    def _handle(self, number: int) -> None:
        """Handle a signal, in the listener's thread."""
        if number not in self._former:
            return
        phase, step = self._state
        if (at_once := _AT_ONCE.get(phase)) is not None:
            self._is_ending = True
            error = Terminated(number, at_once.format(step=step))
            bounded_call(self._restore_terminal)
            bounded_call(partial(report_error, error))
            bounded_call(partial(self._announce_end, f"stopped by {signal.Signals(number).name}"))
            os._exit(error.exit_code)
        if not self.requested:
            self._request(number)
        elif ROUND not in os.environ and time.monotonic() > self._requested_at + REPEAT_S:
            bounded_call(self._restore_terminal)
            # torchrun forwards a second Ctrl-C as SIGTERM, so the line does not name the signal.
            self._say(f"the second signal: ended {self._outcome() or f'at once, {self._loss}'}")
            os._exit(128 + number)

    def _request(self, number: int) -> None:
        self.requested, self._requested_at = number, time.monotonic()
        self._deadline.start()
        if self._speaks:
            self._loss = bounded_value(self._describe_loss, self._loss)
        self.on_request()
        again = "" if ROUND in os.environ else f"; a second signal ends it at once, {self._loss}"
        if not has_failed_rank():
            self._say(f"{signal.Signals(number).name}: the run saves and stops{again}")

    def _say(self, text: str) -> None:
        if self._speaks:
            bounded_call(partial(self._notify, f"aliquot: {text}"))

    def _end_late(self) -> None:
        """End the process because the grace period is over."""
        late = f"not saved within checkpoint.grace_s = {self._grace_s:g} s of {signal.Signals(self.requested).name}"
        error = TrainingError(late) if (outcome := self._outcome()) is None else Terminated(self.requested, outcome)
        bounded_call(self._restore_terminal)
        bounded_call(partial(report_error, error))
        os._exit(error.exit_code)

    def _outcome(self) -> str | None:
        """The outcome if the process ends now; None if work is lost."""
        phase, step = self._state
        if_cut = _IF_CUT.get(phase)
        return if_cut and if_cut.format(step=step, mirror=self._mirror)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # If the listener's thread is ending the process, wait for that thread. An error of the block only follows from
        # the end of other nodes.
        if self._is_ending:
            time.sleep(_ANNOUNCE_S)
        self.disarm()
        for number, former in self._former.items():
            signal.signal(number, self._obey_later if self.requested else former)
        self._listener.close()

    def _obey_later(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal after the block; ignore a repetition of the first signal, which would hide the last lines."""
        if time.monotonic() > self._requested_at + REPEAT_S:
            for stop_signal, former in self._former.items():
                signal.signal(stop_signal, former)
            signal.raise_signal(number)


class StopPoll:
    """The ranks' agreement on a stop signal that any of them has received, or on 0. Every method is a collective."""

    def __init__(self, ranks: Ranks, shutdown: Shutdown, relax: Callable[[], None]) -> None:
        """`relax` is called as soon as all ranks know of a signal."""
        self._ranks, self._shutdown, self._relax = ranks, shutdown, relax
        self._interval = self._left = 1  # micro-batches between two polls, and until the next poll
        self._asked_at = time.monotonic()

    def __call__(self, at_once: bool = False) -> int:
        """Return the signal before a micro-batch. The ranks ask each other only about once a second.

        `at_once`: ask now, because an evaluation begins, which a signal gives up.
        """
        self._left = 0 if at_once else self._left - 1
        if self._left:
            return 0
        now = time.monotonic()
        signals, seconds = zip(*self._ranks.gather([self._shutdown.requested, now - self._asked_at]), strict=True)
        in_time = int(self._interval * _POLL_INTERVAL_S / max(seconds))
        self._interval = self._left = max(1, min(_MAX_GROWTH * self._interval, in_time))
        self._asked_at = now
        return self.agree(signals)

    def now(self) -> int:
        """Return the signal."""
        return self.agree(self._ranks.gather(self._shutdown.requested))

    def agree(self, signals: Iterable[int]) -> int:
        """Return the signal among those that all ranks have gathered."""
        agreed = max(signals)
        if agreed:
            self._relax()
        return agreed
