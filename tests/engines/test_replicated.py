"""`shard.replicate: nodes` of engine fsdp: each node holds all states and trains as the plain loop does."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.restore import restore
from aliquot.distributed.ranks import Members
from aliquot.distributed.topology import RankLayout, Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.engine_plan import Unsharded
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.models import initialize, meta
from aliquot.models.shaped_model import shaped_model
from aliquot.planner.traffic import traffic
from tests.checkpoint.saving import save
from tests.engines import cases
from tests.engines.cases import CASES, EngineSetup
from tests.engines.test_engines import (
    Runs,
    assembled,
    check_curve,
    check_ranks_agree,
    check_rounding,
    check_run,
    initial_weights,
)
from tests.planner.shapes import planned_config
from tests.processes import as_ranks, run_ranks

SAVER = Path(__file__)

SETUPS = {
    "two ranks": EngineSetup("fsdp", 2, replicas=2),
    "gloo": EngineSetup("fsdp", 4, replicas=2),
    "shared memory": EngineSetup("fsdp", 4, shared_memory=True, replicas=2),
    "three nodes": EngineSetup("fsdp", 6, shared_memory=True, replicas=3),
}
MODELS = ["llama-far", "llama-bf16", "llama-compiled", "qwen2-tied", "moe", "rwkv", "deepseek-deep-bf16", "llama-lora",
          "llama-frozen", "llama-full"]  # fmt: skip
NAMES = {"two ranks": ["llama"], "gloo": ["llama", *MODELS], "shared memory": ["llama", *MODELS],
         "three nodes": ["llama"]}  # fmt: skip
KEYS = ["two ranks", *(pytest.param(key, marks=pytest.mark.long) for key in SETUPS if key != "two ranks")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs[str]:
    worlds = {key: (setup, NAMES[key]) for key, setup in SETUPS.items()}
    return Runs(tmp_path_factory.mktemp("replicated"), worlds)


@pytest.mark.parametrize("key", KEYS)
def test_replicas_train_as_the_plain_loop(runs: Runs[str], key: str) -> None:
    for name in NAMES[key]:
        if CASES[name].precision == "bf16":
            continue
        if CASES[name].steps == CASES["llama"].steps:
            check_run(runs[key], name, SETUPS[key].ranks)
        else:
            check_curve(runs[key], name)


@pytest.mark.long
@pytest.mark.parametrize("key", ["gloo", "shared memory"])
def test_bf16_is_as_close_to_fp32_as_the_plain_loop(runs: Runs[str], key: str) -> None:
    for name in ("llama-bf16", "llama-compiled"):
        check_rounding(runs[key], name)


@pytest.mark.parametrize("key", KEYS)
def test_ranks_own_every_element_once(runs: Runs[str], key: str) -> None:
    """`assembled` fails where parts overlap or leave gaps."""
    ranks, expected = SETUPS[key].ranks, initial_weights(CASES["llama"])
    found = assembled(runs[key], "llama", "initial", ranks)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values.flatten()), name
    total = sum(values.numel() for values in expected.values())
    for rank in range(ranks):
        parts = load_file(runs[key] / f"llama-final-{rank}.safetensors")
        owned = sum(values.numel() for name, values in parts.items() if name.startswith("exp_avg/"))
        assert owned <= total / ranks + len(expected) * 50


@pytest.mark.parametrize("key", KEYS)
def test_all_ranks_agree(runs: Runs[str], key: str) -> None:
    check_ranks_agree(runs[key], "llama", SETUPS[key].ranks)


def trained(folder: Path, ranks: int, replicas: int, source: str = "none", whole: str = "") -> list[dict[str, Any]]:
    """What each rank has counted in two steps of `work`, which saves into `folder`."""
    folder.mkdir()
    run_ranks(SAVER, ranks, folder, str(replicas), source, "2", whole)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


Begun = Callable[[int, int, str], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """The folder and the counts of a run without a source: of each layout one run for all tests."""
    runs = tmp_path_factory.mktemp("begun")

    @cache
    def begin(ranks: int, replicas: int, whole: str) -> tuple[Path, list[dict[str, Any]]]:
        folder = runs / f"{ranks}-{replicas}-{whole}"
        return folder, trained(folder, ranks, replicas, whole=whole)

    return begin


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize(
    ("ranks", "replicas", "others"),
    [
        (2, 2, [(1, 1)]),
        pytest.param(4, 2, [(3, 1), (4, 1), (2, 2), (6, 3)], marks=pytest.mark.long),
        pytest.param(3, 1, [(4, 2)], marks=pytest.mark.long),
    ],
)
def test_checkpoints_do_not_depend_on_replicas(
    begun: Begun, tmp_path: Path, ranks: int, replicas: int, others: list[tuple[int, int]]
) -> None:
    source = begun(ranks, replicas, "")[0] / "trained/step-00000002"
    expected = trained(tmp_path / "same", ranks, replicas, str(source))[0]["norms"]
    for other_ranks, other_replicas in others:
        folder = tmp_path / f"{other_ranks} ranks, {other_replicas} replicas"
        norms = trained(folder, other_ranks, other_replicas, str(source))[0]["norms"]
        assert files(folder / "restored/step-00000002") == files(source), folder
        assert norms == pytest.approx(expected, rel=1e-5), folder


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "whole"),
    [
        (2, 1, ""),
        pytest.param(2, 2, "", marks=pytest.mark.long),
        pytest.param(2, 2, "whole", marks=pytest.mark.long),
        pytest.param(3, 2, "", marks=pytest.mark.long),
    ],
)
def test_planned_bytes_between_nodes_are_those_counted(
    begun: Begun, nodes: int, ranks_per_node: int, whole: str
) -> None:
    layout = RankLayout(nodes, ranks_per_node, 1, "cpu")
    _, counted = begun(layout.world_size, nodes, whole)
    config = planned_config(
        {"model_type": "llama", **MODEL}, train={"precision": "fp32"}, data={"sequence_length": 64},
        shard={"engine": "fsdp", "replicate": "nodes"},
    )  # fmt: skip
    shape = shaped_model(config).shape
    unsharded = Unsharded(bool(whole), bool(whole))
    planned = traffic(config, "fsdp", shape, layout, MICRO_BATCHES // layout.world_size, unsharded)
    # Ring all-reduces, once per step, of the shards of each rank.
    assert planned.wire_bytes == 2 * (nodes - 1) * 4 * shape.numel
    assert planned.local_bytes == 0
    for step in range(2):
        assert sum(rank["sent"][step] for rank in counted) == pytest.approx(planned.wire_bytes, abs=layout.world_size)
    inside = "shared memory within a node, " if ranks_per_node > 1 else ""
    assert counted[0]["transport"] == f"{inside}gloo among {nodes} replicas"


MODEL = {**cases.SMALL, "vocab_size": 72, "intermediate_size": 60}  # 2, 3 and 4 ranks pad nothing but hidden_size
MICRO_BATCHES = 12  # of a global batch: as many on each of 1, 2, 3 and 4 ranks


def train(engine: FsdpEngine, step: int, rank: int, world_size: int) -> tuple[float, int]:
    """Train a step; return the gradient norm, and the bytes that this rank has sent."""
    before = engine.counters().wire_bytes
    sequences = [*cases.documents(step), *cases.documents(100 + step), *cases.documents(200 + step)][:MICRO_BATCHES]
    local = sequences[rank::world_size]
    for number, sequence in enumerate(local):
        engine.backward(cases.micro_batch(sequence), 1 / 300, last=number == len(local) - 1)
        held = 4 * sum(shard.local.numel() for shard in engine._trainable)
        assert engine.counters().gradients_bytes in (held, 0)  # 0: unsharded sums, which torch holds elsewhere
    norm = engine.step(cases.LEARNING_RATE, cases.MAX_GRAD_NORM)
    return norm, engine.counters().wire_bytes - before


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    """Train, save, restore or stay idle. Arguments: replicas, a checkpoint or "none", steps, "whole" or nothing."""
    replicas, source, steps, whole = int(arguments[0]), arguments[1], int(arguments[2]), arguments[3] == "whole"
    built = meta.build(AutoConfig.for_model("llama", **MODEL))
    spec = EngineSpec(
        "fp32", 64, built.traits.plain_head, replicates=replicas > 1, unsharded=Unsharded(whole, whole),
        collectives="auto" if world_size > replicas else "gloo",
    )  # fmt: skip
    node, local_rank = divmod(rank, local_size := world_size // replicas)
    engine = FsdpEngine.build(
        built.model, spec, Topology(rank, world_size, local_rank, local_size, node, replicas, "cpu", 1, ())
    )
    ranks, files = Members(torch.device("cpu")), CheckpointSpec(built.saved, trained=built.learned)
    begun = 0
    if source == "none":
        initialize.initialize(engine, built.fills, cases.SEED)
    else:
        begun = restore(Path(source), engine, files, ranks)["step"]
        engine.resume_at(begun)
    engine.ready()
    save(folder / "restored", begun, engine, files, {"step": begun}, ranks, 1)
    trained = [train(engine, step, rank, world_size) for step in range(begun, begun + steps)]
    save(folder / "trained", begun + steps, engine, files, {"step": begun + steps}, ranks, 1)
    norms, sent = [norm for norm, _ in trained], [sent_bytes for _, sent_bytes in trained]
    (folder / f"{rank}.json").write_text(json.dumps({"norms": norms, "sent": sent, "transport": engine.transport}))
    engine.close()


if __name__ == "__main__":
    as_ranks(work)
