"""The engine of a single GPU against a plain loop, on the CPU."""

from __future__ import annotations

import pytest

from tests.engines.cases import EngineSetup
from tests.engines.test_engines import Runs, check_rounding, check_run

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
    check_run(runs[world], name, 1)


def test_bf16_is_as_close_to_fp32_as_the_plain_loop(runs: Runs[str]) -> None:
    check_rounding(runs["short"], ROUNDED)
