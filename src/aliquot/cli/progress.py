"""What a command is doing, where that takes longer than a second: on a terminal as it goes on, else one line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 1.0


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """To be told in words what comes next."""
    from rich.console import Console

    console, doing = Console(stderr=True), ""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return

    def tell(text: str) -> None:
        nonlocal doing
        doing = text

    line = threading.Timer(_PATIENCE_S, lambda: print(f"aliquot: {doing} ...", file=sys.stderr, flush=True))
    line.daemon = True
    line.start()
    try:
        yield tell
    finally:
        line.cancel()
