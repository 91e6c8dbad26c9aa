"""Memory that is used again does not lie beside new memory."""

from __future__ import annotations

import torch

from aliquot.distributed.collectives.buffer_pool import Rooms


def test_a_room_is_used_again_and_what_fits_nothing_makes_way() -> None:
    rooms = Rooms(torch.float32, most_bytes=4000)
    first, second = rooms.take(500), rooms.take(500)
    rooms.give(first)
    rooms.give(second)
    assert rooms.take(500) is second
    other = rooms.take(300)  # for which the first is dropped
    assert rooms.take(500) is not first
    rooms.give(other)
    assert rooms.take(300) is other


def test_no_more_is_kept_than_there_is_room_for() -> None:
    rooms = Rooms(torch.uint8, most_bytes=10)
    kept, dropped = rooms.take(8), rooms.take(8)
    rooms.give(kept)
    rooms.give(dropped)
    assert rooms.take(8) is kept
    assert rooms.take(8) is not dropped
