"""A DeepSpeed JSON in a run config: what it fills, what contradicts it, what of it is refused and by which line."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aliquot.config.deepspeed_keys import RULES
from aliquot.config.read_config import dump_config, dump_with_locations, read_config, read_with_locations
from aliquot.config.schema import RunConfig
from aliquot.core.errors import UserError
from aliquot.data.workload import BatchSize, batch_size
from aliquot.engines.deepspeed.deepspeed_settings import deepspeed_settings
from tests.config.test_read import failure

DOCS = Path(__file__).resolve().parents[2] / "docs" / "guides" / "deepspeed.md"
RUN = "model: {path: some/model}\ndata: {path: text.txt}\n"
# The keys and values of a ZeRO-3 job for CPU nodes as people have them.
JOB: dict[str, Any] = json.loads((DOCS.parents[2] / "examples" / "seed" / "cpu-ds.json").read_text())


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def files(settings: Any, train: str = "", text: str | None = None) -> Path:
        found = tmp_path / "ds.json"
        found.write_text(json.dumps(settings, indent=2) if text is None else text)
        run = tmp_path / "run.yaml"
        run.write_text(f"{RUN}train: {{{train}}}\nshard: {{deepspeed_config: {found}}}\n")
        return run

    return files


def changed(path: str, value: object) -> dict[str, Any]:
    settings = json.loads(json.dumps(JOB))
    inner = settings
    *above, last = path.split(".")
    for key in above:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return settings


def test_deepspeed_values_fill_unset_keys_with_locations(write: Any) -> None:
    settings = {
        **JOB,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 10, "warmup_type": "linear", "warmup_max_lr": 2e-5, "total_num_steps": 100},
        },
    }
    config, places = read_with_locations(write(settings, "logging_steps: 7"))
    train = config.train
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (2, 4)
    assert (train.max_grad_norm, train.learning_rate, train.weight_decay) == (0.5, 2e-5, 0.1)
    assert (train.adam_beta1, train.adam_beta2, train.adam_epsilon) == (0.9, 0.95, 1e-7)
    assert (train.lr_scheduler_type, train.warmup_steps, train.max_steps) == ("linear", 10, 100)
    assert train.precision == "bf16" and train.logging_steps == 7
    assert re.search(r"ds\.json:\d+$", places["train", "learning_rate"])
    assert places["train", "logging_steps"].endswith("run.yaml:3")


def test_dumped_three_batch_numbers_read_back(write: Any, tmp_path: Path) -> None:
    """The saved config says null where the JSON's total was left out."""
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    config = read_config(write({**JOB, **sizes}))
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert "global_batch_size: null" in again.read_text()
    assert read_config(again) == config


def test_null_counts_as_unset(write: Any) -> None:
    config = read_config(
        write(changed("scheduler", {"params": {"total_num_steps": 7}, "type": "auto"}), "max_steps: null")
    )
    assert config.train.max_steps == 7


def test_dump_names_the_location_of_each_value(write: Any, tmp_path: Path) -> None:
    config, places = read_with_locations(
        write(changed("gradient_clipping", 0.5), "logging_steps: 7"),
        ["run.name=mine", r'observe.sample_prompt="import os\n\n\ndef"', "observe.sample_tokens=9"],
    )
    printed = dump_with_locations(config, places)
    lines = {line.strip().partition(":")[0]: line for line in printed.splitlines() if line.startswith("  ")}
    assert re.search(r"max_grad_norm: 0\.5  # .*ds\.json:\d+$", lines["max_grad_norm"])
    assert re.search(r"logging_steps: 7  # .*run\.yaml:3$", lines["logging_steps"])
    assert lines["name"].endswith("name: mine  # override 'run.name=mine'")
    assert lines["sample_tokens"].endswith("9  # override 'observe.sample_tokens=9'")  # after a value with newlines
    assert "#" not in lines["weight_decay"]  # a default
    again = tmp_path / "printed.yaml"
    again.write_text(printed)
    assert read_config(again) == config


def test_config_made_in_python_is_filled_from_deepspeed() -> None:
    values = {"model": {"path": "m"}, "data": {"path": "t"}, "shard": {"deepspeed_config": {"gradient_clipping": 0.25}}}
    assert RunConfig.model_validate(values).train.max_grad_norm == 0.25
    with pytest.raises(ValueError, match=r"gradient_clipping is 0\.25, but train\.max_grad_norm is 1"):
        RunConfig.model_validate({**values, "train": {"max_grad_norm": 1}})


def test_contradiction_names_both_locations(write: Any) -> None:
    message = failure(write(changed("gradient_clipping", 0.5), "max_grad_norm: 1.0"))
    assert re.search(
        r"ds\.json:\d+: gradient_clipping is 0\.5, but train\.max_grad_norm is 1\.0 at .*run\.yaml:3", message
    )


def test_equal_values_do_not_contradict(write: Any) -> None:
    assert read_config(write(changed("gradient_clipping", 0.5), "max_grad_norm: 0.5")).train.max_grad_norm == 0.5


@pytest.mark.parametrize(
    "settings, expected",
    [
        (
            changed("zero_optimisation.stage", 3),
            "zero_optimisation.stage is no key .* did you mean zero_optimization.stage",
        ),
        (changed("zero_optimization.stage", 2), "zero_optimization.stage is 2: only stage 3"),
        (changed("zero_optimization.stage", True), "zero_optimization.stage is True"),
        (changed("fp16.enabled", True), "fp16.enabled is True: loss scaling is not supported: use bf16"),
        (changed("optimizer.type", "Lamb"), "optimizer.type is 'Lamb': only Adam and AdamW"),
        (changed("scheduler.type", "OneCycle"), "scheduler.type is 'OneCycle': one of"),
        (changed("scheduler.type", "WarmupLR"), "along a logarithm by default"),
        (
            changed("zero_optimization.offload_param.device", "nvme"),
            "offload_param.device is 'nvme': offload to NVMe is not supported",
        ),
        (changed("elasticity.enabled", True), "elasticity.enabled is True: changes the data"),
        (changed("zero_optimization.zero_hpz_partition_size", 2), "keeps a second copy"),
        (changed("zero_optimization.offload_optimizer.ratio", 0.3), "ratio is 0.3: a part of the states on the GPU"),
        (changed("zero_optimization.offload_optimizer.super_offload", True), "super_offload is True: not tested"),
    ],
)
def test_rejected_key_is_refused_with_its_line(write: Any, settings: Any, expected: str) -> None:
    message = failure(write(settings))
    assert re.search(expected, message), message
    assert re.search(r"ds\.json:\d+", message), message


@pytest.mark.parametrize(
    "path, value, expected",
    [
        ("optimizer", None, "optimizer is null: expected an object of settings"),
        ("optimizer", "AdamW", 'optimizer is "AdamW": expected an object'),
        ("optimizer.params", [1], "optimizer.params is .*: expected an object"),
        ("optimizer.params.betas", 0.9, "betas is 0.9: expected two numbers"),
        ("optimizer.params.betas", [0.9], "betas is .0.9.: expected two numbers"),
        ("optimizer.type", 1, "optimizer.type is 1: expected a name"),
        ("scheduler.type", ["WarmupLR"], "scheduler.type is .*: expected a name"),
        ("zero_optimization", None, "zero_optimization is null: expected an object"),
        ("zero_optimization", "auto", 'zero_optimization is "auto": expected an object'),
        ("zero_optimization.offload_optimizer", "cpu", 'offload_optimizer is "cpu": expected an object'),
        ("zero_optimization.offload_param", {"device": "nvme", "nvme_path": 5}, "nvme_path is 5: expected a path"),
        ("zero_optimization.offload_param.device", "gpu", 'device is "gpu": expected cpu or none'),
        ("zero_optimization.sub_group_size", "1e9", 'sub_group_size is "1e9": expected a number'),
        ("bf16", True, "bf16 is true: expected an object"),
        ("bf16.enabled", "false", 'bf16.enabled is "false": expected true or false'),
        ("gradient_clipping", {"value": 1}, "gradient_clipping is .*: expected a number"),
        ("optimizer.params.lr", "1e-4", 'lr is "1e-4": expected a number'),
        ("train_micro_batch_size_per_gpu", "2", 'train_micro_batch_size_per_gpu is "2": expected a number'),
    ],
)
def test_value_of_a_wrong_type_is_one_line(write: Any, path: str, value: object, expected: str) -> None:
    message = failure(write(changed(path, value)))
    assert re.search(expected, message) and re.search(r"ds\.json:\d+", message), message


def test_schema_reports_sections_that_are_no_mappings(write: Any, tmp_path: Path) -> None:
    run = write(JOB)
    run.write_text(f"{RUN}shard: host\n")
    assert "run.yaml:3: shard is 'host'" in failure(run)
    run.write_text(f"{RUN}train: fast\nshard: {{deepspeed_config: {tmp_path / 'ds.json'}}}\n")
    assert "run.yaml:3: train is 'fast'" in failure(run)


# The ZeRO-3 JSON of transformers' documentation.
OF_TRANSFORMERS: dict[str, Any] = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def test_deepspeed_json_of_transformers_is_accepted(write: Any) -> None:
    config = read_config(write(OF_TRANSFORMERS, "precision: bf16"))
    assert config.train.lr_scheduler_type == "constant"
    given, _ = deepspeed_settings(config, world_size=2, hidden_size=64)
    assert "auto" not in json.dumps(given) and "fp16" not in given
    assert given["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    # DeepSpeed's warm-up is along a logarithm unless it is told otherwise: with one, that must be said.
    assert "along a logarithm" in failure(write(OF_TRANSFORMERS, "warmup_steps: 10"))
    read_config(write(OF_TRANSFORMERS, "warmup_steps: 0, warmup_ratio: 0.1"))


@pytest.mark.parametrize("path", [path for path in RULES if not any(key.startswith(f"{path}.") for key in RULES)])
def test_auto_is_accepted_for_every_key(write: Any, path: str) -> None:
    settings = changed(path, "auto")
    if "scheduler" in settings:
        settings["scheduler"].setdefault("type", "auto")
    config = read_config(write(settings, "precision: bf16"))
    given, _ = deepspeed_settings(config, world_size=2, hidden_size=64)
    assert "auto" not in json.dumps(given)


def test_disabled_rejected_keys_are_accepted(write: Any) -> None:
    offload = "zero_optimization.offload_optimizer"
    for path, value in [
        ("fp16.enabled", False), ("elasticity.enabled", False), ("prescale_gradients", False),
        (f"{offload}.ratio", 1.0), (f"{offload}.super_offload", False),
    ]:  # fmt: skip
        read_config(write(changed(path, value)))


def test_gradients_are_sent_and_summed_in_fp32_by_default(write: Any) -> None:
    given, _ = deepspeed_settings(read_config(write(JOB)), world_size=2, hidden_size=64)
    assert (given["communication_data_type"], given["data_types"]) == ("fp32", {"grad_accum_dtype": "fp32"})
    chosen = {**JOB, "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    given, _ = deepspeed_settings(read_config(write(chosen)), world_size=2, hidden_size=64)
    assert (given["communication_data_type"], given["data_types"]) == ("bf16", {"grad_accum_dtype": "bf16"})


def test_broken_deepspeed_json_is_one_line(write: Any, tmp_path: Path) -> None:
    assert re.search(r"ds\.json:2: not valid JSON", failure(write(None, text='{\n  "bf16": }\n')))
    assert "an object of settings" in failure(write([1]))
    run = write(JOB)
    (tmp_path / "ds.json").unlink()
    assert re.search(r"run\.yaml:4: cannot read .*ds\.json: No such file", failure(run))


def test_three_batch_numbers_must_multiply(write: Any) -> None:
    settings = {
        **JOB,
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
    }
    config = read_config(write(settings))
    with pytest.raises(UserError, match=r"train_batch_size is 64, .* 1 x .* 4 x 2 ranks is 8"):
        deepspeed_settings(config, world_size=2, hidden_size=64)
    deepspeed_settings(config, world_size=16, hidden_size=64)
    message = failure(write({**settings, "train_batch_size": "auto"}, "global_batch_size: 8"))
    assert "two of them fix the third" in message and "run.yaml:3" in message and "ds.json" in message


def test_two_batch_numbers_fix_the_third(write: Any) -> None:
    config = read_config(write({**JOB, "train_batch_size": 32, "gradient_accumulation_steps": 4}))
    deepspeed_settings(config, world_size=4, hidden_size=64)
    assert batch_size(config.train, 4) == BatchSize(32, 2)


def test_deepspeed_settings_complete_the_json(write: Any) -> None:
    settings = changed("zero_optimization.reduce_bucket_size", "auto")
    settings["activation_checkpointing"] = {"partition_activations": True}
    config = read_config(write(settings, "max_grad_norm: 0.7"))
    given, lines = deepspeed_settings(config, world_size=2, hidden_size=64)
    assert given["zero_optimization"] == {**JOB["zero_optimization"], "reduce_bucket_size": 64 * 64}
    assert given["bf16"] == {"enabled": True}
    assert (given["train_batch_size"], given["gradient_accumulation_steps"]) == (2, 1)
    assert given["steps_per_print"] is None and "activation_checkpointing" not in given
    assert any("steps_per_print is overridden: train.logging_steps" in line for line in lines)
    assert "auto" not in json.dumps(given)


def zero_keys() -> Iterator[str]:
    """The keys of DeepSpeed's schema, read from its source: to import DeepSpeed takes seconds."""
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        pytest.skip("the extra `deepspeed` is not installed")
    tree = ast.parse((Path(package.origin).parent / "runtime" / "zero" / "config.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in classes["DeepSpeedZeroConfig"].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            options = {word.arg: word.value for word in node.value.keywords} if isinstance(node.value, ast.Call) else {}
            yield str(ast.literal_eval(options["alias"])) if "alias" in options else node.target.id


def test_every_key_of_deepspeeds_own_schema_has_a_rule() -> None:
    keys = list(zero_keys())
    assert {"stage", "overlap_comm", "stage3_prefetch_bucket_size", "leaf_module"} <= set(keys)
    for path in (f"zero_optimization.{key}" for key in keys):
        assert path in RULES or any(key.startswith(f"{path}.") for key in RULES), path


def test_docs_contain_the_table_of_rules() -> None:
    text = DOCS.read_text()
    for key, rule in RULES.items():
        assert f"| `{key}` | {rule.kind} | {rule.note} |" in text, key
