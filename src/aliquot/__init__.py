"""Train Hugging Face causal language models with all state sharded 1/N over ranks.

Importing this package imports neither torch nor transformers: a public name is loaded at its first use.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aliquot import losses as losses
    from aliquot.config.evaluation_config import read_evaluation_config
    from aliquot.config.read_config import read_config
    from aliquot.config.schema import RunConfig
    from aliquot.core.errors import TrainingError, UserError
    from aliquot.loaders.sharded import load_sharded
    from aliquot.loaders.zero3 import load_zero3
    from aliquot.models.export import export_checkpoint
    from aliquot.models.generate import generate
    from aliquot.nn.token_loss import TokenSequence
    from aliquot.planner.plan import Plan
    from aliquot.planner.planner import plan
    from aliquot.run.callbacks import Callback, RunState
    from aliquot.run.evaluate import Evaluation, evaluate_model
    from aliquot.run.sampling import Sample
    from aliquot.run.trainer import OptimizerStep, Result, Trainer, train

# Between two operations, the threads of GNU's OpenMP spin 300,000 times before they sleep. If other processes want the
# same cores, spinning threads take the time of those that compute. torch reads the variable when it is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Evaluation",
    "OptimizerStep",
    "Plan",
    "Result",
    "RunConfig",
    "RunState",
    "Sample",
    "TokenSequence",
    "Trainer",
    "TrainingError",
    "UserError",
    "evaluate_model",
    "export_checkpoint",
    "generate",
    "load_sharded",
    "load_zero3",
    "losses",
    "plan",
    "read_config",
    "read_evaluation_config",
    "train",
]

_MODULES = {
    "Callback": "aliquot.run.callbacks",
    "Evaluation": "aliquot.run.evaluate",
    "Plan": "aliquot.planner.plan",
    "Result": "aliquot.run.trainer",
    "RunConfig": "aliquot.config.schema",
    "RunState": "aliquot.run.callbacks",
    "Sample": "aliquot.run.sampling",
    "OptimizerStep": "aliquot.run.trainer",
    "TokenSequence": "aliquot.nn.token_loss",
    "Trainer": "aliquot.run.trainer",
    "TrainingError": "aliquot.core.errors",
    "UserError": "aliquot.core.errors",
    "evaluate_model": "aliquot.run.evaluate",
    "export_checkpoint": "aliquot.models.export",
    "generate": "aliquot.models.generate",
    "load_sharded": "aliquot.loaders.sharded",
    "load_zero3": "aliquot.loaders.zero3",
    "plan": "aliquot.planner.planner",
    "read_config": "aliquot.config.read_config",
    "read_evaluation_config": "aliquot.config.evaluation_config",
    "train": "aliquot.run.trainer",
}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return import_module("aliquot.losses")
    if name not in _MODULES:
        raise AttributeError(f"module 'aliquot' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
