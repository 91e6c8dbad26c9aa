"""What the plan lets engine fsdp keep whole in a step: the same training, fewer collectives, the memory foreseen."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torch_fsdp

from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import SHARDED, Unsharded
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.fsdp.fsdp_memory import fsdp_memory
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.shaped_model import shaped_model
from aliquot.planner.memory_plan import most_unsharded
from aliquot.planner.traffic import traffic
from tests.engines import cases
from tests.planner.shapes import planned_config
from tests.processes import as_ranks, run_ranks

pytestmark = pytest.mark.long  # no plan for CPUs keeps anything whole: nothing that trains here does this

ALL = [Unsharded(weights, gradients) for weights in (False, True) for gradients in (False, True)]
LAYOUT = RankLayout(1, 2, 1, "cuda")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Unsharded, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("unsharded")
    run_ranks(Path(__file__), 2, folder)
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


MODEL = {**cases.SMALL, "vocab_size": 68, "intermediate_size": 52}  # nothing is padded
STEPS, MICRO_BATCHES = 3, 3


def count(done: Counter[str]) -> None:
    """Of torch's own collectives of a group of weights."""
    for name in ("foreach_all_gather", "foreach_reduce"):
        real = getattr(torch_fsdp, name)

        def counted(*arguments: Any, name: str = name, real: Any = real) -> Any:
            done[name] += 1
            return real(*arguments)

        setattr(torch_fsdp, name, counted)


def whole_bytes(engine: FsdpEngine) -> tuple[int, int]:
    """Of weights and gradients that this rank holds whole, as torch has them."""
    weights = gradients = 0
    for module in engine._model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in [] if group is None else group.fsdp_params:
                weights += sum(tensor.untyped_storage().size() for tensor in parameter.all_gather_outputs)
                # In fp32 they are those of autograd.
                autograd_sum = parameter._unsharded_param.grad if hasattr(parameter, "_unsharded_param") else None
                sums = [tensor for tensor in (parameter.unsharded_accumulated_grad, autograd_sum) if tensor is not None]
                gradients += sum(tensor.nbytes for tensor in sums)
    return weights, gradients


def train(unsharded: Unsharded, precision: str, rank: int, done: Counter[str]) -> dict[str, Any]:
    engine, numel = cases.llama(FsdpEngine, MODEL, rank, 2, precision=precision, unsharded=unsharded)
    losses, norms, counts, between, evaluated = [], [], [], (0, 0), []
    for step in range(STEPS):
        sequences = cases.documents(step)
        batches: list[MicroBatch | None] = [cases.micro_batch(sequences[2 * i + rank]) for i in range(2)]
        done.clear()
        before = engine.counters().wire_bytes
        total = torch.zeros((), dtype=torch.float64)
        for i, batch in enumerate([*batches, None]):  # a rank may have fewer than others
            total += float(engine.backward(batch, 1 / 100, last=i == MICRO_BATCHES - 1))
            between = max(between, whole_bytes(engine)) if i < MICRO_BATCHES - 1 else between
        counts.append({**done, "wire": engine.counters().wire_bytes - before})
        dist.all_reduce(total)
        losses.append(float(total))
        norms.append(engine.step(cases.LEARNING_RATE, cases.MAX_GRAD_NORM))
        # What is kept must not outlive the update: two evaluations, and the next step goes on from them.
        evaluated += [float(engine.evaluate(cases.micro_batch(sequences[rank]))) for _ in range(2)]
    trained = {
        "losses": losses, "norms": norms, "evaluated": evaluated, "collectives": counts, "whole": between,
        "gathered_bytes": engine.counters().gathered_bytes, "numel": numel,
    }  # fmt: skip
    engine.close()
    return trained


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    """Train with weights, gradients, both or nothing whole in a step, and check what that changes."""
    done: Counter[str] = Counter()
    count(done)
    trained = [
        {"kept": asdict(unsharded), "precision": precision, **train(unsharded, precision, rank, done)}
        for precision in ("fp32", "bf16")
        for unsharded in (Unsharded(), Unsharded(weights=True), Unsharded(gradients=True), Unsharded(True, True))
    ]
    (folder / f"{rank}.json").write_text(json.dumps(trained))


if __name__ == "__main__":
    as_ranks(work)
