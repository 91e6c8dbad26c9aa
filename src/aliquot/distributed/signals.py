"""A second Ctrl-C to the launcher of a node whose ranks finish a step and save after the first: they are ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aliquot.distributed.stop_signal import SAME_S, STOP_SIGNALS


@contextmanager
def obeying_second_signal(asked: Callable[[str], None], ends: Callable[[str], None]) -> Iterator[None]:
    """Call `asked` with the name of the first signal that comes, and `ends` with that of another one, which is not the
    first told again. In a thread: the main thread waits for ranks. Their handlers are whoever else's."""
    read, told = os.pipe()
    os.set_blocking(told, False)
    former = signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def listen() -> None:
        first: float | None = None
        while number := os.read(read, 1):
            if number[0] not in STOP_SIGNALS:
                continue
            name = signal.Signals(number[0]).name
            if first is None:
                first = time.monotonic()
                asked(name)
            elif time.monotonic() > first + SAME_S:
                ends(name)
        os.close(read)

    threading.Thread(target=listen, name="aliquot-second-signal", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        os.close(told)
