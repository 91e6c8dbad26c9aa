"""The deepspeed engine: DeepSpeed ZeRO-3 with the user's DeepSpeed JSON, to reuse an existing JSON or to compare.

DeepSpeed stores the bf16 partitions, fp32 master weights, moments and gradients, and runs the collectives. aliquot
provides data, batches, schedule, checkpoints and export. DeepSpeed's partition of a tensor is a flat range, so that
aliquot can treat a partition as a `Part`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, SupportsFloat, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aliquot.core.errors import EngineError, SelfTestError
from aliquot.distributed.flight_recorder import connecting_nccl
from aliquot.distributed.ranks import gather
from aliquot.distributed.topology import Topology
from aliquot.engines.base import Counters, EngineSpec
from aliquot.engines.deepspeed.deepspeed_setup import (
    adamw,
    compiles_adam,
    prepare_ops,
    prepare_states,
    report_phases,
    set_steps,
)
from aliquot.engines.model_engine import ModelEngine
from aliquot.loaders.zero3 import cast_parameters, import_deepspeed, partition, partition_range
from aliquot.models import backward_pass
from aliquot.models.micro_batch import MicroBatch
from aliquot.tensor_io.parts import KINDS, FlatParts, Part


@dataclass(frozen=True)
class _Partition:
    """This rank's range [start, stop) of one weight, without padding."""

    name: str
    parameter: Any
    start: int
    stop: int

    def values(self, kind: str) -> Tensor:
        """Return the memory of the master weight or of a moment, flat fp32. DeepSpeed may have offloaded the memory."""
        optimizer = self.parameter._z3_optimizer  # set on every parameter by DeepSpeed
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(self.parameter)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        whole = flat if kind == "weight" else optimizer.optimizer.state[flat][kind]
        return cast("Tensor", whole.detach()[offset : offset + self.stop - self.start])


class DeepspeedEngine(ModelEngine, FlatParts):
    """See engines/base.py for the contract of each method."""

    def __init__(self, model: nn.Module, engine: Any, spec: EngineSpec, topology: Topology) -> None:
        super().__init__(model, spec, topology)
        self._engine = engine
        engine.module.loss = super()._loss
        self._partitions = {
            name: _Partition(name, weight, *partition_range(weight.ds_numel, topology.rank, topology.world_size))
            for name, weight in cast("Any", model.named_parameters())
        }
        self._wire_bytes = 0

    @classmethod
    def build(cls, meta: nn.Module, spec: EngineSpec, topology: Topology) -> Self:
        if frozen := [name for name, weight in meta.named_parameters() if not weight.requires_grad]:
            raise EngineError(f"{frozen[0]} is frozen: shard.engine must be host or fsdp, not deepspeed")
        # DeepSpeed takes LOCAL_RANK for the number of the GPU, and reads it even for one rank and on CPU.
        gpu = torch.cuda.current_device() if topology.device == "cuda" else topology.local_rank
        os.environ["LOCAL_RANK"] = str(gpu)
        os.environ.setdefault("DS_ACCELERATOR", topology.device)
        deepspeed = import_deepspeed()
        settings = dict(spec.deepspeed or {})
        if topology.device == "cpu" or compiles_adam(settings):
            prepare_ops(topology.device)
        deepspeed.init_distributed("nccl" if topology.device == "cuda" else "gloo", verbose=False)
        if topology.device == "cuda":
            with connecting_nccl(torch.device("cuda")):
                dist.all_reduce(torch.zeros(1, device="cuda"))
        backward_pass.enable_checkpointing(meta, spec.gradient_checkpointing, spec.dropout)
        cast_parameters(meta, spec.compute_dtype)
        partition(meta, settings)
        for weight in cast("Any", meta.parameters()):
            weight.ds_tensor.zero_()  # allocates the pages, so that the memory ledger counts them as weights
        training = _Training(meta)
        if spec.fused_loss:
            head = cast("Any", meta).get_output_embeddings()
            deepspeed.zero.register_external_parameter(training, head.weight)
        optimizer = adamw(list(meta.named_parameters()), spec, settings, topology.device)
        with report_phases(spec.hooks.build):
            engine, *_ = deepspeed.initialize(model=training, optimizer=optimizer, config=settings)
        spec.hooks.build("after ZeRO init")
        prepare_states(engine.optimizer)
        return cls(meta, engine, spec, topology)

    def parts(self) -> Sequence[Part]:
        return [
            Part(partition.name, tuple(partition.parameter.ds_shape), kind, partition.start, partition.stop)
            for kind in KINDS
            for partition in self._partitions.values()
            if partition.stop > partition.start
        ]

    def flat(self, part: Part) -> Tensor:
        return self._partitions[part.name].values(part.kind)

    def ready(self) -> None:
        """Copy the masters into the compute weights, and check that all ranks gather the same values."""
        for local in self._partitions.values():
            local.parameter.partition()  # DeepSpeed keeps small weights gathered, which may have changed since
            local.parameter.ds_tensor[: local.stop - local.start].copy_(local.values("weight"))
        first = next(iter(self._partitions.values()))
        first.parameter.all_gather()
        sums = gather(float(first.parameter.data.double().sum()))
        first.parameter.partition()
        if len(set(sums)) > 1:
            raise SelfTestError(f"{first.name} gathered by DeepSpeed differs among the ranks: {sums}")

    def resume_at(self, steps: int) -> None:
        set_steps(self._engine.optimizer, steps)

    def backward(self, batch: MicroBatch | None, scale: float, last: bool) -> SupportsFloat:
        self._engine.train()
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks, but `scale` already divides by the tokens of the whole batch.
        result = self._train(batch, scale * self._world_size)
        self._count_wire(gathers=2, reduces=1)
        return result

    def _run_backward(self, scaled: Tensor) -> None:
        self._engine.backward(scaled, scale_wrt_gas=False)

    def evaluate(self, batch: MicroBatch | None) -> Tensor:
        self._engine.eval()
        self._count_wire(gathers=1, reduces=0)
        return super().evaluate(batch)

    def _loss(self, batch: MicroBatch | None, scale: float) -> tuple[Tensor, Tensor]:
        return cast("tuple[Tensor, Tensor]", self._engine(batch, scale))

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        optimizer = self._engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.clip_grad = max_grad_norm if math.isfinite(max_grad_norm) else 0.0
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def counters(self) -> Counters:
        optimizer = self._engine.optimizer
        compute = sum(local.parameter.ds_tensor.nbytes for local in self._partitions.values())
        masters = sum(flat.nbytes for flat in optimizer.fp32_partitioned_groups_flat)
        aliased = self._spec.precision == "fp32" and not optimizer.offload_optimizer
        gradients = optimizer.grad_partitions_flat_buffer.nbytes + sum(
            flat.grad.nbytes for flat in optimizer.fp32_partitioned_groups_flat if flat.grad is not None
        )
        return Counters(
            weights_bytes=masters if aliased else compute + masters,
            gradients_bytes=gradients,
            moments_bytes=2 * masters,
            gathered_bytes=max((local.parameter.ds_numel for local in self._partitions.values()), default=0)
            * self._spec.compute_dtype.itemsize,
            activations_bytes=self._activations.peak_bytes,
            wire_bytes=self._wire_bytes,
        )

    def _count_wire(self, gathers: int, reduces: int) -> None:
        """Count the bytes that this rank sends: (N - 1) / N of the model per collective."""
        numel = sum(local.parameter.ds_numel for local in self._partitions.values())
        share = (self._world_size - 1) / self._world_size
        reduced_bytes = self._engine.communication_data_type.itemsize
        self._wire_bytes += int(share * numel * (gathers * self._spec.compute_dtype.itemsize + reduces * reduced_bytes))

    def close(self) -> None:
        self._partitions.clear()
        self._engine.destroy()


class _Training(nn.Module):
    """The model and its loss as one module, because DeepSpeed's hooks surround one forward method."""

    loss: Callable[[MicroBatch | None, float], tuple[Tensor, Tensor]]  # the engine sets it

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch | None, scale: float) -> tuple[Tensor, Tensor]:
        return self.loss(batch, scale)
