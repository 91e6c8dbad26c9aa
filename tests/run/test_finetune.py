"""Fine-tuning a real pretrained model on real text lowers perplexity as much as a plain PyTorch loop does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from aliquot.config.read_config import read_config
from aliquot.data.batches import Batches
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import prepare
from aliquot.data.workload import BatchSize
from tests import plain
from tests.runs import curve, trained

STEPS = 25
CONFIG = """\
run: {{name: stories, directory: {folder}/stories}}
model: {{path: {shared}/models/stories15M}}
data:
  path: {shared}/data/wikitext2-raw-train-head.txt
  eval_path: {folder}/valid.txt
  document: block
  sequence_length: 256
train:
  max_steps: {steps}
  global_batch_size: 8
  learning_rate: 1e-4
  warmup_steps: 5
  lr_scheduler_type: constant
  weight_decay: 0.1
checkpoint: {{export: false}}
launch: {{ranks: 2}}
"""


@pytest.mark.long
def test_stories15m_on_wikitext(shared: Path, tmp_path: Path) -> None:
    text = (shared / "data" / "wikitext2-raw-valid.txt").read_text()
    (tmp_path / "valid.txt").write_text(text[:40_000])
    file = tmp_path / "stories.yaml"
    file.write_text(CONFIG.format(folder=tmp_path, shared=shared, steps=STEPS))
    trained(file, "train.max_steps=1", "train.learning_rate=1e-12", f"run.directory={tmp_path}/before")
    before = curve(tmp_path / "before", "eval_perplexity")[1]
    trained(file)
    ours = curve(tmp_path / "stories", "eval_perplexity")[STEPS]
    plain_before, plain_after = plain_loop(file)
    assert before == pytest.approx(plain_before, rel=0.01)  # bf16 against fp32
    assert plain_after < plain_before * 0.8
    # The logarithm of perplexity fell as far, within 2 %: one loop may compute in bf16, the other in fp32.
    assert math.log(before / ours) == pytest.approx(math.log(plain_before / plain_after), rel=0.02)


def plain_loop(file: Path) -> tuple[float, float]:
    """Perplexity before and after STEPS of fp32 AdamW in stock transformers."""
    config = read_config(file)
    assert config.model.path is not None
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    data = prepare(config.data, Path(config.model.path), model.config.vocab_size)
    size = BatchSize(total=8, micro=1)
    held_out = EvalBatches.of(data, config.data, size)[""]
    before = plain.perplexity(model, held_out.micro_batches(0, 1), held_out.predicted)
    plain.train(model, Batches.of(data, config.data, config.run.seed, size, None), config.train, STEPS)
    return before, plain.perplexity(model, held_out.micro_batches(0, 1), held_out.predicted)
