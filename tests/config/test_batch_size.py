"""Two of global batch, per-device batch and accumulation steps fix the third, and no sequence of the batch is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.batch_size import BatchSize, batch_size
from aliquot.config.schema import TrainSection


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


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 9))
def test_accumulation_steps_take_the_whole_batch(total: int, steps: int, ranks: int) -> None:
    keys = {"max_steps": 1, "global_batch_size": total, "gradient_accumulation_steps": steps}
    size = batch_size(TrainSection.model_validate(keys), ranks)
    assert size.micro * steps * ranks >= size.total == total
    assert (size.micro - 1) * steps * ranks < total  # the smallest that does
