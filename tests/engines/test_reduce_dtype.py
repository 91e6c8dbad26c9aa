"""`shard.reduce_dtype: bf16` with engine fsdp: exactly rounded gradients, and the bytes that the plan foresees."""

from __future__ import annotations

import json
from pathlib import Path

from aliquot.distributed.topology import RankLayout
from aliquot.engines.fsdp.fsdp_memory import fsdp_memory
from aliquot.models.shaped_model import shaped_model
from aliquot.planner.traffic import traffic
from tests.engines.reduce_dtype_worker import MODEL, UNSHARDED
from tests.planner.shapes import planned_config
from tests.processes import run_ranks

LAYOUT = RankLayout(1, 2, 1, "cuda")
LLAMA = {"model_type": "llama", **MODEL}
ROWS = {"sequence_length": 64}


def test_gradients_are_rounded_for_the_network_alone(tmp_path: Path) -> None:
    run_ranks(Path(__file__).parent / "reduce_dtype_worker.py", 2, tmp_path)
    configs = [
        planned_config(LLAMA, train={"precision": "fp32"}, data=ROWS, shard={"reduce_dtype": dtype})
        for dtype in ("fp32", "bf16")
    ]
    shape = shaped_model(configs[0]).shape
    plans = [traffic(config, "fsdp", shape, LAYOUT, 2, UNSHARDED) for config in configs]
    exact_bytes, rounded_bytes = (plan.wire_bytes + plan.local_bytes for plan in plans)
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["collective"] and told["equal"] and told["rounds"]
        assert 2 * told["saved_bytes"] == exact_bytes - rounded_bytes > 0


def test_plan_counts_the_rounded_copy() -> None:
    exact, rounded = (planned_config(LLAMA, data=ROWS, shard={"reduce_dtype": dtype}) for dtype in ("fp32", "bf16"))
    shape = shaped_model(exact).shape
    for layout, copied in ((LAYOUT, True), (RankLayout(1, 2, 1, "cpu"), False), (RankLayout(1, 1, 1, "cuda"), False)):
        plain, copies = (fsdp_memory(config, shape, layout, 0, 0) for config in (exact, rounded))
        assert (copies.backward > plain.backward) is copied
        assert copies.forward == plain.forward
