"""The host engine: its state is in host memory, and it communicates between hosts once per optimizer step.

On CPUs, all ranks of a NUMA node compute from one copy of the weights in shared memory. On GPUs, each rank computes
from a copy of these weights on its GPU (compute_device.py).

Forward and backward passes gather no weights. Master weights, moments and gradient sums are sharded over all ranks. The
ranks of a host sum gradients in shared memory, and hosts exchange the sums once per optimizer step. A step has this
order:

1. Each micro-batch runs a forward and a backward pass. Ranks stage gradients in shared memory as soon as autograd has
   computed them, and the owner of a range sums the range's gradients (host_gradients.py). With several hosts, ranks
   send complete sums to the owner on another host during the last micro-batch (gradient_exchange.py).
2. When the sums of all hosts are complete, the ranks compute the global gradient norm. From then on, no rank computes
   from the weights. Owners clip, run AdamW and write the shared weights. After a barrier, all ranks may read
   the new weights.
3. With several hosts, GPUs, or optimizer state on disk, there is no such barrier. Instead, each layer waits for its own
   updated weights (weight_publication.py).

host_builder.py constructs the components of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.ranks import gather
from aliquot.distributed.topology import Topology
from aliquot.engines.base import Counters, EngineSpec
from aliquot.engines.global_norm import global_norm
from aliquot.engines.host.host_builder import HostComponents, parameter_index
from aliquot.engines.host.host_gradients import HostGradients
from aliquot.engines.host.layer_hooks import LayerHooks
from aliquot.engines.model_engine import ModelEngine
from aliquot.engines.model_kernels import prepare_layers
from aliquot.machine.cpu import numa_nodes
from aliquot.models import model_calls
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.attention.document_attention import Documents
from aliquot.nn.experts.expert_modules import experts_weights, send_to
from aliquot.nn.head_loss import Chosen
from aliquot.optim.adamw import FlatShard
from aliquot.tensor_io.parts import KINDS, Part

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class HostEngine(ModelEngine):
    """See engines/base.py for the contract of each method."""

    _gathers = False

    def __init__(self, model: nn.Module, spec: EngineSpec, hosts: Hosts, topology: Topology) -> None:
        """Build the engine around a model on the meta device. Collective."""
        super().__init__(model, spec, topology)
        self._hosts = hosts
        self._rank = topology.rank

        self._components = HostComponents(model, spec, hosts, topology)
        self._pending = [
            pending for pending in (self._components.publication, self._components.overlapped) if pending is not None
        ]
        self._trainable_numel = sum(weight.trainable_numel(self._rank) for weight in self._components.weights)
        self._index = {weight.name: index for index, weight in enumerate(self._components.weights)}
        self._used_first = self._components.forward_order.first if spec.packs else self._components.update_order

        # Hooks run in the order of registration: a layer first waits for its updated weights, then for its disk reads.
        self._hooks = [
            *self._gradient_hooks(),
            *(
                layer.register_forward_pre_hook(partial(self._wait_usable, indices))
                for layer, indices in (self._components.forward_order.layers if spec.packs else ())
            ),
        ]
        self._absent = [
            layers for layers in (self._components.streamed, self._components.compressed) if layers is not None
        ]
        self._layers_in_use: Sequence[LayerHooks] = (
            self._absent if self._components.device_weights is None else [self._components.device_weights]
        )
        for layers in self._layers_in_use:
            layers.attach()
        # If the model is called once per document, a weight gets several gradients, and autograd must sum them.
        self._experts = experts_weights(model) if spec.packs and self._components.device_weights is None else []
        for weight in self._experts:
            send_to(weight, StagedExperts(self._components.gradients, parameter_index(model, weight)))

        self._steps = self._updates = 0
        self._is_last = True
        self._looked_up: tuple[Tensor, Tensor] | None = None  # the token ids of a micro-batch, and their embeddings

    @classmethod
    def build(cls, meta: nn.Module, spec: EngineSpec, topology: Topology) -> Self:
        node = numa_nodes(Path("/")).get(topology.cores[0], 0) if topology.cores else 0
        prepare_layers(meta, spec, topology)
        return cls(meta, spec, Hosts.join(topology.rank, node, gather), topology)

    def _gradient_hooks(self) -> Iterator[RemovableHandle]:
        """Register hooks that stage each gradient as soon as autograd has completed it, for tied weights only once."""

        def stage(index: int, parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._components.staging.stage(index, parameter.grad)
            parameter.grad = None

        for index, parameter in enumerate(self._model.parameters()):
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(partial(stage, index))  # type: ignore[no-untyped-call]

    @property
    def transport(self) -> str:
        return self._hosts.transport

    def parts(self) -> Sequence[Part]:
        return [
            Part(weight.name, weight.shape, kind, *weight.ranges[self._rank])
            for kind in KINDS
            for weight in self._components.weights
            if (weight.shard_numel if kind == "weight" else weight.trainable_numel)(self._rank)
        ]

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._join_update()
        self._components.states.load(self._index[part.name], part.kind, start - part.start, out)

    def write(self, part: Part, start: int, values: Tensor) -> None:
        self._components.states.store(self._index[part.name], part.kind, start - part.start, values)

    def view(self, part: Part) -> Tensor | None:
        self._join_update()
        return self._components.states.view(self._index[part.name], part.kind)

    def ready(self) -> None:
        parts = self._components
        parts.states.put_away()
        if parts.streamed is not None:
            parts.streamed.evict_all()
        self._publish_all()
        if parts.compressed is not None:
            parts.compressed.finish()
        if parts.device_weights is not None:
            parts.device_weights.outdate(parts.forward_order.all)
            parts.device_weights.refresh(parts.forward_order.all)
        parts.gradients.check()
        parts.shared.check_published(self._rank, {index for layers in self._absent for index in layers.weights})

    def resume_at(self, steps: int) -> None:
        self._components.optimizer.steps = self._steps = steps

    def backward(self, batch: MicroBatch | None, scale: float, last: bool) -> SupportsFloat:
        self._wait_usable(self._used_first)
        self._components.gradients.begin_micro_batch(self._steps, last)
        self._is_last = last
        return self._train(batch, scale)

    def _run_backward(self, scaled: Tensor) -> None:
        # Layers that the model skipped have not waited for their weights. Hosts must exchange all weights before
        # gradients.
        self._wait_all_usable()
        if scaled.requires_grad:  # otherwise only the head is trainable, and its gradient is staged already
            super()._run_backward(scaled)
        self._components.staging.end_micro_batch()
        if self._looked_up is not None:
            self._add_embedding(*self._looked_up)
            self._looked_up = None
        if self._is_last and self._hosts.wire is not None:
            # All ranks must do this together, because a rank that waits for buffers may wait for others to receive.
            self._components.gradients.finish()
            self._components.gradients.exchange()

    def evaluate(self, batch: MicroBatch | None) -> Tensor:
        self._wait_all_usable()
        if batch is None:
            for layers in self._layers_in_use:
                layers.pass_through()
            return torch.zeros(())
        return super().evaluate(batch)

    def _fused_loss(
        self, ids: Tensor, positions: Tensor, labels: Tensor, documents: Documents, scale: float, chosen: Chosen
    ) -> tuple[Tensor, Tensor]:
        tokens, training = ids, torch.is_grad_enabled()
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        if training and self._components.cuts_look_up:
            # Cut the autograd graph at the embedding, so that its gradient is one row per token, not a whole table.
            with torch.no_grad():
                tokens = F.embedding(ids, self._model.get_input_embeddings().weight)  # type: ignore[operator]
            self._looked_up = (ids, tokens.requires_grad_())
        # Allocate the logits before layers save activations, while the heap has a free block of this size.
        room = self._head_loss.room(chosen, labels, head.weight) if training else None
        hidden = model_calls.hidden_states(self._model, tokens, positions, documents)
        self._wait_all_usable()
        sink = None
        if training and head.weight.requires_grad:
            sink = self._components.staging.head_rows(parameter_index(self._model, head.weight))
        return self._head_loss(hidden, head.weight, labels, scale, sink, chosen, room)

    def _add_embedding(self, ids: Tensor, rows: Tensor) -> None:
        embedding, gradient = self._model.get_input_embeddings(), rows.grad  # type: ignore[operator]
        assert gradient is not None
        if embedding.padding_idx is not None:  # like nn.Embedding, do not train the padding row
            used = ids != embedding.padding_idx
            ids, gradient = ids[used], gradient[used]
        self._components.staging.add_rows(parameter_index(self._model, embedding.weight), ids, gradient)

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        if self._hosts.wire is None:
            # Once per optimizer step instead of per micro-batch, because all ranks wait for each other here.
            self._components.gradients.finish()
        # In this collective, all ranks wait for each other. Afterwards, no rank computes from the old weights.
        with self._hosts.name_lost_host():
            norm = global_norm(self._components.sums.squares())
        if self._components.streamed is not None:
            self._components.streamed.evict_all()
        if math.isfinite(norm):
            update = partial(
                self._components.optimizer.step, self._shards_to_update(), learning_rate, norm, max_grad_norm
            )
            self._steps += 1
            self._updates += 1
            if self._components.device_weights is not None:
                self._components.device_weights.outdate(self._components.update_order)
            if self._components.overlapped is not None:
                self._components.overlapped.begin(update)
                return norm
            if self._components.publication is not None:
                self._components.publication.begin(
                    self._components.update_order, raw=self._spec.compute_dtype == torch.float32
                )
            update()
        if self._components.publication is None:
            self._hosts.peers.barrier()
        return norm

    def _shards_to_update(self) -> Iterator[FlatShard]:
        """Yield every shard to update, and publish each weight after the last of its shards is updated."""
        shards = self._components.states.to_update(self._components.update_order)
        for index, shards_of_weight in groupby(shards, key=itemgetter(0)):
            if self._components.publication is not None:
                self._components.publication.before_update(index)
            for _, shard in shards_of_weight:
                yield shard
            for pending in self._pending:
                pending.mark_updated(index)

    def _publish_all(self) -> None:
        """Copy the weights from their owners to every host, so that all ranks may read the weights."""
        if self._components.publication is None:
            self._hosts.peers.barrier()
            return
        absent = {index for layers in self._absent for index in layers.weights}
        weights = [index for index in self._components.forward_order.all if index not in absent]
        self._components.publication.begin(weights, raw=True)
        for index in weights:
            self._components.publication.mark_updated(index)
        self._components.publication.wait_usable(weights)

    def _wait_all_usable(self) -> None:
        self._wait_usable(self._components.update_order)

    def _wait_usable(self, indices: Sequence[int], *_: Any) -> None:
        """Wait until this rank may compute with the updated values of these weights. Layers call this as a hook."""
        for pending in self._pending:
            pending.wait_usable(indices)
        if self._components.device_weights is not None:
            self._components.device_weights.refresh(indices)

    def _join_update(self) -> None:
        """Wait until the last update of this rank's ranges is complete. May be called in any thread."""
        if self._components.overlapped is not None:
            self._components.overlapped.join()

    def counters(self) -> Counters:
        wire, scratch = self._hosts.wire, None if self._components.disk is None else self._components.disk.scratch
        moments_bytes, ring = self._components.states.moments_bytes, self._components.gradients.ring
        # Gradients are read twice, for the norm and for the update; moments and master weights are read and written.
        update_bytes = 2 * self._components.sums.size_bytes + 2 * moments_bytes + 2 * 4 * self._trainable_numel
        absent_bytes = 0 if self._components.streamed is None else self._components.streamed.absent_bytes
        compressed = self._components.compressed
        shared_bytes = self._components.shared.size_bytes + (0 if compressed is None else compressed.size_bytes)
        reduce_s, wait_s = None, 0.0  # a GPU computes while its rank reduces and waits
        if self._components.device_weights is None:
            reduce_s = ring.reading_s + (wire.waited_s if wire is not None else 0.0)
            wait_s = self._hosts.peers.waited_s + sum(pending.waited_s for pending in self._pending)
        return Counters(
            weights_bytes=self._components.states.low_bytes,
            gradients_bytes=self._components.sums.size_bytes,
            moments_bytes=moments_bytes,
            gathered_bytes=0 if self._components.device_weights is None else self._components.device_weights.size_bytes,
            activations_bytes=self._activations.peak_bytes,
            wire_bytes=wire.sent_bytes if wire is not None else 0,
            shared_bytes=shared_bytes // self._hosts.peers.size + ring.size_bytes - absent_bytes,
            staged_bytes=self._components.gradients.staged_bytes,
            moved_bytes=self._components.gradients.moved_bytes + self._updates * update_bytes,
            reduce_s=reduce_s,
            wait_s=wait_s,
            disk_read_bytes=0 if scratch is None else scratch.read_bytes,
            disk_written_bytes=0 if scratch is None else scratch.written_bytes,
        )

    def generate(self, ids: Tensor, **options: object) -> Tensor:
        self._wait_all_usable()
        return super().generate(ids, **options)

    def close(self) -> None:
        self._wait_all_usable()
        if self._components.overlapped is not None:
            self._components.overlapped.close()
        if self._hosts.wire is not None:
            self._hosts.wire.close()
        # Engine, weights and hooks form a reference cycle through autograd objects that Python's collector cannot see.
        for hook in self._hooks:
            hook.remove()
        for weight in self._experts:
            send_to(weight, None)
        for layers in self._layers_in_use:
            layers.close()
        if self._components.disk is not None:
            self._components.disk.scratch.close()
        # A rank that still waits for weights would take the end of a connection for the end of another rank.
        self._hosts.peers.barrier()
        self._hosts.peers.close()


@dataclass(frozen=True)
class StagedExperts:
    """Stage the gradient of a weight [experts, ...] in blocks of experts (see nn/experts/expert_modules.py)."""

    gradients: HostGradients
    index: int

    def begin(self) -> Iterable[tuple[int, int]] | None:
        return pairwise(self.gradients.row_edges(self.index)) if self.gradients.take_turn(self.index) else None

    def buffer(self, first: int, last: int) -> Tensor:
        return self.gradients.row_buffer(self.index, first, last)

    def publish(self, present: bool) -> None:
        self.gradients.publish(present)

    def whole(self, gradient: Tensor) -> None:
        self.gradients.stage(self.index, gradient)
