"""The host engine: on CPU, one copy of the weights per NUMA node in shared memory, from which all its ranks compute.

Forward and backward gather nothing. Master weights, moments and gradient sums are sharded over all ranks; gradients are
summed in shared memory, and between hosts once per optimizer step. The order of a step:

each micro-batch: forward, backward; every gradient is staged as it arises and summed by its owner   (host_gradients.py)
    between hosts, of the last: sums that are complete go to their owner on another host          (gradient_exchange.py)
step: sums complete, of all hosts -> norm, which all ranks wait for: nobody computes any more -> clip, AdamW, owners
    write the shared weights -> barrier: the new weights may be read
    between hosts instead of it: a layer that is to be used waits for its own new weights (weight_publication.py)
    with states on disk, too, which come and go while the layers before it compute (weight_publication.py)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.json_values import gather
from aliquot.distributed.topology import Topology
from aliquot.engines.activation_meter import SavedBytes
from aliquot.engines.base import Counters, EngineSpec, StepResult
from aliquot.engines.global_norm import global_norm
from aliquot.engines.host.expert_gradients import RingGradients
from aliquot.engines.host.gradient_order import GradientOrder
from aliquot.engines.host.host_check import check_published, check_sums
from aliquot.engines.host.host_disk import HostDisk
from aliquot.engines.host.host_gradients import HostGradients
from aliquot.engines.host.host_states import HostStates
from aliquot.engines.host.host_sums import HostSums
from aliquot.engines.host.shared_weights import SharedWeights, Weight
from aliquot.engines.host.streamed_layers import Layers, StreamedLayers, layers_on_disk
from aliquot.engines.host.weight_publication import ForwardOrder, LateUpdate, Publication
from aliquot.engines.model_kernels import compile_or_copy, meet_kernels
from aliquot.machine.cpu import numa_nodes
from aliquot.machine.matmul import copies_transposed
from aliquot.models import model_calls, recompute
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.attention.base import Documents
from aliquot.nn.attention.document_attention import attention_on
from aliquot.nn.experts.expert_modules import experts_weights, send_to
from aliquot.nn.loss.base import GradientRows
from aliquot.nn.loss.head_loss import choose, head_loss_on
from aliquot.optim.adamw import BlockedAdamW, FlatShard
from aliquot.optim.sizes import update_block
from aliquot.tensor_io.parts import KINDS, Part, row_ranges

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class HostEngine:
    """See engines/base.py for the contract of each method."""

    def __init__(self, model: nn.Module, spec: EngineSpec, hosts: Hosts, topology: Topology) -> None:
        self._model = model
        self._spec = spec
        self._hosts = hosts
        self._rank = topology.rank
        self._compute = spec.compute_dtype
        self._weights = [
            Weight(
                name,
                tuple(each.shape),
                row_ranges(tuple(each.shape), topology.world_size),
                each.requires_grad,
                torch.float32 if name in spec.exact else self._compute,
            )
            for name, each in model.named_parameters()
        ]
        self._index = {weight.name: index for index, weight in enumerate(self._weights)}
        streamed = layers_on_disk(model, spec, several_hosts=hosts.wire is not None)
        self._shared = SharedWeights(hosts, self._weights, touch=not streamed)
        self._shared.place(model)
        kept = torch.float32 if spec.optimizer_states == "fp32" else torch.bfloat16
        embedding = cast(nn.Parameter, cast(nn.Module, model.get_input_embeddings()).weight)  # type: ignore[operator]
        self._cuts_look_up = spec.looks_up and spec.fused_loss and embedding.requires_grad
        states, owners = spec.optimizer_states, hosts.counterparts
        self._disk = None
        on_disk = frozenset(index for _, indices in streamed for index in indices)
        if spec.on_disk:
            of_rows, splits = self._index_of(embedding), self._compute == torch.bfloat16
            places = (self._weights, of_rows, owners, hosts.own, states, splits, kept.itemsize)
            self._disk = HostDisk(spec.offload_directory, spec.on_disk, *places, on_disk)
        head = cast(nn.Parameter, model.get_output_embeddings().weight) if spec.fused_loss else None  # type: ignore[operator]
        order = GradientOrder(model, head, embedding if self._cuts_look_up else None, spec.packs)
        self._sums = HostSums(
            self._weights, owners, hosts.own, kept, states, self._disk,
            sent_dtype=torch.bfloat16 if spec.reduce_dtype == "bf16" else kept,
            passing=order.dense_once if spec.micro_batches == 1 else (),
        )  # fmt: skip
        width = embedding.shape[1] if self._cuts_look_up else 1
        self._gradients = HostGradients(
            hosts, self._weights, self._sums, order.by_autograd, self._compute, spec.micro_batch_tokens, width,
            order.head, order.looked_up,
        )  # fmt: skip
        owned = [self._shared.owned(index, self._rank) for index in range(len(self._weights))]
        compiled = spec.compile == "layers"
        self._states = HostStates(owned, self._sums, states, self._disk, on_disk, compiled)
        self._optimizer = BlockedAdamW(
            betas=(spec.adam_beta1, spec.adam_beta2),
            epsilon=spec.adam_epsilon,
            weight_decay=spec.weight_decay,
            frugal=states != "fp32",
            longest=max(update_block(states, own.row_numel) for own in owned if own.learns),
            compiled=compiled,
        )
        self._learned_numel = sum(own.numel for own in owned if own.learns)
        self._hooks = list(self._listen())
        wanted = ForwardOrder(model, head)
        self._order = self._states.order(wanted.all)  # of what learns
        self._all_wanted = wanted.all
        serve = self._gradients.ring.read_published
        self._publication = self._late = None
        if hosts.wire is not None:
            of_hosts = (hosts.wire, hosts.peers, owners)
            self._publication = Publication(*of_hosts, self._weights, self._shared.ranges, serve)
        elif self._states.on_disk:
            self._late = LateUpdate(hosts.peers, self._order, serve)
        self._wanted_first = self._order
        if spec.packs:
            self._wanted_first = wanted.first
            self._hooks += self._before_layers(wanted.layers)
        self._layers = None
        if self._disk is not None and streamed:
            own = None if self._late is None else self._late.need_own
            self._layers = StreamedLayers(hosts.peers, serve, self._disk, owned, streamed, own)
        # Where a document is a call, a weight has several gradients, which autograd sums.
        self._experts = experts_weights(model) if spec.packs else []
        for of_experts in self._experts:
            index = self._index_of(of_experts)
            send_to(of_experts, RingGradients(self._gradients, index, self._weights[index].shape))
        self._attention = attention_on("cpu", spec.packs, spec.gradient_checkpointing == "selective")
        self._head_loss = head_loss_on("cpu", copies_transposed=copies_transposed("cpu", spec.compute_dtype))
        self._steps = self._updates = 0
        self._activations = SavedBytes(spec.gradient_checkpointing)

    @classmethod
    def build(cls, meta: nn.Module, spec: EngineSpec, topology: Topology) -> Self:
        node = numa_nodes(Path("/")).get(topology.cores[0], 0) if topology.cores else 0
        recompute.enable(meta, spec.gradient_checkpointing, spec.dropout)
        compile_or_copy(meta, spec, topology)
        return cls(meta, spec, Hosts.join(topology.rank, node, gather), topology)

    def _listen(self) -> Iterator[RemovableHandle]:
        """Hooks that hand each gradient on as soon as autograd has completed it, a tied weight's once."""
        for index, (_, parameter) in enumerate(self._model.named_parameters()):
            if not parameter.requires_grad:
                continue

            def leave(parameter: Tensor, index: int = index) -> None:
                assert parameter.grad is not None
                self._gradients.arrived(index, parameter.grad)
                parameter.grad = None

            yield parameter.register_post_accumulate_grad_hook(leave)  # type: ignore[no-untyped-call]

    def _before_layers(self, layers: Layers) -> Iterator[RemovableHandle]:
        """Have each layer wait for its own weights."""
        for layer, indices in layers:

            def wait(*_: Any, indices: Sequence[int] = indices) -> None:
                self._need(indices)

            yield layer.register_forward_pre_hook(wait)

    @property
    def transport(self) -> str:
        return self._hosts.transport

    def parts(self) -> Sequence[Part]:
        return [
            Part(weight.name, weight.shape, kind, *weight.ranges[self._rank])
            for kind in KINDS
            for weight in self._weights
            if (weight.numel_of if kind == "weight" else weight.learned_of)(self._rank)
        ]

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._settle()
        self._states.load(self._index[part.name], part.kind, start - part.start, out)

    def write(self, part: Part, start: int, values: Tensor) -> None:
        self._states.store(self._index[part.name], part.kind, start - part.start, values)

    def view(self, part: Part) -> Tensor | None:
        self._settle()
        return self._states.view(self._index[part.name], part.kind)

    def ready(self) -> None:
        self._states.put_away()
        self._publish_all()
        check_sums(self._hosts, self._gradients.ring)
        starts = [(index, *weight.ranges[self._rank]) for index, weight in enumerate(self._weights)]
        if self._layers is not None:
            starts = [each for each in starts if each[0] not in self._layers.weights]
        views = [self._shared.view(index).view(-1) for index in range(len(self._weights))]
        check_published([(index, start) for index, start, stop in starts if start < stop], views)

    def restored(self, steps: int) -> None:
        self._optimizer.steps = self._steps = steps

    def backward(self, batch: MicroBatch | None, scale: float, last: bool) -> Tensor:
        self._model.train()
        self._need(self._wanted_first)
        self._gradients.begin_micro_batch(self._steps, last)
        batch = MicroBatch.empty() if batch is None else batch
        if self._spec.dropout:
            torch.manual_seed(batch.seed)
        embedding = self._model.get_input_embeddings()  # type: ignore[operator]
        rows = None
        if self._cuts_look_up:
            # The look-up's gradient is a row per token, not a whole table: cut the graph here and sum rows instead.
            with torch.no_grad():
                rows = F.embedding(batch.input_ids, embedding.weight)
            rows.requires_grad_()
        with self._activations.measure():
            summed, scaled = self._loss(batch, scale, rows)
        self._spec.phase("forward")
        self._need_all()  # of layers that were left out, too: what comes next between hosts are gradients
        if scaled.requires_grad:  # else the head alone learns, and has been told
            scaled.backward()  # type: ignore[no-untyped-call]
        meet_kernels(self._attention, self._spec, batch.edges)
        self._gradients.end_micro_batch()
        if rows is not None:
            self._add_embedding(embedding, batch.input_ids, rows.grad)
        if last and self._hosts.wire is not None:
            # Here, where all ranks are: one that waits for room may wait for what others have not taken yet.
            self._gradients.finish()
            self._gradients.exchange()
        self._spec.phase("backward")
        return summed

    def evaluate(self, batch: MicroBatch | None) -> Tensor:
        self._model.eval()
        self._need_all()
        if batch is None:
            if self._layers is not None:
                self._layers.pass_through()
            return torch.zeros(())
        with torch.no_grad():
            return self._loss(batch, 1.0)[0]

    def _loss(self, batch: MicroBatch, scale: float, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The summed loss, detached, and what backward() starts from."""
        documents = Documents(batch.edges, self._attention)
        if not self._spec.fused_loss:
            loss = model_calls.whole_logits_loss(
                self._model, batch.input_ids, batch.position_ids, batch.labels, documents
            )
            return loss.detach(), model_calls.with_auxiliary(self._model, loss * scale, scale, batch.labels, documents)
        tokens = batch.input_ids if rows is None else rows
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        training, chosen = torch.is_grad_enabled(), choose(batch.labels)
        room = self._head_loss.room(chosen, batch.labels, head.weight) if training else None  # before layers save
        hidden = model_calls.hidden_states(self._model, tokens, batch.position_ids, documents)
        self._need_all()
        sink = self._head_sink(self._index_of(head.weight)) if training and head.weight.requires_grad else None
        summed, scaled = self._head_loss(hidden, head.weight, batch.labels, scale, sink, chosen, room)
        return summed, model_calls.with_auxiliary(self._model, scaled, scale, batch.labels, documents)

    def _head_sink(self, index: int) -> GradientRows:
        row_numel = self._weights[index].row_numel

        def buffer(first: int, last: int) -> Tensor:
            return self._gradients.buffer(index, first * row_numel, last * row_numel).view(-1, row_numel)

        return GradientRows(self._gradients.row_edges(index), buffer, self._gradients.publish)

    def _index_of(self, parameter: nn.Parameter) -> int:
        return next(i for i, own in enumerate(self._model.parameters()) if own is parameter)

    def _add_embedding(self, embedding: nn.Module, ids: Tensor, gradient: Tensor | None) -> None:
        weight = cast(nn.Parameter, embedding.weight)
        assert gradient is not None
        if embedding.padding_idx is not None:  # as nn.Embedding: its row learns nothing from look-ups
            used = ids != embedding.padding_idx
            ids, gradient = ids[used], gradient[used]
        self._gradients.add_rows(self._index_of(weight), ids, gradient)

    def step(self, learning_rate: float, max_grad_norm: float | None) -> StepResult:
        if self._hosts.wire is None:
            self._gradients.finish()  # not after each micro-batch: ranks need not wait for each other in between
        # All ranks wait for each other here: nobody computes from the weights any more.
        with self._hosts.naming():
            norm = global_norm(self._sums.squares(), torch.device("cpu"))
        if self._layers is not None:
            self._layers.forget()
        if math.isfinite(norm):
            update = partial(self._optimizer.step, self._updating(), learning_rate, norm, max_grad_norm)
            self._steps += 1
            self._updates += 1
            if self._late is not None:
                self._late.begin(update)
                return StepResult(norm)
            if self._publication is not None:
                self._publication.begin(self._order, raw=self._compute == torch.float32)
            update()
        if self._publication is None:
            self._hosts.peers.barrier()
        return StepResult(norm)

    def _updating(self) -> Iterator[FlatShard]:
        """Every shard; a weight of which all have been updated is on its way to the other hosts, and to be used."""
        before = None
        for index, shard in self._states.to_update(self._order):
            if index != before:
                if before is not None:
                    self._updated(before)
                if self._publication is not None:
                    self._publication.changes(index)
            before = index
            yield shard
        if before is not None:
            self._updated(before)

    def _updated(self, index: int) -> None:
        if self._publication is not None:
            self._publication.updated(index)
        if self._late is not None:
            self._late.updated(index)

    def _publish_all(self) -> None:
        """Bring what the owners hold to every host; when this returns all ranks may read it."""
        if self._publication is None:
            self._hosts.peers.barrier()
            return
        self._publication.begin(self._all_wanted, raw=True)
        for index in self._all_wanted:
            self._publication.updated(index)
        self._publication.need(self._all_wanted)

    def _need_all(self) -> None:
        """What owners have published is to be used."""
        self._need(self._order)

    def _need(self, indices: Sequence[int]) -> None:
        for waited in (self._publication, self._late):
            if waited is not None:
                waited.need(indices)

    def _settle(self) -> None:
        """What this rank holds is as the last update leaves it. In any thread."""
        if self._late is not None:
            self._late.settle()

    def counters(self) -> Counters:
        wire, scratch = self._hosts.wire, None if self._disk is None else self._disk.scratch
        moments_bytes = self._states.moments_bytes
        # Gradients are read twice, for the norm and for the update; moments and master weights are read and written.
        update_bytes = 2 * self._sums.size_bytes + 2 * moments_bytes + 2 * 4 * self._learned_numel
        return Counters(
            weights_bytes=self._states.low_bytes,
            gradients_bytes=self._sums.size_bytes,
            moments_bytes=moments_bytes,
            gathered_bytes=0,
            activations_bytes=self._activations.peak_bytes,
            wire_bytes=wire.sent_bytes if wire is not None else 0,
            shared_bytes=self._shared.size_bytes // self._hosts.peers.size
            + self._gradients.ring.size_bytes
            - (0 if self._layers is None else self._layers.absent_bytes),
            staged_bytes=self._gradients.staged_bytes,
            moved_bytes=self._gradients.moved_bytes + self._updates * update_bytes,
            reduce_s=self._gradients.ring.reading_s + (wire.waited_s if wire is not None else 0.0),
            wait_s=self._hosts.peers.waited_s
            + sum(waited.waited_s for waited in (self._publication, self._late) if waited is not None),
            disk_read_bytes=0 if scratch is None else scratch.read_bytes,
            disk_written_bytes=0 if scratch is None else scratch.written_bytes,
        )

    def generate(self, ids: Tensor, **options: object) -> Tensor:
        self._model.eval()
        self._need_all()
        with torch.no_grad():
            result: Tensor = self._model.generate(ids, **options)  # type: ignore[operator]
        return result

    def close(self) -> None:
        self._need_all()
        if self._late is not None:
            self._late.close()
        if self._hosts.wire is not None:
            self._hosts.wire.close()
        # Engine, weight, hook, engine: a cycle through autograd's own memory, which Python's collector does not see.
        for hook in self._hooks:
            hook.remove()
        for of_experts in self._experts:
            send_to(of_experts, None)
        if self._layers is not None:
            self._layers.close()
        if self._disk is not None:
            self._disk.scratch.close()
        self._hosts.peers.close()
