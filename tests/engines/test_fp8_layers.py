"""`train.fp8`: products in fp8 train about as bf16 does."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import nn

from aliquot.core.errors import EngineError, MissingToolError, SelfTestError
from aliquot.engines.fsdp import fp8_layers
from aliquot.engines.fsdp.fp8_layers import use_fp8
from aliquot.engines.fsdp.single_gpu_engine import SingleGpuEngine
from aliquot.models.micro_batch import MicroBatch
from tests.engines import cases
from tests.processes import as_ranks, run_ranks

pytest.importorskip("torchao", reason="needs torchao: make test-fp8")
CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs"
ROW = 127  # tokens; products need sizes that are multiples of 16
# Two of the three matrices of an MLP are large enough for fp8: 133,120 of 160,000 weights of a model.
MODEL = {**cases.SMALL, "vocab_size": 68, "intermediate_size": 1040}


class Decoder(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, inner), nn.Linear(inner, 24))])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fp8")
    run_ranks(Path(__file__), 1, folder)
    result: dict[str, dict[str, Any]] = json.loads((folder / "1-0.json").read_text())
    return result


def test_fp8_trains_about_as_bf16_does(trained: dict[str, dict[str, Any]]) -> None:
    losses, exact = trained["fp8"], trained["bf16"]
    assert losses["losses"] != exact["losses"] and losses["losses"] == pytest.approx(exact["losses"], rel=0.02)
    assert losses["names"] == exact["names"] and losses["weights_bytes"] == exact["weights_bytes"]
    for name in trained.keys() - {"bf16"}:
        assert trained[name]["losses"] == pytest.approx(losses["losses"], rel=0.01), name


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fp8_learns_text_as_well_as_bf16(seed: int) -> None:
    exact, rounded = (losses_on_text(seed, fp8) for fp8 in (False, True))
    print(
        f"seed {seed}: mean loss of the last 50 steps {mean(exact[-50:]):.4f} in bf16, {mean(rounded[-50:]):.4f} in fp8"
    )
    assert mean(exact[-50:]) < 0.6 * exact[0]
    assert mean(rounded[-50:]) == pytest.approx(mean(exact[-50:]), rel=0.01)


def losses_on_text(seed: int, fp8: bool) -> list[float]:
    """Train on bytes of the documentation, four rows a step."""
    text = torch.tensor(list(b"".join(file.read_bytes() for file in sorted(DOCS.glob("*/*.md")))))
    model = {**MODEL, "vocab_size": 256, "max_position_embeddings": ROW}
    engine, _ = cases.llama(SingleGpuEngine, model, 0, 1, ROW, seed, precision="bf16", fp8=fp8)
    draw, losses = random.Random(seed), []
    for _ in range(300):
        total = 0.0
        for row in range(4):
            start = draw.randrange(len(text) - ROW)
            ids = text[start : start + ROW]
            labels = torch.cat([ids[1:], torch.tensor([-100])])
            batch = MicroBatch(ids, labels, torch.arange(ROW), (0, ROW))
            total += float(engine.backward(batch, 1 / (4 * ROW), last=row == 3)) / (4 * ROW)
        engine.step(2e-3, 1.0)
        losses.append(total)
    engine.close()
    return losses


def test_converts_large_layers_whose_sizes_suit() -> None:
    model = Decoder(inner=2048)
    use_fp8(model, CPU)
    first, second = model.layers[0]
    assert type(first).__name__ == "Float8Linear" and type(second) is nn.Linear
    with pytest.raises(EngineError, match="no linear layer that is large enough"):
        use_fp8(Decoder(inner=1024), CPU)


def test_a_device_that_multiplies_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_layers, "_TOLERANCE", 1e-3)  # fp8 itself is less exact
    with pytest.raises(SelfTestError, match="a product in fp8 on cpu is wrong: its output differs by"):
        use_fp8(Decoder(inner=2048), CPU)


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingToolError, match="pip install 'aliquot\\[fp8\\]'"):
        use_fp8(Decoder(inner=2048), CPU)


def train(**settings: Any) -> dict[str, Any]:
    engine, _ = cases.llama(SingleGpuEngine, MODEL, 0, 1, precision="bf16", **settings)
    losses = []
    for step in range(cases.FAR):
        batches = [cases.micro_batch(sequence) for sequence in cases.documents(step)[:4]]
        parts = [float(engine.backward(batch, 1 / 100, last=batch is batches[-1])) for batch in batches]
        losses.append(sum(parts))
        engine.step(cases.LEARNING_RATE, cases.MAX_GRAD_NORM)
    names, counters = sorted({part.name for part in engine.parts()}), engine.counters()
    engine.close()
    return {"losses": losses, "names": names, "weights_bytes": counters.weights_bytes}


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    """One rank with products in fp8, which torchao emulates."""
    variants: dict[str, dict[str, Any]] = {
        "bf16": {"fp8": False}, "fp8": {}, "compiled": {"compile": "layers"},
        "recomputed": {"gradient_checkpointing": "full"},
    }  # fmt: skip
    results = {name: train(**{"fp8": True, **settings}) for name, settings in variants.items()}
    (folder / "1-0.json").write_text(json.dumps(results))


if __name__ == "__main__":
    as_ranks(work)
