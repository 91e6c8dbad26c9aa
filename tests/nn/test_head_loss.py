"""Head and cross-entropy as one step against autograd on plain logits, in fp64; whole, in chunks, and row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aliquot.machine import matmul
from aliquot.nn import head_loss as head_loss_module
from aliquot.nn.head_loss import Chosen, FusedLoss, GradientRows, choose, head_loss_on
from aliquot.nn.preference_loss import Answers, Objective
from aliquot.nn.product_shapes import logits_room
from aliquot.nn.token_loss import TokenLoss, TokenSequence
from tests.nn.reference_loss import reference_loss

TOKENS, WIDTH, VOCABULARY = 37, 16, 101
SCRATCH = 4 * VOCABULARY * 5  # five rows in fp32
BACKENDS: dict[str, Callable[..., Any]] = {
    "reference": reference_loss,
    "cpu": FusedLoss(SCRATCH),
    "cpu-in-chunks": FusedLoss(SCRATCH, logits_bytes=8 * VOCABULARY * 9),
    "cpu-from-copies": FusedLoss(SCRATCH, copies_transposed=True),
    "cpu-from-copies-in-chunks": FusedLoss(SCRATCH, logits_bytes=8 * VOCABULARY * 9, copies_transposed=True),
    "cuda": head_loss_on("cuda", logits_bytes=logits_room(80 << 30)),
    "cuda-compiled": head_loss_on("cuda", logits_bytes=logits_room(80 << 30), compiled=True),
}
head_loss = head_loss_on("cpu")


@pytest.fixture(autouse=True)
def small_ones_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nothing here would be large enough for a transposed copy."""
    for limit in ("_FEWEST_ROWS", "_FEWEST_COLUMNS", "_SMALLEST_RIGHT_SIDE"):
        monkeypatch.setattr(matmul, limit, 1)
    monkeypatch.setattr(head_loss_module, "_LOGITS_COLUMNS", 40)  # of 101


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    summed = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
    return summed.detach(), *torch.autograd.grad(summed * scale, (hidden, weight))


COMPILED = pytest.param("cuda-compiled", marks=pytest.mark.long)  # torch.compile takes half a minute


@pytest.mark.parametrize("backend", [*list(BACKENDS)[:-1], COMPILED])
@pytest.mark.parametrize("by_rows", [False, True])
def test_equals_autograd(backend: str, by_rows: bool) -> None:
    head_loss = BACKENDS[backend]
    hidden, weight, labels = case()
    expected = plain(hidden, weight, labels, 0.25)
    rows: dict[int, Tensor] = {}
    sink = None
    if by_rows:

        def buffer(a: int, b: int) -> Tensor:
            rows[a] = torch.full((b - a, WIDTH), float("nan"), dtype=hidden.dtype)
            return rows[a]

        sink = GradientRows((0, 40, 41, VOCABULARY), buffer, lambda: None)
    summed, scaled = head_loss(hidden, weight, labels, 0.25, sink)
    scaled.backward()
    gradient = weight.grad if not by_rows else torch.cat([rows[a] for a in sorted(rows)])
    # The softmax is taken in fp32, whatever the dtype: exponentials to a few parts in 10^7.
    for ours, theirs in zip((summed, hidden.grad, gradient), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-6)
    assert (weight.grad is None) == by_rows
    with torch.no_grad():
        torch.testing.assert_close(head_loss(hidden, weight, labels, 0.25)[0].double(), expected[0], rtol=1e-6, atol=0)


def test_what_is_compiled_is_the_same_where_torch_does_not_compile() -> None:
    """Under a dispatch mode, or beyond its limit of graphs."""
    hidden, weight, labels = case(torch.float32)
    expected = plain(hidden, weight, labels, 0.25)
    with torch.compiler.set_stance("force_eager"):
        summed, scaled = BACKENDS["cuda-compiled"](hidden, weight, labels, 0.25)
    scaled.backward()
    for ours, theirs in zip((summed, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "cpu-in-chunks", "cpu-from-copies"])
def test_logits_in_memory_that_was_taken_before_are_the_same(backend: str) -> None:
    fused = BACKENDS[backend]
    assert isinstance(fused, FusedLoss)
    results = []
    for with_room in (False, True):
        hidden, weight, labels = case()
        chosen = choose(labels)
        room = fused.room(chosen, labels, weight) if with_room else None
        if room is not None:
            assert room.shape == (16 if backend == "cpu-in-chunks" else len(chosen.rows), VOCABULARY)
            room.fill_(float("nan"))
        summed, scaled = fused(hidden, weight, labels, 0.25, None, chosen, room)
        if room is not None:
            assert room.isfinite().all()  # it is where they were
            room.fill_(float("nan"))  # and nothing of the backward pass lies in it
        scaled.backward()
        results.append((summed, hidden.grad, weight.grad))
    assert all(map(torch.equal, *results))


class LargestInFp32(TorchDispatchMode):
    """The elements of the largest tensor in fp32 that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("backend", ["cpu", "cpu-in-chunks"])
@pytest.mark.parametrize("learns", [True, False])
def test_no_more_rows_than_one_pass_are_in_fp32_at_once(backend: str, learns: bool) -> None:
    """An evaluation that turned all of them to fp32 left a heap that every later step was spread over."""
    hidden, weight, labels = (
        each.detach().to(dtype)
        for each, dtype in zip(case(), (torch.bfloat16, torch.bfloat16, torch.int64), strict=True)
    )
    weight.requires_grad_(learns)
    # The whole logits are in bf16: what is in fp32 is one pass. Columns that are computed again have their own bound.
    with torch.set_grad_enabled(learns), LargestInFp32() as seen:
        summed, _ = BACKENDS[backend](hidden, weight, labels, 0.25)
    allowed = SCRATCH if not learns or backend == "cpu" else 8 * VOCABULARY * 9
    assert 4 * seen.elements <= allowed < 4 * TOKENS * VOCABULARY
    torch.testing.assert_close(summed, plain(*case(), 0.25)[0].float(), rtol=1e-2, atol=0)


class Waits(TorchDispatchMode):
    """What makes a host wait for its GPU: a number of a tensor, or a shape that depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        assert not waits and not by_mask, f"{name} waits for the GPU"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["cuda", "cpu-in-chunks"])
def test_a_gpu_is_asked_for_nothing_once_its_tokens_are_chosen(backend: str) -> None:
    hidden, weight, labels = case()
    chosen = choose(labels)
    assert chosen.rows is not None and chosen.learned == int((labels != -100).sum())
    expected = plain(hidden, weight, labels, 0.25)

    def both(known: Chosen | None) -> Tensor:
        summed, scaled = BACKENDS[backend](hidden, weight, labels, 0.25, chosen=known)
        scaled.backward()
        return summed

    with Waits():
        summed = both(chosen)
    for ours, theirs in zip((summed, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-6)
    with Waits(), pytest.raises(AssertionError, match="waits"):
        both(None)


def test_a_large_gpu_keeps_logits_that_a_cpu_would_compute_twice() -> None:
    assert logits_room(None) == 256 << 20 == logits_room(2 << 30)
    assert 2 * 8192 * 128256 < logits_room(80 << 30) < (80 << 30) // 10


def test_bf16_is_as_near_to_exact_as_autograd_in_bf16() -> None:
    exact = plain(*case(), 0.25)
    hidden, weight, labels = case()
    hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    summed = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
    theirs = torch.autograd.grad(summed * 0.25, (hidden, weight))
    head_loss(hidden, weight, labels, 0.25)[1].backward()
    for ours, other, right in zip((hidden.grad, weight.grad), theirs, exact[1:], strict=True):
        assert (ours.double() - right).norm() <= 1.1 * (other.double() - right).norm()


def test_confident_predictions_keep_their_small_gradients() -> None:
    """Where the label's probability is 0.999, bf16 holds the difference to 1, not the probability."""
    weight = torch.eye(4, WIDTH).bfloat16().requires_grad_()
    hidden = torch.zeros(1, WIDTH, dtype=torch.bfloat16)
    hidden[0, 2] = 8.0
    hidden.requires_grad_()
    head_loss(hidden, weight, torch.tensor([2]), 1.0)[1].backward()
    exact = plain(hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(),
                  torch.tensor([2]), 1.0)  # fmt: skip
    torch.testing.assert_close(hidden.grad.double(), exact[1], rtol=0.02, atol=1e-6)


def test_nothing_to_predict() -> None:
    hidden, weight, _ = case(torch.float32)
    summed, scaled = head_loss(hidden, weight, torch.full((TOKENS,), -100), 1.0)
    scaled.backward()
    assert float(summed) == 0 and not hidden.grad.any() and not weight.grad.any()


def test_extreme_logits_give_finite_losses_and_gradients() -> None:
    hidden = torch.tensor([[300.0], [-300.0]]).requires_grad_()
    weight = torch.tensor([[1.0], [-1.0], [0.5]]).requires_grad_()
    summed, scaled = head_loss(hidden, weight, torch.tensor([1, 1]), 1.0)
    scaled.backward()
    assert float(summed) == pytest.approx(600.0)
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("backend", [*list(BACKENDS)[1:-1], COMPILED])
@pytest.mark.parametrize("objective", [Objective("dpo", beta=0.7), Objective("orpo")], ids=lambda one: one.name)
@pytest.mark.parametrize("by_rows", [False, True])
def test_preference_loss_equals_autograd(backend: str, objective: Objective, by_rows: bool) -> None:
    """Two pairs, whose answers are documents of the row; a further document has no labels."""
    fused = BACKENDS[backend]
    hidden, weight, labels = case()
    labels[30:] = -100
    answers = torch.tensor([0, 1, 2, 3]).repeat_interleave(torch.tensor([9, 6, 8, 7]))
    lengths = torch.stack([(labels[:30][answers == one] != -100).sum() for one in range(4)]).view(2, 2).float()
    reference = torch.tensor([[-40.0, -28.0], [-33.0, -30.0]])
    token_losses = F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")[:30]
    logprobs = -torch.zeros(4, dtype=hidden.dtype).index_add(0, answers, token_losses).view(2, 2)
    summed = objective.losses(logprobs, reference, lengths).sum()
    tokens = (labels != -100).nonzero().flatten()
    expected = -token_losses.detach()[tokens], *torch.autograd.grad(summed * 0.25, (hidden, weight))

    rows: dict[int, Tensor] = {}

    def buffer(a: int, b: int) -> Tensor:
        rows[a] = torch.full((b - a, WIDTH), float("nan"), dtype=hidden.dtype)
        return rows[a]

    sink = GradientRows((0, 40, 41, VOCABULARY), buffer, lambda: None) if by_rows else None
    chosen = choose(labels, Answers(tokens, objective, answers[tokens], lengths, reference))
    result, scaled = fused(hidden, weight, labels, 0.25, sink, chosen)
    scaled.backward()
    gradient = torch.cat([rows[a] for a in sorted(rows)]) if by_rows else weight.grad
    for ours, theirs in zip((result, hidden.grad, gradient), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-6, atol=2e-6)
    with torch.no_grad():
        torch.testing.assert_close(fused(hidden, weight, labels, 1.0, None, chosen)[0], result)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.startswith("cpu")])
def test_loss_of_the_caller_with_entropies(backend: str) -> None:
    """Its gradient with respect to both arguments, for tokens of two sequences."""
    hidden, weight, labels = case()
    ids = [3] * (TOKENS + 1)
    places = (labels != -100).nonzero().flatten()
    weights = {"weights": torch.arange(TOKENS + 1).tolist()}

    def loss(logprobs: Tensor, sequence: TokenSequence, entropies: Tensor) -> Tensor:
        return (logprobs.exp() * sequence["weights"] - entropies.square()).sum()

    sequence = TokenSequence(ids, [False, *(labels != -100).tolist()], weights)
    token_loss = TokenLoss(places, [(sequence,)], loss)
    _, scaled = BACKENDS[backend](hidden, weight, labels, 0.5, chosen=choose(labels, token_loss))
    gradients = torch.autograd.grad(scaled, (hidden, weight))
    logprobs = F.linear(hidden, weight)[places].log_softmax(1)
    targets = logprobs.gather(1, labels[places, None])[:, 0]
    expected = loss(targets, sequence, -(logprobs.exp() * logprobs).sum(1))
    assert token_loss.outcome.total == pytest.approx(float(expected), rel=1e-5)
    for gradient, plain_gradient in zip(gradients, torch.autograd.grad(expected / 2, (hidden, weight)), strict=True):
        torch.testing.assert_close(gradient, plain_gradient, rtol=1e-4, atol=1e-4)
