"""Memory traffic of compiled layers: inputs once, results once, nothing in between."""

from __future__ import annotations

import pytest
import torch

from aliquot.machine import matmul
from aliquot.planner.meta_trace import MetaTrace
from aliquot.planner.micro_batch_cost import Step, Work
from aliquot.planner.planned_model import PlannedModel
from tests.planner.shapes import LLAMA, planned_config

SIZE = 1000 * 4


def memory_bytes(work: Work) -> float:
    return sum(amount for key, amount in work.items() if key[0] == "memory")


def moved(compiled: bool, fusing: bool = True) -> tuple[float, float]:
    """(bytes, calls) of two runs of elementwise operations with a product between them."""
    x, y = torch.empty(1000, device="meta"), torch.empty(1000, device="meta")
    matrix = torch.empty(10, 10, device="meta")
    with MetaTrace([]) as live:
        live.fusing = fusing
        total = (x * y).add_(x).view(10, 100).sigmoid().view(1000)
        product = matrix @ matrix
        total = total * 2
        assert product.shape == (10, 10) and total.shape == x.shape
        work = live.take_work()[compiled]
    return memory_bytes(work), work["calls",]


def test_a_run_is_one_pass() -> None:
    assert moved(compiled=True) == (3 * SIZE + 2 * SIZE, 3)  # x and y to total; total to total; and the product
    assert moved(compiled=False) == moved(compiled=True, fusing=False) == ((3 + 2 + 2 + 2) * SIZE, 7)


def test_compiled_layers_change_time_only() -> None:
    model = PlannedModel(planned_config(LLAMA))
    plain, compiled = (
        model.cost(Step("bf16", "none", "cpu", True, False, compiled), (0, 300, 512), 500) for compiled in (False, True)
    )
    for name in ("forward", "backward"):
        before, after = getattr(plain, name), getattr(compiled, name)
        assert 0.3 * memory_bytes(before) < memory_bytes(after) < 0.95 * memory_bytes(before)
        assert {key: n for key, n in before.items() if key[0] == "matmul"} == {
            key: n for key, n in after.items() if key[0] == "matmul"
        }
    assert compiled.saved_bytes == plain.saved_bytes and compiled.backward_bytes == plain.backward_bytes


def test_copies_convert_permute_or_transpose() -> None:
    rows = torch.empty(8, 6, 4, device="meta")
    with MetaTrace([]) as live:
        kept = [
            rows.clone(),
            rows.transpose(0, 1).contiguous(),  # pieces of four elements lie elsewhere
            rows.mT.contiguous(),  # every element does
            rows.bfloat16(),
            rows.mT.bfloat16().contiguous(),
        ]
        work, _ = live.take_work()
    assert len(kept) == 5
    assert {key[1] for key in work if key[0] == "memory"} == {"clone", "permute", "transpose", "convert"}


def test_copies_for_amx_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_FEWEST_COLUMNS", 64)
    monkeypatch.setattr(matmul, "_SMALLEST_RIGHT_SIDE", 1)
    model = PlannedModel(planned_config(LLAMA))
    plain, copying = (
        model.cost(Step("bf16", "none", "cpu", True, False, copies_transposed=copies), (0, 300, 512), 500)
        for copies in (False, True)
    )

    def of(kind: str, work: Work) -> float:
        return sum(amount for key, amount in work.items() if key[:2] == ("memory", kind))

    assert of("transpose", copying.backward) > of("transpose", plain.backward)
    # The same products, of sides that were exchanged.
    flops = [
        sum(n * key[1] * key[2] * key[3] * key[4] for key, n in each.backward.items() if key[0] == "matmul")
        for each in (plain, copying)
    ]
    assert flops[0] == flops[1]
