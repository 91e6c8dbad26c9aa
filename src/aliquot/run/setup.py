"""Prepare a run, in this order: read the data, plan, build the model, describe the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from aliquot.checkpoint.directories import STATE, newest, step_of
from aliquot.config.schema import RunConfig
from aliquot.core.decode import read_json
from aliquot.core.errors import UnsupportedModelError
from aliquot.core.on_rank_0 import gather_results, run_on_all_ranks, run_on_rank_0
from aliquot.data.batches import Batches, objective_of
from aliquot.data.data_summary import day_line, first_samples, header
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import TokenizerChanges, prepare, prepare_together
from aliquot.data.token_store import answer_ends
from aliquot.data.tokenizer import largest_token
from aliquot.data.workload import batch_size
from aliquot.distributed.launcher import torchrun_advice
from aliquot.distributed.leader_lease import follows_earlier_round
from aliquot.distributed.ranks import group_lines
from aliquot.engines.attention_proof import attention_calls, prove_attention
from aliquot.engines.base import Engine, PhaseHooks
from aliquot.engines.engine_plan import SHARDED
from aliquot.engines.select import engine_class, engine_spec
from aliquot.engines.startup_proof import prove
from aliquot.machine.allocator import FreeMemoryLimit
from aliquot.machine.cpu import read_cpu
from aliquot.machine.matmul import caches_large_kernels
from aliquot.machine.memory import memory_limit
from aliquot.models import meta
from aliquot.models.model_files import model_files
from aliquot.models.source import ModelSource, import_models, resolve
from aliquot.models.stored_weights import StoredNames, published_of
from aliquot.models.structure import decoder_layers
from aliquot.models.traits import Traits, traits
from aliquot.nn.attention.document_attention import attention_on
from aliquot.observe import run_summary
from aliquot.observe.events import RunRecord
from aliquot.observe.step_clock import StepClock, timeline_of
from aliquot.optim.schedule import Schedule
from aliquot.planner.automatic_settings import NO_CHOICES, with_choices
from aliquot.planner.compute_ceiling import Ceiling
from aliquot.planner.plan import Plan
from aliquot.planner.preflight import PlanRequest, plan_together
from aliquot.run.run_context import Inputs, Model, RunContext, Stage, Start


def check_directory(run: RunContext) -> None:
    """Check that all ranks see the same run directory. Collective. Raises NodesDifferError on every rank.

    Even containers on one host may have different file systems.
    """
    if run.ranks.world_size == 1:
        return
    name = run_on_rank_0(run.ranks, run.directory.create_marker)
    try:
        gather_results(run.ranks, lambda: run.directory.find_marker(name) if run.ranks.rank > 0 else None)
    finally:
        if run.ranks.rank == 0:
            run.directory.remove_marker(name)


def fetch_model(run: RunContext) -> RunContext:
    """Fetch the model, and return the run with the default sequence length for the model. Collective."""
    import_models()
    positions = run_on_rank_0(run.ranks, lambda: resolve(run.config.model).positions)  # only rank 0 downloads
    return replace(run, config=run.config.with_positions(positions))


def read_inputs(run: RunContext, trains: bool = True) -> Inputs:
    """Read the description of the model, tokenise the data, and plan the batches of every step. Collective.

    `trains` is False for a stand-alone evaluation, which does not tokenise training data.
    """
    config, ranks = run.config, run.ranks
    source = run_on_all_ranks(ranks, lambda: _model_source(config))
    adds_tokens = config.model.add_tokens, config.model.add_special_tokens
    adapter = None if config.adapter is None else config.adapter.directory
    day = config.data.chat_template_date or date.fromisoformat(run_on_rank_0(ranks, lambda: str(run.directory.day())))
    section = config.data.model_copy(update={"chat_template_date": day})
    prepare_node = partial(
        prepare, section, source.directory, source.largest_vocabulary, run.display.progress, source.config.to_dict(),
        TokenizerChanges(*adds_tokens, adapter), trains,
    )  # fmt: skip
    data = prepare_together(ranks, prepare_node)

    def load_tokenizer() -> Any:
        tokenizer = data.load_tokenizer()
        source.adopt_tokenizer(tokenizer, largest_token(tokenizer), any(adds_tokens))
        # This is the second check, because the padding token may have changed.
        source.check_length(config.data.sequence_length, config.train.answers)
        return tokenizer

    tokenizer = run_on_all_ranks(ranks, load_tokenizer)
    size = batch_size(config.train, ranks.world_size)
    epochs = None if config.train.max_steps else config.train.num_train_epochs
    model_traits = Traits(**run_on_rank_0(ranks, lambda: vars(traits(source.config, config.data.sequence_length))))
    fills_up = caches_large_kernels(ranks.topology.device, config.train.precision)

    def lay_out() -> tuple[Batches, int, dict[str, EvalBatches]]:
        fitting = replace(data, positions=source.positions)
        batches = Batches.of(fitting, config.data, config.run.seed, size, epochs, model_traits.packs, fills_up)
        held_out = EvalBatches.of(fitting, config.data, size, model_traits.packs, fills_up)
        if (objective := objective_of(config.train)) is not None:
            if getattr(source.config, "output_router_logits", False):
                raise UnsupportedModelError(
                    f"train.objective: {objective.name} has no loss for output_router_logits: set it to false in"
                    " config.json"
                )
            batches = batches.with_objective(objective)
            held_out = {name: batches_of_set.with_objective(objective) for name, batches_of_set in held_out.items()}
        return batches, batches.total_steps(config.train.max_steps), held_out

    batches, total_steps, held_out = run_on_all_ranks(ranks, lay_out)
    schedule = Schedule.of(config.train, total_steps)
    return Inputs(source, model_traits, data, tokenizer, size, batches, held_out, total_steps, schedule)


def _model_source(config: RunConfig) -> ModelSource:
    source = resolve(config.model)
    source.check_length(config.data.sequence_length, config.train.answers)  # early: tokenising a corpus takes long
    return source


def wait_for_data(run: RunContext, inputs: Inputs, start: Start) -> None:
    """Return when the data of the next step are tokenised: a new node begins to tokenise a stream anew. Collective."""
    step = min(start.step + 1, inputs.total_steps)
    if inputs.data.streams:
        run.activity.enter(Stage.READ_DATA)
        is_maker = any(stream.maker is not None for stream in inputs.data.streams.values())
        run_on_all_ranks(run.ranks, lambda: inputs.batches.wait_for(step) if is_maker else None)


def make_plan(run: RunContext, inputs: Inputs, force: bool) -> Plan | None:
    """Plan the run on rank 0 and return the plan on every rank; None if no plan can be made. Collective."""
    memory_bytes = min(run.ranks.gather(memory_limit()))
    # The plan assumes equal nodes. Unequal nodes cannot replicate each other.
    is_even = len(set(run.ranks.gather(run.ranks.topology.local_world_size))) == 1
    config = run.config if is_even else with_choices(run.config, {"shard.replicate": "none"})

    def request() -> PlanRequest:
        eval_sequences = sum(batches.epoch.packing.sequences for batches in inputs.held_out.values())
        newest_checkpoint = newest(run.directory.checkpoints)
        return PlanRequest(
            config, recorded_choices(newest_checkpoint), run.ranks.topology, run.ranks.allowed_cores,
            replace(inputs.batches.workload(), eval_sequences=eval_sequences or None),
            vocabulary=inputs.source.config.vocab_size,
            steps_done=0 if newest_checkpoint is None else step_of(newest_checkpoint), memory_bytes=memory_bytes,
        )  # fmt: skip

    # Advice needs a dozen plans, for which all nodes wait some seconds. Later rounds of an elastic run get no advice.
    return plan_together(run.ranks, request, force, not follows_earlier_round(), run.display.warning)


def with_choices_of_plan(run: RunContext, inputs: Inputs, plan: Plan | None) -> tuple[RunContext, Inputs]:
    """Return the run and its inputs with the plan's choice for each setting that is `auto`.

    Without a plan, layers are not compiled, a micro-batch has one sequence, and nodes hold no replicas. The files of
    the run record the choices. A resumed run keeps those of `train`.
    """
    config = with_choices(run.config, NO_CHOICES if plan is None else plan.choices)
    sequences = batch_size(config.train, run.ranks.world_size).micro
    if sequences > 1 and run.config.train.per_device_train_batch_size == "auto":
        run.display.line(f"micro-batches of {sequences} sequences (train.per_device_train_batch_size: auto)")
    return replace(run, config=config), inputs.with_micro_batches(sequences)


def recorded_choices(checkpoint: Path | None) -> dict[str, object]:
    """Return the values with which `checkpoint` was trained, of the settings of `train` that may be `auto`."""
    if checkpoint is None:
        return {}
    train = read_json(checkpoint / STATE)["config"]["train"]
    keys = [key for key in NO_CHOICES if key.startswith("train.")]
    return {key: train.get(key.removeprefix("train."), NO_CHOICES[key]) for key in keys}


def build_model(run: RunContext, inputs: Inputs, plan: Plan | None = None) -> Model:
    """Build the model without weights and the engine that shards it. Collective.

    Without a plan, the engine itself chooses what the planner would choose.
    """
    topology, ledger = run.ranks.topology, run.ledger
    built = meta.build(inputs.source.config, inputs.traits, run.config.adapter, run.config.train.freeze)
    if run.config.train.precision == "bf16":
        _warn_of_bf16(run, built)
    engine_name, engine_type = engine_class(run.config, topology, built.numel, None if plan is None else plan.engine)
    clock = StepClock(lambda: engine.counters().inside_s(), timeline_of(topology.device))
    allocator_cache = None
    if plan is not None and plan.scratch_bytes_per_node:
        allocator_cache = FreeMemoryLimit(plan.allocator_cache_bytes)

    def end_phase(name: str) -> None:
        if allocator_cache is not None:
            allocator_cache.check()
        ledger.mark(f"first {name}", lambda: engine.counters().memory())
        clock.ended(name)

    spec = engine_spec(
        run.config, topology, engine_name, built, PhaseHooks(end_phase, lambda name: ledger.mark(name, {})),
        on_disk=None if plan is None else plan.on_disk, unsharded=SHARDED if plan is None else plan.unsharded,
    )  # fmt: skip
    ledger.offloads |= spec.copies_weights
    attention = attention_on(topology.device, spec.packs, spec.gradient_checkpointing == "selective")
    if attention is not None:
        prove_attention(attention_calls(built.model), attention, spec, topology.device)
    prove(inputs.source.config, built.traits, engine_type, spec, topology)
    # Names and stored forms are read before the engine shards the model.
    names = StoredNames.from_model(built.model)
    published = published_of(built.model, built.tensors) if built.adapter is None else built.adapter.loads
    engine: Engine = engine_type.build(built.model, spec, topology)
    if allocator_cache is not None:  # check before layers and the loss allocate memory
        for layer in decoder_layers(built.model):
            layer.register_forward_pre_hook(allocator_cache.check)
        built.model.get_decoder().register_forward_hook(allocator_cache.check)
    ledger.mark("model built", engine.counters().memory())
    return Model(built, published, names, engine, engine_name, clock, spec.notes, plan)


def _warn_of_bf16(run: RunContext, built: meta.MetaModel) -> None:
    if run.ranks.topology.device == "cpu" and not (cpu := read_cpu()).has_bf16_instructions:
        run.display.warning(
            f"this CPU has no instructions for bf16 ({', '.join(cpu.isa)}): matrix products in bf16 are much slower"
            " than in fp32. Set train.precision=fp32"
        )
    if rounded := sorted(built.exact & built.learned):
        run.display.warning(
            f"{len(rounded)} parameters such as {rounded[0]} are computed in bf16, although transformers keeps fp32:"
            " their master weights and exports are fp32. train.freeze keeps such parameters unchanged"
        )


def files_beside_weights(run: RunContext, inputs: Inputs, model: Model) -> Mapping[str, bytes]:
    """Return the files that checkpoints and exports hold beside the weights, by name."""
    data, source = inputs.data, inputs.source
    ends = answer_ends(data.open_train().values(), inputs.tokenizer, run.config.data.train_on == "all")
    files = model_files(source.config, inputs.tokenizer, source.directory, data.prefix, data.chat_prefix, ends)
    if model.built.adapter is None:
        return files
    return model.built.adapter.files(files, str(run.config.model.path))


def introduce(run: RunContext, inputs: Inputs, model: Model, start: Start, ceiling: Ceiling) -> RunRecord:
    """Print what the run trains, on which data and how, and return these facts for the records. Collective."""
    config, ranks = run.config, run.ranks
    data = header(inputs.batches, inputs.total_steps, inputs.held_out) if ranks.rank == 0 else []
    data += [day_line(inputs.data.day)] if inputs.data.day else []
    samples = first_samples(inputs.batches, inputs.tokenizer, text=True) if ranks.rank == 0 else []
    record = RunRecord(
        run.placement, run.machine, ceiling.flops_per_s, ceiling.is_sure,
        resumed_from=None if start.resumed_from is None else str(start.resumed_from),
        model=model.built.name, parameters=model.built.numel, learned=model.built.learned_numel,
        engine=model.engine_name, plan=run.ledger.plan, data={"summary": data, "samples": samples},
    )  # fmt: skip
    connections = group_lines(ranks, model.engine.transport)
    notes = (*model.notes, *_attention_note(model.built), *torchrun_advice(os.environ, config.checkpoint.grace_s))
    run_summary.begin(run.display, config, record, *data, *connections, *notes)
    return record


def _attention_note(built: meta.MetaModel) -> list[str]:
    if built.traits.packs:
        return []
    return [
        f"attention: each document is a call of its own ({built.traits.attention}), because"
        f" {built.traits.why_unpacked}; short documents cost more than in packed rows"
    ]
