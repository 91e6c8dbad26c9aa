"""An adapter on a base of 4 or 8 bits learns as in a plain fp32 loop with the decoded weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.cases import EngineSetup
from tests.engines.test_engines import WORKER, assembled, check_ranks_agree, check_run, plain_loop, result
from tests.processes import World, run_worlds

EXACT = ["llama-nf4", "gpt2-nf4", "moe-nf4", "llama-nf4-full", "llama-int8-base"]
OTHERS = ["qwen3-nf4", "gemma3-nf4", "mixtral-nf4"]
ROUNDED = "qwen2-tied-nf4-bf16"


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(EngineSetup("host", 1), marks=pytest.mark.long),
        EngineSetup("host", 2),
        EngineSetup("fsdp", 2),
        pytest.param(EngineSetup("fsdp", 1), marks=pytest.mark.long),
        pytest.param(EngineSetup("fsdp", 2, offload=True), marks=pytest.mark.long),
        pytest.param(EngineSetup("fsdp", 3, shared_memory=True), marks=pytest.mark.long),
        pytest.param(EngineSetup("fsdp", 4, replicas=2), marks=pytest.mark.long),
        pytest.param(EngineSetup("host", 3), marks=pytest.mark.long),
        pytest.param(EngineSetup("host", 4, numa_nodes=2), marks=pytest.mark.long),
        EngineSetup("host", 4, hosts=2, late=True),
    ],
    ids=str,
)
def test_losses_norms_and_weights_equal_the_plain_loop(tmp_path: Path, setup: EngineSetup) -> None:
    run_worlds(WORKER, [World(setup.ranks, tmp_path, (setup.as_argument(), *EXACT, ROUNDED))])
    for name in EXACT:
        check_run(tmp_path, name, setup.ranks, norm_error=1e-5)
        before, after = (assembled(tmp_path, name, when, setup.ranks) for when in ("initial", "final"))
        moments = assembled(tmp_path, name, "final", setup.ranks, "exp_avg")
        assert all((tensor in moments) != before[tensor].equal(after[tensor]) for tensor in after)
    assert result(tmp_path, ROUNDED)["losses"] == pytest.approx(plain_loop(ROUNDED, bf16=False)[0], rel=1e-2)
    check_ranks_agree(tmp_path, EXACT[0], setup.ranks)


@pytest.mark.long
def test_other_architectures_equal_the_plain_loop(tmp_path: Path) -> None:
    run_worlds(WORKER, [World(2, tmp_path, (EngineSetup("host", 2).as_argument(), *OTHERS))])
    for name in OTHERS:
        check_run(tmp_path, name, 2, norm_error=1e-5)
