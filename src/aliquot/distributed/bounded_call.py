"""Call a disk, a network or a terminal that may never answer, from a process that is about to end."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LIMIT_S = 3.0


def bounded_call(work: Callable[[], object]) -> bool:
    """Call `work` in a thread and wait at most three seconds. Returns False if it has not finished by then."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return not thread.is_alive()
