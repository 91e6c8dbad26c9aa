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
_EVERY_BYTES = 4 << 20  # distance of samples: an interrupted copy lacks more
_OTHER_FORMS = "consolidated*.safetensors"  # the same weights in a format for other programs


def fingerprint(directory: Path) -> str:
    """Hash samples of the weights: sizes, headers, the beginning of each tensor, and 4 KiB of each 4 MiB.

    Raises OSError.
    """
    total = hashlib.sha256()
    duplicates = set(directory.glob(_OTHER_FORMS))
    for path in sorted(set(directory.glob("*.safetensors")) - duplicates):
        total.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            for at in sorted({*range(0, path.stat().st_size, _EVERY_BYTES), *_tensors(path)}):
                file.seek(at)
                total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()[:16]


def _tensors(path: Path) -> Iterator[int]:
    """Yield the offsets of tensors and of pieces of the header; nothing for a file whose loading will fail."""
    with suppress(UserError):
        header = read_header(path)
        yield from range(0, header.header_bytes, _SAMPLE_BYTES)
        yield from (entry.offset for entry in header.entries.values())


# Keys that may change between two stages of a run: special tokens, auxiliary losses, the attention implementation, and
# settings without an effect on steps: initialisation, and what is cached and returned.
_ELSEWHERE = ("_token_id", "_loss", "implementation", "initializer", "init_std")
_OTHERS = {"use_cache", "torch_dtype", "pretraining_tp", "output_router_logits", "output_attentions"}


def computed(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings that decide what weights compute, as JSON, with the version of transformers."""
    import transformers

    common_keys = transformers.PretrainedConfig().to_dict().keys() - {
        "model_type"
    }  # names, labels, dtypes: no effect on computation
    values = json.loads(json.dumps(config.to_dict(), default=str))
    return {"transformers": transformers.__version__, "config": _without(values, common_keys | _OTHERS)}


def _without(values: dict[str, Any], excluded: set[str]) -> dict[str, Any]:
    return {
        key: _without(value, excluded) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in excluded and not key.startswith("_") and not is_dropout(key)
        if not any(part in key for part in _ELSEWHERE)
    }
