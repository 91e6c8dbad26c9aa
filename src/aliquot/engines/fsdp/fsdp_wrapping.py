"""Prepare a model for FSDP2: the groups that it gathers, their transport, and the loss as a forward method."""

from __future__ import annotations

from collections import Counter
from types import MethodType
from typing import cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from aliquot.core.errors import EngineError
from aliquot.distributed.collectives.json_values import gather
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.fsdp.fsdp_collectives import SharedAllGather, SharedReduceScatter, StagingBuffer
from aliquot.models import model_calls
from aliquot.models.structure import decoder_layers
from aliquot.nn.attention.document_attention import Documents
from aliquot.nn.head_loss import Chosen, FusedLoss


def groups_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules to gather as groups, inner before outer: decoder layers, an untied head, then the model.

    A layer that shares weights with another module is gathered with the model.
    """
    uses = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    groups = []
    for layer in decoder_layers(model):
        uses_in_layer = Counter(weight for _, weight in layer.named_parameters(remove_duplicate=False))
        if all(uses[weight] == count for weight, count in uses_in_layer.items()):
            groups.append(layer)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if head is not None and head.weight is not embedding.weight:
        groups.append(head)
    return [*groups, model]


def use_shared_memory(model: nn.Module, spec: EngineSpec, topology: Topology) -> StagingBuffer | None:
    """Let CPU ranks of one host exchange weights and gradients through shared memory. None: gloo or nccl is used.

    Raises:
        EngineError: `spec` asks for shared memory, and the ranks cannot share any.
    """
    if spec.collectives == "gloo" or topology.world_size == 1:
        return None
    condition = "shard.collectives: shared_memory is for CPU ranks of one host with engine fsdp"
    if topology.device != "cpu":
        if spec.collectives == "shared_memory":
            raise EngineError(f"{condition}, and launch.device is {topology.device}: use auto")
        return None
    peers = Peers.join(topology.rank, gather)
    hosts = len({tuple(ranks) for ranks in gather(list(peers.ranks))})
    if hosts > 1:
        peers.close()
        if spec.collectives == "shared_memory":
            raise EngineError(f"{condition}, and there are {hosts} hosts: use auto or gloo, or engine host")
        return None
    staging = StagingBuffer(peers)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # torch annotates these with private classes, but calls them with keywords only.
            module.set_custom_all_gather(SharedAllGather(staging))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(SharedReduceScatter(staging))  # type: ignore[arg-type]
    return staging


def add_fused_loss(model: nn.Module, head_loss: FusedLoss) -> None:
    """Give the model and its head a method `fused_loss`, for which FSDP2 gathers weights as for `forward`."""
    head = model.get_output_embeddings()  # type: ignore[operator]

    def head_fused_loss(
        head: nn.Module, hidden: Tensor, labels: Tensor, scale: float, chosen: Chosen | None
    ) -> tuple[Tensor, Tensor]:
        return head_loss(hidden, cast("nn.Parameter", head.weight), labels, scale, chosen=chosen)

    def model_fused_loss(
        model: nn.Module,
        ids: Tensor,
        positions: Tensor,
        labels: Tensor,
        documents: Documents,
        scale: float,
        chosen: Chosen | None,
    ) -> tuple[Tensor, Tensor]:
        hidden = model_calls.hidden_states(model, ids, positions, documents)
        result: tuple[Tensor, Tensor] = head.fused_loss(hidden, labels, scale, chosen)
        return result

    for module, method in ((head, head_fused_loss), (model, model_fused_loss)):
        module.fused_loss = MethodType(method, module)
        register_fsdp_forward_method(module, "fused_loss")


def group_numel(module: nn.Module) -> int:
    """Return the number of parameters in the module's FSDP group, without those of inner groups."""
    inner = {
        id(parameter)
        for child in module.modules()
        if child is not module and isinstance(child, FSDPModule)
        for parameter in child.parameters()
    }
    return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in inner)
