"""What the plan lets engine fsdp keep whole in a step: the same training, fewer collectives, the memory foreseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import SHARDED, Unsharded
from aliquot.engines.fsdp.fsdp_memory import fsdp_memory
from aliquot.models.shaped_model import shaped_model
from aliquot.planner.memory_plan import most_unsharded
from aliquot.planner.traffic import traffic
from tests.engines.unsharded_worker import MICRO_BATCHES, MODEL
from tests.planner.shapes import planned_config
from tests.processes import run_ranks

pytestmark = pytest.mark.long  # no plan for CPUs keeps anything whole: nothing that trains here does this

ALL = [Unsharded(weights, gradients) for weights in (False, True) for gradients in (False, True)]
LAYOUT = RankLayout(1, 2, 1, "cuda")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Unsharded, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("unsharded")
    run_ranks(Path(__file__).parent / "unsharded_worker.py", 2, folder)
    trained = json.loads((folder / "0.json").read_text())
    return {(Unsharded(**entry["kept"]), entry["precision"]): entry for entry in trained}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("unsharded", ALL[1:], ids=lambda unsharded: unsharded.words)
def test_unsharded_state_trains_the_same(
    runs: dict[tuple[Unsharded, str], dict[str, Any]], unsharded: Unsharded, precision: str
) -> None:
    expected, trained = runs[SHARDED, precision], runs[unsharded, precision]
    # Gradients are summed over micro-batches before ranks, not after: another order of the same fp32 sums.
    for name in ("losses", "norms", "evaluated"):
        assert trained[name] == pytest.approx(expected[name], rel=2e-5 if precision == "fp32" else 2e-3), name
    assert len(set(trained["evaluated"][::2])) == 3, "evaluation used the weights before the update"
    assert trained["evaluated"][::2] == trained["evaluated"][1::2]


@pytest.mark.parametrize("unsharded", ALL, ids=lambda unsharded: unsharded.words or "nothing")
def test_step_gathers_and_reduces_only_sharded_state(
    runs: dict[tuple[Unsharded, str], dict[str, Any]], unsharded: Unsharded
) -> None:
    """Four groups: the root, two layers and the head. The root is gathered once a micro-batch in any case."""
    first, second, _ = runs[unsharded, "fp32"]["collectives"]
    groups = 4
    assert first["foreach_reduce"] == groups * (1 if unsharded.gradients else MICRO_BATCHES)
    assert first["foreach_all_gather"] == (groups if unsharded.weights else MICRO_BATCHES * (1 + 2 * (groups - 1)))
    # The evaluations have gathered what they leave: the root, or all.
    assert second.get("foreach_all_gather", 0) == (0 if unsharded.weights else first["foreach_all_gather"] - 1)
    planned = _traffic(unsharded)
    counted = 2 * first["wire"]  # two ranks
    root = 4 * 68 * 32 + 4 * 32
    assert counted == (planned if unsharded.weights else planned + MICRO_BATCHES * root)  # counted twice, gathered once


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("unsharded", ALL, ids=lambda unsharded: unsharded.words or "nothing")
def test_unsharded_memory_equals_the_plan(
    runs: dict[tuple[Unsharded, str], dict[str, Any]], unsharded: Unsharded, precision: str
) -> None:
    trained = runs[unsharded, precision]
    config = planned_config(
        {"model_type": "llama", **MODEL}, train={"precision": precision}, data={"sequence_length": 64}
    )
    planned_memory = fsdp_memory(config, shaped_model(config).shape, LAYOUT, 0, 0, unsharded)
    itemsize, numel = 2 if precision == "bf16" else 4, trained["numel"]
    weights, gradients = trained["whole"]
    assert weights == (itemsize * numel if unsharded.weights else 0)
    assert gradients == (4 * numel if unsharded.gradients else 0)
    assert planned_memory.gradients == (gradients or 4 * numel // 2)
    assert planned_memory.forward >= trained["gathered_bytes"] >= weights
    if unsharded.weights:
        assert trained["gathered_bytes"] == weights
        assert planned_memory.forward - weights < weights / 2  # the flat result of one all-gather


def test_plan_unshards_the_most_that_fits() -> None:
    sizes = {Unsharded(True, True): 6, Unsharded(True, False): 2, Unsharded(False, True): 4}
    for room, expected in ((6, Unsharded(True, True)), (5, Unsharded(True)), (2, Unsharded(True)), (1, SHARDED)):
        assert most_unsharded(4, lambda unsharded, room=room: sizes[unsharded] <= room) == expected
    assert most_unsharded(1, lambda _: True) == Unsharded(weights=True)  # reduced once anyway


def _traffic(unsharded: Unsharded) -> int:
    config = planned_config({"model_type": "llama", **MODEL}, train={"precision": "fp32"}, data={"sequence_length": 64})
    moved = traffic(config, "fsdp", shaped_model(config).shape, LAYOUT, MICRO_BATCHES, unsharded)
    return moved.wire_bytes + moved.local_bytes
