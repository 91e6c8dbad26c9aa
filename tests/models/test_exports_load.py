"""What comes out can be used: training's own ids and logits, in this transformers and in the one before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import aliquot
from aliquot.data.prepare import prepare
from tests.runs import command, trained, write_config

TEXT = "It's 12345 o'clock, isn't it?\n\n the rank  waits 678"
BASE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "llama": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "qwen3-yarn": {"model_type": "qwen3", "head_dim": 8, "rope_parameters": YARN},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8,
               "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}  # fmt: skip
OLDER = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4.57"), transformers.__version__
found = {}
for directory in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].tolist()
    found[directory] = {"ids": ids, "logits": logits}
print("FOUND" + json.dumps(found))
"""


def exported(folder: Path, name: str, **data: Any) -> Path:
    config = {**BASE, **MODELS[name]} if name != "gpt2" else MODELS[name]
    settings: dict[str, Any] = {"model": {"config": config}, "train": {"max_steps": 1, "learning_rate": 0.05}}
    trained(write_config(folder / name, "run", **settings, data=data))
    return folder / name / "run" / "export"


def own_ids(run_yaml: Path, text: str) -> list[int]:
    """As training makes them of a document."""
    config = aliquot.read_config(run_yaml)
    model_type = config.model.config["model_type"]  # type: ignore[index]
    tokenizer = prepare(config.data, None, 1 << 20, config=AutoConfig.for_model(model_type).to_dict()).load_tokenizer()
    ids: list[int] = tokenizer.encode(text)
    return ids


@pytest.mark.parametrize("name", ["qwen2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_exported_tokenizer_gives_the_ids_of_training(tmp_path: Path, name: str) -> None:
    directory = exported(tmp_path, name)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.encode(TEXT) == own_ids(tmp_path / name / "run.yaml", TEXT)
    config = json.loads((directory / "config.json").read_text())
    generation = json.loads((directory / "generation_config.json").read_text())
    for key in ("bos_token_id", "eos_token_id"):
        assert config[key] == generation[key] == getattr(tokenizer, key)
    assert (
        AutoConfig.from_pretrained(directory).rope_parameters
        == AutoConfig.for_model(**BASE, **MODELS[name]).rope_parameters
    )


@pytest.mark.long
def test_export_remembers_prepended_tokens(tmp_path: Path) -> None:
    directory = exported(tmp_path, "llama", add_bos=False)
    assert json.loads((directory / "aliquot.json").read_text()) == {
        "prefix": [],
        "chat_prefix": [],
        "ends": [1],
        "step": 1,
    }
    said = command("generate", directory, "--prompt", "the rank", "--max-new-tokens", "1", "--temperature", "0")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    bare = torch.tensor([tokenizer.encode("the rank", add_special_tokens=False)])
    assert bare[0].tolist() != tokenizer.encode("the rank"), "the tokenizer itself would put bos there"
    with torch.no_grad():
        expected = tokenizer.decode([*bare[0].tolist(), int(model(bare).logits[0, -1].argmax())])
    assert said.stdout.strip() == expected.strip(), said.stderr


@pytest.mark.long
def test_transformers_4_57_gives_the_same(tmp_path: Path) -> None:
    older = tmp_path / "older"
    wanted = ["transformers==4.57.6", "huggingface_hub>=0.34,<1", "tokenizers>=0.22,<=0.23.0"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(older), *wanted]
    done = subprocess.run(install, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot install transformers 4.57: {done.stderr.strip().splitlines()[-1:]}")
    directories = [exported(tmp_path, name) for name in MODELS]
    environment = {**os.environ, "PYTHONPATH": str(older)}
    arguments = [sys.executable, "-c", OLDER, TEXT, *map(str, directories)]
    run = subprocess.run(arguments, check=False, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.partition("FOUND")[2])
    for directory in directories:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = tokenizer.encode(TEXT)
        assert found[str(directory)]["ids"] == ids, directory
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(torch.tensor(found[str(directory)]["logits"]), logits, rtol=1e-3, atol=1e-4)
