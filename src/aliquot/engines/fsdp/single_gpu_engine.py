"""Engine fsdp on a single GPU, which holds the whole state: there is nothing to shard, so FSDP2 would only copy.

The GPU holds fp32 master weights and moments, and a bf16 copy of the weights for forward and backward passes. The
gradients of a single micro-batch per optimizer step stay bf16, as the backward pass computes them. The gradients of
several micro-batches are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, SupportsFloat, cast

import torch
from torch import Tensor, nn

from aliquot.distributed.topology import Topology
from aliquot.engines.base import Counters, EngineSpec
from aliquot.engines.fsdp.fp8_layers import use_fp8
from aliquot.engines.model_engine import ModelEngine
from aliquot.engines.model_kernels import prepare_layers
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.structure import materialise
from aliquot.optim.adamw import decays, rate_ratio
from aliquot.optim.resident_adamw import ResidentAdamW, ResidentWeight
from aliquot.tensor_io.parts import KINDS, FlatParts, Part


@dataclass
class _Gradient:
    """The gradient of one weight within an optimizer step."""

    parameter: nn.Parameter
    total: Tensor | None = None  # fp32 sum over micro-batches; None: `parameter.grad` is the whole gradient

    def take(self) -> Tensor:
        """Return the gradient, flat, and forget it. A weight that no micro-batch used has the gradient 0."""
        gradient = self.parameter.grad if self.total is None else self.total
        self.parameter.grad = self.total = None
        return (torch.zeros_like(self.parameter) if gradient is None else gradient).view(-1)


class SingleGpuEngine(ModelEngine, FlatParts):
    """See engines/base.py for the contract of each method."""

    def __init__(self, model: nn.Module, spec: EngineSpec, topology: Topology) -> None:
        super().__init__(model, spec, topology)
        self._frozen = {name: p.detach().view(-1) for name, p in model.named_parameters() if not p.requires_grad}
        self._weights = {name: _resident(name, p, spec) for name, p in model.named_parameters() if p.requires_grad}
        self._gradients = [_Gradient(p) for p in model.parameters() if p.requires_grad]
        self._sums = False  # whether this step sums the gradients of several micro-batches
        for gradient in self._gradients:
            sum_up = partial(self._sum_up, gradient)
            gradient.parameter.register_post_accumulate_grad_hook(sum_up)  # type: ignore[no-untyped-call]
        self._optimizer = ResidentAdamW(
            list(self._weights.values()), (spec.adam_beta1, spec.adam_beta2), spec.adam_epsilon, spec.weight_decay,
            compiled=spec.compile == "layers",
        )  # fmt: skip

    @classmethod
    def build(cls, meta: nn.Module, spec: EngineSpec, topology: Topology) -> Self:
        device = torch.device(topology.device)
        if spec.fp8:
            use_fp8(meta, device)
        prepare_layers(meta, spec, topology)
        for name, parameter in meta.named_parameters():
            if name not in spec.exact:
                parameter.data = parameter.data.to(spec.compute_dtype)
        materialise(meta, device, buffers_on=device)
        return cls(meta, spec, topology)

    def parts(self) -> Sequence[Part]:
        shapes = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        return [
            Part(name, shape, kind, 0, self._model.get_parameter(name).numel())
            for kind in KINDS
            for name, shape in shapes.items()
            if (kind == "weight" or name in self._weights) and self._model.get_parameter(name).numel()
        ]

    def flat(self, part: Part) -> Tensor:
        if part.name in self._frozen:
            return self._frozen[part.name]
        weight = self._weights[part.name]
        return {"weight": weight.master, "exp_avg": weight.exp_avg, "exp_avg_sq": weight.exp_avg_sq}[part.kind]

    def ready(self) -> None:
        for weight in self._weights.values():
            weight.compute.copy_(weight.master)

    def resume_at(self, steps: int) -> None:
        self._optimizer.steps = steps

    def backward(self, batch: MicroBatch | None, scale: float, last: bool) -> SupportsFloat:
        self._sums = self._sums or not last
        return self._train(batch, scale)

    def _sum_up(self, gradient: _Gradient, parameter: Tensor) -> None:
        """Move the gradient of a micro-batch into the fp32 sum."""
        if self._sums:
            latest = cast("Tensor", parameter.grad)
            gradient.total = latest.float() if gradient.total is None else gradient.total.add_(latest)
            parameter.grad = None

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        gradients = [gradient.take() for gradient in self._gradients]
        self._sums = False
        # The GPU still updates the weights when the norm is known, and Python goes on with the next step.
        return float(self._optimizer.step(gradients, learning_rate, max_grad_norm))

    def counters(self) -> Counters:
        weights = self._weights.values()
        gradients = [tensor for g in self._gradients for tensor in (g.total, g.parameter.grad) if tensor is not None]
        return Counters(
            weights_bytes=sum(p.nbytes for p in self._frozen.values()) + sum(w.master.nbytes for w in weights),
            gradients_bytes=sum(gradient.nbytes for gradient in gradients),
            moments_bytes=sum(2 * weight.exp_avg.nbytes for weight in weights),
            gathered_bytes=sum(w.compute.nbytes for w in weights if w.compute is not w.master),
            activations_bytes=self._activations.peak_bytes,
            wire_bytes=0,
        )

    def close(self) -> None:
        self._weights.clear()


def _resident(name: str, parameter: nn.Parameter, spec: EngineSpec) -> ResidentWeight:
    compute = parameter.detach().view(-1)
    master = compute if compute.dtype == torch.float32 else torch.empty_like(compute, dtype=torch.float32)
    return ResidentWeight(
        compute, master, torch.zeros_like(master), torch.zeros_like(master), decays(name, parameter.shape),
        rate_ratio(name, spec.loraplus_lr_ratio),
    )  # fmt: skip
