"""What is exported gives the same logits in transformers 4.57, or the export says that it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.config.schema import ModelSection
from aliquot.models.model_files import older_transformers, with_old_names
from aliquot.models.source import resolve
from aliquot.models.traits import quiet, redraw
from tests.models.test_every_type import MERGED, TYPES
from tests.tools.architectures import small_config

OLDER = """
import json, sys, torch, transformers
from pathlib import Path
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN
assert transformers.__version__.startswith("4.57"), transformers.__version__
torch.set_num_threads(1)
ids, found = torch.arange(5, 17)[None], {}
for directory in sorted(Path(sys.argv[1]).iterdir()):
    if json.loads((directory / "config.json").read_text())["model_type"] not in KNOWN:
        continue
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
        expected = torch.load(directory / "logits.pt")
        found[directory.name] = float((logits - expected).abs().max() / expected.abs().max())
    except Exception as error:
        found[directory.name] = f"{type(error).__name__}: {error}"[:300]
print("FOUND" + json.dumps(found))
"""
TOLERANCE = 1e-4  # of the largest logit
# Values that are not the defaults, so that a version that does not find a key computes something else.
ROPE = {"rope_theta": 777.0, "rope_type": "default"}
SLIDING = {"sliding_attention": {**ROPE, "rope_theta": 555.0}}
LINEAR = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 777.0}}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "gpt_neox_japanese": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "phi": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
    "stablelm": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "nemotron": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
    "gemma3_text": {"rope_parameters": {**SLIDING, **LINEAR}},
    "olmo3": {"rope_parameters": {"sliding_attention": ROPE, **LINEAR}},
    # What narrow copies have and no model: layers that share keys with none, counts that contradict each other.
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"use_mamba_kernels": False},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1, "use_mamba_kernels": False,
              "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"]},
}  # fmt: skip
# Parts of models that see pictures: a text alone is no model of transformers 4.57.
OF_PICTURES = {"emu3", "fuyu"}


def config_of(kind: str) -> Any:
    values = {**small_config(kind, False).to_dict(), **OTHERS.get(kind, {})}
    return resolve(ModelSection(config={**values, "model_type": kind})).config


def exported_fields(config: Any) -> dict[str, Any]:
    """As they lie in a config.json."""
    return with_old_names(json.loads(type(config).from_dict(config.to_dict()).to_json_string()))


@pytest.mark.parametrize(
    "kind", ["gpt2", "gpt_neox", "qwen3_moe", "gemma3_text", "granitemoehybrid", "mamba2", "llama"]
)
def test_older_names_are_aliases_of_current_names(kind: str) -> None:
    config = config_of(kind)
    fields = exported_fields(config)
    expected: dict[str, dict[str, Any]] = {
        "gpt2": {"n_ctx": getattr(config, "n_positions", None)},
        "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 777.0},
        "qwen3_moe": {"num_experts": config.num_local_experts} if kind == "qwen3_moe" else {},
        "gemma3_text": {"rope_theta": 777.0, "rope_local_base_freq": 555.0},
        "granitemoehybrid": {"layer_types": ["mamba"] * config.num_hidden_layers},
        "mamba2": {"time_step_limit": [0.0, float("inf")]},
    }
    assert fields.items() >= expected.get(kind, {"rope_theta": fields.get("rope_theta")}).items()
    assert AutoConfig.for_model(**json.loads(json.dumps(fields))).to_dict().items() >= config.to_dict().items()


def test_exports_unreadable_in_transformers_4_are_named() -> None:
    assert older_transformers("llama") is None
    assert "transformers 4 does not read this moshi export as version 5" in str(older_transformers("moshi"))


@pytest.mark.long
def test_every_type_gives_the_same_logits_in_transformers_4_57(
    tmp_path: Path, in_transformers_4: Callable[..., dict[str, Any]]
) -> None:
    for kind in sorted(set(TYPES) - MERGED - OF_PICTURES):
        config, directory = config_of(kind), tmp_path / kind
        with quiet():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        redraw(model)
        model.eval().save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps(exported_fields(model.config)))
        read: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            torch.save(read.eval()(torch.arange(5, 17)[None], use_cache=False).logits, directory / "logits.pt")
    found = in_transformers_4(OLDER, tmp_path)
    unlike = {kind: told for kind, told in found.items() if not isinstance(told, float) or told > TOLERANCE}
    assert len(found) > 90 and {kind for kind in found if older_transformers(kind) is not None} == set(unlike), unlike
