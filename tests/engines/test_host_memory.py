"""What engine host says that it holds, on one host and on several."""

from __future__ import annotations

import pytest

from aliquot.config.on_disk import OnDisk
from aliquot.engines.host.host_memory import host_memory
from aliquot.launch.rank_layout import RankLayout
from aliquot.models.shaped_model import shaped_model
from tests.plan.shapes import LLAMA, planned_config


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_host_keeps_sums_for_its_counterparts(nodes: int) -> None:
    config = planned_config(LLAMA, train={"precision": "fp32", "global_batch_size": 64})  # several micro-batches a step
    shape = shaped_model(config).shape
    held = host_memory(config, shape, RankLayout(nodes, 2, 1, "cpu"), OnDisk())
    # Every weight of this shape has rows that the ranks divide evenly.
    assert held.gradients == 4 * shape.numel // 2  # its own part and one for each other host: half the model, always
    assert held.moments == 8 * shape.numel // (2 * nodes)
    assert held.shared_weights == 4 * shape.numel
    assert (held.forward, held.backward) == (0, 0)  # nothing is gathered


@pytest.mark.parametrize(("changes", "bytes_for_others"), [({}, 4), ({"reduce_dtype": "bf16"}, 2)])
def test_what_a_host_keeps_for_others_with_and_without_accumulation(
    changes: dict[str, str], bytes_for_others: int
) -> None:
    layout = RankLayout(4, 1, 1, "cpu")
    several, one = (planned_config(LLAMA, train={"global_batch_size": 8 * count}, shard=changes) for count in (4, 1))
    shape = shaped_model(several).shape
    own = 4 * shape.numel // 4
    assert host_memory(several, shape, layout, OnDisk()).gradients == own + bytes_for_others * shape.numel * 3 // 4
    # Only the look-up's rows are added to what is there; all else leaves as it arises.
    held = host_memory(one, shape, layout, OnDisk())
    assert held.gradients == own + bytes_for_others * 2048 * 128 * 3 // 4
    assert held.own_gradients == own
