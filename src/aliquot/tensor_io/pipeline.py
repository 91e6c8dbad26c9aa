"""Input and output in a few threads, everything else in the calling one: at most `DEPTH` pieces are under way.

A store is so only ever touched by the thread that fills or drains it, piece by piece in the order of the files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from aliquot.tensor_io.mapped_memory import mapped_tensor
from aliquot.tensor_io.piece_size import DEPTH, PIECE_BYTES

THREADS = 4  # more gain nothing on a local disk; a network file system wants several requests at once


class Pipeline:
    """`add` starts the work of a piece in another thread; its `end` runs here, in the order of the pieces."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aliquot-io")
        self._under_way: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(DEPTH)]
        self._pieces = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def buffer(self) -> torch.Tensor:
        """`PIECE_BYTES` of uint8 for the next piece, free until that has ended. Raises what older pieces raised."""
        self._end_down_to(DEPTH - 1)
        index = self._pieces % DEPTH  # pieces end in order, so this one's last user has
        if not self._buffers[index].numel():
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                # To and from a GPU only pinned memory goes at the full speed of the bus.
                self._buffers[index] = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            else:
                self._buffers[index] = mapped_tensor(PIECE_BYTES, torch.uint8)
        return self._buffers[index]

    def add(self, work: Callable[[], None], end: Callable[[], None]) -> None:
        """Raises what `work` or `end` of an older piece raised."""
        self._end_down_to(DEPTH - 1)
        self._under_way.append((self._threads.submit(work), end))
        self._pieces += 1

    def flush(self) -> None:
        """Return when all pieces have ended. Raises what one of them raised."""
        self._end_down_to(0)

    def _end_down_to(self, count: int) -> None:
        while len(self._under_way) > count:
            future, end = self._under_way.popleft()
            future.result()
            end()
