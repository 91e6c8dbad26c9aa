"""Chat templates are programs of strangers: one that loops for ever ends in an error."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CPU_SECONDS = 1.0  # a chat of megabytes takes a fifth of it


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Raise TimeoutError where the block takes more than CPU_SECONDS of this process.

    The kernel counts them, and a stopped or starved process spends none. Python handles signals in the main thread
    alone, so that nothing is bounded in another one. Neither is a single operation, as of a text of gigabytes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _obey()
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache
def _obey() -> None:
    """Once: it takes longer than all the rest."""
    signal.signal(signal.SIGVTALRM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it has run for {CPU_SECONDS:g} s, as one that loops for ever does")
