"""Compiled layers: what `selective` saves for the backward pass, and torch's global settings, which stay the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as partitioner_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.distributed.topology import Topology
from aliquot.engines import model_kernels
from aliquot.engines.base import EngineSpec
from aliquot.engines.model_engine import ActivationMeter
from aliquot.engines.model_kernels import compile_layers
from aliquot.models.backward_pass import enable_checkpointing
from aliquot.nn.attention.document_attention import DYNAMIC_SOURCES

TOPOLOGY = Topology(0, 1, 0, 1, 0, 1, "cpu", 1, ())
WIDTH, INNER, LAYERS, TOKENS = 32, 96, 2, 48


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


def trained(spec: EngineSpec) -> tuple[int, int, list[Tensor]]:
    """Return the saved bytes, the matrix products of the backward pass, and the gradients of a model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, attn_implementation="eager",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    enable_checkpointing(model, spec.eager_checkpointing)
    if spec.compile == "layers":
        compile_layers(model, TOPOLOGY, spec.gradient_checkpointing == "selective")
    inputs = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    meter = ActivationMeter("none")
    with meter.measure():
        loss = model.model(inputs_embeds=inputs).last_hidden_state.square().sum()
    with Products() as products:
        loss.backward()
    return meter.peak_bytes, products.count, [p.grad for p in model.model.layers.parameters() if p.grad is not None]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without a C++ compiler: the same partition of each graph, whose operations then run one by one."""

    def compile_function(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
        return torch.compile(function, backend="aot_eager")

    monkeypatch.setattr(model_kernels, "compile_function", compile_function)
    monkeypatch.setattr(model_kernels, "register", lambda **_: None)


class Layer(torch.nn.Module):
    """A norm and an MLP of a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.gate, self.up = (torch.nn.Linear(WIDTH, INNER, bias=False) for _ in "gu")
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))


@pytest.mark.usefixtures("traced")
def test_selective_saves_no_norm_and_no_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_kernels, "decoder_layers", lambda model: [model])
    saved, products, gradients = [], [], []
    for selective in (False, True):
        torch._dynamo.reset()
        layer, meter = Layer(), ActivationMeter("none")
        compile_layers(layer, TOPOLOGY, selective)
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with meter.measure():
            loss = layer(x).square().sum()
        with Products() as counted:
            loss.backward()
        saved.append(meter.peak_bytes)
        products.append(counted.count)
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert saved[0] - saved[1] >= 4 * TOKENS * (WIDTH + INNER)
    assert products[0] == products[1]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("traced")
def test_selective_saves_less_in_compiled_layers_and_repeats_no_product() -> None:
    none, selective, full = (
        trained(EngineSpec("fp32", TOKENS, True, gradient_checkpointing=mode, compile="layers"))  # type: ignore[arg-type]
        for mode in ("none", "selective", "full")
    )
    # At least two normed inputs and the product of the MLP's two branches.
    fewer = 4 * LAYERS * TOKENS * (2 * WIDTH + INNER)
    assert full[0] < selective[0] <= none[0] - fewer
    assert full[1] > selective[1] == none[1]
    for ours, others in zip(selective[2], none[2], strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-5)


def test_global_settings_of_the_compiler_stay_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compile_function(_: Callable[..., Any], **__: object) -> Callable[..., Any]:
        def compiled() -> None:
            banned = partitioner_config.ban_recompute_materialized_backward  # type: ignore[attr-defined]
            seen.append((torch.compiler.config.dynamic_sources, banned))

        return compiled

    monkeypatch.setattr(model_kernels, "compile_function", compile_function)
    monkeypatch.setattr(model_kernels, "register", lambda **_: None)
    monkeypatch.setattr(model_kernels, "decoder_layers", lambda model: [model])
    for users in ("", r"L\['mine'\]"):
        with torch.compiler.config.patch(dynamic_sources=users):  # type: ignore[attr-defined]
            layer = torch.nn.Linear(1, 1)
            compile_layers(layer, TOPOLOGY, selective=True)
            layer.forward()
            assert torch.compiler.config.dynamic_sources == users
    assert seen == [(DYNAMIC_SOURCES, False), (rf"L\['mine'\],{DYNAMIC_SOURCES}", False)]
    assert partitioner_config.ban_recompute_materialized_backward is True  # type: ignore[attr-defined]
