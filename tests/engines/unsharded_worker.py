"""Engine fsdp keeps weights, gradients, both or nothing whole in a step: what that changes, and what it must not."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torch_fsdp
from transformers import AutoConfig

from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.engine_plan import Unsharded
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.models import initialize, meta
from aliquot.models.micro_batch import MicroBatch
from tests.engines import cases
from tests.processes import as_ranks

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
    built = meta.build(AutoConfig.for_model("llama", **MODEL))
    spec = EngineSpec(precision, 64, built.traits.plain_head, unsharded=unsharded)  # type: ignore[arg-type]
    engine = FsdpEngine.build(built.model, spec, Topology(rank, 2, rank, 2, 0, 1, "cpu", 1, ()))
    initialize.initialize(engine, built.fills, cases.SEED)
    engine.ready()
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
        norms.append(engine.step(cases.LEARNING_RATE, cases.MAX_GRAD_NORM).grad_norm)
        # What is kept must not outlive the update: two evaluations, and the next step goes on from them.
        evaluated += [float(engine.evaluate(cases.micro_batch(sequences[rank]))) for _ in range(2)]
    trained = {
        "losses": losses, "norms": norms, "evaluated": evaluated, "collectives": counts, "whole": between,
        "gathered_bytes": engine.counters().gathered_bytes, "numel": built.numel,
    }  # fmt: skip
    engine.close()
    return trained


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
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
