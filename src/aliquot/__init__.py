"""Train Hugging Face causal language models with all state sharded 1/N over ranks.

Importing this package imports neither torch nor transformers: a public name is loaded at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aliquot.config.read_config import read_config
    from aliquot.config.schema import RunConfig
    from aliquot.core.errors import TrainingError, UserError
    from aliquot.loaders.sharded import load_sharded
    from aliquot.loaders.zero3 import load_zero3
    from aliquot.models.export import export_checkpoint
    from aliquot.planner.planner import plan
    from aliquot.run.train import train

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

_MODULES = {
    "RunConfig": "aliquot.config.schema",
    "TrainingError": "aliquot.core.errors",
    "UserError": "aliquot.core.errors",
    "export_checkpoint": "aliquot.models.export",
    "load_sharded": "aliquot.loaders.sharded",
    "load_zero3": "aliquot.loaders.zero3",
    "plan": "aliquot.planner.planner",
    "read_config": "aliquot.config.read_config",
    "train": "aliquot.run.train",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'aliquot' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
