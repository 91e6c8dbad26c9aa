"""What engine host says that it holds, on one host and on several."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from aliquot.config.adapter_section import AdapterSection
from aliquot.distributed.topology import RankLayout, Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.engine_plan import OnDisk
from aliquot.engines.host.gradient_sums import GradientSums
from aliquot.engines.host.host_engine import HostEngine
from aliquot.engines.host.host_memory import RING_BYTES, host_memory
from aliquot.engines.host.shared_weights import Counterparts, GradientOrder, Weight
from aliquot.models.shaped_model import shaped_model
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planner import plan
from aliquot.tensor_io.parts import row_ranges
from tests.planner.shapes import GEMMA2, LLAMA, QWEN3, planned_config


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_planned_memory_has_sums_for_counterparts(nodes: int) -> None:
    config = planned_config(LLAMA, train={"precision": "fp32", "global_batch_size": 64})  # several micro-batches a step
    shape = shaped_model(config).shape
    planned = host_memory(config, shape, RankLayout(nodes, 2, 1, "cpu"), OnDisk())
    # Every weight of this shape has rows that the ranks divide evenly.
    assert planned.gradients == 4 * shape.numel // 2  # its own part and one for each other host: half the model, always
    assert planned.moments == 8 * shape.numel // (2 * nodes)
    assert planned.shared_weights == 4 * shape.numel
    assert (planned.forward, planned.backward) == (0, 0)  # nothing is gathered


@pytest.mark.parametrize(("changes", "bytes_for_others"), [({}, 4), ({"reduce_dtype": "bf16"}, 2)])
def test_planned_sums_for_other_hosts_follow_accumulation(changes: dict[str, str], bytes_for_others: int) -> None:
    layout = RankLayout(4, 1, 1, "cpu")
    several, one = (planned_config(LLAMA, train={"global_batch_size": 8 * count}, shard=changes) for count in (4, 1))
    shape = shaped_model(several).shape
    owned = 4 * shape.numel // 4
    assert host_memory(several, shape, layout, OnDisk()).gradients == owned + bytes_for_others * shape.numel * 3 // 4
    # Only the look-up's rows are added to what is there; all else leaves as it arises. (Tied: below.)
    planned = host_memory(one, shape, layout, OnDisk())
    assert planned.gradients == owned + bytes_for_others * 2048 * 128 * 3 // 4
    assert planned.own_gradients == owned


@pytest.mark.parametrize("model", [LLAMA, QWEN3, GEMMA2, {**GEMMA2, "final_logit_softcapping": None}])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_planned_sums_for_other_hosts_equal_the_engine_s(model: dict[str, Any], micro_batches: int) -> None:
    """Tied or not, with a head that its loss multiplies by and with one that transformers does."""
    config = planned_config(model, train={"global_batch_size": 4 * micro_batches})
    shaped, layout = shaped_model(config), RankLayout(2, 1, 1, "cpu")
    built, traits = shaped.built.model, shaped.built.traits
    embedding, head = built.get_input_embeddings().weight, built.get_output_embeddings().weight
    order = GradientOrder.from_model(
        built,
        head if traits.plain_head else None,
        embedding if traits.plain_head and traits.looks_up else None,
        packs=traits.packs,
    )
    weights = [
        Weight(name, tuple(parameter.shape), row_ranges(tuple(parameter.shape), 2), True, torch.bfloat16)
        for name, parameter in built.named_parameters()
    ]
    passing = order.complete_at_once if micro_batches == 1 else ()
    sums = GradientSums(weights, Counterparts([0, 1], 0), torch.float32, "fp32", None, transient=passing)
    assert host_memory(config, shaped.shape, layout, OnDisk()).gradients == sums.size_bytes


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_planned_bytes_of_a_compressed_base_equal_the_engine_s(base: Literal["int8", "nf4"]) -> None:
    config = planned_config({**LLAMA, "num_hidden_layers": 8})
    config = config.model_copy(update={"adapter": AdapterSection(base=base)})
    plain = config.model_copy(update={"adapter": AdapterSection()})
    shaped, layout = shaped_model(config), RankLayout(1, 1, 1, "cpu")
    spec = EngineSpec("bf16", 64, fused_loss=True, base=base, compressed=shaped.built.compressed)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = HostEngine.build(shaped.built.model, spec, Topology(0, 1, 0, 1, 0, 1, "cpu", 1, ()))
    planned, uncompressed = (host_memory(each, shaped_model(each).shape, layout, OnDisk()) for each in (config, plain))
    assert engine.counters().shared_bytes == pytest.approx(planned.shared_weights + RING_BYTES, rel=1e-3)
    assert planned.shared_weights < uncompressed.shared_weights and planned.moments == uncompressed.moments
    engine.close()
    dist.destroy_process_group()
    made, as_before = (plan(each, Machine.from_numbers(64, 16, 10), 1, 2) for each in (config, plain))
    assert as_before.step_s < made.step_s < 1.3 * as_before.step_s  # the time to decode
