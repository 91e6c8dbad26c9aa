"""Of two configurations, whether the same weights are the same model under them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from aliquot.checkpoint.resume import check_model
from aliquot.core.errors import ResumeError
from aliquot.models.model_config import computation_settings

SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 8,
    "intermediate_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
HERE = Path("step-00000004")


def of_llama(**values: Any) -> dict[str, Any]:
    return computation_settings(AutoConfig.for_model("llama", **{**SIZES, **values}))


def saved(**values: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps({"model": of_llama(**values)}))
    return state


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_dropout": 0.1},
        {"use_cache": False},
        {"dtype": "bfloat16"},
        {"initializer_range": 0.1},
        {"pad_token_id": 3, "eos_token_id": [4, 5]},
        {"attn_implementation": "eager"},
        {"architectures": ["Mine"], "id2label": {0: "a"}, "name_or_path": "here"},
    ],
)
def test_equivalent_configurations(changed: dict[str, Any]) -> None:
    assert check_model(saved(), of_llama(**changed), HERE) is None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps was 1e-06 and is 0.001"),
        ({"hidden_act": "gelu"}, "hidden_act was 'silu' and is 'gelu'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads was 2 and is 4"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta was 10000.0 and is 500000.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters.factor was not set and is 2.0; rope_parameters.rope_type was 'default' and is 'linear'",
        ),
    ],
)
def test_different_configurations(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ResumeError) as caught:
        check_model(saved(), of_llama(**changed), HERE)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_another_type_of_the_same_tensors() -> None:
    other = computation_settings(AutoConfig.for_model("mistral", **SIZES))
    with pytest.raises(ResumeError, match="model_type was 'llama' and is 'mistral'"):
        check_model(saved(), other, HERE)


def test_unknown_keys_do_not_stop_a_run() -> None:
    """Another version of transformers may read a file otherwise."""
    other = of_llama(rms_norm_eps=1e-3)
    older = check_model({"model": {**saved()["model"], "transformers": "4.57.0"}}, other, HERE)
    assert older is not None and "rms_norm_eps was 1e-06" in older and "transformers was 4.57.0 and is " in older
