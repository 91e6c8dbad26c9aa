"""Engine host on nodes with GPUs: what it sends does not grow with the micro-batches, and is what the plan foresees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aliquot.distributed.topology import RankLayout
from aliquot.models.shaped_model import shaped_model
from aliquot.planner.traffic import traffic
from tests.engines.once_a_step_worker import FIRST, LEARNING_RATE, MODEL, STEPS, TOKENS
from tests.planner.shapes import planned_config
from tests.processes import run_ranks


def sent_and_planned(folder: Path, nodes: int, micro_batches: int) -> tuple[float, int]:
    """Bytes that all nodes send in an optimizer step."""
    folder.mkdir()
    run_ranks(Path(__file__).parent / "once_a_step_worker.py", nodes, folder, str(micro_batches))
    totals = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nodes)]
    train = {
        "global_batch_size": nodes * micro_batches, "per_device_train_batch_size": 1, "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    config = planned_config(MODEL, data={"sequence_length": TOKENS}, train=train)
    shape = shaped_model(config, MODEL["vocab_size"]).shape  # type: ignore[arg-type]
    planned = traffic(config, "host", shape, RankLayout(nodes, 1, 1, "cuda"), micro_batches).wire_bytes
    return sum(total[STEPS] - total[FIRST] for total in totals) / (STEPS - FIRST), planned


@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_nodes_send_the_planned_bytes_whatever_the_micro_batches(tmp_path: Path, nodes: int) -> None:
    sent, planned = sent_and_planned(tmp_path / "four", nodes, 4)
    assert sent == pytest.approx(planned, rel=0.02)
    if nodes == 4:
        more, _ = sent_and_planned(tmp_path / "eight", nodes, 8)
        assert more == pytest.approx(sent, rel=0.02)
