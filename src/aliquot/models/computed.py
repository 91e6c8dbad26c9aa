"""What of a model's configuration says what its weights compute: a checkpoint goes on with no other one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aliquot.models.narrow import is_dropout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What may change between two stages of a run: special tokens, auxiliary losses, how attention is computed; and what no
# step depends on: how weights were drawn, what is kept and returned.
_ELSEWHERE = ("_token_id", "_loss", "implementation", "initializer", "init_std")
_OTHERS = {"use_cache", "torch_dtype", "pretraining_tp", "output_router_logits", "output_attentions"}


def computed(config: PretrainedConfig) -> dict[str, Any]:
    """As JSON, with the version of transformers that has read it."""
    import transformers

    of_all = transformers.PretrainedConfig().to_dict().keys() - {"model_type"}  # names, labels, dtypes
    values = json.loads(json.dumps(config.to_dict(), default=str))
    return {"transformers": transformers.__version__, "config": _without(values, of_all | _OTHERS)}


def _without(values: dict[str, Any], others: set[str]) -> dict[str, Any]:
    return {
        key: _without(value, others) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in others and not key.startswith("_") and not is_dropout(key)
        if not any(each in key for each in _ELSEWHERE)
    }
