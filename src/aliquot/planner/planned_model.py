"""The model that is planned for: its shape, and what its micro-batches cost, kept from one plan to the next.

Both come from running the model's own code on the meta device. That takes seconds, most of them to import it, so what
was found is kept in the cache directory under all that it follows from: the model's configuration, the length of
sequences and the software. To plan with what is kept imports neither torch nor transformers.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.config.schema import ModelSection, RunConfig
from aliquot.core.errors import UserError
from aliquot.core.paths import cache_root
from aliquot.core.small_files import publish_text, read_small_file
from aliquot.data.workload import Workload
from aliquot.models.model_shape import LayerKind, ModelShape
from aliquot.models.source import CONFIG_FILES, local_directory
from aliquot.planner.micro_batch_cost import WORKS, MicroBatchCost, Step, Work

if TYPE_CHECKING:
    from aliquot.models.shaped_model import ShapedModel

_log = logging.getLogger(__name__)

_MOST_SEQUENCES = 64  # of a micro-batch that is run through on meta tensors as it is; larger ones are extrapolated
_KEPT_FILES = 1000  # of some ten kilobytes each; those that were used least recently go


class PlannedModel:
    def __init__(self, config: RunConfig, vocabulary: int | None = None) -> None:
        """`vocabulary`: rows of its embedding, where a tokenizer has told them. Raises UserError as training would."""
        self._config = config
        self._vocabulary = vocabulary
        rows = vocabulary or config.data.tokenizer_vocab_size
        adapter = config.adapter and config.adapter.model_dump()
        model = [_configuration(config.model), adapter, config.train.freeze]
        self._key = [model, rows, config.data.sequence_length, _software()]
        kept = _read(self._key)
        if kept is None:
            kept = asdict(self._shaped.shape)
            _keep(self._key, kept)
        self.shape = _shape(kept)
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
        """Of a micro-batch of so many sequences: bytes of the heaviest, and the mean work of the slowest of `ranks`,
        which wait for each other whenever each has computed `between`. The same object whenever it is asked for.

        `approximate`: more than two are extrapolated, so that many sizes take no longer than two; that logits beyond
        their room are made twice is not in it.
        """
        key = (step, workload, sequences, approximate, ranks, between)
        if key not in self._costs:
            if sequences > (2 if approximate else _MOST_SEQUENCES):
                self._costs[key] = self._extrapolated(step, workload, sequences, ranks, between, approximate)
            else:
                heaviest, typical = workload.heaviest(sequences), workload.typical(sequences, ranks, between)
                made = (step, heaviest, typical)
                if made not in self._costs:  # however many ranks and micro-batches make it so
                    work = [(share, self.cost(step, row.edges, row.labels)) for share, row in typical]
                    self._costs[made] = self.cost(step, heaviest.edges, heaviest.labels).with_work(work)
                self._costs[key] = self._costs[made]
        return self._costs[key]

    def _extrapolated(
        self, step: Step, workload: Workload, sequences: int, ranks: int, between: int, approximate: bool
    ) -> MicroBatchCost:
        even = replace(workload, fills_up=None)  # what fills up two says nothing of what fills up many
        fewest = self._with_all_logits(step, workload)
        first = fewest if not approximate and fewest < min(sequences, _MOST_SEQUENCES) else 1
        base, more = (self.cost_of(step, even, count) for count in (first, first + 1))
        found = base.plus(more, base, sequences - first)
        return found.with_work([(workload.waiting(sequences, ranks, between), found)])

    def _with_all_logits(self, step: Step, workload: Workload) -> int:
        """The fewest sequences that fill the room for logits: those of more take no more, and are made twice."""
        rows = step.logits_bytes / (self.shape.vocabulary * (2 if step.precision == "bf16" else 4))
        return math.ceil(rows / max(1.0, workload.predicted))

    def cost(self, step: Step, edges: tuple[int, ...], predicted: int) -> MicroBatchCost:
        """Of one row with documents at `edges`, `predicted` of whose tokens have a label.

        A model whose code does not run without values is taken for a Llama of its sizes.
        """
        key = [*self._key, asdict(replace(step, compiled=False)), edges, predicted]
        kept = _read(key)
        if kept is None:
            kept = self._found(step, edges, predicted)
            _keep(key, kept)
        if (why := kept["as_llama"]) is not None:
            _log.warning("%s is planned as a Llama of its sizes: %s", self.shape.name, why)
        return _cost(kept["compiled" if step.compiled else "cost"])

    @cached_property
    def _shaped(self) -> ShapedModel:
        with collecting_no_garbage():
            from aliquot.models.shaped_model import shaped_model

            return shaped_model(self._config, self._vocabulary)

    def _found(self, step: Step, edges: tuple[int, ...], predicted: int) -> dict[str, Any]:
        from aliquot.planner.activations import micro_batch_costs

        why, otherwise = None, {}
        try:
            costs = micro_batch_costs(self._shaped, step, edges, predicted)
        except UserError:
            raise
        except Exception as error:  # each model's code fails in its own way on tensors that hold nothing
            costs = micro_batch_costs(self._shaped.as_llama(), step, edges, predicted)
            why, otherwise = f"without values it does not run ({error})", {"tile_products": 0}
        plain, compiled = (
            {**vars(cost), **otherwise, **{name: [*getattr(cost, name).items()] for name in WORKS}} for cost in costs
        )
        return {"as_llama": why, "cost": plain, "compiled": compiled}


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """What imports make stays: to look through it again and again, as there comes more, takes a sixth of their time,
    and as much of the passes over a model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _shape(kept: dict[str, Any]) -> ModelShape:
    kinds = tuple(
        LayerKind(_tuples(kind["weights"]), _tuples(kind["learned"]), kind["window"], tuple(kind["positions"]))
        for kind in kept["kinds"]
    )
    head = None if kept["head"] is None else tuple(kept["head"])
    tuples = {name: _tuples(kept[name]) for name in ("weights", "learned", "rest")}
    return ModelShape(**kept | tuples | {"kinds": kinds, "head": head, "embedding": tuple(kept["embedding"])})


def _cost(kept: dict[str, Any]) -> MicroBatchCost:
    return MicroBatchCost(**kept | {name: _work(kept[name]) for name in WORKS})


def _work(kept: list[tuple[list[Any], float]]) -> Work:
    work: Work = defaultdict(float)
    work.update({tuple(key): amount for key, amount in kept})
    return work


def _tuples(lists: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, lists))


def _configuration(section: ModelSection) -> Any:
    """What the model is made of, unread: the text of a file, or the values that stand in the run's configuration."""
    if isinstance(section.config, dict):
        return section.config
    try:
        file = section.config or local_directory(str(section.path), CONFIG_FILES) / "config.json"
        return [section.path is not None, read_small_file(file, anywhere=True).decode()]
    except (OSError, ValueError):
        return str(section)  # what is wrong with it is said where it is read


@cache
def _software() -> list[Any]:
    """Versions, and the state of our own files: who changes aliquot gets what it says now."""
    versions = []
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            versions.append(version(name))
    package = Path(__file__).parents[1]
    states = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in package.rglob("*.py"))
    return [*versions, hashlib.sha256(repr(states).encode()).hexdigest()]


def _file(key: list[Any]) -> Path:
    text = json.dumps(key, sort_keys=True, default=str)
    return cache_root() / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _read(key: list[Any]) -> Any:
    """None: it is not kept, or not readable."""
    file = _file(key)
    try:
        kept = json.loads(file.read_text())
        os.utime(file)
    except (OSError, ValueError):
        return None
    return kept


def _keep(key: list[Any], found: dict[str, Any]) -> None:
    """Where the cache cannot be written nothing is kept: the next plan takes as long as this one."""
    file = _file(key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        publish_text(file, json.dumps(found))
        used = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
        for old in used[:-_KEPT_FILES]:
            old.unlink(missing_ok=True)
