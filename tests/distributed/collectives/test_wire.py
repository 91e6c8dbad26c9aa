"""Messages between hosts: checksums notice any bit and any order, and buffers are used again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from aliquot.distributed.collectives.wire import BufferPool, Tally

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def tally(messages: list[torch.Tensor]) -> int:
    found = Tally()
    for message in messages:
        found.add(message)
    return int(found.value())


@given(lengths=LENGTHS, seed=st.integers(0, 1 << 30), data=st.data())
def test_any_bit_counts(lengths: list[int], seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    messages = [torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator) for length in lengths]
    before = tally(messages)
    assert tally([message.clone() for message in messages]) == before
    hit = data.draw(st.sampled_from(messages))
    hit[data.draw(st.integers(0, len(hit) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert tally(messages) != before


def test_order_counts() -> None:
    first, second = torch.randn(100), torch.randn(33)
    assert tally([first, second]) != tally([second, first])


def test_buffer_pool_reuses_buffers_and_drops_other_sizes() -> None:
    rooms = BufferPool(torch.float32, limit_bytes=4000)
    first, second = rooms.take(500), rooms.take(500)
    rooms.give(first)
    rooms.give(second)
    assert rooms.take(500) is second
    other = rooms.take(300)  # for which the first is dropped
    assert rooms.take(500) is not first
    rooms.give(other)
    assert rooms.take(300) is other


def test_buffer_pool_stays_within_its_limit() -> None:
    rooms = BufferPool(torch.uint8, limit_bytes=10)
    kept, dropped = rooms.take(8), rooms.take(8)
    rooms.give(kept)
    rooms.give(dropped)
    assert rooms.take(8) is kept
    assert rooms.take(8) is not dropped
