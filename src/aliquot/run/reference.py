"""Compute the log-probabilities of answers before training, with which DPO and KTO compare the model.

All ranks compute them once, before the first step, with the engine that trains afterwards, so that no second model is
in memory. Rank 0 writes the results to <run>/reference/ again and again, so that a killed run continues there. Each
file is named by the hash of the tokens and the weights from which its values follow.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from aliquot.config.evaluation_config import EvaluationConfig
from aliquot.core.errors import WeightsFileError
from aliquot.core.on_rank_0 import run_on_all_ranks, run_on_rank_0
from aliquot.core.small_files import publish_bytes, read_small_file
from aliquot.data.batches import Batches
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.token_store import Reference, TokenStore
from aliquot.data.vocabulary import adopt_tokenizer
from aliquot.models.model_config import computation_settings
from aliquot.models.stored_weights import fingerprint
from aliquot.nn.preference_loss import Answers
from aliquot.run.built_model import build_model
from aliquot.run.resolved_run import ResolvedRun, model_source, traits_together
from aliquot.run.starting_point import begin_model

if TYPE_CHECKING:
    from aliquot.run.prepared_run import PreparedRun

_BETWEEN_WRITES = 16  # micro-batches of each rank
_DIGEST_BYTES = 32
_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # of a mean log-probability, relative
_LARGEST_FILE = 1 << 34


def with_reference(trainer: PreparedRun) -> tuple[Batches, dict[str, EvalBatches], bool]:
    """Return the batches with the log-probabilities before training, and whether the engine has these weights.

    The engine gets the weights with which the run begins only if results are missing. Collective. Raises
    WeightsFileError if a log-probability is not finite, and UserError if the newest checkpoint has another model.
    """
    run, ranks = trainer.resolved, trainer.ranks
    objective = run.batches.format.objective
    if objective is None or not objective.needs_reference:
        return run.batches, run.held_out, False
    # The longest mismatched answer to the prompt of a rated answer depends on the length of sequences.
    facts = [weights_key(run), *([run.batches.format.length] if objective.rates_answers else [])]
    passes = {
        ("train", source.name): EvalBatches(source.store, run.batches.format, run.batches.micro_batch_size)
        for source in run.batches.sources
    } | {("eval", name): batches for name, batches in run.held_out.items()}
    files = {key: _ReferenceFile(trainer.directory.reference, batches.store, facts) for key, batches in passes.items()}
    if ranks.rank == 0:
        for file in files.values():
            file.read()
    starts = run_on_rank_0(ranks, lambda: [files[key].first_missing(batches) for key, batches in passes.items()])
    stops = [batches.epoch.packing.sequences for batches in passes.values()]
    if missing := starts != stops:
        run_on_rank_0(ranks, lambda: trainer.directory.begin(run.config))  # so that a killed run may continue here
        begin_model(trainer)
        trainer.activity.enter("computing reference log-probabilities")
        for start, (key, batches) in zip(starts, passes.items(), strict=True):
            _compute(trainer, batches, files[key], start)
        trainer.activity.enter("loading weights")
    for file in files.values():
        ranks.broadcast_into(torch.from_numpy(file.values))
    train = {name: file.values for (kind, name), file in files.items() if kind == "train"}
    held_out = {
        name: batches.with_objective(objective, files["eval", name].values) for name, batches in run.held_out.items()
    }
    return run.batches.with_objective(objective, train), held_out, missing


def weights_key(run: ResolvedRun) -> str:
    """Return the hash of all that determines the function before training: weights, configuration and precision."""
    config = run.config
    adapter = None if config.adapter is None else config.adapter.directory
    adds_tokens = [config.model.add_tokens, config.model.add_special_tokens]
    seed = config.run.seed if any(adds_tokens) else None  # rows of added tokens are drawn
    trained = adapter and config.adapter and [fingerprint(adapter), config.adapter.model_dump(exclude={"path"})]
    computation = computation_settings(run.source.config)["config"], config.train.chosen_precision, config.train.fp8
    return _hash([run.source.fingerprint, trained, adds_tokens, seed, computation])


def check_first_step(trainer: PreparedRun, metrics: Mapping[str, float]) -> None:
    """Check that a model that has learned nothing has the log-probabilities of its reference, but for rounding.

    Raises WeightsFileError.
    """
    train, objective = trainer.config.train, trainer.train_batches.format.objective
    if objective is None or not objective.needs_reference or trainer.model.built.dropout:
        return
    tolerance = 0.1 if train.fp8 else _TOLERANCE[train.chosen_precision]
    for answers in ("chosen", "rejected"):
        logprob = metrics.get(f"logps/{answers}", 0.0)
        difference = metrics.get(f"rewards/{answers}", 0.0) / objective.beta
        if abs(difference) > tolerance * (1 + abs(logprob)):
            raise WeightsFileError(
                f"step 1: the mean log-probability of {answers} answers is {logprob:.6g}, but"
                f" {logprob - difference:.6g} in the reference, which is of another model: remove this directory, and"
                " start again",
                trainer.directory.reference,
            )


def _hash(values: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


class _ReferenceFile:
    """A file with the log-probability of each answer of a token store, behind a SHA-256 of its name and the numbers."""

    def __init__(self, directory: Path, store: TokenStore, facts: Sequence[object]) -> None:
        """`facts`: what determines the log-probabilities besides the store."""
        self.path = directory / f"{_hash([store.path.name, *facts])}.bin"
        self.store = store
        self.values: Reference = np.full(store.references, np.nan, np.float32)  # NaN: not computed yet

    def read(self) -> None:
        """Read the values; a missing or damaged file has none."""
        with suppress(OSError, ValueError):
            data = read_small_file(self.path, _LARGEST_FILE, "none")
            digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if len(content) == self.values.nbytes and self._digest(content) == digest:
                self.values = np.frombuffer(content, np.float32).copy()

    def add(self, results: list[tuple[list[int], list[float]]]) -> None:
        """Set the values of (places, log-probabilities), and write all values. Raises WeightsFileError."""
        for places, logprobs in results:
            if not all(map(math.isfinite, logprobs)):
                raise WeightsFileError(
                    "a log-probability before training is not finite: check the weights of model.path"
                )
            self.values[places] = logprobs
        content = self.values.tobytes()
        self.path.parent.mkdir(exist_ok=True)
        publish_bytes(self.path, self._digest(content) + content)

    def _digest(self, content: bytes) -> bytes:
        return hashlib.sha256(self.path.name.encode() + content).digest()

    def first_missing(self, batches: EvalBatches) -> int:
        """Return the first sequence of `batches` without values; the number of sequences if all have values."""
        count = batches.epoch.packing.sequences
        first = self.store.places(batches.epoch.packing.pieces.start)  # of two: a pair, or an answer and its mismatch
        if not np.isnan(self.values[first]).any() and not np.isnan(self.values[first + 1]).any():
            return count
        return next((at for at in range(count) if np.isnan(self.values[batches.places(at)]).any()), count)


def _compute(trainer: PreparedRun, batches: EvalBatches, file: _ReferenceFile, start: int) -> None:
    """Compute the log-probabilities from sequence `start` on; rank 0 receives and writes them. Collective."""
    ranks, total = trainer.ranks, batches.count(trainer.ranks.world_size)
    first = start // (ranks.world_size * batches.micro_batch_size)
    started_s, results = time.perf_counter(), list[tuple[list[int], list[float]]]()
    for done, logprobs in enumerate(_answer_logprobs(trainer, batches, first), first + 1):
        results += logprobs
        if done < total and (done - first) % _BETWEEN_WRITES:
            continue
        gathered = [result for rank_results in ranks.gather(results) for result in rank_results]
        results = []
        run_on_rank_0(ranks, partial(file.add, gathered))
        trainer.display.evaluating(done, total, time.perf_counter() - started_s, "reference log-probabilities")


def _answer_logprobs(
    trainer: PreparedRun, batches: EvalBatches, first: int = 0
) -> Iterator[list[tuple[list[int], list[float]]]]:
    """Yield (places in `TokenStore.reference`, log-probabilities) of each micro-batch of this rank. Collective.

    `first`: the number of the first micro-batch of each rank.
    """
    engine = trainer.model.engine
    for micro_batch in batches.micro_batches(trainer.ranks.rank, trainer.ranks.world_size, first):
        passes = [micro_batch]
        if batches.store.desirable is not None:
            passes.append(micro_batch and (micro_batch.mismatched or micro_batch))
        results = [(row and row.row_loss, engine.evaluate(row)) for row in passes]
        places = answers.places if isinstance(answers := results[0][0], Answers) else ()
        yield [
            ([place + n for place in places], answers.sums(result).flatten().tolist())
            for n, (answers, result) in enumerate(results)
            if isinstance(answers, Answers)
        ]


def compare_with_reference(trainer: PreparedRun, run: ResolvedRun) -> ResolvedRun:
    """Return a stand-alone evaluation with the log-probabilities of the model before training. Collective.

    That model is built first and closed again, so that no two models are in memory.
    """
    config, objective = run.config, run.batches.format.objective
    if not isinstance(config, EvaluationConfig) or config.reference is None or objective is None:
        return run
    before = config.model_copy(update={"model": config.reference, "adapter": config.reference_adapter})
    source = run_on_all_ranks(trainer.ranks, lambda: model_source(before))
    run_on_all_ranks(trainer.ranks, lambda: adopt_tokenizer(before, source, run.tokenizer))
    trainer.resolved = replace(run, config=before, source=source, traits=traits_together(trainer.ranks, before, source))
    trainer.model = build_model(trainer)
    begin_model(trainer)
    held_out = {}
    for name, batches in run.held_out.items():
        values = np.full(batches.store.references, np.nan, np.float32)  # the values of this rank's micro-batches
        for places, logprobs in chain.from_iterable(_answer_logprobs(trainer, batches)):
            values[places] = logprobs
        held_out[name] = batches.with_objective(objective, values)
    trainer.model.engine.close()
    del trainer.model
    return replace(run, held_out=held_out)
