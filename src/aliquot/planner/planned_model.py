"""The model of a plan: its shape, and the cost of its micro-batches, cached from one plan to the next.

Shape and costs come from running the model's own code on the meta device, which takes seconds, mostly for imports.
Therefore the cache directory stores the results. Their key is everything that determines them: the configuration of the
model, the sequence length and the software. A plan from the cache imports neither torch nor transformers.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from aliquot.config.schema import ModelSection, RunConfig
from aliquot.core.decode import publish_checked_json, read_checked_json
from aliquot.core.errors import UserError
from aliquot.core.small_files import cache_root, read_small_file, with_home
from aliquot.data.workload import Workload
from aliquot.models.model_shape import ModelShape
from aliquot.models.source import CONFIG_FILES, local_directory, resolve
from aliquot.planner.micro_batch_cost import WORKS, MicroBatchCost, Step, Work

if TYPE_CHECKING:
    from aliquot.models.shaped_model import ShapedModel

_log = logging.getLogger(__name__)

_MOST_SEQUENCES = 64  # in the largest micro-batch on meta tensors; costs of larger ones are extrapolated
_CACHED_FILES = 1000  # of about ten kilobytes; the least recently used files are deleted


class PlannedModel:
    """Shape and costs of the model of a configuration."""

    def __init__(self, config: RunConfig, vocabulary: int | None = None) -> None:
        """Read the shape from the cache, or build the model on the meta device. Raises the UserErrors of training.

        Args:
            vocabulary: rows of the embedding, if the tokenizer is known.
        """
        self._config = config
        self._vocabulary = vocabulary
        # Another version of a tokenizer on the hub is not noticed; it hardly has another size.
        tokenizer, data = with_home(config.data.tokenizer or os.devnull), config.data
        files = _states([tokenizer, *tokenizer.glob("*")])
        rows = vocabulary or [data.tokenizer_vocab_size, data.tokenizer, data.chat_template, files]
        adapter = config.adapter and config.adapter.model_dump()
        model = [_configuration(config.model), adapter, config.train.freeze]
        self._key = [model, rows, config.data.sequence_length, _software()]
        values = _remembered(self._key, lambda: asdict(self._shaped.shape))
        self.shape = TypeAdapter(ModelShape).validate_python(values)
        self._costs: dict[Hashable, MicroBatchCost] = {}

    def cost_of(
        self,
        step: Step,
        workload: Workload,
        sequences: int,
        approximate: bool = False,
        ranks: int = 1,
        between: int = 1,
    ) -> MicroBatchCost:
        """Return the cost of a micro-batch: bytes of the heaviest one, and mean work of the slowest of `ranks`.

        Equal arguments return the same object.

        Args:
            approximate: extrapolate from micro-batches of one and two sequences, to save time. This ignores that logits
                are computed twice if they exceed their buffer.
            between: micro-batches that a rank computes before it waits for other ranks.
        """
        key = (step, workload, sequences, approximate, ranks, between)
        if key not in self._costs:
            if sequences > (2 if approximate else _MOST_SEQUENCES):
                self._costs[key] = self._extrapolated(step, workload, sequences, ranks, between, approximate)
            else:
                heaviest, typical = workload.heaviest(sequences), workload.typical(sequences, ranks, between)
                rows = (step, heaviest, typical)
                if rows not in self._costs:  # several numbers of ranks and micro-batches have the same rows
                    work = [(share, self.cost(step, row.edges, row.labels)) for share, row in typical]
                    self._costs[rows] = self.cost(step, heaviest.edges, heaviest.labels).with_work(work)
                self._costs[key] = self._costs[rows]
        return self._costs[key]

    def _extrapolated(
        self, step: Step, workload: Workload, sequences: int, ranks: int, between: int, approximate: bool
    ) -> MicroBatchCost:
        even = replace(workload, fills_up=None)  # the padding of two sequences says nothing about many sequences
        fewest = self._sequences_that_fill_logits(step, workload)
        first = fewest if not approximate and fewest < min(sequences, _MOST_SEQUENCES) else 1
        base, more = (self.cost_of(step, even, count) for count in (first, first + 1))
        cost = base.plus(more, base, sequences - first)
        return cost.with_work([(workload.waiting(sequences, ranks, between), cost)])

    def _sequences_that_fill_logits(self, step: Step, workload: Workload) -> int:
        """Return the fewest sequences that fill the logits buffer.

        More sequences do not enlarge the buffer, but compute logits twice.
        """
        rows = step.logits_bytes / (self.shape.vocabulary * (2 if step.precision == "bf16" else 4))
        return math.ceil(rows / max(1.0, workload.predicted))

    def cost(self, step: Step, edges: tuple[int, ...], predicted: int) -> MicroBatchCost:
        """Return the cost of a micro-batch of one row, whose documents begin and end at `edges`.

        `predicted` tokens of the row have a label. If the code of the model does not run on meta tensors, a Llama of
        the same sizes replaces the model.
        """
        # Larger buffers than those of all fp32 logits change nothing: GPUs of all sizes share a pass.
        step = replace(step, logits_bytes=min(step.logits_bytes, 4 * edges[-1] * self.shape.vocabulary))
        key = [*self._key, asdict(replace(step, compiled=False)), edges, predicted]
        values = _remembered(key, lambda: self._measure(step, edges, predicted))
        if (why := values["as_llama"]) is not None:
            _log.warning("%s is planned as a Llama of its sizes: %s", self.shape.name, why)
        fields = values["compiled" if step.compiled else "cost"]
        return MicroBatchCost(**fields | {name: _work(fields[name]) for name in WORKS})

    @cached_property
    def _shaped(self) -> ShapedModel:
        with collecting_no_garbage():
            from aliquot.data.vocabulary import planned_vocabulary
            from aliquot.models.shaped_model import shaped_model

            return shaped_model(self._config, self._vocabulary or planned_vocabulary(self._config))

    def _measure(self, step: Step, edges: tuple[int, ...], predicted: int) -> dict[str, Any]:
        from aliquot.planner.meta_pass import micro_batch_costs

        why, replaced = None, {}
        try:
            costs = micro_batch_costs(self._shaped, step, edges, predicted)
        except UserError:
            raise
        except Exception as error:  # the code of a model may raise anything on meta tensors
            costs = micro_batch_costs(self._shaped.as_llama(), step, edges, predicted)
            why, replaced = f"without values it does not run ({error})", {"tile_products": 0}
        plain, compiled = (
            {**vars(cost), **replaced, **{name: [*getattr(cost, name).items()] for name in WORKS}} for cost in costs
        )
        return {"as_llama": why, "cost": plain, "compiled": compiled}


def with_model_limits(config: RunConfig) -> RunConfig:
    """Return the config with the default sequence length for its model. Raises the UserErrors of training."""
    if "sequence_length" in config.data.model_fields_set:
        return config
    key = ["positions", _configuration(config.model), _software()]
    values = _remembered(key, lambda: {"positions": resolve(config.model, CONFIG_FILES).positions})
    return config.with_positions(values["positions"])


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Turn the garbage collector off, because it takes a sixth of the time of imports and meta passes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _work(items: list[tuple[list[Any], float]]) -> Work:
    return defaultdict(float, {tuple(key): amount for key, amount in items})


def _configuration(section: ModelSection) -> Any:
    """Return the model's configuration without parsing it: the text of its file, or the values in the run's config."""
    if isinstance(section.config, dict):
        return section.config
    try:
        file = section.config or local_directory(str(section.path), CONFIG_FILES) / "config.json"
        return [section.path is not None, read_small_file(file, links="anywhere").decode()]
    except (OSError, ValueError):
        return str(section)  # the code that reads the configuration reports the error


def _states(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    return sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())


@cache
def _software() -> list[Any]:
    """Return versions and a hash of aliquot's file sizes and times, so that a changed aliquot uses no old results."""
    package = Path(__file__).parents[1]
    return [
        version("torch"),
        version("transformers"),
        hashlib.sha256(repr(_states(package.rglob("*.py"))).encode()).hexdigest(),
    ]


def _remembered(key: list[Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the values of `key` from the cache; compute and cache them if they are missing or damaged."""
    text = json.dumps(key, sort_keys=True, default=str)
    file = cache_root() / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    if (cached_values := read_checked_json(file)) is not None:
        with suppress(OSError):  # the least recently used files are deleted
            os.utime(file)
        return cached_values
    values = compute()
    with suppress(OSError):  # if the cache cannot be written, the next plan takes as long as this one
        file.parent.mkdir(parents=True, exist_ok=True)
        publish_checked_json(file, values)
        oldest_first = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in oldest_first[:-_CACHED_FILES]:
            old.unlink(missing_ok=True)
    return values
