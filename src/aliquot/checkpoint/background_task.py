"""Work in a thread of which all ranks hear at the next step, and waiting for it together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from aliquot.core.errors import CutOffError, RunDirectoryError, StorageError, StorageFailureError, UserError
from aliquot.core.on_rank_0 import RankGroup
from aliquot.machine.memory import unwritten_bytes

Report = dict[str, Any]

_ASKED_S = 0.5  # ranks that wait for each other tell how far they are


class Background:
    """Something done in a thread: whether it is over, and what came of it."""

    def __init__(self, name: str, work: Callable[[], Any], on_error: Callable[[], None] = lambda: None) -> None:
        self.result: Any = None
        self.seconds = 0.0  # that it took
        self._error: str | None = None
        self._kind: str | None = None  # of the error
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, args=[work], name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            self.result = work()
        # Whatever it is, it must reach the training thread, which alone can tell the other ranks.
        except Exception as error:
            self._error = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._kind = error.id if isinstance(error, UserError) else StorageError.id
            self._on_error()
        finally:
            self.seconds = time.perf_counter() - began

    def report(self) -> Report:
        return {"done": not self._thread.is_alive(), "error": self._error, "kind": self._kind}

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def failure(reports: Sequence[Report]) -> UserError | None:
    """The error of the first rank that has failed, the same on every rank; None if no rank has.

    Other kinds than StorageError end the run whatever `checkpoint.on_error` is.
    """
    final = {kind.id: kind for kind in (CutOffError, RunDirectoryError)}
    for rank, report in enumerate(reports):
        if report["error"] and report["kind"] in final:
            return final[report["kind"]](report["error"])
        if report["error"]:
            kind = StorageFailureError if report["kind"] == StorageFailureError.id else StorageError
            return kind(f"rank {rank}: {report['error']}")
    return None


def wait_together(
    ranks: RankGroup, arrived: Callable[[float], bool], written_bytes: Callable[[], int], beat: Callable[[], None]
) -> None:
    """Until `arrived`, which takes seconds to wait at most, is true on every rank. Collective.

    A slow disk is not a hang: as long as any rank writes, or its machine has less and less left to write, `beat` is
    called on all of them.
    """
    before: list[tuple[int, int]] = []
    while True:
        own = arrived(_ASKED_S)
        told = ranks.gather([own, written_bytes(), unwritten_bytes()])
        if all(there for there, _, _ in told):
            beat()
            return
        now = [(written, left) for _, written, left in told]
        lowest = [min(left, low) for (_, left), (_, low) in zip(now, before or now, strict=True)]
        if any(written > past or left < low for (written, left), (past, low) in zip(now, before, strict=False)):
            beat()
        before = [(written, low) for (written, _), low in zip(now, lowest, strict=True)]
