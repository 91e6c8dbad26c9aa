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
    sent = sum(total[STEPS] - total[FIRST] for total in totals) / (STEPS - FIRST)
    print(f"{nodes} nodes, {micro_batches} micro-batches: {sent:,.0f} bytes a step, {planned:,} planned")
    return sent, planned


def test_two_nodes_send_the_planned_bytes(tmp_path: Path) -> None:
    sent, planned = sent_and_planned(tmp_path / "two", nodes=2, micro_batches=2)
    assert sent == pytest.approx(planned, rel=0.02)


@pytest.mark.long
def test_four_nodes_send_as_much_for_any_number_of_micro_batches(tmp_path: Path) -> None:
    few, planned = sent_and_planned(tmp_path / "few", nodes=4, micro_batches=4)
    many, _ = sent_and_planned(tmp_path / "many", nodes=4, micro_batches=8)
    assert few == pytest.approx(planned, rel=0.02) and many == pytest.approx(few, rel=0.02)
