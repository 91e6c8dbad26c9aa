"""Small models of several families, as run configurations that are only planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aliquot.config.read_config import validate
from aliquot.config.schema import RunConfig
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from aliquot.planner.settings_search import Search

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 2048,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 64}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 32, "attn_logit_softcapping": None}


def planned_config(model: dict[str, Any] | Path, **sections: dict[str, Any]) -> RunConfig:
    """`model`: the fields of its config.json, or this file. `sections` are merged over a run of a few steps."""
    values: dict[str, Any] = {
        "model": {"config": model},
        "data": {"path": "stdlib", "sequence_length": 256},
        "train": {"max_steps": 10, "global_batch_size": 16, "per_device_train_batch_size": 2, "precision": "bf16"},
        "launch": {"device": "cpu", "ranks": 2, "threads_per_rank": 1},
        "checkpoint": {"every": 0},
    }
    for section, update in sections.items():
        values.setdefault(section, {}).update(update)
    return validate(values, {}, "a test")


def search_on(machine: Machine, config: RunConfig, layout: RankLayout) -> Search:
    """The search for other settings of a run; it has a planner of the run's model."""
    return Search(Planner(PlannedModel(config), machine), config, layout, Workload.assumed(config))
