"""Engine host on nodes with GPUs: what it sends does not grow with the micro-batches, and is what the plan foresees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.ranks import gather
from aliquot.distributed.topology import RankLayout, Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.host.host_engine import HostEngine
from aliquot.models import initialize, meta
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.shaped_model import shaped_model
from aliquot.planner.traffic import traffic
from tests.planner.shapes import planned_config
from tests.processes import as_ranks, run_ranks

# Llama 3 8B, scaled down: a thirtieth of its width and vocabulary, a sixteenth of its layers.
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 4008,
    "max_position_embeddings": 512,
}
TOKENS, LEARNING_RATE = 128, 2e-5
FIRST, STEPS = 2, 4  # counted are the steps from FIRST on: Adam's first steps change more weights


def row(seed: int) -> MicroBatch:
    """Tokens as often as in text, by Zipf's law."""
    draw = torch.Generator().manual_seed(seed)
    frequencies = 1 / torch.arange(1, MODEL["vocab_size"] + 1)  # type: ignore[operator]
    ids = torch.multinomial(frequencies, TOKENS + 1, replacement=True, generator=draw)
    return MicroBatch(ids[:-1], ids[1:], torch.arange(TOKENS), (0, TOKENS))


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    """A rank on one of several hosts, with a copy of the weights as on a GPU, writes the bytes that it has sent."""
    micro_batches = int(arguments[0])
    built = meta.build(AutoConfig.for_model(**MODEL))
    spec = EngineSpec("bf16", TOKENS, built.traits.plain_head, micro_batches=micro_batches, copies_weights=True)
    topology = Topology(rank, world_size, 0, 1, rank, world_size, "cpu", 1, ())
    engine = HostEngine(built.model, spec, Hosts.join(rank, 0, gather, f"host {rank}"), topology)
    initialize.initialize(engine, built.fills, 0)
    engine.ready()
    sent = [engine.counters().wire_bytes]
    for step in range(STEPS):
        for number in range(micro_batches):
            batch = row((step * micro_batches + number) * world_size + rank)
            engine.backward(batch, 1 / (TOKENS * micro_batches * world_size), last=number == micro_batches - 1)
        engine.step(LEARNING_RATE, 1.0)
        sent.append(engine.counters().wire_bytes)
    (folder / f"{rank}.json").write_text(json.dumps(sent))
    engine.close()


def sent_and_planned(folder: Path, nodes: int, micro_batches: int) -> tuple[float, int]:
    """Bytes that all nodes send in an optimizer step."""
    folder.mkdir()
    run_ranks(Path(__file__), nodes, folder, str(micro_batches))
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
def test_four_nodes_send_hardly_more_for_twice_the_micro_batches(tmp_path: Path) -> None:
    """More tokens reach more rows of the embedding; nothing else grows."""
    few, planned = sent_and_planned(tmp_path / "few", nodes=4, micro_batches=4)
    many, planned_many = sent_and_planned(tmp_path / "many", nodes=4, micro_batches=8)
    assert few == pytest.approx(planned, rel=0.02) and many == pytest.approx(planned_many, rel=0.02)
    assert many < 1.05 * few


if __name__ == "__main__":
    as_ranks(work)
