"""Construct the components of the host engine, in the order of their dependencies.

1. The list of weights, because every component names a weight by its index in this list.
2. The choice of streamed and compressed layers, because shared memory must not allocate pages for weights on disk.
3. Shared memory. The model's parameters become views of it, or copies on a GPU. The builder looks up embedding and head
   afterwards, because `place` replaces the parameter objects.
4. The scratch file, which stores the sums and states that are on disk.
5. Gradient sums, then the ring buffer whose gradients are added to the sums.
6. Optimizer states, because the state of a weight refers to the memory of its gradient sum.
7. The exchange of updated weights or the overlapped update, because both follow the update order of the states.
8. Streamed layers, because a layer may be read only after its update.

Steps 3, 5, 7 and 8 are collective, because the ranks of the host share memory in these steps.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.host.compressed_layers import CompressedLayers, choose_compressed
from aliquot.engines.host.compute_device import DeviceGradients, DeviceWeights
from aliquot.engines.host.gradient_sums import GradientSums
from aliquot.engines.host.host_disk import HostDisk
from aliquot.engines.host.host_gradients import HostGradients
from aliquot.engines.host.host_states import HostStates
from aliquot.engines.host.layer_hooks import spread_layers
from aliquot.engines.host.shared_weights import Counterparts, ForwardOrder, GradientOrder, SharedWeights, Weight, place
from aliquot.engines.host.streamed_layers import StreamedLayers, choose_streamed
from aliquot.engines.host.weight_publication import OverlappedUpdate, WeightPublication
from aliquot.models.structure import replace_tensors
from aliquot.optim.adamw import BlockedAdamW, rate_ratio
from aliquot.optim.sizes import update_block
from aliquot.tensor_io.parts import row_ranges


class HostComponents:
    """The components of a host engine. At most one of `publication` and `overlapped` is not None."""

    def __init__(self, model: nn.Module, spec: EngineSpec, hosts: Hosts, topology: Topology) -> None:
        """Construct all components and place the model's parameters in shared memory. Collective."""
        streamed_layers = choose_streamed(model, spec, several_hosts=hosts.wire is not None)
        compressed_layers = choose_compressed(model, spec)
        compressed = {index for _, indices in compressed_layers for index in indices}
        self.weights = weights = [
            Weight(
                name,
                tuple(parameter.shape),
                _ranges(tuple(parameter.shape), hosts, on_each_host=index in compressed),
                parameter.requires_grad,
                torch.float32 if name in spec.exact else spec.compute_dtype,
                rate_ratio(name, spec.loraplus_lr_ratio),
            )
            for index, (name, parameter) in enumerate(model.named_parameters())
        ]
        device = torch.device(topology.device)
        streamed = frozenset(index for _, indices in streamed_layers for index in indices)

        self.shared = shared = SharedWeights(
            hosts, weights, not streamed_layers, [indices for _, indices in compressed_layers]
        )
        self.device_weights = device_weights = None  # with a GPU: its copy of the weights
        tensors = shared.views()
        if spec.copies_weights:
            indices = {id(parameter): index for index, parameter in enumerate(model.parameters())}
            copied = spread_layers(model, spec.copied_layers if spec.packs else 0, indices)
            self.device_weights = device_weights = DeviceWeights(shared, device, copied)
            tensors = device_weights.tensors
            replace_tensors(model, {name: buffer.to(device) for name, buffer in model.named_buffers()})
        place(model, weights, tensors)
        embedding = cast(nn.Parameter, cast(nn.Module, model.get_input_embeddings()).weight)  # type: ignore[operator]
        head = cast(nn.Parameter, model.get_output_embeddings().weight) if spec.fused_loss else None  # type: ignore[operator]
        # Whether the engine looks up embeddings itself, so that their gradient arrives as rows.
        self.cuts_look_up = spec.looks_up and spec.fused_loss and embedding.requires_grad
        looked_up = embedding if self.cuts_look_up else None

        states, counterparts = spec.optimizer_states, Counterparts(hosts.counterparts, hosts.host)
        sum_dtype = torch.float32 if states == "fp32" else torch.bfloat16
        self.disk: HostDisk | None = None
        if spec.on_disk:
            index, folder = parameter_index(model, embedding), spec.offload_directory
            self.disk = HostDisk(folder, spec.on_disk, weights, index, counterparts, states, streamed)

        order = GradientOrder.from_model(model, head, looked_up, spec.packs)
        sent_dtype = torch.bfloat16 if spec.reduce_dtype == "bf16" else sum_dtype
        transient = order.complete_at_once if spec.micro_batches == 1 else ()
        self.sums = GradientSums(weights, counterparts, sum_dtype, states, self.disk, sent_dtype, transient)
        width = 1 if looked_up is None else looked_up.shape[1]
        self.gradients = gradients = HostGradients(
            hosts, weights, self.sums, order, spec.compute_dtype, spec.micro_batch_tokens, width
        )
        # Receives the gradients of the backward pass.
        self.staging = gradients if device_weights is None else DeviceGradients(gradients, weights, device)
        serve = gradients.ring.serve  # other ranks may wait for what a waiting rank has to do

        self.compressed: CompressedLayers | None = None
        if compressed_layers:
            self.compressed = CompressedLayers(hosts, spec, weights, compressed_layers, shared, serve)
            if device_weights is not None:
                device_weights.decode(self.compressed)
        shards = [shared.shard(index, topology.rank) for index in range(len(weights))]
        self.states = HostStates(
            shards, self.sums, states, self.disk, streamed, spec.compile == "layers", self.compressed
        )
        self.optimizer = BlockedAdamW(
            betas=(spec.adam_beta1, spec.adam_beta2),
            epsilon=spec.adam_epsilon,
            weight_decay=spec.weight_decay,
            frugal=states != "fp32",
            longest=max(update_block(states, weight.row_numel) for weight in weights if weight.trainable),
            compiled=spec.compile == "layers",
        )

        self.forward_order = ForwardOrder(model, head)
        self.update_order = self.states.update_order(self.forward_order.all)
        self.publication: WeightPublication | None = None  # with several hosts: exchanges updated weights
        self.overlapped: OverlappedUpdate | None = None  # with states on disk, or on a GPU: updates weights in a thread
        if hosts.wire is not None:
            self.publication = WeightPublication(hosts.wire, hosts.peers, counterparts, weights, shared, serve)
        elif self.states.on_disk or device_weights is not None:
            self.overlapped = OverlappedUpdate(hosts.peers, self.update_order, serve)

        self.streamed: StreamedLayers | None = None
        if self.disk is not None and streamed_layers:
            wait_updated = None if self.overlapped is None else self.overlapped.wait_updated_here
            self.streamed = StreamedLayers(hosts.peers, serve, self.disk, shards, streamed_layers, wait_updated)


def _ranges(shape: tuple[int, ...], hosts: Hosts, on_each_host: bool) -> tuple[tuple[int, int], ...]:
    """Divide a weight among all ranks, or among the ranks of each host, because hosts do not exchange it."""
    members = {rank: member for ranks in hosts.table for member, rank in enumerate(ranks)}
    ranges = row_ranges(shape, hosts.peers.size if on_each_host else len(members))
    return tuple(ranges[members[rank] if on_each_host else rank] for rank in range(len(members)))


def parameter_index(model: nn.Module, parameter: nn.Parameter) -> int:
    """Return the index of a parameter in the engine's list of weights."""
    return next(index for index, weight in enumerate(model.parameters()) if weight is parameter)
