"""The fsdp engine: PyTorch FSDP2, which gathers weights layer by layer, for GPUs and for weights larger than a node.

Master weights are fp32 and sharded along dim 0. FSDP2 gathers a layer in bf16 (or fp32) and reduces gradients in fp32,
which `shard.reduce_dtype: bf16` rounds to bf16 for the network alone. With `shard.replicate: nodes`, the ranks of a
node gather and reduce among themselves, and nodes add their gradients once per step (FSDP2's hybrid sharding).
Frozen weights have no fp32 master weights; their shards have the dtype in which FSDP2 gathers them, or 8 or 4 bits
(fsdp_shards.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import MethodType
from typing import Any, Self, SupportsFloat, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as register_forward
from torch.distributed.tensor import DTensor

from aliquot.core.errors import EngineError
from aliquot.core.number_format import count_of
from aliquot.distributed.flight_recorder import connecting_nccl
from aliquot.distributed.topology import Topology
from aliquot.engines.base import Counters, EngineSpec
from aliquot.engines.fsdp.fsdp_collectives import (
    RoundedReduceScatter,
    StagingBuffer,
    check_collectives,
    use_shared_memory,
)
from aliquot.engines.fsdp.fsdp_shards import Division, ShardedCodes, compress, local_shards
from aliquot.engines.global_norm import global_norm, global_norm_on_device, squared_norms
from aliquot.engines.model_engine import ModelEngine
from aliquot.engines.model_kernels import prepare_layers, run_head_loss
from aliquot.machine.device_copies import read_early
from aliquot.models import model_calls
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.structure import decoder_layers, materialise
from aliquot.nn.attention.document_attention import Documents
from aliquot.nn.head_loss import Chosen, FusedLoss
from aliquot.optim.adamw import ShardedAdamW, decays, rate_ratio
from aliquot.tensor_io.parts import KINDS, FlatParts, Kind, Part
from aliquot.tensor_io.weight_codes import CompressedRange


class FsdpEngine(ModelEngine, FlatParts):
    """See engines/base.py for the contract of each method."""

    def __init__(
        self,
        model: nn.Module,
        division: Division,
        spec: EngineSpec,
        topology: Topology,
        staging: StagingBuffer | None,
    ) -> None:
        super().__init__(model, spec, topology)
        self._division = division
        self._shards = local_shards(model, division, topology)
        self._by_name = {shard.name: shard for shard in self._shards}
        self._trainable = [shard for shard in self._shards if shard.parameter.requires_grad]
        self._optimizer = ShardedAdamW(
            [shard.local for shard in self._trainable],
            [decays(shard.name, shard.parameter.shape) for shard in self._trainable],
            betas=(spec.adam_beta1, spec.adam_beta2),
            epsilon=spec.adam_epsilon,
            weight_decay=spec.weight_decay,
            rate_ratios=[rate_ratio(shard.name, spec.loraplus_lr_ratio) for shard in self._trainable],
        )
        self._whole_bytes = sum(
            division.shards * shard.local.nbytes
            if isinstance(shard.local, ShardedCodes)
            else spec.compute_dtype.itemsize * shard.parameter.numel()
            for shard in self._shards
        )
        self._trainable_numel = sum(shard.parameter.numel() for shard in self._trainable)
        self._wire_bytes = 0
        self._groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
        # On CPU, gradients stay allocated between steps. New gradients between activations of changing sizes would
        # fragment the heap: by 94 MiB in 90 steps of a model with 60 M parameters. torch's allocator of GPU memory does
        # not fragment. Between replicas FSDP2 always adds gradients in new memory.
        self._keeps_gradients = topology.device == "cpu" and division.replicas == 1
        self._has_partial_sums = False  # whether gradients of this node wait for those of other nodes
        self._gathered = False  # whether unsharded weights are gathered now
        self._staging = staging  # None: gloo or nccl carries the collectives
        whole, *groups = (sum(parameter.numel() for parameter in module.parameters()) for module in self._groups)
        # The root group stays gathered while any layer is gathered. A single rank also gathers a copy.
        self._gathered_bytes = spec.compute_dtype.itemsize * (
            whole if spec.unsharded.weights else whole - sum(groups) + max(groups, default=0)
        )

    @classmethod
    def build(cls, meta: nn.Module, spec: EngineSpec, topology: Topology) -> Self:
        device = torch.device(topology.device)
        division = Division.join(spec.replicates, topology)
        # Inputs keep their dtype, because FSDP2 would also round the log-probabilities and lengths of answers.
        policy = MixedPrecisionPolicy(spec.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        prepare_layers(meta, spec, topology)
        # FSDP2 pins the shards when `materialise` allocates them, before the optimizer gets them. From pinned memory,
        # copies to the GPU overlap with kernels.
        offload = CPUOffloadPolicy(pin_memory=topology.device == "cuda") if spec.offload else OffloadPolicy()
        for name, parameter in meta.named_parameters():
            if not parameter.requires_grad and name not in spec.exact:
                parameter.data = parameter.data.to(spec.compute_dtype)
        # FSDP2 cannot shard scalars or gather two dtypes in one layer. Every rank holds these few weights whole.
        whole = {p: name for name, p in meta.named_parameters() if p.ndim == 0 or name in spec.exact}
        if scalars := [name for parameter, name in whole.items() if parameter.requires_grad]:
            raise EngineError(f"engine fsdp: FSDP2 shards no weight without a dimension, and {scalars[0]} has none")
        reshard = False if spec.unsharded.weights else None  # None: reshard all groups except for the root
        for group in _groups_of(meta):
            fully_shard(
                group, mesh=division.mesh, mp_policy=policy, offload_policy=offload, ignored_params=set(whole) or None,
                reshard_after_forward=reshard,
            )  # fmt: skip
        groups = [module for module in meta.modules() if isinstance(module, FSDPModule)]
        staging = use_shared_memory(groups, spec, topology, division)
        if spec.fused_loss:
            _add_fused_loss(meta, run_head_loss(spec, topology.device))
        for module in groups:
            # Sum gradients without averaging, because the loss is already scaled by the global number of tokens.
            module.set_force_sum_reduction_for_comms(True)
            if topology.world_size > 1:  # for a single rank FSDP2 would divide by 1 in an extra pass
                module.set_gradient_divide_factor(1.0)
                if staging is None and spec.reduce_dtype == "bf16":
                    module.set_custom_reduce_scatter(RoundedReduceScatter())  # type: ignore[arg-type]
        compress(meta, spec, division)
        materialise(meta, torch.device("cpu") if spec.offload else device, buffers_on=device)
        for name in whole.values():
            parameter = meta.get_parameter(name)
            parameter.data = torch.zeros_like(parameter, device=device)
        return cls(meta, division, spec, topology, staging)

    @property
    def transport(self) -> str:
        library = super().transport
        name = library if self._staging is None else "shared memory"
        if self._division.replicas == 1:
            return name
        inside = f"{name} within a node, " if self._division.shards > 1 else ""
        return f"{inside}{library} among {count_of(self._division.replicas, 'replica')}"

    def parts(self) -> Sequence[Part]:
        return [
            shard.part(kind)
            for kind in KINDS
            for shard in (self._shards if kind == "weight" else self._trainable)
            if shard.stop > shard.start
        ]

    def flat(self, part: Part) -> Tensor:
        return self._by_name[part.name].select(self._values(part.name, part.kind))

    def read(self, part: Part, start: int, out: Tensor) -> None:
        if (codes := self._codes(part)) is None:
            super().read(part, start, out)
        else:
            codes.load(start - part.start, out)

    def write(self, part: Part, start: int, values: Tensor) -> None:
        if (codes := self._codes(part)) is None:
            super().write(part, start, values)
        else:
            codes.store(start - part.start, values)

    def view(self, part: Part) -> Tensor | None:
        return super().view(part) if self._codes(part) is None else None

    def _codes(self, part: Part) -> CompressedRange | None:
        """Return this rank's part of a compressed weight, or None if the weight is not compressed."""
        shard = self._by_name[part.name]
        return (
            shard.local.range(self._division.shard, shard.start - shard.first)
            if isinstance(shard.local, ShardedCodes)
            else None
        )

    def _values(self, name: str, kind: Kind) -> Tensor:
        """Return this rank's rows of a weight or of a moment."""
        local = self._by_name[name].local
        return local if kind == "weight" else self._optimizer.moment(local, kind)

    def ready(self) -> None:
        for module in self._groups:
            module.reshard()  # an evaluation leaves weights gathered, which may have changed since
        self._gathered = False
        with connecting_nccl(self._device):
            check_collectives(self._device, self._staging, self._division)
        for shard in self._shards:
            if isinstance(shard.local, ShardedCodes):
                shard.local.finish(self._division)
            elif isinstance(shard.parameter, DTensor):
                for kind in KINDS if shard.parameter.requires_grad else KINDS[:1]:
                    self._division.exchange_parts(self._values(shard.name, kind))
            else:  # every rank holds such a weight whole, with its range filled
                whole = torch.zeros_like(shard.parameter, dtype=torch.float32).view(-1)
                whole[shard.start : shard.stop] = shard.local
                dist.all_reduce(whole)
                shard.parameter.data.copy_(whole.view(shard.parameter.shape))

    def resume_at(self, steps: int) -> None:
        self._optimizer.set_steps(steps)

    def backward(self, batch: MicroBatch | None, scale: float, last: bool) -> SupportsFloat:
        self._hold_unsharded(last)
        result = self._train(batch, scale)
        calls = self._call_count(batch)
        self._count_wire(
            gathers=(0 if self._gathered else 1) if self._spec.unsharded.weights else 2 * calls,
            reduces=0 if self._spec.unsharded.gradients and not last else calls,
            all_reduces=calls if last else 0,
        )
        self._gathered = self._spec.unsharded.weights and not last
        self._has_partial_sums = self._division.replicas > 1 and not self._spec.unsharded.gradients and not last
        return result

    def _hold_unsharded(self, last: bool) -> None:
        """Delay the reduction of unsharded gradients and the release of unsharded weights to the last micro-batch.

        Unsharded gradients cost 4 bytes and unsharded weights 2 bytes per parameter of the model on every rank. Nodes
        with replicas add their gradients in the last micro-batch, too.
        """
        for module in self._groups:
            if self._division.replicas > 1:
                module.set_requires_all_reduce(last, recurse=False)
            if self._spec.unsharded.gradients:
                module.set_requires_gradient_sync(last, recurse=False)
            if self._spec.unsharded.weights:
                module.set_reshard_after_backward(last, recurse=False)

    def evaluate(self, batch: MicroBatch | None) -> Tensor:
        self._count_wire(gathers=0 if self._gathered else self._call_count(batch), reduces=0, all_reduces=0)
        self._gathered = self._spec.unsharded.weights
        return super().evaluate(batch)

    def _call_count(self, batch: MicroBatch | None) -> int:
        return 1 if batch is None or self._spec.packs else max(batch.calls, len(batch.edges) - 1)

    def _fused_loss(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        return cast("tuple[Tensor, Tensor]", self._model.fused_loss(*arguments))  # type: ignore[operator]

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        for shard in self._trainable:
            gradient = cast("DTensor | None", shard.parameter.grad)
            # A shard without rows has no gradient, but the optimizer needs a gradient for every weight.
            shard.local.grad = torch.zeros_like(shard.local) if gradient is None else gradient.to_local()
            if not self._keeps_gradients:
                shard.parameter.grad = None
        gradients = [cast("Tensor", shard.local.grad) for shard in self._trainable]
        # Each rank adds the part of its shards that no other rank adds: equal shards of replicas count once.
        parts = [shard.select(gradient) for shard, gradient in zip(self._trainable, gradients, strict=True)]
        on_gpu = self._device.type == "cuda" and not self._spec.offload
        norm = global_norm_on_device(parts) if on_gpu else global_norm(squared_norms(parts))
        # The GPU still updates the weights when the norm is known, and Python goes on with the next step.
        result = read_early(norm) if isinstance(norm, Tensor) else norm
        self._optimizer.step(learning_rate, norm, max_grad_norm)
        if self._keeps_gradients:
            torch._foreach_zero_(gradients)
        return float(result)

    def counters(self) -> Counters:
        trainable = sum(shard.local.numel() for shard in self._trainable)
        return Counters(
            weights_bytes=sum(shard.local.nbytes for shard in self._shards),
            gradients_bytes=4 * trainable
            if self._has_partial_sums
            else sum(4 * shard.local.numel() for shard in self._trainable if shard.parameter.grad is not None),
            moments_bytes=8 * trainable,
            gathered_bytes=self._gathered_bytes,
            activations_bytes=self._activations.peak_bytes,
            wire_bytes=self._wire_bytes,
            staged_bytes=self._staging.staged_bytes if self._staging is not None else 0,
            reduce_s=self._staging.busy_s if self._staging is not None else None,
            wait_s=self._staging.peers.waited_s if self._staging is not None else 0.0,
        )

    def _count_wire(self, gathers: int, reduces: int, all_reduces: int) -> None:
        """Count the bytes sent by this rank, by ring collectives.

        Among N ranks that divide the weights, a rank sends (N - 1) / N of all weights per gather, and of trainable
        weights per reduce. Among R replicas, it sends 2 (R - 1) / R of its trainable shards per all-reduce.
        """
        trainable, shards, replicas = self._trainable_numel, self._division.shards, self._division.replicas
        if self._staging is None:
            gathered = gathers * self._whole_bytes
            reduced = reduces * (2 if self._spec.reduce_dtype == "bf16" else 4) * trainable
            self._wire_bytes += int((shards - 1) / shards * (gathered + reduced))
        self._wire_bytes += int(2 * (replicas - 1) / replicas * all_reduces * 4 * trainable / shards)

    def close(self) -> None:
        self._shards.clear()
        if self._staging is not None:
            self._staging.peers.close()
        self._division.close()


def _groups_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules for fully_shard, inner before outer: decoder layers, an untied head, then the model.

    A layer that shares weights with another module gets no group; FSDP2 gathers the layer with the model.
    """

    def uses(module: nn.Module) -> Counter[nn.Parameter]:
        return Counter(weight for _, weight in module.named_parameters(remove_duplicate=False))

    in_model = uses(model).items()
    groups = [layer for layer in decoder_layers(model) if uses(layer).items() <= in_model]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if head is not None and head.weight is not embedding.weight:
        groups.append(head)
    return [*groups, model]


def _add_fused_loss(model: nn.Module, head_loss: FusedLoss) -> None:
    """Give the model and its head a method `fused_loss`, for which FSDP2 gathers weights as for `forward`."""
    head = model.get_output_embeddings()  # type: ignore[operator]

    def head_fused_loss(
        head: nn.Module, hidden: Tensor, labels: Tensor, scale: float, chosen: Chosen | None
    ) -> tuple[Tensor, Tensor]:
        return head_loss(hidden, cast("nn.Parameter", head.weight), labels, scale, chosen=chosen)

    def model_fused_loss(
        model: nn.Module, ids: Tensor, positions: Tensor, labels: Tensor, documents: Documents, *scale_and_chosen: Any
    ) -> tuple[Tensor, Tensor]:
        hidden = model_calls.hidden_states(model, ids, positions, documents)
        return cast("tuple[Tensor, Tensor]", head.fused_loss(hidden, labels, *scale_and_chosen))

    for module, method in ((head, head_fused_loss), (model, model_fused_loss)):
        module.fused_loss = MethodType(method, module)
        register_forward(module, "fused_loss")
