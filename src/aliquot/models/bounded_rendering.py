"""Limit the time of chat templates, which are programs of model authors and may loop forever."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CPU_SECONDS = 1.0  # five times as much as a chat of megabytes needs


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Raise TimeoutError if the block needs more than CPU_SECONDS of this process.

    The kernel counts CPU time, of which a stopped or starved process spends none. Python handles signals in the main
    thread only, so that blocks in other threads have no limit, nor has a single long operation.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _install_handler()
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache
def _install_handler() -> None:
    """Install the signal handler, once, because that takes longer than rendering."""
    signal.signal(signal.SIGVTALRM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it has run for {CPU_SECONDS:g} s, as one that loops for ever does")
