"""Weight gradients from transposed copies: the same numbers, and really copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from aliquot.engines import model_kernels
from aliquot.engines.model_kernels import transposing_pass
from aliquot.machine import matmul

TOKENS, WIDTH, INNER = 96, 80, 130


@pytest.fixture(autouse=True)
def small_ones_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_FEWEST_COLUMNS", 64)
    monkeypatch.setattr(matmul, "_SMALLEST_RIGHT_SIDE", 1)


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        self.narrow = nn.Linear(WIDTH, 8, bias=False)  # not worth a copy
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x))) * self.narrow(x).sum(-1, keepdim=True)


def gradients(dtype: torch.dtype, compiled: bool) -> tuple[list[Tensor], int]:
    """Of all weights and the input, and how many transposed copies were made."""
    torch._dynamo.reset()
    layer = Layer(dtype)
    function = torch.compile(layer, options={"post_grad_custom_post_pass": transposing_pass()}) if compiled else layer
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    function(x).square().sum().backward()  # compiling runs operations, too
    layer.zero_grad()
    x.grad = None
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function(x).square().sum().backward()
    copies = sum(event.name == "aliquot::transposed_copy" for event in seen.events())
    computed = [tensor.grad for tensor in (x, *layer.parameters())]
    assert all(tensor is not None for tensor in computed)
    return computed, copies  # type: ignore[return-value]


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "copies"), [(torch.bfloat16, 2), (torch.float32, 0)])
def test_transposed_copies_give_the_gradients_of_plain_products(dtype: torch.dtype, copies: int) -> None:
    computed, made = gradients(dtype, compiled=True)
    expected, none = gradients(torch.float32, compiled=False)
    assert (made, none) == (copies, 0)
    for ours, exact in zip(computed, expected, strict=True):
        # bf16 rounds weights, inputs and each product to 8 bits.
        assert (ours.float() - exact).norm() <= (3e-2 if dtype == torch.bfloat16 else 1e-5) * exact.norm()


@pytest.mark.long
def test_rows_of_several_lengths_use_transposed_copies() -> None:
    """After the second length torch.compile takes one graph for all, in which the length has no number."""
    torch._dynamo.reset()
    layer = Layer(torch.bfloat16)
    function = torch.compile(layer, options={"post_grad_custom_post_pass": transposing_pass()})
    made = []
    for tokens in (TOKENS, 2 * TOKENS, TOKENS, 150):
        x = torch.randn(1, tokens, WIDTH).bfloat16().requires_grad_()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            function(x).square().sum().backward()
        made.append(sum(event.name == "aliquot::transposed_copy" for event in seen.events()))
    assert made[2:] == [2, 2]


@pytest.mark.parametrize("amx", [True, False])
def test_pass_is_used_only_with_amx(monkeypatch: pytest.MonkeyPatch, amx: bool) -> None:
    monkeypatch.setattr(model_kernels, "multiplies_with_amx", lambda device, precision: amx)
    assert ("post_grad_custom_post_pass" in (model_kernels._compile_options() or {})) == amx
