"""What engines share: the model of a rank with its attention, and forward and backward passes of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, SupportsFloat

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.model_kernels import run_head_loss, warm_up_kernels
from aliquot.machine.device_copies import read_early
from aliquot.models import model_calls
from aliquot.models.backward_pass import is_kept
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.structure import set_training
from aliquot.nn.attention.document_attention import Documents, attention_on
from aliquot.nn.head_loss import Chosen, choose


class ModelEngine:
    """The part of an engine that computes with the model. An engine replaces the methods that it does differently."""

    _gathers = True  # whether weights are gathered in each forward pass, so that ranks must run equally many passes

    def __init__(self, model: nn.Module, spec: EngineSpec, topology: Topology) -> None:
        self._model = model
        self._spec = spec
        self._device = torch.device(topology.device)
        self._world_size = topology.world_size
        self._attention = attention_on(topology.device, spec.packs, spec.gradient_checkpointing == "selective")
        self._activations = ActivationMeter(spec.eager_checkpointing, topology.device)
        self._head_loss = run_head_loss(spec, topology.device)

    @property
    def transport(self) -> str:
        if self._world_size == 1:
            return "one rank"
        return "gloo" if self._device.type == "cpu" else "nccl"

    def _train(self, batch: MicroBatch | None, scale: float) -> SupportsFloat:
        """Run the forward and the backward pass of a micro-batch. Return the result of `Engine.backward`."""
        set_training(self._model, True)
        if batch is not None and self._spec.dropout:
            torch.manual_seed(batch.seed)
        with self._activations.measure():
            summed, scaled = self._loss(batch, scale)
        result = read_early(summed)
        self._spec.hooks.step("forward")
        self._run_backward(scaled)
        if batch is not None:
            warm_up_kernels(self._attention, self._spec, batch.edges)
        self._spec.hooks.step("backward")
        return result

    def _run_backward(self, scaled: Tensor) -> None:
        scaled.backward()  # type: ignore[no-untyped-call]

    def evaluate(self, batch: MicroBatch | None) -> Tensor:
        set_training(self._model, False)
        with torch.no_grad():
            return self._loss(batch, 1.0)[0]

    def _loss(self, batch: MicroBatch | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return the result of `evaluate`, and the scaled loss to call backward() on."""
        batch = batch or MicroBatch.empty()
        fed = (batch.with_equal_calls() if self._gathers else batch).to(self._device)
        inputs = fed.input_ids, fed.position_ids, fed.labels, Documents(fed.edges, self._attention).on(self._device)
        if not self._spec.fused_loss:
            result, loss = model_calls.whole_logits_loss(self._model, *inputs, fed.row_loss, fed.chosen)
            scaled = loss * scale
        else:
            result, scaled = self._fused_loss(*inputs, scale, fed.chosen or choose(fed.labels, fed.row_loss))
        return result, model_calls.with_auxiliary(self._model, scaled, scale, fed.labels, inputs[-1])

    def _fused_loss(
        self, ids: Tensor, positions: Tensor, labels: Tensor, documents: Documents, scale: float, chosen: Chosen
    ) -> tuple[Tensor, Tensor]:
        """Return the results of the fused loss (nn/head_loss.py) over the output of the decoder."""
        head = self._model.get_output_embeddings().weight  # type: ignore[operator]
        hidden = model_calls.hidden_states(self._model, ids, positions, documents)
        return self._head_loss(hidden, head, labels, scale, chosen=chosen)

    def generate(self, ids: Tensor, **options: object) -> Tensor:
        set_training(self._model, False)
        if self._gathers and self._world_size > 1:
            options["synced_gpus"] = True  # until the longest text ends, every rank gathers weights for the others
        # Compiled layers would be compiled again for the shapes of a cache.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            result: Tensor = self._model.generate(ids.to(self._device), **options)  # type: ignore[operator]
        return result


class ActivationMeter:
    """Measure the bytes that a forward pass saves for the backward pass. Each storage counts once, parameters never.

    On a GPU, the results that selective checkpointing saves are not counted. Counting them needs a dispatch mode, under
    which torch.compile does not run, and flex_attention must be compiled.
    """

    def __init__(self, mode: Literal["none", "selective", "full"], device: str = "cpu") -> None:
        self._counts_selective = mode == "selective" and device == "cpu"
        self.peak_bytes = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the first forward pass only, because the hooks cost time for every saved tensor."""
        if self.peak_bytes:
            yield
            return
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            # Autograd also saves gathered weights, as parameters or views (`weight.t()`). Weights are no activations.
            if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        selective = _SelectiveResults()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            selective if self._counts_selective else nullcontext(),
        ):
            yield
        self.peak_bytes = sum(storages.values()) + selective.total_bytes


class _SelectiveResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes that selective checkpointing stores itself, because saved-tensor hooks miss these bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_kept(func):
            self.total_bytes += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result
