"""The deepspeed engine against the plain loop: the same proofs as the other engines, with and without offload."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from aliquot.core.errors import EngineError
from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.deepspeed.deepspeed_engine import DeepspeedEngine
from aliquot.engines.deepspeed.deepspeed_setup import missing_tools
from tests.engines.cases import CASES, EngineSetup
from tests.engines.test_engines import Runs, assembled, initial_weights, plain_loop, result

if importlib.util.find_spec("deepspeed") is None:  # to import it takes seconds, of every worker
    pytest.skip("the extra `deepspeed` is not installed", allow_module_level=True)
if missing_tools():
    pytest.skip(f"DeepSpeed on CPUs needs {' and '.join(missing_tools())}", allow_module_level=True)

LLAMAS = {"short": "llama", "offload": "llama-far"}
# DeepSpeed is imported for each world anew, and compiles its ops on a machine that it has not seen, which takes a
# minute: `make test` has the first.
WORLDS = {
    "short": (EngineSetup("deepspeed", 2, uncompiled=True), ["llama"]),
    "more": (EngineSetup("deepspeed", 2), ["llama-bf16-far", "qwen2-tied"]),
    "offload": (EngineSetup("deepspeed", 3, offload=True), ["llama-far"]),
}
EACH = ["short", pytest.param("offload", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs[str]:
    return Runs(tmp_path_factory.mktemp("deepspeed"), WORLDS)


@pytest.mark.parametrize(
    ("world", "name"),
    [
        ("short", "llama"),
        pytest.param("more", "qwen2-tied", marks=pytest.mark.long),
        pytest.param("offload", "llama-far", marks=pytest.mark.long),
    ],
)
def test_fp32_equals_the_plain_loop(runs: Runs[str], world: str, name: str) -> None:
    losses, norms, weights = plain_loop(name, bf16=False)
    trained = result(runs[world], name)
    # fp32 in another order of summation: 1e-6 a step, which the steps of AdamW amplify.
    assert trained["losses"] == pytest.approx(losses, rel=1e-4)
    assert trained["norms"] == pytest.approx(norms, rel=1e-3)
    for tensor, values in assembled(runs[world], name, "final", WORLDS[world][0].ranks).items():
        torch.testing.assert_close(values, weights[tensor].flatten(), rtol=2e-3, atol=2e-3, msg=tensor)


@pytest.mark.long
def test_bf16_follows_the_plain_bf16_loop(runs: Runs[str]) -> None:
    losses, _, _ = plain_loop("llama-bf16-far", bf16=True)
    # DeepSpeed reduces and accumulates gradients in bf16, eight bits: each may be off by 2^-8, and Adam's first steps
    # have the size of the learning rate whatever the gradient's.
    assert result(runs["more"], "llama-bf16-far")["losses"] == pytest.approx(losses, rel=2e-2)


@pytest.mark.parametrize("world", EACH)
def test_parts_cover_every_tensor_once(runs: Runs[str], world: str) -> None:
    expected = initial_weights(CASES["llama"])
    for part_kind in ("weight", "exp_avg", "exp_avg_sq"):
        trained = assembled(runs[world], LLAMAS[world], "initial", WORLDS[world][0].ranks, part_kind)
        assert {name: values.numel() for name, values in trained.items()} == {
            name: values.numel() for name, values in expected.items()
        }
    for name, values in assembled(runs[world], LLAMAS[world], "initial", WORLDS[world][0].ranks).items():
        assert torch.equal(values, expected[name].flatten()), name


def test_frozen_weights_need_another_engine() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad = False
    with pytest.raises(EngineError, match=r"bias is frozen: shard\.engine must be host or fsdp, not deepspeed"):
        DeepspeedEngine.build(model, EngineSpec("fp32", 64, True), Topology(0, 1, 0, 1, 0, 1, "cpu", 1, ()))


@pytest.mark.parametrize("world", EACH)
def test_all_ranks_agree(runs: Runs[str], world: str) -> None:
    first, *others = [result(runs[world], LLAMAS[world], rank) for rank in range(WORLDS[world][0].ranks)]
    assert all(rank["losses"] == first["losses"] and rank["norms"] == first["norms"] for rank in others)
    assert first["evaluated"] > 0 and others[0]["evaluated"] == 0
