"""What comes before the first step, in this order: read data, foresee, build and fill the model, say what it is."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.directories import complete_directories, directory_of, newest, step_of
from aliquot.checkpoint.evaluation_history import EvaluationHistory
from aliquot.checkpoint.remote_download import fetch_best, fetch_newer, fetch_replacement
from aliquot.checkpoint.resume import changed_settings, check_continuity, check_model, is_from_another_run, resume
from aliquot.config.schema import RunConfig
from aliquot.core.on_rank_0 import gather_results, run_on_all_ranks, run_on_rank_0
from aliquot.data.batch_size import batch_size
from aliquot.data.batches import Batches, Position
from aliquot.data.data_summary import day_line, examples, header, warnings
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import prepare_together
from aliquot.data.tokenizer import largest_token
from aliquot.distributed.config_consistency import check_same
from aliquot.distributed.launcher import torchrun_advice
from aliquot.distributed.leader_lease import goes_on
from aliquot.distributed.ranks import group_lines
from aliquot.engines.base import Engine
from aliquot.engines.select import engine_class, engine_spec
from aliquot.engines.startup_proof import prove
from aliquot.engines.state_placement import SHARDED
from aliquot.machine.allocator import FreeMemoryLimit, release_free_memory
from aliquot.machine.cpu import read_cpu
from aliquot.machine.matmul import caches_large_kernels
from aliquot.machine.memory import memory_limit
from aliquot.models import initialize, meta
from aliquot.models.load import load_adapter, load_weights
from aliquot.models.model_identity import computed, fingerprint
from aliquot.models.published import published_of
from aliquot.models.source import ModelSource, import_models, resolve
from aliquot.models.stored_weights import StoredNames
from aliquot.models.structure import decoder_layers
from aliquot.models.traits import Traits, traits
from aliquot.observe import run_summary
from aliquot.observe.step_clock import StepClock, timeline_of
from aliquot.optim.schedule import Schedule
from aliquot.planner.compute_ceiling import ceiling
from aliquot.planner.plan import Plan
from aliquot.planner.preflight import PlanRequest, plan_run
from aliquot.run.data_sanity import doubts
from aliquot.run.run_context import Attempt, Inputs, Model, Start

_SHOWN_CHARACTERS = 400  # of a stretch of an example


def check_directory(run: Attempt) -> None:
    """Whether the run directory is one for all ranks: those of one host may be in containers with file systems of their
    own. Collective; raises NodesDifferError on every rank."""
    if run.ranks.world_size == 1:
        return
    name = run_on_rank_0(run.ranks, run.directory.show)
    try:
        gather_results(run.ranks, lambda: run.directory.find(name) if run.ranks.rank > 0 else None)
    finally:
        if run.ranks.rank == 0:
            run.directory.hide(name)


def read_inputs(run: Attempt) -> Inputs:
    config, ranks = run.config, run.ranks
    import_models()
    run_on_rank_0(ranks, lambda: bool(resolve(config.model)))  # from the hub only rank 0 downloads
    source = run_on_all_ranks(ranks, lambda: _source(config))
    beside, largest = source.config.to_dict(), source.largest_vocabulary
    added = config.model.add_tokens, config.model.add_special_tokens
    learned = None if config.adapter is None else config.adapter.directory
    told = run.display.progress
    day = config.data.chat_template_date or date.fromisoformat(run_on_rank_0(ranks, lambda: str(run.directory.day())))
    section = config.data.model_copy(update={"chat_template_date": day})
    data = prepare_together(section, source.directory, largest, ranks, told, beside, *added, learned)

    def adopted() -> Any:
        tokenizer = data.load_tokenizer()
        source.adopt_tokenizer(tokenizer, largest_token(tokenizer), any(added))
        source.check_length(config.data.sequence_length)  # its padding token may have become another
        return tokenizer

    tokenizer = run_on_all_ranks(ranks, adopted)
    size = batch_size(config.train, ranks.world_size)
    epochs = None if config.train.max_steps else config.train.num_train_epochs
    found = Traits(**run_on_rank_0(ranks, lambda: vars(traits(source.config, config.data.sequence_length))))
    fills_up = caches_large_kernels(ranks.topology.device, config.train.precision)

    def packed() -> tuple[Batches, int, dict[str, EvalBatches]]:
        batches = Batches.of(data, config.data, config.run.seed, size, epochs, found.packs, fills_up)
        held_out = EvalBatches.of(data, config.data, size, found.packs, fills_up)
        return batches, batches.total_steps(config.train.max_steps), held_out

    batches, total_steps, held_out = run_on_all_ranks(ranks, packed)
    schedule = Schedule.of(config.train, total_steps)
    return Inputs(source, found, data, tokenizer, size, batches, held_out, total_steps, schedule)


def _source(config: RunConfig) -> ModelSource:
    found = resolve(config.model)
    found.check_length(config.data.sequence_length)  # before a corpus is tokenised for nothing
    return found


def check_inputs(run: Attempt, inputs: Inputs) -> None:
    """Whether data and model are the same on all ranks, wherever they lie. Collective; raises NodesDifferError."""
    adapter = None if run.config.adapter is None else run.config.adapter.directory

    def told() -> dict[str, Any]:
        data, config = inputs.data, inputs.source.config.to_dict()
        return {
            **{f"{name or 'data'} (hash of the tokens)": Path(store).name for name, store in data.train.items()},
            **{f"held-out {name or 'data'} (hash of the tokens)": Path(at).name for name, at in data.eval.items()},
            "tokenizer (hash of its files)": Path(data.tokenizer).name,
            "model.config": {key: value for key, value in config.items() if not key.startswith("_")},
            "weights (hash of samples)": inputs.source.fingerprint,
            "adapter (hash of samples)": None if adapter is None else fingerprint(adapter),
        }

    check_same(run.ranks, told)


def foresee(run: Attempt, inputs: Inputs, force: bool) -> Plan | None:
    """Plan the run on rank 0 and return the plan on every rank; None if no plan can be made. Collective."""
    found = ceiling(run.ranks, run.config.train.precision)  # and all that plans go by
    run.about.update(ceiling_flops_per_s=found.flops_per_s, ceiling_is_sure=found.is_sure)

    least = min(run.ranks.gather(memory_limit()))

    def plan() -> dict[str, Any] | None:
        evaluated = sum(batches.epoch.packing.sequences for batches in inputs.held_out.values())
        workload = replace(inputs.batches.workload(), eval_sequences=evaluated or None)
        # Advice takes a dozen plans, each for as many nodes as there are: seconds in which all of them stand still.
        advise = not goes_on()
        saved = newest(run.directory.checkpoints)
        done = 0 if saved is None else step_of(saved)
        request = PlanRequest(
            run.config, run.ranks.topology, run.ranks.allowed_cores, workload,
            vocabulary=inputs.source.config.vocab_size, steps_done=done, memory_bytes=least,
        )  # fmt: skip
        made = plan_run(request, force, advise, run.display.warning)
        return None if made is None else made.as_json()

    values = run_on_rank_0(run.ranks, plan)
    return None if values is None else Plan.from_json(values)


def build_model(run: Attempt, inputs: Inputs, plan: Plan | None = None) -> Model:
    topology, ledger = run.ranks.topology, run.ledger
    if (
        run.config.train.precision == "bf16"
        and topology.device == "cpu"
        and not (cpu := read_cpu()).has_bf16_instructions
    ):
        run.display.warning(
            f"this CPU has no instructions for bf16 ({', '.join(cpu.isa)}): products in it are much slower than in"
            " fp32; set train.precision=fp32"
        )
    built = meta.build(inputs.source.config, inputs.traits, run.config.adapter, run.config.train.freeze)
    if run.config.train.precision == "bf16" and (rounded := sorted(built.exact & built.learned)):
        run.display.warning(
            f"{rounded[0]} and its like ({len(rounded)}) are computed with in bf16, where transformers keeps fp32;"
            " masters and exports of them are fp32, and train.freeze would keep them as they are"
        )
    engine_name, engine_type = engine_class(run.config, topology, built.numel, None if plan is None else plan.engine)
    clock = StepClock(lambda: engine.counters().inside_s(), timeline_of(topology.device))

    kept = None
    if plan is not None and plan.scratch_bytes_per_node:
        kept = FreeMemoryLimit(plan.allocator_cache_bytes)

    def phase_ended(name: str) -> None:
        if kept is not None:
            kept.check()
        ledger.mark(f"first {name}", lambda: engine.counters().memory())
        clock.ended(name)

    spec = engine_spec(
        run.config, topology, engine_name, built, phase_ended, lambda name: ledger.mark(name, {}),
        on_disk=None if plan is None else plan.on_disk, unsharded=SHARDED if plan is None else plan.unsharded,
    )  # fmt: skip
    if engine_name != "deepspeed":  # which can be started once in a process
        prove(inputs.source.config, built.traits, engine_type, spec, topology)
    # Before the engine shards it.
    names = StoredNames.of_model(built.model)
    published = published_of(built.model, built.tensors) if built.adapter is None else built.adapter.loads
    engine: Engine = engine_type.build(built.model, spec, topology)
    if kept is not None:  # where a layer is about to ask for memory, or the loss for its logits
        for layer in decoder_layers(built.model):
            layer.register_forward_pre_hook(kept.check)
        built.model.get_decoder().register_forward_hook(kept.check)
    ledger.mark("model built", engine.counters().memory())
    return Model(built, published, names, engine, engine_name, clock, spec.notes, plan)


def _load_source(run: Attempt, inputs: Inputs, model: Model) -> None:
    config, built = run.config, model.built
    assert inputs.source.directory is not None
    may_grow = built.vocabulary if config.model.add_tokens or config.model.add_special_tokens else ()
    load_weights(
        model.engine, inputs.source.directory, built.tensors, built.tied, run.ranks,
        published=model.published, may_grow=may_grow, seed=config.run.seed, names=model.names,
        tell=run.display.line,
    )  # fmt: skip


def fill_model(run: Attempt, inputs: Inputs, model: Model) -> Start:
    """With a checkpoint of this run, with the source's weights, or from scratch."""
    config, engine, built = run.config, model.engine, model.built
    start = Start()
    root = run.directory.checkpoints
    if built.adapter is not None:
        _load_source(run, inputs, model)
    told = run.display.warning
    fetch_newer(config.checkpoint, config.mirror, root, run.ranks, told)
    settings = config.model_dump(mode="json", by_alias=True)
    resumed = resume(
        config.checkpoint, root, model.saved, CheckpointSpec(built.saved, trained=built.learned), run.ranks, settings,
        lambda damaged: fetch_replacement(config.checkpoint, config.mirror, damaged, run.ranks, told),
    )  # fmt: skip
    if resumed is not None:
        where, state = resumed
        check_continuity(state, inputs.determinants(config), where)
        if (other := check_model(state, computed(inputs.source.config), where)) is not None:
            told(other)
        engine.restored(state["step"])
        position, ends = Position(**state["position"]), tuple(state.get("ends", ()))
        start = Start(state["step"], state["tokens"], where, position, ends, _evaluations(run, inputs, where, state))
        run.display.line(f"resuming from {where}")
        if (before := state.get("engine")) not in (None, model.engine_name):
            told(
                f"the engine is {model.engine_name}, but this checkpoint was saved by {before}: losses agree up to"
                f" rounding, not bit for bit. Set shard.engine={before} to continue exactly"
            )
        for change in changed_settings(state, settings):
            run.display.line(f"changed since: {change}")
    elif config.adapter is not None and (learned := config.adapter.directory) is not None:
        assert built.adapter is not None
        load_adapter(model.saved, learned, built.adapter.saves, inputs.source.fingerprint, run.ranks)
    elif built.adapter is not None:
        initialize.initialize(engine, built.fills, config.run.seed)
    elif inputs.source.directory is not None:
        _load_source(run, inputs, model)
    else:
        initialize.initialize(engine, built.fills, config.run.seed)
    run.ledger.mark("weights loaded", engine.counters().memory())
    release_free_memory()  # whole tensors were drawn, of which a rank has kept its rows
    return start


def _evaluations(run: Attempt, inputs: Inputs, where: Path, state: dict[str, Any]) -> EvaluationHistory:
    """Those of the checkpoint's state, without the best one where it is not there any more; none of another run, and
    none on other data."""
    root, mirror, found = run.directory.checkpoints, run.config.mirror, EvaluationHistory.from_state(state)
    if is_from_another_run(run.config.checkpoint, mirror, root, where):
        return EvaluationHistory()
    if None not in (before := state.get("evaluated"), now := inputs.evaluated) and before != now:
        run.display.warning("other data are evaluated on than before: what was best is forgotten")
        return EvaluationHistory()
    if not run.config.checkpoint.best or found.best_step is None:
        return found
    best = directory_of(root, found.best_step)
    if run_on_rank_0(run.ranks, lambda: best in complete_directories(root)):
        return found
    if fetch_best(mirror, best, run.ranks, run.display.warning):
        return found
    run.display.warning(f"the checkpoint of step {found.best_step}, which evaluated best, is not here any more")
    return replace(found, best_step=None, best_loss=math.inf)


def complete(run: Attempt, inputs: Inputs, start: Start) -> str | None:
    """What a person does about a run that has no step left; None: it has."""
    train = run.config.train
    if start.evaluations.exhausts(train.early_stopping_patience):
        return f"it stopped early, {start.evaluations.summary()}; raise train.early_stopping_patience"
    if start.step < inputs.total_steps:
        return None
    return f"raise {'train.max_steps' if train.max_steps else 'train.num_train_epochs'}"


def introduce(run: Attempt, inputs: Inputs, model: Model, start: Start) -> None:
    """Say what is trained on what and how, and keep it for the records."""
    config, ranks = run.config, run.ranks
    run.about.update(
        resumed_from=None if start.resumed_from is None else str(start.resumed_from),
        model=model.built.name,
        parameters=model.built.numel,
        learned=model.built.learned_numel,
        engine=model.engine_name,
        plan=run.ledger.plan,
    )
    connections = group_lines(ranks, model.engine.transport)
    notes = (*model.notes, *_a_call_each(model.built), *torchrun_advice(os.environ, config.checkpoint.grace_s))
    data = header(inputs.batches, inputs.total_steps, inputs.held_out) if ranks.rank == 0 else []
    data += [day_line(inputs.data.day)] if inputs.data.day else []
    run_summary.begin(run.display, config, run.about, *data, *connections, *notes)
    if start.step == 0:
        run_on_rank_0(ranks, lambda: _show_data(run, inputs))


def _show_data(run: Attempt, inputs: Inputs) -> None:
    """Once in a run: what is learned of the first examples, where that is not all of them, and what may be wrong."""
    for stream in inputs.batches.streams:
        for line in examples(stream.source, inputs.tokenizer, _SHOWN_CHARACTERS):
            run.display.line(line)
    for text in warnings(inputs.batches, inputs.total_steps, run.config.train.max_steps is not None):
        run.display.warning(text)


def check_beginning(run: Attempt, inputs: Inputs, model: Model) -> None:
    batch = inputs.batches.step_batch(0, run.ranks.rank, run.ranks.world_size).micro_batches[0]
    vocabulary = inputs.source.config.get_text_config(decoder=True).vocab_size
    answers = {stream.source.store.mask is not None for stream in inputs.batches.streams}
    prefix = inputs.data.chat_prefix if answers == {True} else inputs.data.prefix  # of a mixture ranks see either
    told = doubts(model.engine, batch, prefix, inputs.tokenizer, vocabulary, run.ranks)
    if told is not None:
        run.display.warning(told)


def _a_call_each(built: meta.MetaModel) -> list[str]:
    if built.traits.packs:
        return []
    return [
        f"attention: each document is a call of its own ({built.traits.attention}), because {built.traits.why_alone};"
        " short documents cost more than in packed rows"
    ]
