"""Overlapped updates: layers wait for their own weights, and failures reach the waiting callers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from aliquot.distributed.collectives.hosts import Hosts
from aliquot.engines.host.weight_publication import OverlappedUpdate

ORDER = [4, 2, 7]


@pytest.fixture
def late() -> Iterator[OverlappedUpdate]:
    hosts = Hosts.join(0, 0, lambda value: [value])
    update = OverlappedUpdate(hosts.peers, ORDER, lambda: None)
    yield update
    update.close()
    hosts.peers.close()


def check_waits_for(event: threading.Event, wait: Callable[..., None], *arguments: list[int]) -> None:
    waiting = threading.Thread(target=wait, args=arguments)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    event.set()
    waiting.join(30)
    assert not waiting.is_alive()


def test_layer_waits_only_for_its_own_weights(late: OverlappedUpdate) -> None:
    late.wait_usable(ORDER)  # before the first update there is nothing to wait for
    late.wait_updated_here(ORDER)
    late.join()
    for _ in range(2):
        goes_on = [threading.Event() for _ in ORDER]

        def update(goes_on: list[threading.Event] = goes_on) -> None:
            for index, event in zip(ORDER, goes_on, strict=True):
                assert event.wait(30)
                late.mark_updated(index)

        late.begin(update)
        goes_on[0].set()
        check_waits_for(goes_on[1], late.wait_usable, [4, 2, 9])  # 9 is never updated
        late.wait_updated_here([2])
        check_waits_for(goes_on[2], late.join)
        late.wait_usable(ORDER)


def test_update_publishes_weights_without_local_rows_at_its_end(late: OverlappedUpdate) -> None:
    late.begin(lambda: late.mark_updated(4))
    late.wait_usable([7])


@pytest.mark.parametrize("wait", ["wait_usable", "wait_updated_here"])
def test_failure_of_an_update_reaches_waiting_callers(late: OverlappedUpdate, wait: str) -> None:
    def update() -> None:
        late.mark_updated(4)
        raise OSError("the disk is gone")

    late.begin(update)
    late.wait_usable([4])
    with pytest.raises(OSError, match="the disk is gone"):
        getattr(late, wait)([2])
    with pytest.raises(OSError, match="the disk is gone"):
        late.join()


def test_late_end_of_an_update_does_not_count_for_the_next(late: OverlappedUpdate) -> None:
    ends, goes_on = threading.Event(), threading.Event()

    def first() -> None:
        for index in ORDER:
            late.mark_updated(index)
        assert ends.wait(30)

    def second() -> None:
        assert goes_on.wait(30)

    late.begin(first)
    late.wait_usable(ORDER)
    late.begin(second)
    ends.set()
    check_waits_for(goes_on, late.wait_usable, ORDER)
