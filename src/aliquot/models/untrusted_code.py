"""Protect against code that comes with a model or a tokenizer: Python code never runs, and chat templates end soon.

If a directory names Python code (`auto_map`), transformers would ask on standard input whether to run it. A chat
template is a program from a stranger, too, and may never end.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from aliquot.core.errors import ModelFilesError, UnsupportedModelError
from aliquot.core.small_files import check_small, refuse_link

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TEMPLATE_CPU_S = 1.0  # five times as long as rendering a chat of several megabytes takes
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
                "it comes with Python code of its own (`auto_map` in its JSON), which aliquot does not run: give one"
                " whose code is part of transformers, or of a tokenizer its tokenizer.json, copied into a directory of"
                " its own",
                path,
            ) from error

    return loading


def model_from_config(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a causal language model from a configuration, as transformers does, without running the model's code."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = without_code(AutoModelForCausalLM.from_config)(config, **options)
    return model


@contextmanager
def limit_template_time() -> Iterator[None]:
    """Raise TimeoutError if the block, which renders a chat template, takes more CPU time than TEMPLATE_CPU_S.

    CPU time, unlike elapsed time, does not advance while the process is stopped or waits for a core. Python handles
    signals only in the main thread and between operations. A block in another thread or a single long operation is
    therefore not limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _install_handler()
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache
def _install_handler() -> None:
    """Install the signal handler once per process, because installing takes longer than rendering."""
    signal.signal(signal.SIGVTALRM, _end_template)


def _end_template(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it has run for {TEMPLATE_CPU_S:g} s, as one that loops for ever does")
