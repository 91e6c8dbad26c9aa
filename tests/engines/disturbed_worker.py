"""One rank of two or three hosts that are disturbed in a way which the test has drawn; see test_hosts_disturbed.py."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

from torch import Tensor

from aliquot.distributed.collectives.peers import PeerLost
from aliquot.distributed.collectives.wire import Wire
from aliquot.engines import global_norm
from aliquot.engines.host.host_engine import HostEngine
from aliquot.engines.host.weight_publication import WeightPublication
from tests.engines import cases, worker
from tests.processes import as_ranks

Transfer = Callable[[Wire, Tensor, int], Future[None]]


def disturb(rank: int, under_way: int, message: int, published: int, delays_ms: list[int]) -> None:
    """Messages leave late, in their order, and are seen to be over later than they are, in any order."""
    worker.limit_messages(under_way, message, published)
    waiting: list[Queue[Any]] = []
    places = count(rank)  # which several threads may ask, as they may not a generator

    def delay_s() -> float:
        return delays_ms[next(places) % len(delays_ms)] / 1e3

    def late(transfer: Transfer) -> Transfer:
        begun: Queue[tuple[Future[None], Wire, Tensor, int]] = Queue()
        waiting.append(begun)

        def begin(wire: Wire, values: Tensor, host: int) -> Future[None]:
            seen: Future[None] = Future()
            begun.put((seen, wire, values, host))
            return seen

        def work() -> None:
            while True:
                seen, *arguments = begun.get()
                time.sleep(delay_s())
                try:
                    transfer(*arguments).add_done_callback(partial(see, seen))
                except PeerLost as lost:
                    seen.set_exception(lost)
                begun.task_done()

        threading.Thread(target=work, daemon=True).start()
        return begin

    def see(seen: Future[None], over: Future[None]) -> None:
        error = over.exception()
        tell = partial(seen.set_result, None) if error is None else partial(seen.set_exception, error)
        timer = threading.Timer(delay_s(), tell)
        timer.daemon = True
        timer.start()

    close = Wire.close

    def close_late(wire: Wire) -> None:
        for begun in waiting:
            begun.join()
        close(wire)

    Wire.close = close_late  # type: ignore[method-assign]
    Wire.send, Wire.receive = late(Wire.send), late(Wire.receive)  # type: ignore[method-assign]


class Moments:
    """What this rank does to meet the others in its second step, in whose forward pass the first one's weights still
    arrive: it ends without a word at the one of `number`, never if that is negative."""

    def __init__(self, number: int, note: Path) -> None:
        self._number = number
        self._note = note  # the kind of each
        self._warm_shapes: list[str] = []
        self._steps = 0
        HostEngine.step = self._counted(HostEngine.step)  # type: ignore[method-assign]
        WeightPublication.wait_usable = self._before(WeightPublication.wait_usable, "needs")  # type: ignore[method-assign]
        Wire.receive = self._before(Wire.receive, "receives")  # type: ignore[method-assign]
        Wire.send = self._before(Wire.send, "sends")  # type: ignore[method-assign]
        Wire.compare = self._before(Wire.compare, "compares")  # type: ignore[method-assign]
        global_norm.gather = self._before(global_norm.gather, "norm")  # type: ignore[attr-defined]

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any) -> Any:
            result = step(*arguments)
            self._steps += 1
            return result

        return stepped

    def _before(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def counted_call(*arguments: Any) -> Any:
            if self._steps == 1:
                self._warm_shapes.append(kind)
                self._note.write_text(" ".join(self._warm_shapes))
                if len(self._warm_shapes) - 1 == self._number:
                    os._exit(0)  # as by SIGKILL nothing is told to anybody; the kernel closes what is open
            return method(*arguments)

        return counted_call


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    name, asked = arguments
    disturbance = json.loads(asked)
    setup = cases.EngineSetup("host", world_size, hosts=world_size)
    if "delays_ms" in disturbance:
        disturb(rank, **disturbance)
        worker.train(setup, cases.CASES[name], rank, folder)
        return
    if rank == world_size - 1:
        Moments(disturbance["ends_at"], folder / "moments")
    try:
        worker.train(setup, cases.CASES[name], rank, folder)
    except Exception as error:
        lost = isinstance(error, PeerLost)
        lost_note = {"error": type(error).__name__, "message": str(error), "named": lost, "at": time.time()}
        (folder / f"lost-{rank}.json").write_text(json.dumps(lost_note))
        os._exit(0)  # the process group would wait for the dead rank


if __name__ == "__main__":
    as_ranks(work)
