from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from aliquot.optim.schedule import learning_rate


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_equals_transformers(kind: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    name = "constant_with_warmup" if kind == "constant" else kind
    theirs = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=20)
    for step in range(20):
        assert learning_rate(step, 20, warmup, 0.5, kind) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()
