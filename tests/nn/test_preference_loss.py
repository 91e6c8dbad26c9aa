"""The losses of pairs against the formulas of the papers, as TRL writes them, and their gradients by differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aliquot.nn.preference_loss import Answers, Objective, RatedAnswers

LOGPROBS = torch.tensor([[-31.0, -25.5], [-12.0, -40.0], [-3.0, -2.0]])
REFERENCE = torch.tensor([[-30.0, -27.0], [-15.0, -33.0], [-3.0, -2.0]])
LENGTHS = torch.tensor([[12.0, 9.0], [5.0, 14.0], [2.0, 3.0]])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def margin(p: Tensor, q: Tensor) -> float:
    return float((p[0] - q[0]) - (p[1] - q[1]))


def orpo(p: Tensor, q: Tensor, n: Tensor) -> float:
    likelihoods = (p / n).exp()
    odds = likelihoods / (1 - likelihoods)
    return float(-(p / n)[0] - 0.4 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))


CASES: dict[str, tuple[Objective, Callable[[Tensor, Tensor, Tensor], float]]] = {
    "sigmoid": (Objective("dpo", 0.4), lambda p, q, n: -math.log(sigmoid(0.4 * margin(p, q)))),
    "smoothed": (
        Objective("dpo", 0.4, label_smoothing=0.2),
        lambda p, q, n: -0.8 * math.log(sigmoid(0.4 * margin(p, q))) - 0.2 * math.log(sigmoid(-0.4 * margin(p, q))),
    ),
    "robust": (
        Objective("dpo", 0.4, "robust", label_smoothing=0.2),
        lambda p, q, n: (
            (0.2 * math.log(sigmoid(-0.4 * margin(p, q))) - 0.8 * math.log(sigmoid(0.4 * margin(p, q)))) / 0.6
        ),
    ),
    "hinge": (Objective("dpo", 0.4, "hinge"), lambda p, q, n: max(0.0, 1 - 0.4 * margin(p, q))),
    "ipo": (Objective("dpo", 0.4, "ipo"), lambda p, q, n: (margin(p / n, q / n) - 1 / 0.8) ** 2),
    "simpo": (
        Objective("simpo", 2.0, simpo_gamma=0.3),
        lambda p, q, n: -math.log(sigmoid(2.0 * float(p[0] / n[0] - p[1] / n[1]) - 0.3)),
    ),
    "orpo": (Objective("orpo", 0.4), orpo),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_the_formulas(name: str) -> None:
    objective, formula = CASES[name]
    rows = [row.double() for row in LOGPROBS]
    expected = [formula(p, q.double(), n.double()) for p, q, n in zip(rows, REFERENCE, LENGTHS, strict=True)]
    torch.testing.assert_close(
        objective.losses(LOGPROBS, REFERENCE, LENGTHS), torch.tensor(expected), rtol=1e-5, atol=1e-6
    )
    # The weight of a token in the cross-entropy is -dL/d(log-probability of its answer).
    pairs = Answers(torch.arange(6), objective, torch.arange(6), LENGTHS, REFERENCE)
    step = 1e-5
    for pair in range(3):
        for answer in range(2):
            changed = torch.zeros(2, dtype=torch.float64)
            changed[answer] = step
            q, n = REFERENCE[pair].double(), LENGTHS[pair].double()
            slope = (formula(rows[pair] + changed, q, n) - formula(rows[pair] - changed, q, n)) / (2 * step)
            weight = float(pairs.weights(-LOGPROBS.view(-1))[2 * pair + answer])
            assert weight == pytest.approx(-slope, rel=1e-3, abs=1e-5)


def test_kto_compares_answers_with_the_divergence() -> None:
    objective = Objective("kto", 0.4, desirable_weight=1.5, undesirable_weight=0.5)
    logprobs, reference = torch.tensor([[-31.0], [-12.0], [-3.0]]), torch.tensor([[-30.0], [-15.0], [-5.0]])
    desirable = torch.tensor([True, False, True])
    lengths = torch.ones(3, 1)
    answers = RatedAnswers(
        torch.arange(3), objective, torch.arange(3), lengths, reference, desirable=desirable, divergence=2
    )
    losses = [1.5 * sigmoid(-0.4 * (-1 - 2)), 0.5 * sigmoid(0.4 * (3 - 2)), 1.5 * sigmoid(-0.4 * (2 - 2))]
    assert answers.losses(logprobs).tolist() == pytest.approx(losses)
    slopes = [-0.4 * losses[0] * sigmoid(0.4 * -3), 0.4 * losses[1] * sigmoid(-0.4), -0.4 * losses[2] * 0.5]
    logprobs = logprobs[:, 0]  # of answers of one token
    assert answers.weights(-logprobs).tolist() == pytest.approx([-slope for slope in slopes])
    assert answers.summed_ratios(logprobs) == pytest.approx(-1 + 3 + 2)
    assert objective.means(answers.metrics(logprobs), 3) == pytest.approx(
        {
            "loss": sum(losses) / 3,
            "kl": 2,
            "rewards/chosen": 0.4 * (-1 + 2) / 2,
            "rewards/rejected": 0.4 * 3,
            "rewards/margins": 0.4 * 0.5 - 0.4 * 3,
            "logps/chosen": -17,
            "logps/rejected": -12,
        }
    )
    undesirable = replace(answers, desirable=torch.zeros(3, dtype=torch.bool))
    assert "rewards/chosen" not in objective.means(undesirable.metrics(logprobs), 3)


def test_metrics_have_trl_s_names() -> None:
    pairs = Answers(torch.arange(6), Objective("dpo", 0.4), torch.arange(6), LENGTHS, REFERENCE)
    metrics = pairs.metrics(LOGPROBS.view(-1))
    assert metrics["rewards/chosen"] == pytest.approx(0.4 * (-1 + 3))
    assert metrics["rewards/rejected"] == pytest.approx(0.4 * (1.5 - 7))
    assert metrics["rewards/margins"] == pytest.approx(0.4 * (2 + 5.5))
    assert metrics["rewards/accuracies"] == 1  # a margin of 0 counts as wrong
    assert metrics["logps/chosen"] == -46


def test_likely_answers_have_finite_odds() -> None:
    losses = Objective("orpo").losses(torch.tensor([[-1e-4, -1e-6]]), torch.zeros(1, 2), torch.ones(1, 2))
    assert losses.isfinite().all()
