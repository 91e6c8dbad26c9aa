"""Two of global batch, per-device batch and accumulation steps fix the third, and no sequence of the batch is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.schema import RunConfig, TrainSection
from aliquot.data.batch_size import BatchSize, batch_size


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


def test_each_micro_batch_of_a_mixture_is_of_one_source() -> None:
    assert [BatchSize(4, 2).micro_batches(2, sources) for sources in (1, 2, 3, 9)] == [1, 2, 2, 2]
    assert BatchSize(8, 1).micro_batches(2, 5) == 4


def test_the_rank_that_has_most_has_whole_micro_batches_and_one_of_what_they_leave() -> None:
    assert BatchSize(10, 4).sequences(2) == 6  # 4 and 2, not 8
    assert BatchSize(8, 8).sequences(1, sources=3) == 8  # 3, 3 and 2
    assert BatchSize(32, 8).sequences(2, sources=3) == 19  # 8, 8 and 3; the other 8, 3 and 2


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 9), st.integers(1, 6))
def test_no_rank_has_less_than_the_mean_or_more_than_its_micro_batches(
    total: int, micro: int, ranks: int, sources: int
) -> None:
    size = BatchSize(total, micro)
    most = size.sequences(ranks, sources)
    assert -(-total // ranks) <= most <= micro * size.micro_batches(ranks, sources)


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 9))
def test_accumulation_steps_take_the_whole_batch(total: int, steps: int, ranks: int) -> None:
    keys = {"max_steps": 1, "global_batch_size": total, "gradient_accumulation_steps": steps}
    size = batch_size(TrainSection.model_validate(keys), ranks)
    assert size.micro * steps * ranks >= size.total == total
    assert (size.micro - 1) * steps * ranks < total  # the smallest that does
