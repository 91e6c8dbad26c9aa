"""The experts against transformers' own eager loop: every kind of module, every way in which tokens can be spread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from aliquot.nn.experts.expert_modules import send_to, spread, take_counts, weights_of
from aliquot.nn.experts.sorted_experts import IMPLEMENTATION, GatedSilu, activation_of, register, route, suits
from aliquot.nn.product_shapes import filled_up, row_counts

EXPERTS, WIDTH, INNER = 5, 16, 12


@use_experts_implementation(has_gate=False)
class PlainExperts(nn.Module):
    """As those of models whose experts have no gate."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.up_proj = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.act_fn = nn.GELU()

    def forward(self, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            tokens, places = torch.where(chosen == expert)
            values = self.act_fn(hidden[tokens] @ self.up_proj[expert].t()) @ self.down_proj[expert].t()
            total = total.index_add(0, tokens, values * scores[tokens, places, None])
        return total


def module_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt_oss":
        made: nn.Module = GptOssExperts(
            GptOssConfig(num_local_experts=EXPERTS, hidden_size=WIDTH, intermediate_size=INNER)
        )
    else:
        of = Qwen3MoeConfig(
            num_experts=EXPERTS, hidden_size=WIDTH, moe_intermediate_size=INNER,
            hidden_act="gelu" if kind == "gelu" else "silu",
        )  # fmt: skip
        made = PlainExperts(of) if kind == "plain" else Qwen3MoeExperts(of)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def ran(module: nn.Module, how: str, chosen: Tensor) -> dict[str, Tensor]:
    """The result, and the gradients of everything."""
    generator = torch.Generator().manual_seed(2)
    tokens, per_token = chosen.shape
    hidden = torch.randn(tokens, WIDTH, generator=generator, requires_grad=True)
    scores = torch.rand(tokens, per_token, generator=generator, requires_grad=True)
    module.config._experts_implementation = how  # type: ignore[union-attr]
    result = module(hidden, chosen, scores)
    result.backward(torch.randn(tokens, WIDTH, generator=generator))
    found = {"result": result.detach(), "hidden": hidden.grad, "scores": scores.grad}
    for name, parameter in module.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return found  # type: ignore[return-value]


def choices(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    random = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(150)])
    return {
        "random": random,
        "one expert has no token": torch.where(random == 3, 4, random) * torch.tensor([1, 0]) + torch.tensor([0, 2]),
        "one expert has all": torch.full((9, 1), 2),
        "one token in all": torch.tensor([[4, 0]]),
        "some choose none": torch.where(random == 1, EXPERTS, random),
    }[kind]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


CHOICES = ["random", "one expert has no token", "one expert has all", "one token in all"]


@pytest.mark.parametrize(
    ("kind", "how"), [*product(["silu", "gelu", "plain", "gpt_oss"], CHOICES), ("silu", "some choose none")]
)
def test_equals_the_eager_loop(kind: str, how: str) -> None:
    module, chosen = module_of(kind), choices(how)
    expected, found = ran(module, "eager", chosen), ran(module, IMPLEMENTATION, chosen)
    for name, values in expected.items():
        # fp32 sums in another order: a few roundings.
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=2e-5, msg=lambda text, name=name: name + text)


def test_silu_needs_no_autograd() -> None:
    assert isinstance(activation_of(module_of("silu")), GatedSilu)


def test_repeats_are_the_same_bits() -> None:
    module, chosen = module_of("silu"), choices("random")
    first, again = ran(module, IMPLEMENTATION, chosen), ran(module, IMPLEMENTATION, chosen)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_what_tokens_chose_is_counted_over_ranks() -> None:
    module = module_of("silu")
    model = nn.Sequential(nn.Linear(2, 2), module)
    ran(module, IMPLEMENTATION, torch.tensor([[0, 2], [2, 0], [0, 4]]))
    ran(module, IMPLEMENTATION, torch.tensor([[0, 2]]))
    first = take_counts(model)
    assert first == [[4, 0, 3, 0, 1]] and take_counts(model) == []
    assert spread([first, [], [[0, 0, 1, 0, 1]]]) == {"busiest_expert": [2.0], "unused_experts": 2}
    assert spread([[], []]) == {}


class SavedProbabilities:
    """Gradients in blocks of two experts; or whole, where it is not its turn."""

    def __init__(self, weight: Tensor, turn: bool) -> None:
        self.gradient = torch.full_like(weight, float("nan"))
        self.turn = turn
        self.present: list[bool] = []

    def begin(self) -> Sequence[tuple[int, int]] | None:
        return [(0, 2), (2, 4), (4, 5)] if self.turn else None

    def buffer(self, first: int, last: int) -> Tensor:
        return self.gradient[first:last]

    def publish(self, present: bool) -> None:
        self.present.append(present)

    def whole(self, gradient: Tensor) -> None:
        self.gradient.copy_(gradient)


@pytest.mark.parametrize("turn", [True, False])
def test_gradients_go_where_they_are_sent(turn: bool) -> None:
    module, chosen = module_of("silu"), torch.tensor([[0, 2], [2, 0], [0, 2]])  # nobody chooses 1, 3 or 4
    expected = ran(module, IMPLEMENTATION, chosen)
    weights = weights_of(module)
    assert weights is not None
    sinks = [SavedProbabilities(weight, turn) for weight in weights]
    for weight, sink in zip(weights, sinks, strict=True):
        send_to(weight, sink)
    found = ran(module, IMPLEMENTATION, chosen)
    for name in ("gate_up_proj", "down_proj"):
        assert not found[name].any()  # autograd sees none of it
    for name, sink in zip(("gate_up_proj", "down_proj"), sinks, strict=True):
        assert sink.present == ([True, True, False] if turn else [])
        seen = slice(0, 4 if turn else EXPERTS)  # what is not present is left as it is
        assert torch.equal(sink.gradient[seen], expected[name][seen])
    for weight in weights:
        send_to(weight, None)
    assert torch.equal(ran(module, IMPLEMENTATION, chosen)["down_proj"], expected["down_proj"])


def test_experts_learn_where_nothing_before_them_does() -> None:
    module, chosen = module_of("silu"), choices("random")
    weights = weights_of(module)
    assert weights is not None
    sink = SavedProbabilities(weights[1], True)
    for weight in weights:
        send_to(weight, sink)
    module.config._experts_implementation = IMPLEMENTATION  # type: ignore[union-attr]
    module(torch.ones(len(chosen), WIDTH), chosen, torch.ones(chosen.shape)).sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in weights) and not sink.present


def test_bf16_is_as_near_to_fp32_as_the_eager_loop() -> None:
    module, chosen = module_of("silu"), choices("random")
    exact = ran(module, "eager", chosen)
    module.bfloat16()

    def error(how: str) -> float:
        generator = torch.Generator().manual_seed(2)
        hidden = torch.randn(len(chosen), WIDTH, generator=generator)
        scores = torch.rand(chosen.shape, generator=generator)
        module.config._experts_implementation = how  # type: ignore[union-attr]
        found = module(hidden.bfloat16(), chosen, scores.bfloat16())
        return float((found.detach().float() - exact["result"]).norm())

    assert error(IMPLEMENTATION) <= 1.2 * error("eager")


def test_a_norm_behind_each_expert_is_left_to_transformers() -> None:
    module = module_of("silu")
    assert suits(module)
    module.has_post_expert_norm = True  # type: ignore[assignment]
    assert not suits(module)


@given(st.integers(1, 7), st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), min_size=1, max_size=40))
def test_every_choice_has_a_slot_of_its_expert(experts: int, chosen: list[list[int]]) -> None:
    routing = route(torch.tensor(chosen), experts)
    slots = routing.slots.tolist()
    own = [slot for of_token in slots for slot in of_token if slot < routing.size]
    assert len(set(own)) == len(own) == sum(routing.counts)
    for token, (experts_of, slots_of) in enumerate(zip(chosen, slots, strict=True)):
        for expert, slot in zip(experts_of, slots_of, strict=True):
            if expert >= experts:
                assert slot == routing.size
            else:
                start, stop = routing.spans[expert]
                assert start <= slot < stop and int(routing.tokens[slot]) == token
    assert [stop - start for start, stop in routing.spans] == [filled_up(count) for count in routing.counts]
    scores = routing.scores(torch.ones(len(chosen), 2))
    assert float(scores.sum()) == len(own) and scores[own].eq(1).all()


def test_there_are_few_numbers_of_rows() -> None:
    sizes = {filled_up(count) for count in range(4097)}
    assert (
        len(sizes) <= 64
        and len(sizes) == row_counts(4096) + 1
        and all(filled_up(count) >= count for count in range(4097))
    )
    assert all(filled_up(count) <= max(8 + count, 1.125 * count) for count in range(1, 4097))
    assert filled_up(0) == 0 and filled_up(128) == 128 and filled_up(129) == 144
