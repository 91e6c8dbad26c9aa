"""Never run Python code that comes with a model or a tokenizer.

If a directory names Python code (`auto_map`), transformers would ask on standard input whether to run it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aliquot.core.errors import ModelFilesError, UnfitFileError, UnsupportedModelError
from aliquot.core.small_files import LIMIT_BYTES, open_regular, resolve_link

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_START_BYTES = 1 << 10  # enough for a byte order mark, or the beginning of a git-lfs pointer
# The names of all files that transformers might read with a tokenizer or a configuration.
_SMALL_FILES = (
    "*.json", "*.model", "*.txt", "*.jinja", "*.codes", "*.spm", "*.tokenizer", "additional_chat_templates/*.jinja",
)  # fmt: skip


def check_files(directory: Path) -> dict[Path, bytes]:
    """Return the files in `directory` that transformers might read, with the first bytes of each.

    Raises ModelFilesError unless all these files are regular files in `directory`, and small unless they hold weights.
    The files of a hub snapshot may also be links into the hub's cache. Links to other places are refused, because a run
    would save copies of their targets.
    """
    starts = {}
    for pattern in (*_SMALL_FILES, "*.safetensors"):
        for file in sorted(directory.glob(pattern)):
            try:
                limit = LIMIT_BYTES if pattern in _SMALL_FILES else None
                with open_regular(resolve_link(file, directory), "none", limit) as opened:
                    starts[file] = opened.read(_START_BYTES)
            except OSError as error:
                reason = str(error) if isinstance(error, UnfitFileError) else f"cannot read: {error.strerror}"
                raise ModelFilesError(reason, file) from error
    return starts


def without_code(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load`, a `from_pretrained` or `from_config` of transformers, so that it runs no code of a model.

    The wrapper raises UserError for models and tokenizers that need such code.
    """

    def loading(source: Any, **options: Any) -> Any:
        path = source if isinstance(source, str | Path) else None
        if path is not None and Path(path).is_dir():
            check_files(Path(path))
        try:
            return load(source, **options, trust_remote_code=False)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UnsupportedModelError(
                "it needs its own Python code (`auto_map` in its JSON), which aliquot does not run. Use a model whose"
                " code is part of transformers; for a tokenizer, use a new directory with its tokenizer.json only",
                path,
            ) from error

    return loading


def model_from_config(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a causal language model from a configuration, as transformers does, without running the model's code."""
    from transformers import AutoModelForCausalLM

    return cast("PreTrainedModel", without_code(AutoModelForCausalLM.from_config)(config, **options))
