"""DeepSpeed's compiled ops: a missing tool is one line; the lock of a killed build is removed, a live one is not."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from aliquot.core.errors import UserError
from aliquot.engines.base import EngineSpec
from aliquot.engines.deepspeed.deepspeed_setup import adamw, compiles_adam, prepare_ops, prepare_states


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
