"""Build the model of a resolved run, and the engine that shards it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aliquot.engines.attention_proof import attention_calls, prove_attention
from aliquot.engines.base import Engine, PhaseHooks
from aliquot.engines.engine_plan import SHARDED
from aliquot.engines.select import engine_class, engine_spec
from aliquot.engines.startup_proof import prove
from aliquot.machine.allocator import FreeMemoryLimit
from aliquot.models import meta
from aliquot.models.model_files import model_files
from aliquot.models.stored_weights import Published, StoredNames, published_of
from aliquot.models.structure import decoder_layers
from aliquot.nn.attention.document_attention import attention_on
from aliquot.observe.step_clock import HostMark, StepClock, cuda_mark
from aliquot.run.resolved_run import ResolvedRun
from aliquot.tensor_io.parts import PartStore, SelectedParts

if TYPE_CHECKING:
    from aliquot.run.prepared_run import PreparedRun


@dataclass(frozen=True)
class Model:
    """A model and the engine that holds it."""

    built: meta.MetaModel
    published: tuple[Published, ...] | None  # the stored form of the weights, if it differs from the form in the model
    names: StoredNames
    engine: Engine
    engine_name: str
    clock: StepClock
    notes: tuple[str, ...]  # for the console

    @property
    def saved(self) -> PartStore:
        """The parts that a checkpoint holds: all parts of a model, or only the parts of an adapter."""
        if self.built.adapter is None:
            return self.engine
        return SelectedParts(self.engine, {name for name, _ in self.built.saved})


def build_model(trainer: PreparedRun) -> Model:
    """Build the model without weights and the engine that shards it. Collective.

    Without a plan, the engine itself chooses what the planner would choose.
    """
    run, config, plan = trainer.resolved, trainer.resolved.config, trainer.resolved.plan
    topology, ledger = trainer.ranks.topology, trainer.ledger
    source, train = run.source, config.train
    built = meta.build(source.config, run.traits, config.adapter, train.freeze, train.drops, source.beside_nf4)
    if train.chosen_precision == "bf16" and (rounded := sorted(built.exact & built.learned)):
        trainer.display.warning(
            f"{len(rounded)} parameters such as {rounded[0]} are computed in bf16, although transformers keeps fp32:"
            " their master weights and exports are fp32. train.freeze keeps such parameters unchanged"
        )
    engine_name, engine_type = engine_class(config, topology, built.numel, None if plan is None else plan.engine)
    clock = StepClock(lambda: engine.counters().inside_s(), cuda_mark if topology.device == "cuda" else HostMark)
    allocator_cache = FreeMemoryLimit(plan.allocator_cache_bytes) if plan and plan.scratch_bytes_per_node else None

    def end_phase(name: str) -> None:
        if allocator_cache is not None:
            allocator_cache.check()
        ledger.mark(f"first {name}", lambda: engine.counters().memory())
        clock.ended(name)

    spec = engine_spec(
        config, topology, engine_name, built, PhaseHooks(end_phase, lambda name: ledger.mark(name, {})),
        on_disk=None if plan is None else plan.on_disk, unsharded=SHARDED if plan is None else plan.unsharded,
    )  # fmt: skip
    if plan is not None:
        spec = replace(spec, copied_layers=plan.copied_layers)
    if trainer.has_own_loop:
        spec = replace(spec, micro_batches=None)
    ledger.offloads |= spec.copies_weights
    attention = attention_on(topology.device, spec.packs, spec.gradient_checkpointing == "selective")
    if attention is not None:
        prove_attention(attention_calls(built.model), attention, spec, topology.device)
    prove(run.source.config, built.traits, engine_type, spec, topology)
    # Names and stored forms are read before the engine shards the model.
    names = StoredNames.from_model(built.model)
    published = published_of(built.model, built.tensors) if built.adapter is None else built.adapter.loads
    engine: Engine = engine_type.build(built.model, spec, topology)
    if allocator_cache is not None:  # check before layers and the loss allocate memory
        for layer in decoder_layers(built.model):
            layer.register_forward_pre_hook(allocator_cache.check)
        built.model.get_decoder().register_forward_hook(allocator_cache.check)
    ledger.mark("model built", engine.counters().memory())
    unpacked = (
        f"attention: each document is a call of its own ({built.traits.attention}), because"
        f" {built.traits.why_unpacked}; short documents cost more than in packed rows"
    )
    notes = spec.notes if built.traits.packs else (*spec.notes, unpacked)
    return Model(built, published, names, engine, engine_name, clock, notes)


def files_beside_weights(run: ResolvedRun, model: Model) -> Mapping[str, bytes]:
    """Return the files that checkpoints and exports hold beside the weights, by name."""
    data, source = run.data, run.source
    files = model_files(source.config, run.tokenizer, source.directory, data.prefix, data.chat_prefix, run.answer_ends)
    if model.built.adapter is None:
        return files
    return model.built.adapter.files(files, str(run.config.model.path))
