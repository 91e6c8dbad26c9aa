"""Transfers under way, told when they are over: gloo's can only be waited for, which a thread does here.

It holds no tensor longer than its transfer takes and computes nothing.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue

import torch.distributed as dist


class Transfers:
    """Each is waited for after those that were begun before it."""

    def __init__(self, name: str) -> None:
        self._begun: SimpleQueue[tuple[dist.Work, Future[None], Exception] | None] = SimpleQueue()
        # A daemon: where a rank ends by an error its peers are told by that end, and what it waits for never comes.
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def add(self, work: dist.Work, lost: Exception) -> Future[None]:
        """Done when `work` is; raises `lost` where that fails."""
        over: Future[None] = Future()
        self._begun.put((work, over, lost))
        return over

    def close(self) -> None:
        """When all are over."""
        self._begun.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (begun := self._begun.get()) is not None:
            work, over, lost = begun
            try:
                work.wait()
            except Exception as error:  # it is raised where the transfer was wanted
                lost.__cause__ = error
                over.set_exception(lost)
            else:
                over.set_result(None)
            del begun, work, over, lost
