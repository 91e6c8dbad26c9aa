from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from aliquot.config.schema import RunConfig, TrainSection
from aliquot.core.errors import UserError
from aliquot.distributed.topology import Topology
from aliquot.engines import select
from aliquot.engines.model_kernels import compile_layers
from aliquot.engines.select import engine_class


def config(**sections: dict[str, Any]) -> RunConfig:
    train = {"global_batch_size": 1, "precision": "bf16"} | sections.get("train", {})
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections, "train": train})


def on(device: str = "cpu", ranks: int = 2, nodes: int = 1) -> Topology:
    return Topology(0, ranks * nodes, 0, ranks, 0, nodes, device, 1, ())  # type: ignore[arg-type]


def test_auto_selects_host_if_one_copy_of_weights_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "memory_limit", lambda: 100)
    assert engine_class(config(), on(), 25)[0] == "host"
    assert engine_class(config(), on(), 26)[0] == "fsdp"
    assert engine_class(config(train={"precision": "fp32"}), on(), 13)[0] == "fsdp"
    assert engine_class(config(), on("cuda"), 1)[0] == "fsdp"
    assert engine_class(config(), on("cuda"), 1, "host")[0] == "host"
    for only_host in ({"shard": {"offload": "disk"}}, {"train": {"optimizer_states": "int8"}}):
        assert engine_class(config(**only_host), on("cuda"), 1)[0] == "host"
    uneven = Topology(0, 3, 0, 2, 0, 2, "cpu", 1, ())
    assert engine_class(config(), uneven, 1)[0] == engine_class(config(), uneven, 1, "host")[0] == "fsdp"
    # A node of less memory than the one that has planned does as that one does.
    assert engine_class(config(), on(), 26, "host")[0] == "host"
    assert engine_class(config(), on(), 25, "fsdp")[0] == "fsdp"


def test_settings_that_an_engine_cannot_follow_are_refused() -> None:
    with pytest.raises(UserError, match="engine host keeps all states in host memory anyway"):
        engine_class(config(shard={"engine": "host", "offload": "cpu"}), on("cuda"), 1)
    with pytest.raises(UserError, match="gloo is for engine fsdp"):
        engine_class(config(shard={"engine": "host", "collectives": "gloo"}), on(), 1)
    assert engine_class(config(shard={"collectives": "gloo"}), on(), 1)[0] == "fsdp"
    with pytest.raises(UserError, match=r"compile: layers is for engines host and fsdp.*Set train\.compile: none"):
        engine_class(config(shard={"engine": "deepspeed"}, train={"compile": "layers"}), on(), 1)
    with pytest.raises(UserError, match="needs shard"):
        engine_class(config(shard={"engine": "fsdp"}, train={"optimizer_states": "int8"}), on(), 1)
    with pytest.raises(UserError, match=r"needs shard\.engine: host or fsdp, not deepspeed"):
        engine_class(config(shard={"engine": "deepspeed"}, train={"objective": "dpo"}), on(), 1)


def test_replicas_refuse_what_excludes_them() -> None:
    nodes = {"replicate": "nodes", "engine": "fsdp"}
    assert engine_class(config(shard=nodes), on("cuda", 2, 2), 1)[0] == "fsdp"
    for shard, words in (
        ({"engine": "host"}, r"replicate: nodes needs shard\.engine: fsdp, not host"),
        ({"engine": "deepspeed"}, "fsdp, not deepspeed"),
        ({"reduce_dtype": "bf16"}, r"leave out shard\.reduce_dtype"),
    ):
        with pytest.raises(UserError, match=words):
            engine_class(config(shard=nodes | shard), on(ranks=2, nodes=2), 1)
    with pytest.raises(UserError, match=r"shard\.offload: cpu is for too little"):
        engine_class(config(shard=nodes | {"offload": "cpu"}), on("cuda", 2, 2), 1)


def test_fp8_refuses_what_excludes_it() -> None:
    fp8 = {"global_batch_size": 1, "fp8": True}
    assert engine_class(config(train=fp8), on("cuda"), 1)[0] == "fsdp"
    assert TrainSection(fp8=True).precision == "bf16"
    for train, shard, device, words in (
        ({}, {}, "cpu", r"train\.fp8 is for GPUs"),
        ({}, {"engine": "host"}, "cuda", r"needs shard\.engine: fsdp, not host"),
        ({"optimizer_states": "int8"}, {}, "cuda", r"needs shard\.engine: fsdp, not host"),
        ({}, {"engine": "deepspeed"}, "cuda", "fsdp, not deepspeed"),
        ({}, {"offload": "cpu"}, "cuda", r"needs shard\.offload: none"),
        ({}, {"engine": "fsdp", "replicate": "nodes"}, "cuda", r"needs shard\.replicate: none"),
        ({"freeze": ["*norm*"]}, {}, "cuda", r"leave out train\.freeze or train\.fp8"),
    ):
        with pytest.raises(UserError, match=words):
            engine_class(config(train=fp8 | train, shard=shard), on(device), 1)
    with pytest.raises(ValueError, match=r"set train\.precision: bf16, or leave fp8 out"):
        config(train=fp8 | {"precision": "fp32"})


def test_compiling_without_a_compiler_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        compile_layers(nn.Module(), on())
