"""Sums that are rounded to bf16: to nearest where that loses nothing, by chance where small numbers would be lost.

Messages between hosts: checksums notice any bit and any order, and buffers are used again.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from aliquot.distributed.collectives.reduce import RoundingNoise, add_hosts, add_rows_rounded, add_sum_rounded
from aliquot.distributed.collectives.wire import BufferPool, Tally

STEP = 2.0**-7  # between neighbouring bf16 values from 1 to 2
COUNT = 100_000  # longer than the noise, which repeats


def test_first_sum_rounds_to_nearest_even() -> None:
    sources = [torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    out = torch.full((COUNT,), 7.0).bfloat16()
    add_sum_rounded(out, sources, first=True, noise=None)
    assert torch.equal(out, (sources[0] + sources[1] + sources[2]).bfloat16())

    ties = torch.tensor([1 + STEP / 2, 1 + 3 * STEP / 2, -1 - STEP / 2])
    out = torch.empty(3).bfloat16()
    add_sum_rounded(out, [ties], first=True, noise=None)
    assert out.tolist() == [1, 1 + 2 * STEP, -1]


def test_noise_preserves_small_contributions() -> None:
    fractions = torch.rand(COUNT, generator=torch.Generator().manual_seed(0)) * STEP / 4
    out = torch.ones(COUNT).bfloat16()
    add_sum_rounded(out, [fractions], first=False, noise=RoundingNoise(1, 1, 0))
    assert torch.isin(out.float(), torch.tensor([1.0, 1.0 + STEP])).all()
    # A mean of COUNT roundings, each wrong by less than STEP / 3 on average: 5 standard deviations.
    assert abs((out.float() - 1 - fractions).mean()) < 5 * STEP / 3 / COUNT**0.5


def test_hosts_draw_different_noise() -> None:
    """The error of a sum over 64 hosts is 8 times that of one; with the same noise on all it would be 64 times."""
    fractions = torch.rand(COUNT, generator=torch.Generator().manual_seed(0)) * STEP
    errors = []
    for host in range(64):
        out = torch.ones(COUNT).bfloat16()
        add_sum_rounded(out, [fractions], first=False, noise=RoundingNoise(1, 1, host))
        errors.append(out.float() - 1 - fractions)
    of_one, of_sum = errors[0].square().mean().sqrt(), torch.stack(errors).sum(0).square().mean().sqrt()
    assert 7.8 < of_sum / of_one < 8.2


def test_every_step_and_micro_batch_draws_its_own_noise() -> None:
    keys = [(1, 1, 0), (1, 2, 0), (2, 1, 0), (1, 1, 1), (4097, 1, 0), (1 << 40, 1, 0)]
    draws = [RoundingNoise(*key).at(0, 1 << 16) for key in keys]
    assert torch.equal(draws[0], RoundingNoise(*keys[0]).at(0, 1 << 16))
    for at, draw in enumerate(draws):
        assert draw.min() >= 0
        assert draw.max() < 1 << 16
        assert not any(torch.equal(draw, other) for other in draws[:at])


@given(st.integers(1, 300), st.integers(1, 700), st.data())
def test_rounding_does_not_depend_on_pieces(rows: int, width: int, data: st.DataObject) -> None:
    values = torch.rand(rows, width, generator=torch.Generator().manual_seed(rows)) * STEP
    noise = RoundingNoise(3, 1, 2)
    whole = torch.ones(rows * width).bfloat16()
    add_sum_rounded(whole, [values.view(-1)], first=False, noise=noise)

    cut = data.draw(st.integers(0, rows * width))
    parts = torch.ones(rows * width).bfloat16()
    for start, stop in ((0, cut), (cut, rows * width)):
        add_sum_rounded(parts[start:stop], [values.view(-1)[start:stop]], False, noise, start)
    assert torch.equal(parts, whole)

    first_row = data.draw(st.integers(0, rows - 1))
    looked_up = [torch.arange(rows), torch.randperm(rows - first_row)]
    of_rows = [torch.ones(rows, width).bfloat16(), torch.ones(rows - first_row, width).bfloat16()]
    for out, numbers, first in zip(of_rows, looked_up, (0, first_row), strict=True):
        add_rows_rounded(out, numbers, values[first + numbers], False, noise, first)
    assert torch.equal(of_rows[1], of_rows[0][first_row:])


def test_head_and_embedding_draw_different_noise() -> None:
    """As a tied embedding's: the head's sum and the rows looked up. With one draw the variance would be 1.6 times."""
    rows, width = 1000, 100
    fractions = torch.rand(2, rows, width, generator=torch.Generator().manual_seed(0)) * STEP / 2
    noise, out = RoundingNoise(1, 1, 0), torch.ones(rows * width).bfloat16()
    add_sum_rounded(out, [fractions[0].view(-1)], False, noise)
    add_rows_rounded(out.view(rows, width), torch.arange(rows), fractions[1], False, noise, 0)
    errors = (out.float() - 1 - fractions.sum(0).view(-1)) / STEP
    # Each rounding of a fraction f of a step, evenly from 0 to 1/2: f (1 - f) on average, 1/4 - 1/12.
    assert abs(errors.square().mean() - 2 / 6) < 0.01


def test_hosts_are_summed_in_fp32_and_rounded_once() -> None:
    own = torch.full((8,), 256.0).bfloat16()
    add_hosts(own, 3, {host: torch.ones(8).bfloat16() for host in (0, 1, 2, 4, 5, 6)})
    assert own.tolist() == [262.0] * 8  # one by one it would stay 256, where bf16 knows every second number


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


def test_buffer_pool_reuses_buffers_within_its_limit_and_drops_other_sizes() -> None:
    rooms = BufferPool(torch.float32, limit_bytes=4000)
    first, second, third = (rooms.take(500) for _ in range(3))
    for room in (first, second, third):  # with the third, the free ones would exceed the limit
        rooms.give(room)
    assert rooms.take(500) is second
    other = rooms.take(300)  # for which the first is dropped
    assert rooms.take(500) is not first
    rooms.give(other)
    assert rooms.take(300) is other
