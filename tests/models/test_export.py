"""An export: its files, and that training's own ids and logits come out of it, in two versions of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import aliquot
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.core.errors import DamagedCheckpoint, RunDirectoryError, UsageError, UserError
from aliquot.core.on_rank_0 import SingleRank
from aliquot.data.prepare import prepare
from aliquot.models import meta
from aliquot.models.export import ExportOptions, export, export_checkpoint
from aliquot.models.load import load_weights
from aliquot.models.stored_weights import published_of
from tests.checkpoint.saving import save
from tests.engines import cases
from tests.runs import command, trained, write_config
from tests.tensor_io.world import SMALL, FakeStore, PipedRanks, Tensors, run_world, value_of

CONFIG = {"config.json": b'{"model_type": "llama", "torch_dtype": "float32"}', "tokenizer.json": b"{}"}


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def export_small(out_dir: Path, ranks: Any, limit: int = 400) -> None:
    store = FakeStore(SMALL, ranks.rank, ranks.world_size)
    export(store, SMALL, out_dir, torch.bfloat16, CONFIG, ranks, ExportOptions(max_shard_bytes=limit))


def checkpoint(root: Path) -> Path:
    return save(root, 1, FakeStore(SMALL), CheckpointSpec(SMALL, CONFIG), {"step": 1}, SingleRank(), 1)


def test_files_do_not_depend_on_the_world_size(tmp_path: Path) -> None:
    for world in (1, 2, 3):
        assert run_world(world, lambda ranks, w=world: export_small(tmp_path / str(w), ranks)) == [None] * world
    assert digests(tmp_path / "1") == digests(tmp_path / "2") == digests(tmp_path / "3")
    export_checkpoint(
        checkpoint(tmp_path), tmp_path / "offline", "bfloat16", options=ExportOptions(max_shard_bytes=400)
    )
    assert digests(tmp_path / "1") == digests(tmp_path / "offline")
    assert len(list((tmp_path / "1").glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "1" / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_checkpoint_exported_alone(tmp_path: Path, dtype: Any, verify: bool) -> None:
    export_checkpoint(checkpoint(tmp_path), tmp_path / "out", dtype, options=ExportOptions(verify=verify))
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == {name for name, _ in SMALL}
    for part in FakeStore(SMALL, kinds=["weight"]).parts():
        assert torch.equal(loaded[part.name].flatten(), value_of(part).to(getattr(torch, dtype)))
    assert set(digests(tmp_path / "out")) == {"model.safetensors", *CONFIG}


@pytest.mark.parametrize("offline", [False, True])
def test_fp32_modules_of_transformers_export_as_fp32(tmp_path: Path, offline: bool) -> None:
    config = AutoConfig.for_model(**{**cases.SMALL, **cases.DEEPSEEK})
    built = meta.build(config)
    files = {"config.json": json.dumps(config.to_dict()).encode()}
    store, out = FakeStore(built.tensors), tmp_path / "out"
    if offline:
        export_checkpoint(
            save(tmp_path, 1, store, CheckpointSpec(built.tensors, files), {"step": 1}, SingleRank(), 1),
            out,
            "bfloat16",
        )
    else:
        published = published_of(built.model, built.tensors)
        export(
            store,
            built.tensors,
            out,
            torch.bfloat16,
            files,
            SingleRank(),
            ExportOptions(published=published, exact=built.exact),
        )
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    weights = {part.name: value_of(part) for part in store.parts() if part.kind == "weight"}
    assert len(built.exact) == 2
    for name in built.exact:
        assert torch.equal(loaded[name], weights[name]) and loaded[name].dtype == torch.float32
    assert loaded["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_export(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=33, max_position_embeddings=32, tie_word_embeddings=tied, **sizes)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "source")
    tensors: Tensors = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    files = {"config.json": (tmp_path / "source" / "config.json").read_bytes()}

    def work(ranks: PipedRanks) -> None:
        store = FakeStore(tensors, ranks.rank, ranks.world_size, zeros=True)
        load_weights(store, tmp_path / "source", tensors, aliases, ranks)
        export(store, tensors, tmp_path / "out", torch.float32, files, ranks, ExportOptions(max_shard_bytes=8000))
        save(tmp_path, 3, store, CheckpointSpec(tensors, files), {}, ranks, 1)

    assert run_world(2, work) == [None, None]
    ids = torch.arange(7)[None]
    for directory in (tmp_path / "out", tmp_path / "step-00000003"):
        loaded = AutoModelForCausalLM.from_pretrained(directory).eval()
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_existing_export_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    answers = run_world(2, lambda ranks: export_small(tmp_path / "out", ranks))
    assert [type(answer) for answer in answers] == [RunDirectoryError] * 2
    assert str(answers[0]) == f"{tmp_path / 'out'}: exists and is not empty: give another directory, or remove it first"
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.tex"]
    (tmp_path / "out" / "thesis.tex").unlink()
    export_small(tmp_path / "out", SingleRank())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists"):
        export_small(tmp_path / "file", SingleRank())


def test_float16_overflow_is_reported(tmp_path: Path) -> None:
    def work(ranks: PipedRanks) -> None:
        store = FakeStore(SMALL, ranks.rank, ranks.world_size)
        for part, values in store.values.items():
            if (part.name, part.kind, ranks.rank) == ("lm_head.weight", "weight", 1):
                values[3] = -70_000.0
        export(store, SMALL, tmp_path / dtype, getattr(torch, dtype), CONFIG, ranks)

    dtype = "float16"
    answers = run_world(2, work)
    assert [type(answer) for answer in answers] == [UsageError] * 2
    assert "lm_head.weight has values of up to 70000, and float16 ends at 65504: choose bfloat16" in str(answers[0])
    assert list(tmp_path.iterdir()) == []
    dtype = "bfloat16"
    assert run_world(2, work) == [None, None]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "checkpoints")
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors: damaged"):
        export_checkpoint(directory, tmp_path / "out", "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    export_checkpoint(directory, tmp_path / "out", "bfloat16", options=ExportOptions(verify=False))
    (directory / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"no manifest\.json"):
        export_checkpoint(directory, tmp_path / "other", "bfloat16")
    with pytest.raises(DamagedCheckpoint, match="not a complete checkpoint"):
        export_checkpoint(tmp_path / "absent", tmp_path / "other", "bfloat16")


def test_leftovers_of_a_killed_export_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".out.partial-00112233").mkdir()
    (tmp_path / ".other.partial-00112233").mkdir()
    export_small(tmp_path / "out", SingleRank())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.partial-00112233", "out"]


def test_files_outside_the_manifest_are_not_trusted(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    save_file({"x": torch.zeros(1)}, directory / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match="bytes instead of"):
        export_checkpoint(directory, tmp_path / "out", "bfloat16")


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
    return tokenizer.encode(text)


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
def test_transformers_4_57_gives_the_same(tmp_path: Path, in_transformers_4: Callable[..., dict[str, Any]]) -> None:
    directories = [exported(tmp_path, name) for name in MODELS]
    found = in_transformers_4(OLDER, TEXT, *directories)
    for directory in directories:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = tokenizer.encode(TEXT)
        assert found[str(directory)]["ids"] == ids, directory
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(torch.tensor(found[str(directory)]["logits"]), logits, rtol=1e-3, atol=1e-4)
