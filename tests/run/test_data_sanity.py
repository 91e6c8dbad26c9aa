"""Data sanity: a pretrained model that needs a bos token, or that does not know the text, causes a warning."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.head_loss import IGNORE
from aliquot.run.data_sanity import with_prefix
from tests.runs import command, trained, write_config

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip


def test_prefix_precedes_documents_and_is_not_predicted() -> None:
    labels = torch.tensor([6, IGNORE, 8, 9, IGNORE])
    batch = MicroBatch(torch.tensor([5, 6, 7, 8, 9]), labels, torch.tensor([0, 1, 0, 1, 2]), (0, 2, 5))
    prefixed = with_prefix(batch, [1])
    assert prefixed.input_ids.tolist() == [1, 5, 1, 7, 8], "as long as they were: a model may know no more positions"
    assert prefixed.labels.tolist() == [IGNORE, 6, IGNORE, 8, 9]
    assert prefixed.position_ids.tolist() == [0, 1, 0, 1, 2] and prefixed.edges == (0, 2, 5)


@pytest.mark.long
def test_bad_first_loss_warns_with_advice(tmp_path: Path) -> None:
    """The model has learned a text by positions, and without bos every position is off by one."""
    words = random.Random(0).choices(["the", "a", "rank", "waits"], k=12)
    text = tmp_path / "song.txt"
    text.write_text((" ".join(words) + "\n") * 40)
    data = {"path": str(text), "eval_fraction": 0.0, "tokenizer_vocab_size": 290}
    train = {"max_steps": 60, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "warmup_steps": 0}
    taught = write_config(tmp_path, "taught", model={"config": GPT2}, data=data, train=train)
    trained(taught)
    export = tmp_path / "taught" / "export"
    again = {**data, "tokenizer_vocab_size": None}
    model = {"config": None, "path": str(export)}
    tuned = write_config(tmp_path, "tuned", model=model, data={**again, "add_bos": False}, train={"max_steps": 1})
    run_output = command("train", tuned)
    assert run_output.returncode == 0 and "set data.add_bos=true" in run_output.stdout + run_output.stderr
    right = command("train", write_config(tmp_path, "right", model=model, data=again, train={"max_steps": 1}))
    assert right.returncode == 0 and "begin at a loss" not in right.stdout + right.stderr

    weights = load_file(export / "model.safetensors")
    save_file({name: -3 * values for name, values in weights.items()}, export / "model.safetensors")
    worse = command("train", write_config(tmp_path, "worse", model=model, data=again, train={"max_steps": 1}))
    assert "guessing gives" in worse.stdout + worse.stderr
