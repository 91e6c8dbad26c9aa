"""What a process that ends still wants of a disk, a network or a terminal that may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

_MOMENT_S = 3.0


def within_a_moment(work: Callable[[], object]) -> bool:
    """Do it, but wait no longer for it than that: False where it has not been done by then."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_MOMENT_S)
    return not thread.is_alive()
