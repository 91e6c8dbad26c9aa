"""The deepspeed engine against the plain loop: the same proofs as the other engines, with and without offload.

DeepSpeed's compiled ops: a missing tool is one line; the lock of a killed build is removed, a live one is not.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from aliquot.core.errors import EngineError, UserError
from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.deepspeed.deepspeed_engine import DeepspeedEngine
from aliquot.engines.deepspeed.deepspeed_setup import adamw, compiles_adam, missing_tools, prepare_ops, prepare_states
from tests.engines.cases import CASES, EngineSetup
from tests.engines.test_engines import Runs, assembled, check_ranks_agree, initial_weights, plain_loop, result

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
    check_ranks_agree(runs[world], LLAMAS[world], WORLDS[world][0].ranks)


def test_missing_tools_are_named_with_their_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    with pytest.raises(UserError, match=r"apt install g\+\+.* and pip install ninja; the engines host and fsdp"):
        prepare_ops()
    with pytest.raises(UserError, match=r"its AdamW for offloaded states.*zero_force_ds_cpu_optimizer: false"):
        prepare_ops("cuda")


def test_only_an_abandoned_lock_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("g++", "ninja"):
        (tmp_path / tool).touch(0o755)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    names = ("abandoned", "held", "young")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    for name in ("abandoned", "held"):
        os.utime(tmp_path / name / "lock", (1, 1))
    with (tmp_path / "held" / "lock").open():
        prepare_ops()
    assert [name for name in names if (tmp_path / name / "lock").exists()] == ["held", "young"]


def test_compilation_of_adamw_on_gpu_nodes_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    offloading = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert compiles_adam(offloading)
    assert not compiles_adam(offloading | {"zero_force_ds_cpu_optimizer": False})
    assert not compiles_adam({"zero_optimization": {"stage": 3}})
    with caplog.at_level(logging.WARNING):
        prepare_ops("cuda")
    assert "DeepSpeed compiles its AdamW for offloaded states at its first start" in caplog.text


@pytest.mark.parametrize(
    ("device", "offload", "fused"), [("cuda", "none", True), ("cuda", "cpu", False), ("cpu", "none", False)]
)
def test_adamw_is_fused_where_the_gpu_holds_the_states(
    device: str, offload: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class AdamW:
        def __init__(self, groups: object, **options: object) -> None:
            given.update(options)

    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    weight: Any = torch.nn.Parameter(torch.zeros(2, 2))
    weight.ds_shape = torch.Size((2, 2))
    settings = {"zero_optimization": {"offload_optimizer": {"device": offload}}, "zero_force_ds_cpu_optimizer": False}
    adamw([("w", weight)], EngineSpec("bf16", 8, True), settings, device)
    assert given["fused"] is fused


def test_states_suit_fused_adamw() -> None:
    """On the CPU, torch's fused AdamW has the same rules for states as on a GPU."""
    flat = torch.nn.Parameter(torch.ones(4))

    class Zero:
        optimizer = torch.optim.AdamW([flat], lr=0.1, fused=True)
        fp32_partitioned_groups_flat = (flat,)

    prepare_states(Zero())
    flat.grad = torch.ones(4)
    Zero.optimizer.step()
    assert flat.detach().tolist() == pytest.approx([0.899] * 4)
