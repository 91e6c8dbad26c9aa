"""load_zero3: the weights that from_pretrained gives, in partitions that were never whole, and a model that trains."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.core.errors import UserError
from aliquot.engines.deepspeed.deepspeed_setup import missing_tools
from aliquot.loaders.zero3 import load_zero3, partition_range
from tests.engines.cases import SMALL
from tests.processes import run_ranks

if importlib.util.find_spec("deepspeed") is None:  # to import it takes seconds, of every worker
    pytest.skip("the extra `deepspeed` is not installed", allow_module_level=True)
if missing_tools():
    pytest.skip(f"DeepSpeed on CPUs needs {' and '.join(missing_tools())}", allow_module_level=True)
WORKER = Path(__file__).parent / "zero3_worker.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = AutoConfig.for_model(**{**SMALL, "model_type": "qwen2", "tie_word_embeddings": True})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


# Each of these starts DeepSpeed; the short case of its partitions is tests/engines/test_deepspeed.py.
@pytest.mark.parametrize(
    "world_size, how",
    [
        pytest.param(1, "fp32", marks=pytest.mark.long),
        pytest.param(3, "bf16", marks=pytest.mark.long),
        pytest.param(2, "unknown version", marks=pytest.mark.long),
    ],
)
def test_the_same_bytes_and_a_loss_that_falls(model: Path, tmp_path: Path, world_size: int, how: str) -> None:
    run_ranks(WORKER, world_size, tmp_path, str(model), how)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)]
    assert all(result["losses"] == found[0]["losses"] for result in found)
    assert found[0]["losses"][0] == found[0]["plain"]
    assert found[0]["losses"][-1] < found[0]["losses"][0]


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_partitions_are_deepspeeds_and_cover_once(numel: int, world_size: int) -> None:
    share = -(-numel // world_size)
    edges = [partition_range(numel, rank, world_size) for rank in range(world_size)]
    assert [start for start, _ in edges] == [min(rank * share, numel) for rank in range(world_size)]
    assert edges[0][0] == 0 and edges[-1][1] == numel
    assert all(stop == start for (_, stop), (start, _) in pairwise(edges))


def test_wrong_arguments_are_one_line(model: Path) -> None:
    with pytest.raises(UserError, match="needs the directory of the weights"):
        load_zero3(AutoConfig.from_pretrained(model))
    with pytest.raises(UserError, match="cannot read this DeepSpeed config"):
        load_zero3(model, config="no/such.json")
    with pytest.raises(UserError, match="zero_hpz_partition_size"):
        load_zero3(model, config={"zero_optimization": {"zero_hpz_partition_size": 2}})
    with pytest.raises(UserError, match="does not know device_map"):
        load_zero3(model, device_map="auto")
