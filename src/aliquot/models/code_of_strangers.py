"""No Python that comes with a model or a tokenizer is ever run.

Where a directory names such code (`auto_map`), transformers asks on standard input whether to run it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aliquot.errors import UnsupportedModelError


def without_code(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, one of transformers' `from_pretrained` or `from_config`, for what transformers has itself.

    Raises UserError for what it has not.
    """

    def loading(*arguments: Any, **options: Any) -> Any:
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
