"""One rank of the tests of the start-up proof: plants a fault, runs the proof, tells what it says."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aliquot.core.errors import SelfTestError
from aliquot.distributed.topology import Topology
from aliquot.engines import model_engine
from aliquot.engines.base import Engine, EngineSpec
from aliquot.engines.deepspeed.deepspeed_engine import DeepspeedEngine
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.host import host_gradients
from aliquot.engines.host.host_engine import HostEngine
from aliquot.engines.startup_proof import prove
from aliquot.models.traits import traits
from aliquot.nn.attention.document_attention import Documents
from aliquot.nn.attention.tiled_attention import TiledAttention
from tests.processes import as_ranks
from tests.tools.architectures import small_config

KINDS: dict[str, type[Engine]] = {"host": HostEngine, "fsdp": FsdpEngine, "deepspeed": DeepspeedEngine}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}, "steps_per_print": None,
}  # fmt: skip


class Faulty(TiledAttention):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def attend(self, query: Any, key: Any, value: Any, documents: Any, scoring: Any) -> Any:
        if self.fault == "scale":
            scoring = replace(scoring, scaling=1.0)
        if self.fault == "softcap":
            scoring = replace(scoring, softcap=None)
        if self.fault == "sinks":
            scoring = replace(scoring, sinks=None)
        if self.fault == "window" and scoring.window is not None:
            scoring = replace(scoring, window=scoring.window + 1)
        if self.fault == "leak":
            key, value = (x.roll(-1, 2) for x in (key, value))
        if self.fault == "neighbours":
            documents = Documents((0, documents.edges[-1]), self)
        return super().attend(query, key, value, documents, scoring)


class Forgetful(Counter[int]):
    """Each contribution of a step is taken for its first: it replaces what is there."""

    def __getitem__(self, key: int) -> int:
        return 0


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    outcomes = {}
    for argument in arguments:
        model_type, engine, fault = argument.split(":")
        attention_on, contributions = model_engine.attention_on, host_gradients.Counter
        if fault == "contributions":
            host_gradients.Counter = Forgetful  # type: ignore[misc]
        elif fault != "none":
            model_engine.attention_on = lambda *_, fault=fault: Faulty(fault)  # type: ignore[assignment]
        topology = Topology(rank, world_size, rank, world_size, 0, 1, "cpu", 1, ())
        config = small_config(model_type, dropout=True)
        model_traits = traits(config)
        spec = EngineSpec(
            "bf16", 512, model_traits.plain_head, model_traits.packs, model_traits.looks_up, True,
            collectives="shared_memory",
            optimizer_states="int8" if engine == "host" else "fp32", micro_batches=1,
            deepspeed=DEEPSPEED if engine == "deepspeed" else None,
        )  # fmt: skip
        try:
            prove(config, model_traits, KINDS[engine], spec, topology)
            outcomes[argument] = ""
        except SelfTestError as error:
            outcomes[argument] = str(error)
        model_engine.attention_on, host_gradients.Counter = attention_on, contributions  # type: ignore[misc]
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    as_ranks(work)
