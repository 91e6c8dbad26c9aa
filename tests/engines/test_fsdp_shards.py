"""An adapter's base of 4 or 8 bits in engine fsdp: memory and traffic of codes alone, as planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout, Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.fsdp.fsdp_memory import fsdp_memory, gathered_bytes, pinned_bytes
from aliquot.engines.fsdp.single_gpu_engine import SingleGpuEngine
from aliquot.engines.select import engine_class
from aliquot.models import initialize, meta
from aliquot.models.shaped_model import shaped_model
from aliquot.tensor_io.code_sizes import code_bytes
from tests.engines import cases
from tests.planner.shapes import planned_config
from tests.processes import as_ranks, run_ranks

RANKS = 2
MODEL = {**cases.SMALL, **cases.WIDE, "model_type": "llama", "vocab_size": 68}  # nothing is padded
MATRICES = [(32, 64), (16, 64), (16, 64), (128, 64), (128, 64), (64, 128)]  # of a layer; o_proj is too narrow


def config_of(base: str, **sections: dict[str, Any]) -> RunConfig:
    adapter, data, shard = {"r": 4, "base": base}, {"sequence_length": 64}, {"engine": "fsdp", "collectives": "gloo"}
    return planned_config(MODEL, adapter=adapter, data=data, shard=shard, **sections)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("codes")
    run_ranks(Path(__file__), RANKS, folder)
    return json.loads((folder / "0.json").read_text())


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_rank_holds_its_share_of_the_codes_and_gathers_codes(measured: dict[str, Any], base: str) -> None:
    shape, layout = shaped_model(config_of(base)).shape, RankLayout(1, RANKS, 1, "cpu")
    planned = fsdp_memory(config_of(base), shape, layout, 0, 0)
    found, plain = measured[base], measured["bf16"]
    assert found["memory"]["weights"] == planned.weights
    saved = 3 * sum(2 * rows * columns - RANKS * code_bytes(base, (rows, columns), RANKS) for rows, columns in MATRICES)
    assert plain["memory"]["weights"] - found["memory"]["weights"] == saved // RANKS
    assert found["memory"]["gathered"] == plain["memory"]["gathered"] <= planned.forward
    # A micro-batch gathers all groups twice; a ring sends one of two shards.
    assert found["wire"] == sum(gathered_bytes(config_of(base), shape, RANKS))
    assert plain["wire"] - found["wire"] == saved


@pytest.mark.parametrize("base", ["nf4", "int8", "bf16"])
def test_codes_and_decoded_weights_are_freed_after_their_layer(measured: dict[str, Any], base: str) -> None:
    assert measured[base]["in layers"] == [0, 0]


def test_offloaded_codes_are_planned_as_torch_pins_them() -> None:
    gpu = RankLayout(1, 1, 1, "cuda")
    bf16, nf4 = (pinned_bytes(config_of(base), shaped_model(config_of(base)).shape, gpu)[0] for base in ("bf16", "nf4"))
    # Half a byte for each element and a few scales, rounded up to the next power of two.
    assert bf16 - nf4 == 3 * sum((2 - 1) * rows * columns for rows, columns in MATRICES)


def test_a_single_gpu_decodes_with_fsdp2() -> None:
    gpu = Topology(0, 1, 0, 1, 0, 1, "cuda", 1, ())
    chosen = {base: engine_class(config_of(base, launch={"device": "cuda"}), gpu, 1)[1] for base in ("bf16", "nf4")}
    assert chosen == {"bf16": SingleGpuEngine, "nf4": FsdpEngine}


def bytes_in_layers(engine: FsdpEngine) -> int:
    """Bytes of gathered codes and weights in the groups of the decoder layers, as torch has them."""
    groups = [module._get_fsdp_state()._fsdp_param_group for module in engine._groups[1:-1]]
    weights = [parameter for group in groups for parameter in group.fsdp_params]
    tensors = [tensor for p in weights for tensor in (*p.all_gather_outputs, *p._unsharded_inner_tensors)]
    assert all(isinstance(module, FSDPModule) for module in engine._groups) and tensors
    return sum(tensor.untyped_storage().size() for tensor in tensors)


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    measured = {}
    for base in ("nf4", "int8", "bf16"):
        adapter = config_of(base).adapter
        built = meta.build(AutoConfig.for_model(**MODEL), adapter=adapter)
        spec = EngineSpec("bf16", 64, fused_loss=True, base=built.base, compressed=built.compressed)
        topology = Topology(rank, world_size, rank, world_size, 0, 1, "cpu", 1, ())
        engine = FsdpEngine.build(built.model, spec, topology)
        initialize.initialize(engine, built.fills, cases.SEED)
        engine.ready()
        batch = cases.micro_batch(cases.documents(0)[rank])
        engine.evaluate(batch)
        left, before = bytes_in_layers(engine), engine.counters().wire_bytes
        engine.evaluate(batch)
        wire = engine.counters().wire_bytes - before
        engine.backward(batch, 1.0, last=True)
        left_after = bytes_in_layers(engine)
        measured[base] = {"memory": engine.counters().memory(), "wire": 2 * wire, "in layers": [left, left_after]}
        engine.close()
    (folder / f"{rank}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    as_ranks(work)
