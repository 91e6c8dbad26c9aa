"""Limit the time that a chat template may take: it is a program from a stranger, and may never end."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TEMPLATE_CPU_S = 1.0  # five times as long as rendering a chat of several megabytes takes


@contextmanager
def limit_template_time() -> Iterator[None]:
    """Raise TimeoutError if the block, which renders a chat template, takes more CPU time than TEMPLATE_CPU_S.

    CPU time, unlike elapsed time, does not advance while the process is stopped or waits for a core. Python handles
    signals only in the main thread and between operations. A block in another thread or a single long operation is
    therefore not limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _install_handler()
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache
def _install_handler() -> None:
    """Install the signal handler once per process, because installing takes longer than rendering."""
    signal.signal(signal.SIGVTALRM, _end_template)


def _end_template(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it has run for {TEMPLATE_CPU_S:g} s, as one that loops for ever does")
