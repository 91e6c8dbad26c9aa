"""The engine of a single GPU against a plain loop, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.cases import EngineSetup
from tests.engines.test_engines import WORKER, assembled, plain_loop, result
from tests.processes import World, run_worlds

EXACT = ["llama", "qwen2-tied", "rwkv", "moe", "llama-frozen", "llama-lora"]
ROUNDED = ["llama-bf16"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single_gpu")
    run_worlds(WORKER, [World(1, folder, (EngineSetup("single_gpu", 1).as_argument(), *EXACT, *ROUNDED))])
    return folder


@pytest.mark.parametrize("name", EXACT)
def test_fp32_equals_the_plain_loop(trained: Path, name: str) -> None:
    losses, norms, weights = plain_loop(name, bf16=False)
    ours = result(trained, name)
    assert ours["losses"] == pytest.approx(losses, rel=1e-5)
    assert ours["norms"] == pytest.approx(norms, rel=1e-4)
    final = assembled(trained, name, "final", 1)
    for tensor, weight in weights.items():
        torch.testing.assert_close(final[tensor], weight.flatten(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ROUNDED)
def test_bf16_follows_the_plain_loop(trained: Path, name: str) -> None:
    losses, norms, weights = plain_loop(name, bf16=True)
    ours = result(trained, name)
    assert ours["losses"] == pytest.approx(losses, rel=5e-3)
    assert ours["norms"] == pytest.approx(norms, rel=5e-2)
    assert assembled(trained, name, "final", 1).keys() == weights.keys()
