"""Identify a model: a hash of samples of its weights, and the settings that decide what its weights compute."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.core.errors import UserError
from aliquot.models.narrow import is_dropout
from aliquot.tensor_io.header import read_header

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_SAMPLE_BYTES = 4096
_EVERY_BYTES = 4 << 20  # of a file: what a copy that was broken off has left out is larger
_OTHER_FORMS = "consolidated*.safetensors"  # the same weights again, for other programs


def fingerprint(directory: Path) -> str:
    """Of its weights: a hash of sizes, of the files' headers, of the beginning of each tensor and of a sample of each
    4 MiB, a thousandth of them. Raises OSError."""
    total = hashlib.sha256()
    others = set(directory.glob(_OTHER_FORMS))
    for path in sorted(set(directory.glob("*.safetensors")) - others):
        total.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            for at in sorted({*range(0, path.stat().st_size, _EVERY_BYTES), *_tensors(path)}):
                file.seek(at)
                total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()[:16]


def _tensors(path: Path) -> Iterator[int]:
    """Where each begins, and pieces of what says so; nothing of a file that cannot be loaded, as whoever does says."""
    with suppress(UserError):
        header = read_header(path)
        yield from range(0, header.header_bytes, _SAMPLE_BYTES)
        yield from (entry.offset for entry in header.entries.values())


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
