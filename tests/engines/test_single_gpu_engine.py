"""The engine of a single GPU against a plain loop, on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.engines.cases import EngineSetup
from tests.engines.test_engines import Runs, assembled, plain_loop, result

EXACT = {"short": ["llama", "qwen2-tied", "llama-frozen"], "long": ["rwkv", "moe", "llama-lora"]}
ROUNDED = "llama-bf16"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs[str]:
    setup = EngineSetup("single_gpu", 1)
    worlds = {"short": (setup, [*EXACT["short"], ROUNDED]), "long": (setup, EXACT["long"])}
    return Runs(tmp_path_factory.mktemp("single_gpu"), worlds)


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=[pytest.mark.long] if world == "long" else [])
        for world, names in EXACT.items()
        for name in names
    ],
)
def test_fp32_equals_the_plain_loop(runs: Runs[str], world: str, name: str) -> None:
    losses, norms, weights = plain_loop(name, bf16=False)
    ours = result(runs[world], name)
    assert ours["losses"] == pytest.approx(losses, rel=1e-5)
    assert ours["norms"] == pytest.approx(norms, rel=1e-4)
    final = assembled(runs[world], name, "final", 1)
    for tensor, weight in weights.items():
        torch.testing.assert_close(final[tensor], weight.flatten(), rtol=1e-3, atol=1e-4)


def test_bf16_is_as_close_to_fp32_as_the_plain_loop(runs: Runs[str]) -> None:
    exact, _, _ = plain_loop(ROUNDED, bf16=False)
    plain, _, _ = plain_loop(ROUNDED, bf16=True)
    ours = result(runs["short"], ROUNDED)["losses"]
    gap = max(abs(a - b) for a, b in zip(plain, exact, strict=True))
    assert max(abs(a - b) for a, b in zip(ours, exact, strict=True)) <= 2 * gap
