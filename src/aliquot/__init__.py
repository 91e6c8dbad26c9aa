"""Train Hugging Face causal language models with all state sharded 1/N. Importing this imports neither torch nor
transformers: each name below is loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aliquot.config.read_config import read_config
    from aliquot.config.schema import RunConfig
    from aliquot.errors import TrainingError, UserError
    from aliquot.loaders.sharded import load_sharded
    from aliquot.loaders.zero3 import load_zero3
    from aliquot.models.export import export_checkpoint
    from aliquot.plan.planner import plan
    from aliquot.train import train

__version__ = "0.1.0"
__all__ = [
    "RunConfig",
    "TrainingError",
    "UserError",
    "export_checkpoint",
    "load_sharded",
    "load_zero3",
    "plan",
    "read_config",
    "train",
]

_HOME = {
    "RunConfig": "aliquot.config.schema",
    "TrainingError": "aliquot.errors",
    "UserError": "aliquot.errors",
    "export_checkpoint": "aliquot.models.export",
    "load_sharded": "aliquot.loaders.sharded",
    "load_zero3": "aliquot.loaders.zero3",
    "plan": "aliquot.plan.planner",
    "read_config": "aliquot.config.read_config",
    "train": "aliquot.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aliquot' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


class _Package(ModuleType):
    """Keeps `aliquot.train` and `aliquot.plan` functions: importing what has their name would replace them."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
