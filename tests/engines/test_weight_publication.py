"""What waits for an update that is under way, and what does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from aliquot.distributed.collectives.hosts import Hosts
from aliquot.engines.host.weight_publication import LateUpdate

ORDER = [4, 2, 7]


@pytest.fixture
def late() -> Iterator[LateUpdate]:
    hosts = Hosts.join(0, 0, lambda value: [value])
    update = LateUpdate(hosts.peers, ORDER, lambda: None)
    yield update
    update.close()
    hosts.peers.close()


def test_a_layer_waits_for_its_own_weights_alone(late: LateUpdate) -> None:
    late.need(ORDER)  # before the first update there is nothing to wait for
    late.need_own(ORDER)
    late.settle()
    for _ in range(2):
        goes_on = [threading.Event() for _ in ORDER]

        def update(goes_on: list[threading.Event] = goes_on) -> None:
            for index, event in zip(ORDER, goes_on, strict=True):
                assert event.wait(30)
                late.updated(index)

        late.begin(update)
        waiting = threading.Thread(target=late.need, args=([4, 2, 9],))  # 9 is never updated
        waiting.start()
        goes_on[0].set()
        waiting.join(0.1)
        assert waiting.is_alive()
        goes_on[1].set()
        waiting.join(30)
        assert not waiting.is_alive()
        late.need_own([2])
        waiting = threading.Thread(target=late.settle)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        goes_on[2].set()
        waiting.join(30)
        late.need(ORDER)


def test_weights_of_which_a_rank_has_no_row_are_waited_for_with_all(late: LateUpdate) -> None:
    late.begin(lambda: late.updated(4))
    late.need([7])


@pytest.mark.parametrize("wait", ["need", "need_own"])
def test_what_an_update_raises_reaches_who_waits(late: LateUpdate, wait: str) -> None:
    def update() -> None:
        late.updated(4)
        raise OSError("the disk is gone")

    late.begin(update)
    late.need([4])
    with pytest.raises(OSError, match="the disk is gone"):
        getattr(late, wait)([2])
    with pytest.raises(OSError, match="the disk is gone"):
        late.settle()


def test_an_update_that_ends_late_does_not_speak_for_the_next(late: LateUpdate) -> None:
    ends, goes_on = threading.Event(), threading.Event()

    def first() -> None:
        for index in ORDER:
            late.updated(index)
        assert ends.wait(30)

    def second() -> None:
        assert goes_on.wait(30)

    late.begin(first)
    late.need(ORDER)
    late.begin(second)
    ends.set()
    waiting = threading.Thread(target=late.need, args=(ORDER,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    goes_on.set()
    waiting.join(30)
    assert not waiting.is_alive()
