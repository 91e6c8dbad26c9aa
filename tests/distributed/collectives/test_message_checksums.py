"""A tally of messages changes with any bit of any of them, and with their order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from aliquot.distributed.collectives.message_checksums import Tally

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def tally(messages: list[torch.Tensor]) -> int:
    found = Tally()
    for message in messages:
        found.add(message)
    return int(found.told())


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
