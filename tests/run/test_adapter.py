"""LoRA and frozen weights, as a person runs them: the curve of peft in a plain loop, checkpoints, exports, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import aliquot
from aliquot.config.adapter_section import AdapterSection
from aliquot.config.evaluation_config import read_evaluation_config
from aliquot.config.schema import ModelSection
from aliquot.core.errors import UserError
from aliquot.core.on_rank_0 import SingleRank
from aliquot.data.batches import Batches
from aliquot.data.prepare import prepare
from aliquot.data.vocabulary import TokenizerChanges
from aliquot.data.workload import batch_size
from aliquot.models import meta
from aliquot.models.export import export_checkpoint
from aliquot.models.generate import generate
from aliquot.models.load import load_adapter
from aliquot.models.narrow import narrow
from aliquot.models.source import resolve
from aliquot.run.evaluate import evaluate_model
from tests import plain
from tests.runs import command, curve, refusal, refused, trained, write_config

LORA = {"r": 3, "alpha": 12.0, "loraplus_lr_ratio": 2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """A model after a few training steps."""
    aliquot.train(aliquot.read_config(write_config(folder, "base", train={"max_steps": 3})))
    return folder / "base" / "export"


def adapter_config(base: Path, name: str, **sections: dict[str, object]) -> Path:
    model = {"model": {"config": None, "path": str(base)}, "launch": {"ranks": 2}}
    data = {"data": {"tokenizer_vocab_size": None}, "checkpoint": {"every": 2, "keep": 9}}
    train = {"train": {"learning_rate": 1e-2}}
    return write_config(base.parents[1], name, **{**model, **data, **train, **sections})


@pytest.fixture(scope="module")
def lora(folder: Path, base: Path) -> Path:
    output = trained(adapter_config(base, "lora", adapter=LORA))
    assert "parameters, of which 2,820 learn" in output
    return folder / "lora"


def plain_curve(file: Path, steps: int) -> list[float]:
    """Losses of peft's own layers, from the weights that aliquot draws, in a plain loop."""
    config = aliquot.read_config(file)
    assert config.adapter is not None and config.model.path is not None
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    data = prepare(config.data, Path(config.model.path), model.config.vocab_size)
    if (form := config.adapter.base) != "bf16":
        names = {
            name.replace(".base_layer", "") for name in meta.build(model.config, adapter=config.adapter).compressed
        }
        compressed = {name: plain.decoded(values, form) for name, values in model.state_dict().items() if name in names}
        model.load_state_dict(compressed, strict=False)
    plain.add_lora(model, config.adapter)
    model.load_state_dict(adapter_weights(model, config.adapter, config.run.seed), strict=False)
    batches = Batches.of(data, config.data, config.run.seed, batch_size(config.train, 1), None)
    return plain.train(model, batches, config.train, steps, loraplus_lr_ratio=config.adapter.loraplus_lr_ratio)


def adapter_weights(model: nn.Module, adapter: AdapterSection, seed: int) -> dict[str, torch.Tensor]:
    drawn = plain.initial_weights(model.config, seed, adapter)
    return {name: values for name, values in drawn.items() if ".lora_" in name}


def test_the_curve_is_that_of_peft_in_a_plain_loop(folder: Path, lora: Path) -> None:
    assert list(curve(lora).values()) == pytest.approx(plain_curve(folder / "lora.yaml", 6), rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "engine"), [(1, "host"), (2, "fsdp"), pytest.param(3, "host", marks=pytest.mark.long)]
)
def test_an_adapter_goes_on_at_any_world_size_and_engine(
    folder: Path, base: Path, lora: Path, ranks: int, engine: str
) -> None:
    """A checkpoint holds the adapter alone: the base model is read again."""
    name = f"moved-{engine}-{ranks}"
    config = adapter_config(base, name, adapter=LORA, launch={"ranks": ranks}, shard={"engine": engine})
    shutil.copytree(lora, folder / name)
    for step in (4, 6):
        shutil.rmtree(folder / name / "checkpoints" / f"step-{step:08d}")
    held = load_file(folder / name / "checkpoints" / "step-00000002" / "model.safetensors")
    assert all(".lora_" in tensor for tensor in held) and len(held) == 28
    assert "resuming from" in trained(config)
    assert curve(folder / name) == pytest.approx(curve(lora), rel=1e-5)


@pytest.fixture(scope="module")
def wide(folder: Path) -> Path:
    """A model whose rows have whole blocks of 64 elements."""
    sizes = {"model.config.hidden_size": 64, "model.config.intermediate_size": 128}
    changes = [f"{key}={value}" for key, value in sizes.items()]
    trained(write_config(folder, "wide", train={"max_steps": 1}), *changes)
    return folder / "wide" / "export"


def test_an_adapter_on_4_bits_learns_resumes_and_is_exported(folder: Path, wide: Path) -> None:
    config = adapter_config(wide, "nf4", adapter={**LORA, "base": "nf4"}, observe={"sample_prompt": "the"})
    trained(config)
    whole = curve(folder / "nf4")
    assert list(whole.values()) == pytest.approx(plain_curve(config, 6), rel=1e-5)
    for place in (["launch.ranks=1"], ["shard.engine=fsdp"]):
        for step in (4, 6):
            shutil.rmtree(folder / "nf4" / "checkpoints" / f"step-{step:08d}")
        assert "resuming from" in trained(config, *place)
        assert curve(folder / "nf4") == pytest.approx(whole, rel=1e-5)
    done = command("export", folder / "nf4/checkpoints/step-00000006", folder / "nf4-merged", "--merge")
    assert done.returncode == 0 and "trained on a base in nf4, and is merged into the original" in done.stderr
    before, after = (load_file(part / "model.safetensors") for part in (wide, folder / "nf4-merged"))
    same = [name for name, values in after.items() if torch.equal(values, before[name].to(values.dtype))]
    assert same and all("embed" in name or "norm" in name or "lm_head" in name for name in same)


def test_what_cannot_be_compressed_is_refused(base: Path, wide: Path) -> None:
    config = adapter_config(wide, "not-compressed", adapter={**LORA, "base": "int8"})
    assert "adapter needs shard.engine: host or fsdp" in refused(config, "shard.engine=deepspeed")
    assert "shard.offload: disk" in refused(config, "shard.offload=disk", "shard.engine=host")
    assert "adapter.base: nf4" in refused(config, "adapter.load_in_4bit=true")
    narrow_base = adapter_config(base, "not-compressed", adapter={**LORA, "base": "nf4"})
    assert "rows of a multiple of 64 elements" in refused(narrow_base)


def test_exports_are_peft_s_and_merged_they_are_a_model(folder: Path, base: Path, lora: Path) -> None:
    ids = torch.arange(3, 30)[None]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, lora / "export").eval()
    checkpoint = lora / "checkpoints" / "step-00000006"
    for options in ([], ["--merge"]):
        out = folder / ("merged" if options else "exported")
        done = command("export", lora if options else checkpoint, out, "--dtype", "float32", *options)
        assert done.returncode == 0, done.stderr
    again = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    assert not (folder / "merged" / "adapter_config.json").exists()
    with torch.no_grad():
        expected = adapted(ids).logits
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(ids).logits, expected, atol=1e-2)
        assert torch.equal(again(ids).logits, expected)
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_adapted_experts_are_peft_s_and_merged_they_are_a_model(tmp_path: Path, kind: str) -> None:
    shape = json.loads(narrow(AutoConfig.for_model(kind)).to_json_string()) | {"vocab_size": 300}
    trained(write_config(tmp_path, "base", model={"config": shape}, train={"max_steps": 1}))
    base = tmp_path / "base" / "export"
    config = adapter_config(base, "lora", adapter={"r": 3, "alpha": 12.0, "experts": True, "base": "bf16"})
    trained(config)
    assert list(curve(tmp_path / "lora").values()) == pytest.approx(plain_curve(config, 6), rel=1e-5)
    done = command("export", tmp_path / "lora", tmp_path / "merged", "--merge", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        before = model(ids).logits
        adapted = PeftModel.from_pretrained(model, tmp_path / "lora/export").eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    assert not torch.allclose(adapted, before, atol=1e-3)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    continued = adapter_config(base, "continued", adapter={"path": str(tmp_path / "lora/export")})
    read = aliquot.read_config(continued).adapter
    assert read is not None and read.experts and read.r == 3


@pytest.mark.long
def test_merged_weights_keep_the_names_of_the_base_files(tmp_path: Path) -> None:
    shape = json.loads(narrow(AutoConfig.for_model("nemotron_h")).to_json_string()) | {"vocab_size": 300}
    base = write_config(tmp_path, "base", model={"config": shape}, train={"max_steps": 1})
    trained(base)
    config = adapter_config(tmp_path / "base" / "export", "lora", adapter={**LORA, "target_modules": ["q_proj"]})
    trained(config)
    done = command("export", tmp_path / "lora/checkpoints/step-00000006", tmp_path / "merged", "--merge")
    assert done.returncode == 0, done.stderr
    files = [tmp_path / part / "model.safetensors" for part in ("base/export", "merged")]
    before, after = (load_file(file) for file in files)
    changed = {name for name, values in after.items() if not torch.equal(values, before[name].to(values.dtype))}
    assert before.keys() == after.keys()
    assert changed and all(name.startswith("backbone.") and name.endswith("q_proj.weight") for name in changed)


@pytest.mark.long
def test_training_goes_on_from_a_directory_of_peft(folder: Path, base: Path, lora: Path) -> None:
    """An adapter that peft has saved keeps its weights, and trains on the curve of peft's layers in a plain loop."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    continued = PeftModel.from_pretrained(model, lora / "export", is_trainable=True)
    continued.save_pretrained(folder / "of-peft")
    config = adapter_config(base, "continued", adapter={"path": str(folder / "of-peft")})
    trained(config)
    read = aliquot.read_config(config)
    assert read.adapter is not None and (read.adapter.r, read.adapter.alpha) == (3, 12.0)

    built = meta.build(resolve(read.model).config, adapter=read.adapter)
    assert built.adapter is not None
    for directory in (folder / "of-peft", lora / "checkpoints" / "step-00000006"):
        copy = plain.Whole(built.saved)
        beside_model = resolve(read.model).fingerprint
        load_adapter(copy, directory, built.adapter.saves, beside_model, SingleRank())
        saved = load_file(folder / "of-peft" / "adapter_model.safetensors")
        assert all(torch.equal(copy.values[part.source], saved[part.name]) for part in built.adapter.saves)

    data = prepare(read.data, base, model.config.vocab_size)
    batches = Batches.of(data, read.data, read.run.seed, batch_size(read.train, 1), None)
    expected = plain.train(continued, batches, read.train, 6)
    assert list(curve(folder / "continued").values()) == pytest.approx(expected, rel=1e-5)


def test_adapter_is_evaluated_and_generates_with_its_base(folder: Path, base: Path, lora: Path) -> None:
    """The adapter is given as an export and as a checkpoint."""
    run_loss = curve(lora, "eval_loss")[6]
    for directory in (lora / "export", lora / "checkpoints" / "step-00000006"):
        evaluation = evaluate_model(
            read_evaluation_config(str(directory), str(folder / "lora.yaml"), ["launch.ranks=1"])
        )[""]
        assert evaluation.loss == pytest.approx(run_loss, rel=1e-6)
    said = [next(generate(at, ["the rank"], 4, 0.0, 1)) for at in (lora / "export", directory)]
    assert said[0] == said[1]


def test_adapter_names_moved_base_and_takes_its_new_path(folder: Path, base: Path, lora: Path, tmp_path: Path) -> None:
    copy, config = shutil.copytree(lora / "export", tmp_path / "own"), str(folder / "lora.yaml")
    settings = json.loads((copy / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "gone")
    (copy / "adapter_config.json").write_text(json.dumps(settings))
    expected = r"adapter_config.json: base_model_name_or_path names the model .*gone, which does not exist: .* --base$"
    with pytest.raises(UserError, match=expected):
        read_evaluation_config(str(copy), config, [])
    with pytest.raises(UserError, match=expected):
        next(generate(copy, ["the rank"], 4, 0.0, 1))
    assert read_evaluation_config(str(copy), config, [], str(base)).model.path == str(base)
    said = command(
        "generate", copy, "--prompt", "the rank", "--max-new-tokens", "4", "--temperature", "0", "--base", base
    )
    assert said.stdout.strip("\n") == next(generate(lora / "export", ["the rank"], 4, 0.0, 1)).strip("\n"), said.stderr
    with pytest.raises(UserError, match=r"--base: .* is no adapter"):
        read_evaluation_config(str(base), config, [], str(base))


def test_an_adapter_says_how_its_documents_begin(folder: Path, base: Path, lora: Path, tmp_path: Path) -> None:
    """The tokenizer and aliquot.json of the adapter take precedence over those of the base model."""
    copy = shutil.copytree(lora / "export", tmp_path / "own")
    (copy / "aliquot.json").write_text('{"prefix": []}')
    read = read_evaluation_config(str(copy), str(folder / "lora.yaml"), [])
    assert read.data.tokenizer == str(copy) and read.adapter is not None and read.adapter.directory == copy
    models_own = read.data.model_copy(update={"tokenizer": None})
    changes = (TokenizerChanges(adapter=adapter) for adapter in (None, copy))
    model_prefix, adapter_prefix = (prepare(models_own, base, 512, changes=change).prefix for change in changes)
    assert model_prefix != () and adapter_prefix == () == prepare(read.data, base, 512).prefix


@pytest.mark.long
def test_frozen_weights_are_exported_as_they_were(folder: Path, base: Path) -> None:
    trained(adapter_config(base, "frozen", train={"freeze": ["model.embed_tokens.*", "*.mlp.*"]}))
    before, after = (load_file(at / "model.safetensors") for at in (base, folder / "frozen" / "export"))
    for name, values in before.items():
        assert torch.equal(values, after[name]) == ("embed_tokens" in name or ".mlp." in name), name
    moments = load_file(folder / "frozen" / "checkpoints" / "step-00000006" / "exp_avg.safetensors")
    assert not any("embed_tokens" in name or ".mlp." in name for name in moments)


def test_refusals(folder: Path, base: Path, lora: Path) -> None:
    config, whole = adapter_config(base, "refused", adapter=LORA), adapter_config(base, "whole")
    assert "give model.path" in refusal(write_config(folder, "scratch", adapter=LORA))
    assert "needs shard.engine: host or fsdp, not deepspeed" in refused(config, "shard.engine=deepspeed")
    for override, message in {
        "train.freeze=[model.*]": "leave train.freeze out",
        "adapter.target_modules=[nothing]": "adapter.target_modules: ",
        "adapter.target_modules=[q_proj, v_porj, '']": "adapter.target_modules: 'v_porj' is the end of no layer's name;"
        " there are down_proj, gate_proj,",
        "adapter.target_modules=[embed_tokens]": "embed_tokens is not a linear layer",
        "adapter.target_modules=[q_proj, lm_head]": "names the output head",
        "model.add_tokens=[<a>]": "an adapter trains no embeddings",
    }.items():
        assert message in refusal(config, override)
    assert "no weight is named nothing.*" in refusal(whole, "train.freeze=[nothing.*]")
    assert "the patterns freeze every weight" in refusal(whole, "train.freeze=['*']")
    # The change is refused before the plan, which this memory does not fit.
    changed = refusal(adapter_config(base, "lora", adapter={**LORA, "alpha": 6.0, "r": 4}), "shard.memory=0.001")
    assert "adapter.r was 3 and is 4; adapter.alpha was 12.0 and is 6.0. Undo the change" in changed
    other_data = refusal(adapter_config(base, "lora", adapter=LORA), "data.sequence_length=16")
    assert other_data.endswith("start a new run under another run.name with adapter.path set to this directory")
    frozen = write_config(folder, "base", train={"max_steps": 3, "freeze": ["*.mlp.*"]})
    assert "train.freeze was [] and is ['*.mlp.*']: undo the change" in refusal(frozen)
    saved = {"path": str(lora / "export")}
    for other, evaluation in (
        ({"r": 4}, "adapter.r is 4, but the adapter at adapter.path has 3"),
        ({"target_modules": ["q_proj"]}, "adapter.target_modules is"),
    ):
        assert evaluation in refusal(adapter_config(base, "contradicts", adapter={**saved, **other}))
    assert "no adapter_config.json here" in refusal(adapter_config(base, "none", adapter={"path": str(base)}))
    dora = folder / "dora"
    shutil.copytree(lora / "export", dora)
    settings = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps({**settings, "use_dora": True}))
    assert "it has use_dora" in refusal(adapter_config(base, "dora", adapter={"path": str(dora)}))
    fewer = [name for name in settings["target_modules"] if name != "q_proj"]
    (dora / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": fewer}))
    assert "not of this model: " in refusal(adapter_config(base, "fewer", adapter={"path": str(dora)}))
    with pytest.raises(UserError, match="not of an adapter"):
        export_checkpoint(folder / "base" / "checkpoints" / "step-00000003", folder / "never", "float32", merge=True)
    step, elsewhere = lora / "checkpoints" / "step-00000006", folder / "elsewhere"
    shutil.copytree(base, elsewhere)
    export_checkpoint(step, folder / "moved", "float32", merge=True, base=str(elsewhere))
    moved = load_file(folder / "moved" / "model.safetensors")
    save_file({name: 2 * values for name, values in moved.items()}, elsewhere / "model.safetensors")
    with pytest.raises(UserError, match="not the base weights that the adapter was trained on"):
        export_checkpoint(step, folder / "never", "float32", merge=True, base=str(elsewhere))
    with pytest.raises(UserError, match="--base names another directory"):
        export_checkpoint(step, folder / "never", "float32", merge=True, base=str(folder / "nowhere"))
    with pytest.raises(UserError, match="an adapter, not a model: aliquot export"):
        resolve(ModelSection(path=str(lora / "export")))


@pytest.mark.long
def test_an_adapter_is_not_continued_beside_another_model(folder: Path, base: Path, lora: Path) -> None:
    """The other model has the same shapes."""
    other = folder / "other"
    trained(write_config(folder, "other-base", run={"seed": 6, "name": "other-base", "directory": str(other)}))
    step = {"path": str(lora / "checkpoints" / "step-00000006")}
    begun = adapter_config(base, "begun", adapter=step, model={"config": None, "path": str(other / "export")})
    assert "trained on another model" in refused(begun)
    moved = adapter_config(base, "lora", adapter=LORA, model={"config": None, "path": str(other / "export")})
    assert "model (hash of samples) was" in refused(moved)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["host", "fsdp"])
def test_stories15m_on_shakespeare(shared: Path, tmp_path: Path, engine: str) -> None:
    """A real model and text: 20 steps of rows of many documents."""
    data = {"path": str(shared / "data" / "tinyshakespeare.txt"), "document": "block", "eval_fraction": 0.0}
    config = write_config(
        tmp_path,
        "stories",
        model={"config": None, "path": str(shared / "models" / "stories15M")},
        data={**data, "tokenizer_vocab_size": None, "sequence_length": 128},
        train={"max_steps": 20, "learning_rate": 1e-3, "warmup_steps": 0},
        adapter={"r": 8, "alpha": 16.0},
        shard={"engine": engine},
        launch={"ranks": 2},
    )
    trained(config)
    expected = plain_curve(config, 20)
    assert expected[-1] < 0.85 * expected[0]
    assert list(curve(tmp_path / "stories").values()) == pytest.approx(expected, rel=1e-5)
