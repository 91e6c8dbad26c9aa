"""Which rows of the data a plan looks at: the one that costs most memory, and those whose mean takes as long as all."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise, product
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.schema import RunConfig, TrainSection
from aliquot.data.workload import BatchSize, Row, Workload, batch_size

LENGTH = 2048


def workload(*samples: list[int]) -> Workload:
    """`samples`: lengths of the documents of each."""
    edges = tuple(map(edges_of, samples))
    tokens = sum(map(sum, samples)) / len(samples)
    return Workload(edges, tokens, tokens, None, 0, "test")


LONG, MIDDLING, SHORT = [LENGTH], [512] * 4, [64] * 32


def lengths(row: Row) -> list[int]:
    return [b - a for a, b in pairwise(row.edges)]


def edges_of(row: list[int]) -> tuple[int, ...]:
    return tuple(accumulate(row, initial=0))


def row(*each: int) -> Row:
    return Row(edges_of([*each]), sum(each))


def mean_of(found: Workload) -> float:
    return mean(tokens_and_pairs(Row(edges, 0)) for edges in found.samples)


def tokens_and_pairs(row: Row) -> float:
    """As nn/attention/tiled_attention.py has it, counted pair by pair of blocks of 128."""
    each = lengths(row)
    of_blocks = sum(128 * (first + 128) for length in each if length > 256 for first in range(0, length - 127, 128))
    pairs = of_blocks + sum(length * max(64, length) for length in each if length <= 256)
    return row.edges[-1] + pairs / 1000


def test_row_of_most_memory_is_not_the_slowest() -> None:
    """What is kept of a row follows from its tokens: a shorter row of one long document may take longer."""
    long, many = [1152], [120] * 10
    found = workload(long, long, many, [64])
    assert lengths(found.heaviest(1)) == many and tokens_and_pairs(row(*long)) > tokens_and_pairs(row(*many))
    (share, heaviest), (rest, other) = found.typical(1)
    assert lengths(heaviest) == many and lengths(other) in (long, [64])
    assert share * tokens_and_pairs(heaviest) + rest * tokens_and_pairs(other) == pytest.approx(mean_of(found))


def test_slowest_of_equally_long_rows_is_heaviest() -> None:
    assert lengths(workload(SHORT, MIDDLING, LONG, MIDDLING).heaviest(1)) == LONG


def test_ranks_take_as_long_as_the_slowest() -> None:
    """Of two equally likely rows, n ranks have the longer one at least once 1 - 2**-n of the time."""
    found = workload([100], [200])
    for ranks in (1, 2, 4):
        shares = {each.edges[-1]: share for share, each in found.typical(1, ranks)}
        assert shares == pytest.approx({200: 1 - 2**-ranks, 100: 2**-ranks})
    # Who waits after nine rows has a third of the difference: sums spread less.
    excess = (0.75 - 0.5) / 3
    assert found.typical(1, 2, between=9)[0][0] == pytest.approx(0.5 + excess)
    assert workload(MIDDLING).typical(1, 8) == ((1.0, row(*MIDDLING)),)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=6), st.integers(1, 4))
def test_slowest_rank_is_the_mean_over_all_draws(rows: list[int], ranks: int) -> None:
    found = workload(*([each] for each in rows))
    drawn = product([tokens_and_pairs(row(each)) for each in rows], repeat=ranks)
    planned = sum(share * tokens_and_pairs(each) for share, each in found.typical(1, ranks))
    assert planned == pytest.approx(mean(map(max, drawn)))


def test_unpacked_rows_are_padded() -> None:
    """By short documents without a label."""
    found = replace(workload([10], [50], [300]), fills_up=512)
    assert Row((0, 300, 320), 300) in [each for _, each in found.typical(1)]
    assert found.heaviest(2) == Row((0, 50, 350, 352), 350)
    assert found.row_lengths(1) == 3 and found.row_lengths(2) == 3  # 60, 350 and 310: 64, 352 and 320
    assert replace(found, fills_up=310).heaviest(1).edges == (0, 300, 310)
    many = replace(workload([900], [910]), fills_up=1024)
    assert lengths(many.heaviest(19))[19:] == [64] * 19 + [26]  # 18,432 tokens instead of 17,190


def test_longest_unpacked_row_is_heaviest() -> None:
    found = workload([10], [11], [12], [500], [900])
    assert lengths(found.heaviest(1)) == [900]
    (share, heaviest), (rest, other) = found.typical(1)
    assert (lengths(heaviest), lengths(other)) == ([900], [12])  # the mean is between 12 and 500
    assert share + rest == 1 and share * 900 + rest * 12 == pytest.approx(found.tokens, rel=0.1)


def test_the_only_row_is_the_mean() -> None:
    found = workload(MIDDLING)
    assert found.typical(1) == ((1.0, found.heaviest(1)),)
    assert found.typical(3) == ((1.0, found.heaviest(3)),) and lengths(found.heaviest(3)) == 3 * MIDDLING


@given(st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 5))
def test_rows_consist_of_consecutive_samples(samples: list[list[int]], count: int) -> None:
    found = workload(*samples)
    rows = [(samples * count)[start : start + count] for start in range(len(samples) * count)]
    windows = [[length for sample in each for length in sample] for each in rows if len(each) == count]
    typical = found.typical(count)
    assert all(lengths(each) in windows for each in (found.heaviest(count), *(each for _, each in typical)))
    assert sum(share for share, _ in typical) == pytest.approx(1) and all(share > 0 for share, _ in typical)
    if len(typical) == 2:  # else all rows may lie on one side of the mean, or one on it
        assert sum(share * tokens_and_pairs(each) for share, each in typical) == pytest.approx(count * mean_of(found))


@pytest.mark.parametrize(
    ("given_keys", "expected"),
    [
        ({"per_device_train_batch_size": 2}, BatchSize(6, 2)),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, BatchSize(24, 2)),
        ({"global_batch_size": 10, "per_device_train_batch_size": 4}, BatchSize(10, 4)),
        ({"global_batch_size": 2, "per_device_train_batch_size": 4}, BatchSize(2, 2)),
        ({"global_batch_size": 10, "gradient_accumulation_steps": 2}, BatchSize(10, 2)),  # 10 / (2 x 3), rounded up
    ],
)
def test_the_third_follows(given_keys: dict[str, int], expected: BatchSize) -> None:
    assert batch_size(TrainSection.model_validate({"max_steps": 1, **given_keys}), 3) == expected


def test_a_batch_in_tokens_is_as_many_sequences_as_hold_them() -> None:
    def config(**train: object) -> RunConfig:
        values = {"model": {"path": "x"}, "data": {"path": "x", "sequence_length": 256}, "train": train}
        return RunConfig.model_validate(values)

    assert batch_size(config(global_batch_tokens=2000).train, 3) == BatchSize(7, 1)
    made = config(global_batch_tokens=2048, per_device_train_batch_size=4)
    assert batch_size(made.train, 3) == BatchSize(8, 4)
    assert RunConfig.model_validate(made.model_dump(by_alias=True)) == made, "as it is written into a run directory"
    with pytest.raises(ValueError, match=r"only one of train\.global_batch_size and train.global_batch_tokens"):
        config(global_batch_tokens=2048, global_batch_size=9)
    with pytest.raises(ValueError, match=r"needs data\.packing"):
        RunConfig.model_validate({**made.model_dump(by_alias=True), "data": {"path": "x", "packing": False}})


def test_mixture_micro_batches_have_one_source() -> None:
    assert [BatchSize(4, 2).micro_batches(2, sources) for sources in (1, 2, 3, 9)] == [1, 2, 2, 2]
    assert BatchSize(8, 1).micro_batches(2, 5) == 4


def test_largest_rank_has_whole_micro_batches_and_a_rest() -> None:
    assert BatchSize(10, 4).sequences(2) == 6  # 4 and 2, not 8
    assert BatchSize(8, 8).sequences(1, sources=3) == 8  # 3, 3 and 2
    assert BatchSize(32, 8).sequences(2, sources=3) == 19  # 8, 8 and 3; the other 8, 3 and 2


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 9), st.integers(1, 6))
def test_rank_share_lies_between_mean_and_micro_batches(total: int, micro: int, ranks: int, sources: int) -> None:
    size = BatchSize(total, micro)
    most = size.sequences(ranks, sources)
    assert -(-total // ranks) <= most <= micro * size.micro_batches(ranks, sources)


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 9))
def test_accumulation_steps_take_the_whole_batch(total: int, steps: int, ranks: int) -> None:
    keys = {"max_steps": 1, "global_batch_size": total, "gradient_accumulation_steps": steps}
    size = batch_size(TrainSection.model_validate(keys), ranks)
    assert size.micro * steps * ranks >= size.total == total
    assert (size.micro - 1) * steps * ranks < total  # the smallest that does
