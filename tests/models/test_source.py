"""Where a model comes from, and the one line that says why it cannot.

Of two configurations, whether the same weights are the same model under them.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoConfig, PreTrainedTokenizerFast

from aliquot.checkpoint.resume import check_model
from aliquot.config.schema import ModelSection, RunConfig
from aliquot.core import small_files
from aliquot.core.errors import ResumeError, UserError
from aliquot.data.tokenizer import load_tokenizer
from aliquot.models import meta, source
from aliquot.models.model_config import computation_settings
from aliquot.models.shaped_model import shaped_model
from aliquot.models.source import model_on_meta, resolve
from aliquot.models.stored_weights import fingerprint
from aliquot.tensor_io.bytemap import ByteMap
from tests.engines.cases import SMALL
from tests.models.hub_server import hub_with


def refused(**section: object) -> str:
    with pytest.raises(UserError) as caught:
        meta.build(resolve(ModelSection.model_validate(section)).config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_hub_id_goes_to_the_hub() -> None:
    # Tests are offline: the hub client says so, and that is what the person sees.
    assert refused(path="some-owner/some-model").endswith(
        "the hub could not serve it: no network, or HF_HUB_OFFLINE is set, and the cache has no copy. Check the name,"
        " run `hf download some-owner/some-model` where the hub is reachable, or set HF_TOKEN for a gated model"
    )


def test_files_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the weights a second time: Mistral's repositories have them in one file for another program, too."""
    wanted = [
        "config.json",
        "model-00001-of-00001.safetensors",
        "tokenizer.json",
        "additional_chat_templates/rag.jinja",
    ]
    others = ["consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "modeling_strange.py"]
    with hub_with({name: name.encode() for name in wanted + others}) as (address, fetched):
        use_hub(address, tmp_path, monkeypatch)
        directory = source.local_directory("owner/name")
    assert sorted(fetched) == sorted(wanted)
    assert all((directory / name).read_text() == name for name in wanted)


def use_hub(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))


@pytest.mark.long
def test_a_hub_that_sends_little_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "_HUB_TIMEOUT_S", 0.2)
    with hub_with({"config.json": b"{}", "model.safetensors": bytes(4000)}, slow="model.safetensors") as (address, _):
        use_hub(address, tmp_path, monkeypatch)
        assert re.search(
            r"the hub could not serve it: the hub sent \d bytes in 0 s\. Check", refused(path="owner/name")
        )


def test_fingerprint_covers_the_loaded_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = fingerprint(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same in another form")
    assert fingerprint(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"others!")
    assert fingerprint(tmp_path) != before


def test_fingerprint_sees_small_tensors_and_truncated_copies(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    weights = {"large": torch.ones(6 << 20), "norm": torch.ones(64), "other": torch.ones(1 << 20)}
    save_file(weights, file)
    before = fingerprint(tmp_path)
    save_file({**weights, "norm": torch.full((64,), 2.0)}, file)
    assert fingerprint(tmp_path) != before
    save_file(weights, file)
    assert fingerprint(tmp_path) == before
    with file.open("r+b") as hole:  # of 28 MiB
        hole.seek(5 << 20)
        hole.write(bytes(5 << 20))
    assert fingerprint(tmp_path) != before


def test_a_config_without_weights_leads_to_model_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    advice = f"To train from scratch, write model.config: {file} instead of model.path"
    assert advice in refused(path=str(file))
    for load in (load_tokenizer, ByteMap.from_directory):
        with pytest.raises(UserError) as caught:
            load(tmp_path)
        assert advice in str(caught.value)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_non_hub_ids_are_directories(path: str) -> None:
    assert "no such directory" in refused(path=path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "no-such-thing"}, "not a causal language model"),
        ({"model_type": "t5"}, "not a causal language model"),
        ({"model_type": "bart"}, "encoder-decoder"),
        ({"model_type": "xlm"}, "Not a causal language model"),
        ({**SMALL, "model_type": "xglm", "layerdrop": 0.1}, "set layerdrop to 0"),
        ({"model_type": "bamba", "z_loss_coefficient": 0.3}, "set z_loss_coefficient to 0"),
        ({"model_type": "big_bird"}, "set attention_type to original_full"),
        ({**SMALL, "model_type": "llama", "hidden_act": "no-such-thing"}, "cannot run this llama model"),
        ({**SMALL, "model_type": "llama", "hidden_size": "64"}, "expected int, got str"),
        ({**SMALL, "model_type": "qwen3", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: no model has"),
        ({**SMALL, "model_type": "qwen3", "vocab_size": 10**13}, "vocab_size is 10000000000000: no model has"),
        ({**SMALL, "model_type": "mixtral", "num_local_experts": 10**9}, "num_local_experts is 1000000000: no model"),
        (
            {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
            "text_config.num_hidden_layers is 1000000000: no model has more than 10000 layers",
        ),
        (
            {"model_type": "bart", "is_decoder": True, "is_encoder_decoder": False, "decoder_layers": 10**9},
            "decoder_layers is 1000000000: no model",
        ),
        (
            {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 10**9]]},
            "attention_types is 1000000000: no model",
        ),
        ({**SMALL, "model_type": "qwen3", "num_labels": 10**9}, "num_labels is 1000000000: no model"),
        ({**SMALL, "model_type": "llama", "hidden_size": 2**40}, "hidden_size is 1099511627776: no model"),
        ({**SMALL, "model_type": "llama", "head_dim": 2**40}, "head_dim is 1099511627776: no model"),
        ({**SMALL, "model_type": "gpt2", "n_embd": 2**40}, "n_embd is 1099511627776: no model"),
    ],
)
def test_untrainable_models_are_refused(config: dict[str, object], expected: str) -> None:
    assert expected in refused(config=config)


def test_quantised_weights_are_refused_but_shapes_are_not(tmp_path: Path) -> None:
    """What BitNet's layers compute, for one, is not what the same weights in plain ones do."""
    config = {**SMALL, "model_type": "llama", "quantization_config": {"quant_method": "bitnet", "linear_class": "auto"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "weights that are stored as bitnet (quantization_config) are not supported" in refused(path=str(tmp_path))
    for section in (config, tmp_path / "config.json"):
        found = resolve(ModelSection.model_validate({"config": section})).config
        assert "quantization_config" not in found.to_dict()
    assert "quantization_config" not in model_on_meta(tmp_path).config.to_dict()


def test_infinities_as_transformers_writes_them(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba2").save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    assert resolve(ModelSection(path=str(tmp_path))).config.time_step_limit[1] == math.inf


def test_invalid_config_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert "no config.json here" in refused(path=str(tmp_path))
    file.write_text("{")
    assert "not valid JSON" in refused(path=str(tmp_path))
    file.write_text("[" * 100_000)
    assert "not valid JSON" in refused(path=str(tmp_path))
    file.write_text(f'{{"model_type": "llama", "x": {"[" * 900}{"]" * 900}}}')
    assert "nest more than 100 levels deep" in refused(path=str(tmp_path))
    file.write_text("[]")
    assert "not a JSON object" in refused(path=str(tmp_path))
    file.write_text(json.dumps({**SMALL, "model_type": "llama", "torch_dtype": "float16"}))
    assert str(resolve(ModelSection(path=str(tmp_path))).dtype) == "torch.float16"
    assert resolve(ModelSection(config=file)).from_scratch


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, shared: Path) -> None:
    for file in (shared / "models" / "stories260K").glob("*.json"):
        (tmp_path / file.name).write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert resolve(ModelSection(path=str(tmp_path))).config.model_type == "llama"
    assert len(load_tokenizer(tmp_path)) == 512


def test_empty_window_is_named_only_if_used() -> None:
    assert "sliding_window is 0: in such a window" in refused(config={"model_type": "mistral", "sliding_window": 0})
    resolve(ModelSection(config={"model_type": "qwen2", "sliding_window": 0, "use_sliding_window": False}))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1024\n"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_git_lfs_pointer_is_named(tmp_path: Path, shared: Path, name: str) -> None:
    shutil.copytree(shared / "models" / "stories260K", tmp_path / "model")
    (tmp_path / "model" / name).unlink()
    (tmp_path / "model" / name).write_text(POINTER)
    expected = rf"{name}: (model.path: )?a git-lfs pointer, not the file itself: fetch it first \(git lfs pull\)$"
    with pytest.raises(UserError, match=expected):
        resolve(ModelSection(path=str(tmp_path / "model")))
        load_tokenizer(tmp_path / "model")
        ByteMap.from_directory(tmp_path / "model")


def test_vocabulary_fits_the_largest_id_and_added_tokens() -> None:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    made = resolve(ModelSection(config={"model_type": "llama"}))
    made.adopt_tokenizer(tokenizer, 5000, added=False)  # vocabularies may have holes
    assert made.config.vocab_size == 5056
    for added, rows in ((False, 300), (True, 302)):
        small = resolve(ModelSection(config={"model_type": "llama", "vocab_size": 300}))
        pretrained = replace(small, directory=Path("m"))
        assert not pretrained.from_scratch
        pretrained.adopt_tokenizer(tokenizer, 301, added)
        assert pretrained.config.vocab_size == rows


@pytest.mark.parametrize(
    ("model_type", "key"), [("roberta", "pad_token_id"), ("modernbert-decoder", "bos_token_id"), ("llama", None)]
)
def test_model_names_its_required_special_token(model_type: str, key: str | None) -> None:
    source = resolve(ModelSection(config={"model_type": model_type}))
    source.adopt_tokenizer(None, 299, added=True)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))  # without any
    if key is None:
        source.adopt_tokenizer(tokenizer, 299, added=False)
        return
    with pytest.raises(
        UserError,
        match=f"model.config: {model_type} needs {key}, and the tokenizer has none: set {key} in model.config",
    ):
        source.adopt_tokenizer(tokenizer, 299, added=False)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"model_type": "llama", "max_position_embeddings": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "mpt", "max_seq_len": 64}, 64),
        ({"model_type": "mamba"}, None),
    ],
)
def test_positions_equal_those_of_the_model_code(config: dict[str, object], longest: int | None) -> None:
    source = resolve(ModelSection(config=config))
    assert source.positions == longest
    source.check_length(longest or 10**6)
    if longest is not None:
        with pytest.raises(UserError, match=f"but the model has {longest} positions"):
            source.check_length(longest + 1)
        source.check_length(2 * longest, answers=2)  # the positions of both answers of a pair begin at 0


SHAPES = sorted((Path(source.__file__).parent / "shapes").iterdir())


@pytest.mark.parametrize(
    "directory",
    [pytest.param(each, marks=() if each.name == "Meta-Llama-3-8B" else pytest.mark.long) for each in SHAPES],
    ids=lambda path: path.name,
)
def test_shipped_shapes_have_the_size_in_their_name(directory: Path) -> None:
    """A name such as Qwen3-8B gives the parameters, rounded; an offline plan must not be of another model."""
    config = RunConfig.model_validate({"model": {"path": f"owner/{directory.name}"}, "data": {"path": "stdlib"}})
    shape = shaped_model(config).shape
    number, unit = re.findall(r"-([0-9.]+)([BM])\b", directory.name)[0]
    promised = float(number) * {"B": 1e9, "M": 1e6}[unit]
    assert abs(shape.numel / promised - 1) < 0.25, f"{shape.numel:,}"


SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 8,
    "intermediate_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
HERE = Path("step-00000004")


def of_llama(**values: Any) -> dict[str, Any]:
    return computation_settings(AutoConfig.for_model("llama", **{**SIZES, **values}))


def saved(**values: Any) -> dict[str, Any]:
    return json.loads(json.dumps({"model": of_llama(**values)}))


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_dropout": 0.1},
        {"use_cache": False},
        {"dtype": "bfloat16"},
        {"initializer_range": 0.1},
        {"pad_token_id": 3, "eos_token_id": [4, 5]},
        {"attn_implementation": "eager"},
        {"architectures": ["Mine"], "id2label": {0: "a"}, "name_or_path": "here"},
    ],
)
def test_equivalent_configurations(changed: dict[str, Any]) -> None:
    assert check_model(saved(), of_llama(**changed), HERE) is None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps was 1e-06 and is 0.001"),
        ({"hidden_act": "gelu"}, "hidden_act was 'silu' and is 'gelu'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads was 2 and is 4"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta was 10000.0 and is 500000.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters.factor was not set and is 2.0; rope_parameters.rope_type was 'default' and is 'linear'",
        ),
    ],
)
def test_different_configurations(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ResumeError) as caught:
        check_model(saved(), of_llama(**changed), HERE)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_another_type_of_the_same_tensors() -> None:
    other = computation_settings(AutoConfig.for_model("mistral", **SIZES))
    with pytest.raises(ResumeError, match="model_type was 'llama' and is 'mistral'"):
        check_model(saved(), other, HERE)


def test_unknown_keys_do_not_stop_a_run() -> None:
    """Another version of transformers may read a file otherwise."""
    other = of_llama(rms_norm_eps=1e-3)
    older = check_model({"model": {**saved()["model"], "transformers": "4.57.0"}}, other, HERE)
    assert older is not None and "rms_norm_eps was 1e-06" in older and "transformers was 4.57.0 and is " in older
