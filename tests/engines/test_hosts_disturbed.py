"""Hosts whose messages are late and seen in another order, and hosts of which one ends at any moment of a step."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from aliquot.distributed.collectives.peers import PeerLost
from aliquot.distributed.collectives.wire import Wire
from aliquot.engines import global_norm
from aliquot.engines.host.host_engine import HostEngine
from aliquot.engines.host.weight_publication import WeightPublication
from tests.engines import cases, worker
from tests.engines.cases import EngineSetup
from tests.engines.test_engines import Runs
from tests.engines.test_host_engine import check_same_bits
from tests.examples import examples
from tests.processes import as_ranks, run_ranks

WORKER = Path(__file__)
ONCE = ["llama-once", "llama-bf16-once", "qwen2-tied-once"]  # of which hosts compute the bits of one

Folder = Callable[[], Path]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A new one each time."""
    return lambda: tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Runs[int]:
    return Runs(tmp_path_factory.mktemp("one"), {size: (EngineSetup("host", size), ONCE) for size in (2, 3)})


@pytest.mark.long
@pytest.mark.timeout(3600)  # an example takes a minute on a busy machine
@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # which makes a new folder each time
    phases=[Phase.generate],  # to look for a smaller example takes seconds each
)
@given(
    name=st.sampled_from(ONCE),
    hosts=st.sampled_from([2, 3]),
    under_way=st.integers(1, 20_000),
    message=st.integers(1, 5000),
    published=st.integers(100, 3000),
    delays_ms=st.lists(st.sampled_from([0, 0, 0, 1, 3, 10, 30]), min_size=1, max_size=40),
)
def test_late_and_reordered_messages_change_no_bit(
    one_host: Runs[int],
    folder: Folder,
    name: str,
    hosts: int,
    under_way: int,
    message: int,
    published: int,
    delays_ms: list[int],
) -> None:
    """With little room for what is under way, and messages and weights in pieces of any length."""
    disturbance = {"under_way": under_way, "message": message, "published": published, "delays_ms": delays_ms}
    disturbed = folder()
    run_ranks(WORKER, hosts, disturbed, name, json.dumps(disturbance))
    check_same_bits(one_host[hosts], disturbed, name, hosts)


def ended(folder: Path, hosts: int, name: str, moment: int) -> str:
    """The last host ends at a moment, and the others must within seconds, naming it; what it was about to do."""
    begun = time.monotonic()
    run_ranks(WORKER, hosts, folder, name, json.dumps({"ends_at": moment}), timeout_s=60)
    assert time.monotonic() - begun < 40
    notes = [json.loads((folder / f"lost-{rank}.json").read_text()) for rank in range(hosts - 1)]
    # The first to notice ends, and another one that waits for it may say so instead.
    first = min(notes, key=lambda lost: lost["at"])
    assert first["named"], notes
    assert first["message"].startswith(f"rank {hosts - 1} has ended on another host"), notes
    return (folder / "moments").read_text().split()[-1]


MOMENTS = {"needs": 2, "receives": 10, "sends": 10, "compares": 1, "norm": 1}  # kinds, and how many are tried


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "hosts"), [("llama-bf16-once", 2), ("qwen2-tied", 2), ("llama-reduced-once", 2), ("llama-once", 3)]
)
def test_host_that_ends_in_an_exchange_is_named_at_once(folder: Folder, name: str, hosts: int) -> None:
    """Before each kind of thing that it does to meet the others, and at moments between."""
    whole = folder()
    run_ranks(WORKER, hosts, whole, name, json.dumps({"ends_at": -1}))
    kinds = (whole / "moments").read_text().split()
    by_kind = {kind: [at for at, seen in enumerate(kinds) if seen == kind] for kind in set(kinds)}
    assert by_kind.keys() == MOMENTS.keys()
    draw = random.Random(name)
    for kind, number in MOMENTS.items():
        for moment in draw.sample(by_kind[kind], min(number, len(by_kind[kind]))):
            assert ended(folder(), hosts, name, moment) == kind


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
    """One rank of two or three hosts that are disturbed in a way which the test has drawn."""
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
