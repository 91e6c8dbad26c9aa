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
    uneven = Topology(0, 3, 0, 2, 0, 2, "cpu", 1, ())
    assert engine_class(config(), uneven, 1)[0] == engine_class(config(), uneven, 1, "host")[0] == "fsdp"
    # A node of less memory than the one that has planned does as that one does.
    assert engine_class(config(), on(), 26, "host")[0] == "host"
    assert engine_class(config(), on(), 25, "fsdp")[0] == "fsdp"


NODES = {"replicate": "nodes", "engine": "fsdp"}
FP8 = {"fp8": True}


@pytest.mark.parametrize(
    ("shard", "train", "place", "words"),
    [
        ({"engine": "host", "offload": "cpu"}, {}, on("cuda"), "engine host keeps all states in host memory anyway"),
        ({"engine": "host", "collectives": "gloo"}, {}, on(), "gloo is for engine fsdp"),
        (
            {"engine": "deepspeed"}, {"compile": "layers"}, on(),
            r"compile: layers is for engines host and fsdp.*Set train\.compile: none",
        ),
        ({"engine": "fsdp"}, {"optimizer_states": "int8"}, on(), "needs shard"),
        ({"engine": "deepspeed"}, {"objective": "dpo"}, on(), r"needs shard\.engine: host or fsdp, not deepspeed"),
        (NODES | {"engine": "host"}, {}, on(nodes=2), r"replicate: nodes needs shard\.engine: fsdp, not host"),
        (NODES | {"engine": "deepspeed"}, {}, on(nodes=2), "fsdp, not deepspeed"),
        (NODES | {"reduce_dtype": "bf16"}, {}, on(nodes=2), r"leave out shard\.reduce_dtype"),
        (NODES | {"offload": "cpu"}, {}, on("cuda", nodes=2), r"shard\.offload: cpu is for too little"),
        ({}, FP8, on("cpu"), r"train\.fp8 is for GPUs"),
        ({"engine": "host"}, FP8, on("cuda"), r"needs shard\.engine: fsdp, not host"),
        ({}, {"optimizer_states": "int8"}, on("cuda"), r"needs shard\.engine: host, not fsdp"),
        ({"offload": "disk"}, {}, on("cuda"), r"shard\.offload: disk needs shard\.engine: host, not fsdp"),
        ({"engine": "deepspeed"}, FP8, on("cuda"), "fsdp, not deepspeed"),
        ({"offload": "cpu"}, FP8, on("cuda"), r"needs shard\.offload: none"),
        ({}, FP8, on("cuda"), "fp8 is for one GPU"),
        ({}, FP8 | {"freeze": ["*norm*"]}, on("cuda"), r"leave out train\.freeze or train\.fp8"),
    ],
)  # fmt: skip
def test_settings_that_an_engine_cannot_follow_are_refused(
    shard: dict[str, Any], train: dict[str, Any], place: Topology, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        engine_class(config(shard=shard, train=train), place, 1)


def test_settings_of_one_engine_select_it() -> None:
    assert engine_class(config(shard={"collectives": "gloo"}), on(), 1)[0] == "fsdp"
    assert engine_class(config(shard=NODES), on("cuda", nodes=2), 1)[0] == "fsdp"
    assert engine_class(config(train=FP8), on("cuda", ranks=1), 1)[0] == "fsdp"
    assert TrainSection(fp8=True).precision == "bf16"
    with pytest.raises(ValueError, match=r"set train\.precision: bf16, or leave fp8 out"):
        config(train=FP8 | {"precision": "fp32"})


def test_compiling_without_a_compiler_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        compile_layers(nn.Module(), on())
