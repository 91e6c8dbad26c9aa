"""Never run Python code that comes with a model or a tokenizer.

If a directory names Python code (`auto_map`), transformers would ask on standard input whether to run it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.core.errors import ModelFilesError, UnsupportedModelError
from aliquot.core.small_files import check_small, refuse_link

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "additional_chat_templates/*.jinja")


def check_small_files(directory: Path) -> None:
    """Raise ModelFilesError unless all small files that transformers might read are regular, small and in `directory`.

    The files of a hub snapshot may also be links into the hub's cache. Links to other places are refused, because a run
    would save copies of their targets.
    """
    for file in sorted(file for pattern in _SMALL_FILES for file in directory.glob(pattern)):
        try:
            refuse_link(file, directory)
            check_small(file)
        except OSError as error:
            raise ModelFilesError(f"cannot read: {error.strerror}", file) from error
        except ValueError as error:
            raise ModelFilesError(str(error), file) from error


def without_code(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load`, a `from_pretrained` or `from_config` of transformers, so that it runs no code of a model.

    The wrapper raises UserError for models and tokenizers that need such code.
    """

    def loading(source: Any, **options: Any) -> Any:
        path = source if isinstance(source, str | Path) else None
        if path is not None and Path(path).is_dir():
            check_small_files(Path(path))
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

    model: PreTrainedModel = without_code(AutoModelForCausalLM.from_config)(config, **options)
    return model
