"""The deepspeed engine against the plain loop: the same proofs as the other engines, with and without offload."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aliquot.engines.deepspeed.deepspeed_ops import missing_tools
from tests.engines.cases import CASES
from tests.engines.test_engines import WORKER, assembled, initial_weights, plain_loop, result
from tests.processes import World, run_worlds

pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
if missing_tools():
    pytest.skip(f"DeepSpeed on CPUs needs {' and '.join(missing_tools())}", allow_module_level=True)

RUNS = {
    ("deepspeed", 2): ["llama", "llama-bf16", "qwen2-tied"],
    ("deepspeed-offload", 3): ["llama"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    folders = {(kind, size): tmp_path_factory.mktemp(f"{kind}{size}") for kind, size in RUNS}
    run_worlds(WORKER, [World(run[1], folders[run], (run[0], *cases)) for run, cases in RUNS.items()])
    return folders


@pytest.mark.parametrize("kind, world_size", RUNS)
def test_fp32_equals_the_plain_loop(runs: dict[tuple[str, int], Path], kind: str, world_size: int) -> None:
    for name in RUNS[kind, world_size]:
        if CASES[name].precision != "fp32":
            continue
        losses, norms, weights = plain_loop(name, bf16=False)
        found = result(runs[kind, world_size], name)
        # fp32 in another order of summation: 1e-6 a step, which twenty steps of AdamW amplify.
        assert found["losses"] == pytest.approx(losses, rel=1e-4), name
        assert found["norms"] == pytest.approx(norms, rel=1e-3), name
        for tensor, values in assembled(runs[kind, world_size], name, "final", world_size).items():
            torch.testing.assert_close(values, weights[tensor].flatten(), rtol=2e-3, atol=2e-3, msg=f"{name} {tensor}")


def test_bf16_follows_the_plain_bf16_loop(runs: dict[tuple[str, int], Path]) -> None:
    losses, _, _ = plain_loop("llama-bf16", bf16=True)
    # DeepSpeed reduces and accumulates gradients in bf16, eight bits: each may be off by 2^-8, and Adam's first steps
    # have the size of the learning rate whatever the gradient's.
    assert result(runs["deepspeed", 2], "llama-bf16")["losses"] == pytest.approx(losses, rel=2e-2)


@pytest.mark.parametrize("kind, world_size", RUNS)
def test_parts_cover_every_tensor_once(runs: dict[tuple[str, int], Path], kind: str, world_size: int) -> None:
    expected = initial_weights(CASES["llama"])
    for part_kind in ("weight", "exp_avg", "exp_avg_sq"):
        found = assembled(runs[kind, world_size], "llama", "initial", world_size, part_kind)
        assert {name: values.numel() for name, values in found.items()} == {
            name: values.numel() for name, values in expected.items()
        }
    for name, values in assembled(runs[kind, world_size], "llama", "initial", world_size).items():
        assert torch.equal(values, expected[name].flatten()), name


def test_all_ranks_agree(runs: dict[tuple[str, int], Path]) -> None:
    ranks = [result(runs["deepspeed-offload", 3], "llama", rank) for rank in range(3)]
    assert ranks[0]["losses"] == ranks[1]["losses"] == ranks[2]["losses"]
    assert ranks[0]["norms"] == ranks[1]["norms"] == ranks[2]["norms"]
    assert ranks[0]["evaluated"] > 0 and ranks[1]["evaluated"] == 0
