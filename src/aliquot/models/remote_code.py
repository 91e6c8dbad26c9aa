"""Never run Python code that comes with a model or a tokenizer.

If a directory names such code (`auto_map`), transformers would ask on standard input whether to run it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aliquot.core.errors import ModelFilesError, UnsupportedModelError
from aliquot.core.small_files import check_small, refuse_link

_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "additional_chat_templates/*.jinja")


def check_small_files(directory: Path) -> None:
    """Raise ModelFilesError unless all small files that transformers might read are regular, small and in `directory`.

    Files of a snapshot may be in the hub's cache. Other links are refused, because a run saves copies of the files.
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

    def loading(*arguments: Any, **options: Any) -> Any:
        if arguments and isinstance(arguments[0], str | Path) and (directory := Path(arguments[0])).is_dir():
            check_small_files(directory)
        try:
            return load(*arguments, **options, trust_remote_code=False)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UnsupportedModelError(
                "it comes with Python code of its own (`auto_map` in its JSON), which aliquot does not run: give one"
                " whose code is part of transformers, or of a tokenizer its tokenizer.json, copied into a directory of"
                " its own",
                arguments[0] if isinstance(arguments[0], str | Path) else None,
            ) from error

    return loading
