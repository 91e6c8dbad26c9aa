"""`shard.reduce_dtype: bf16` with engine fsdp: exactly rounded gradients, and the bytes that the plan foresees."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist

from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import Unsharded
from aliquot.engines.fsdp.fsdp_collectives import RoundedReduceScatter
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.fsdp.fsdp_memory import fsdp_memory
from aliquot.models.shaped_model import shaped_model
from aliquot.planner.traffic import traffic
from aliquot.tensor_io.transfer import read_part
from tests.engines import cases
from tests.planner.shapes import planned_config
from tests.processes import as_ranks, run_ranks

UNSHARDED = Unsharded(gradients=True)  # two micro-batches are summed before they are sent
MODEL = {**cases.SMALL, "vocab_size": 68, "intermediate_size": 52}  # nothing is padded
LAYOUT = RankLayout(1, 2, 1, "cuda")
LLAMA = {"model_type": "llama", **MODEL}
ROWS = {"sequence_length": 64}


def test_gradients_are_rounded_for_the_network_alone(tmp_path: Path) -> None:
    run_ranks(Path(__file__), 2, tmp_path)
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


NUMEL = 1000


def collective_is_exact(rank: int, world_size: int) -> bool:
    inputs = [torch.randn(world_size * NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    reduced, group = torch.empty(NUMEL), dist.group.WORLD
    assert group is not None
    RoundedReduceScatter()(output_tensor=reduced, input_tensor=inputs[rank], group=group, op=dist.ReduceOp.SUM)
    expected = sum(values.bfloat16() for values in inputs)
    assert isinstance(expected, torch.Tensor)
    return torch.equal(reduced, expected[rank * NUMEL : (rank + 1) * NUMEL].float())


def gradients(reduce_dtype: str, rank: int) -> tuple[dict[str, torch.Tensor], int]:
    """Train one step of two micro-batches, of which rank 0 has all tokens.

    Return this rank's gradients, and the bytes that it has sent.
    """
    settings = {"adam_beta1": 0.5, "reduce_dtype": reduce_dtype, "unsharded": UNSHARDED}
    engine, _ = cases.llama(FsdpEngine, MODEL, rank, 2, precision="fp32", **settings)
    for number, sequence in enumerate(cases.documents(0)[:2]):
        engine.backward(cases.micro_batch(sequence) if rank == 0 else None, 1 / 64, last=number == 1)
    engine.step(0.0, math.inf)
    # Half of the gradient, which is exact.
    found = {part.name: read_part(engine, part) for part in engine.parts() if part.kind == "exp_avg"}
    sent = engine.counters().wire_bytes
    engine.close()
    return found, sent


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    """One rank of engine fsdp that sends gradients as bf16: the collective alone, then steps over gloo."""
    exact, exact_bytes = gradients("fp32", rank)
    rounded, rounded_bytes = gradients("bf16", rank)
    told = {
        "collective": collective_is_exact(rank, world_size),
        "equal": all(torch.equal(rounded[name], exact[name].bfloat16().float()) for name in exact),
        "rounds": not all(torch.equal(rounded[name], exact[name]) for name in exact),
        "saved_bytes": exact_bytes - rounded_bytes,
    }
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    as_ranks(work)
