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
    config = planned_config(LLAMA, train={"precision": "fp32"})
    shape = shaped_model(config).shape
    held = host_memory(config, shape, RankLayout(nodes, 2, 1, "cpu"), OnDisk())
    # Every weight of this shape has rows that the ranks divide evenly.
    assert held.gradients == 4 * shape.numel // 2  # its own part and one for each other host: half the model, always
    assert held.moments == 8 * shape.numel // (2 * nodes)
    assert held.shared_weights == 4 * shape.numel
    assert (held.forward, held.backward) == (0, 0)  # nothing is gathered
