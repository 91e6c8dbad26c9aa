"""A model directory on some text, without a run: prepared, sharded and evaluated as a run would do it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

from aliquot.config.schema import RunConfig
from aliquot.core.on_rank_0 import run_on_rank_0
from aliquot.data.data_summary import irregularities
from aliquot.distributed.config_consistency import check_configs
from aliquot.distributed.heartbeat import Heartbeat
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.rendezvous import infer_local_ranks
from aliquot.distributed.topology import choose_device, place
from aliquot.distributed.watchdog import IdleWatchdog
from aliquot.machine.cpu import read_cpu
from aliquot.models.source import resolve
from aliquot.observe.console import Display
from aliquot.observe.ledger import Ledger
from aliquot.observe.prometheus import Exporter
from aliquot.observe.run_directory import RunDirectory
from aliquot.run import setup
from aliquot.run.evaluate import evaluate
from aliquot.run.run_context import Activity, Attempt, Stage

_TIMEOUT_S = 24 * 3600.0  # as in run/train.py


@dataclass(frozen=True)
class Evaluation:
    """Over all predicted tokens. Without `bits_per_byte` the size of the text is not known."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    predicted_tokens: int
    documents: int
    sequence_length: int
    ranks: int


def evaluate_model(config: RunConfig) -> dict[str, Evaluation]:
    """Evaluate `config.model` on each set of evaluation data of `config`, by name, as this process's rank. The one that
    has no name is called "". Nothing is written.

    Every rank calls it with the same config (config/evaluation_config.py makes one) and gets the same. An engine takes
    as much address space as for training, but memory for weights and activations alone. Raises UserError.
    """
    with infer_local_ranks(os.environ, config.launch.join_timeout_s) as bound:
        topology, placement = place(config.launch, os.environ, read_cpu(), choose_device(config.launch.device), bound)
        ranks = Ranks.join(topology, _TIMEOUT_S, config.launch.join_timeout_s)
    display = Display(config.observe.console, enabled=topology.is_first)
    exporter = Exporter(config.observe, config.run.name)
    timeout_s, activity = config.launch.step_timeout_s, Activity()
    with (
        ranks.closing(),
        Heartbeat(topology, ranks.store, timeout_s, activity.describe),
        IdleWatchdog(topology, ranks.store, timeout_s, None, activity.describe),
    ):
        activity.enter(Stage.EVALUATE_MODEL)
        try:
            ledger, directory = Ledger(ranks.rank), RunDirectory(config.run.directory)
            about = {"placement": placement}
            return _evaluate(Attempt(config, ranks, directory, display, exporter, ledger, activity, about))
        finally:
            display.finish()


def _evaluate(run: Attempt) -> dict[str, Evaluation]:
    ranks, display = run.ranks, run.display
    check_configs(ranks, run.config)
    run = replace(run, config=_within(run.config, run_on_rank_0(ranks, lambda: resolve(run.config.model).positions)))
    inputs = setup.read_inputs(run)
    setup.check_inputs(run, inputs)
    model = setup.build_model(run, inputs)
    setup.fill_model(run, inputs, model)
    model.engine.ready()
    about = (f"{model.built.numel:,} parameters", run.config.train.precision, f"engine {model.engine_name}")
    display.line(", ".join((model.built.name, *about)))
    display.line(str(run.about["placement"]))
    for name, held_out in inputs.held_out.items():
        for told in irregularities(held_out.store):
            display.line(f"{name}: {told}" if name else told)
    began = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal began
        began = time.perf_counter() if done == 0 else began
        display.evaluating(done, total, time.perf_counter() - began)

    results = {}
    for name, held_out in inputs.held_out.items():
        found = evaluate(model.engine, held_out, ranks, progress, stopped=lambda: 0)
        assert found is not None  # nothing stops it
        documents, length = held_out.store.documents, held_out.sequence_length
        results[name] = Evaluation(*found, held_out.predicted, documents, length, ranks.world_size)
    model.engine.close()
    return results


def _within(config: RunConfig, positions: int | None) -> RunConfig:
    """With sequences that a model of so many positions can read, where nobody has said how long they are."""
    if "sequence_length" in config.data.model_fields_set or positions is None:
        return config
    length = min(config.data.sequence_length, positions)
    return config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": length})})
