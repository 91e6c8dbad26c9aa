"""Configs and overrides: what is valid, and the one line that says what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aliquot.cli.terminal import one_line_errors
from aliquot.config.key_hints import known_keys
from aliquot.config.read_config import dump_config, read_config, read_with_locations
from aliquot.core.errors import UserError
from aliquot.data.workload import batch_size

MINIMAL = """\
model:
  path: some/model
data:
  path: text.txt
train:
  learning_rate: 2e-5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def failure(file: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        read_config(file, overrides)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_and_yaml_12_floats(file: Path) -> None:
    config = read_config(str(file))
    assert config.train.learning_rate == 2e-5
    assert config.run.directory == Path("runs/run")
    assert read_config(file, ["run.name=other"]).run.directory == Path("runs/other")
    assert read_config(file, ["run.directory=/tmp/x"]).run.directory == Path("/tmp/x")


@pytest.mark.parametrize(
    ("line", "number", "expected"),
    [
        ("  learning_rte: 1", 7, "unknown key train.learning_rte; did you mean train.learning_rate?"),
        ("trian: {}", 7, "unknown key trian; did you mean train?"),
        ("storage: {size_gib: 3}", 7, "unknown key storage; did you mean cluster.storage?"),
        ("lauch:\n  ranks: 2", 7, "unknown key lauch; did you mean launch?"),
        ("  max_steps: many", 7, "train.max_steps is 'many': input should be a valid integer"),
        ("  weight_decay: -1", 7, "train.weight_decay is -1: input should be greater than or equal to 0"),
        (
            "  max_grad_norm: null",
            7,
            "train.max_grad_norm is null (leave it out for its default; Clip gradients to this global"
            " norm; 0: do not clip): input should be a valid number",
        ),
        ("  precision: fp16", 7, "train.precision is 'fp16': input should be 'auto', 'bf16' or 'fp32'"),
        ("  sequence_length: 4", 7, "did you mean data.sequence_length?"),
        ("model: {path: x}", 7, "model is set twice, first at"),
        ("  a: [", 8, "not valid YAML"),
        ("observe: &a {report_to: *a}", 7, "not valid YAML"),
        ("  max_steps: 010", 7, "7: 010 is 8 to some readers of YAML and 10 to others"),
    ],
)
def test_errors_name_file_line_and_key(file: Path, line: str, number: int, expected: str) -> None:
    file.write_text(f"{MINIMAL}{line}\n")
    message = failure(file)
    assert f"{file}:{number}" in message
    assert expected in message


def test_invalid_date_is_one_line(file: Path) -> None:
    file.write_text(f"{MINIMAL}  max_steps: 2026-99-99\n")
    assert f"{file}: not valid YAML: month must be in 1..12" in failure(file)
    file.write_text(MINIMAL)
    assert "override 'train.max_steps=2026-99-99': the value is not valid YAML" in failure(
        file, "train.max_steps=2026-99-99"
    )


def test_errors_of_overrides_name_the_override(file: Path) -> None:
    for override, message in {
        "train.max_stps=3": "override 'train.max_stps=3': unknown key train.max_stps; did you mean train.max_steps?",
        "launch.ranks=two": "override 'launch.ranks=two'",
        "max_steps=3": "expected section.key=value",
        "train.max_steps": "expected section.key=value",
        "model=null": "give exactly one of model.path",
    }.items():
        assert message in failure(file, override)


def test_an_override_leaves_out_an_optional_section(file: Path) -> None:
    file.write_text(f"{MINIMAL}adapter: {{r: 8}}\n")
    assert read_config(file).adapter is not None and read_config(file, ["adapter=null"]).adapter is None


def test_published_weights_replace_a_model_from_scratch(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {config: {model_type: llama, hidden_size: 64}}\ndata: {path: a.txt}\n")
    config, locations = read_with_locations(file, ["model.path=meta-llama/Meta-Llama-3-8B"])
    assert config.model.path == "meta-llama/Meta-Llama-3-8B" and config.model.config is None
    assert not [keys for keys in locations if keys[:2] == ("model", "config")]


def test_the_config_of_a_model_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "hidden_size": 64, "rope_scaling": null}')
    assert failure(file).startswith(f"{file}: this is the config of a model, and not of a run: ")


def test_contradictions(file: Path) -> None:
    assert "exactly one of model.path" in failure(file, "model.config={model_type: llama}")
    assert "exactly one of model.path" in failure(file, "model.config.hidden_size=64", "model.path=x/y")
    assert "exactly one of data.path" in failure(file, "data.dataset=wikitext")
    assert failure(file, "model.config={}").endswith(f": set the other to null; {file}:2 sets model.path")
    assert failure(file, "train.max_steps=1", "data.prompt=q").startswith("override 'data.prompt=q': data.prompt needs")
    message = failure(
        file, "train.global_batch_size=8", "train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=2"
    )
    assert "two of them fix the third" in message
    assert "is not below launch.nodes" in failure(file, "launch.node_rank=1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_steps=true", "train.max_steps cannot be true"),
        ("train.learning_rate=true", "learning_rate cannot be true"),
        ("launch.step_timeout_s=1e12", "less than or equal to"),
        ("train.learning_rate=.inf", "finite"),
        ("train.num_train_epochs=.nan", "finite"),
        ("run.name=..", "pattern"),
        ("run.name=1e5", "put it in quotes"),
        ("data.sources=[{nmae: a, path: x}]", "unknown key data.sources.0.nmae; did you mean data.sources.name?"),
        ("train.global_batch_tokens=7", r"global_batch_tokens 7 is less than one sequence of data.sequence_length"),
        ("data.path=''", "override \"data.path=''\": data.path is empty"),
        ("data.path=[a.txt, '']", "data.path has an empty path"),
        ("data.eval_sources=[{name: a, path: ''}]", "data.eval_sources.0.path is empty"),
        ("data.tokenizer=''", "data.tokenizer is empty"),
        ("model.path=''", "model.path is empty"),
        ("run.directory=''", "run.directory is empty"),
        ("shard.offload_directory=''", "shard.offload_directory is empty"),
        ("checkpoint.resume=''", "checkpoint.resume is empty"),
        ('data.path="a\\0b"', "data.path has characters that no text file can hold: 'a\\x00b'"),
        ('run.directory="a\\0b"', "run.directory has characters that no text file can hold: 'a\\x00b'"),
        ('shard.deepspeed_config="a\\0b"', "not a text file"),
        ("run.directory=a\udcffb", "run.directory"),
        ("adapter.alpha=1e300", "adapter.alpha is 1e+300: give one from 1e-37 to 1e+37"),
        ("train.adam_epsilon=1e-300", "train.adam_epsilon is 1e-300"),
        ("train.max_steps=100000000000000000000", "train.max_steps is too large: give one below 2^63"),
        ("train.max_steps=010", "010 is 8 to some readers of YAML and 10 to others: write it without the leading 0"),
        ("model.config={hidden_size: -0777}", "-0777 is 511 to some"),
        ("observe.sample_prompt=''", "at least 1 character"),
        ("launch.ranks=0", "or input should be 'auto'"),
        ("launch.ranks=1000000000", "less than or equal to 4096"),
        ("launch.nodes=1000000000000", "less than or equal to"),
        ("train.global_batch_size=1000000000000000", "less than or equal to"),
        ("model.config=" + 3000 * "[", "more than 100 levels deep"),
    ],
)
def test_unusable_values_are_refused(file: Path, override: str, expected: str) -> None:
    assert expected in failure(file, override)


@pytest.mark.parametrize(
    ("override", "ending"),
    [
        ("data.eval_fraction=10", "; did you mean 0.1?"),
        ("train.warmup_ratio=3", "; did you mean 0.03?"),
        ("train.adam_beta2=95", "; did you mean 0.95?"),
        ("data.eval_fraction=60", "less than or equal to 0.5"),
        ("data.eval_fraction=0.9", "less than or equal to 0.5"),
    ],
)
def test_percentages_are_recognised(file: Path, override: str, ending: str) -> None:
    assert failure(file, override).endswith(ending)


def test_error_of_an_override_never_names_the_file(file: Path) -> None:
    for override in ("trian.max_steps=3", "train.max_steps=a", "train.lr_scheduler_kwargs={a: 1}", "adapter.x=1"):
        assert failure(file, override).startswith(f"override {override!r}: "), override


def test_several_problems_have_a_line_each(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f"{MINIMAL}  max_steps: many\n  lr: 3\n  gradient_checkpointing: true\nshard:\n  engine: fast\n")
    with pytest.raises(typer.Exit), one_line_errors(debug=False):
        read_config(file)
    lines = capsys.readouterr().err.splitlines()
    assert {line.split(": ")[1] for line in lines} == {f"{file}:{number}" for number in (7, 8, 9, 11)}
    assert all(line.startswith("aliquot: ") and line.endswith(" [config]") for line in lines)


def test_unambiguous_leading_zeros_are_accepted(file: Path) -> None:
    config = read_config(
        file, ["train.warmup_steps=00", "launch.node_rank=0", "train.max_steps=0x10", "run.name='010'"]
    )
    assert (config.train.warmup_steps, config.train.max_steps, config.run.name) == (0, 16, "010")


def test_empty_section_has_its_defaults(file: Path) -> None:
    file.write_text(MINIMAL + "launch:\n")
    assert read_config(file).launch.nodes == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"), (b"\xff\xfe\x00", "not a text file"), (b"- a\n", "mapping of sections"),
        (b"", "run.yaml: the section model is missing"),
    ],
)  # fmt: skip
def test_unreadable_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.yaml").write_bytes(content)
    assert message in failure(tmp_path / "run.yaml")


def test_error_shows_a_path_with_a_newline_on_one_line(tmp_path: Path) -> None:
    odd = tmp_path / "a\nb.yaml"
    with pytest.raises(UserError) as caught:
        read_config(odd)
    assert caught.value.line.endswith("a\\nb.yaml: cannot read this config: No such file or directory [config]")
    odd.write_text(f"{MINIMAL}  max_stps: 1\n")
    assert "a\\nb.yaml:7: unknown key train.max_stps" in failure(odd)


def test_nested_overrides_replace_single_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {config: {model_type: llama, hidden_size: 8}}\ndata: {path: a}\n")
    config = read_config(file, ["model.config.hidden_size=16", "data.path=[a, b]", "train.weight_decay=1e-2"])
    assert config.model.config == {"model_type": "llama", "hidden_size": 16}
    assert config.data.path == ["a", "b"]
    assert config.train.weight_decay == 0.01


@given(
    learning_rate=st.floats(1e-8, 10, allow_nan=False),
    max_steps=st.integers(1, 10**9),
    packing=st.booleans(),
    name=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,19}", fullmatch=True),
)
def test_dumped_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, learning_rate: float, max_steps: int, packing: bool, name: str
) -> None:
    file = tmp_path_factory.mktemp("config") / "run.yaml"
    file.write_text(MINIMAL)
    overrides = [
        f"train.learning_rate={learning_rate!r}",
        f"train.max_steps={max_steps}",
        f"data.packing={str(packing).lower()}",
        f"run.name='{name}'",
    ]
    config = read_config(file, overrides)
    assert (config.train.learning_rate, config.train.max_steps, config.data.packing) == (
        learning_rate,
        max_steps,
        packing,
    )
    file.write_text(dump_config(config))
    assert read_config(file) == config


@pytest.mark.parametrize(
    "sizes",
    [
        ["global_batch_size=8", "gradient_accumulation_steps=2"],
        ["global_batch_tokens=8192", "gradient_accumulation_steps=2"],
        ["global_batch_tokens=8192", "per_device_train_batch_size=2"],
        ["per_device_train_batch_size=2", "gradient_accumulation_steps=3"],
    ],
)
def test_dumped_batch_sizes_read_back_equal(file: Path, sizes: list[str]) -> None:
    config = read_config(file, [f"train.{size}" for size in sizes])
    file.write_text(dump_config(config))
    assert batch_size(read_config(file).train, 2) == batch_size(config.train, 2)


def test_every_key_has_a_description_or_is_plain(file: Path) -> None:
    assert ("train", "learning_rate") in known_keys()
    assert yaml.safe_load(dump_config(read_config(file))).keys() == {k[0] for k in known_keys() if len(k) == 1}


@pytest.mark.parametrize(
    ("kind", "kwargs", "expected"),
    [
        (
            "cosine",
            "{num_cycle: 2}",
            "train.lr_scheduler_kwargs of cosine: unknown setting num_cycle; cosine takes num_cycles",
        ),
        ("linear", "{min_lr: 0}", "train.lr_scheduler_kwargs of linear: unknown setting min_lr; linear takes none"),
        ("cosine_with_min_lr", "{}", "give exactly one of min_lr (a rate) and min_lr_rate"),
        ("cosine_with_min_lr", "{min_lr: 1}", "min_lr 1 is above train.learning_rate 2e-05"),
        ("cosine_with_min_lr", "{min_lr_rate: 2}", "min_lr_rate is 2: input should be less than or equal to 1"),
        ("cosine_with_restarts", "{num_cycles: 1.5}", "num_cycles is 1.5: input should be a valid integer"),
        ("polynomial", "{lr_end: 1}", "lr_end 1 is not below train.learning_rate 2e-05"),
        (
            "warmup_stable_decay",
            "{}",
            "num_decay_steps is missing; warmup_stable_decay takes num_decay_steps, num_stable_steps",
        ),
        ("warmup_stable_decay", "{num_decay_steps: 2, decay_type: exp}", "decay_type is 'exp': input should be"),
        ("reduce_lr_on_plateau", "{}", "follows the losses of the run, not the step alone"),
        ("greedy", "{}", "choose one of linear, cosine"),
        ("cosin", "{}", "train.lr_scheduler_type is 'cosin': input should be 'linear'"),
    ],
)
def test_schedule_takes_only_its_settings(file: Path, kind: str, kwargs: str, expected: str) -> None:
    told = failure(file, f"train.lr_scheduler_type={kind}", f"train.lr_scheduler_kwargs={kwargs}")
    assert expected in told


def test_key_of_digits_is_one_line(file: Path) -> None:
    for override in ("5=3", "train.5=1", "5.x=1"):
        failure(file, override)


SOURCES = ["data.path=null", "data.sources=[{name: a, path: text.txt}]"]
SET = ["data.path=null", "data.dataset=x"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(
            ([*SOURCES, f"data.{key}"], "belongs in each entry of data.sources")
            for key in (
                "split=train[:1%]",
                "dataset_config=x",
                "text_field=a",
                "prompt=a",
                "completion=a",
                "chosen=a",
                "rejected=a",
                "label=a",
                "document=line",
                "messages=a",
            )
        ),
        ([*SOURCES, "train.objective=dpo", "data.chosen=a"], "data.chosen belongs in each entry of data.sources"),
        (["data.split=test"], "data.split is for data.dataset, and this source is files: leave it out"),
        (["data.eval_sources=[{name: b, path: x, dataset_config: c}]"], "data.eval_sources, b: dataset_config is for"),
        (["data.text_field=a", "data.messages=b"], "data.messages has no use beside text_field or messages"),
        (["data.messages=b", "data.prompt=a", "data.completion=b"], "data.prompt has no use beside"),
        (["data.prompt=a"], "data.prompt needs completion"),
        (["data.shuffle_buffer=9"], "data.shuffle_buffer is for data.streaming: true"),
        (
            ["data.streaming=true", "data.eval_fraction=0.1"],
            "data.streaming holds out no data: give data.eval_path",
        ),
        (["data.streaming=true", "data.tokenizer_vocab_size=300"], "data.streaming trains no tokenizer"),
        ([*SET, "data.streaming=true"], "data.streaming reads files: give path (hf://"),
        (
            ["data.path=null", "data.sources=[{name: a, path: x, repeat: false}]", "data.streaming=true"],
            "data.sources, a: repeat needs the length of a source, which data.streaming does not know",
        ),
        (["data.streaming=true"], "data.streaming needs train.max_steps"),
        (["data.streaming=true", "train.objective=simpo"], "data.streaming has no use: preferences need a reference"),
        (
            ["data.tokenizer=x", "data.tokenizer_vocab_size=300"],
            "has no use beside data.tokenizer: give only one of the two",
        ),
        (["data.eval_split=test"], "data.eval_split is for data.dataset; with data.path give data.eval_path"),
        ([*SET, "data.eval_split=test", "data.eval_path=x"], "data.eval_split has no use beside data.eval_path"),
        (["data.eval_path=x", "data.eval_fraction=0.1"], "data.eval_fraction has no use beside data.eval_path"),
        (["data.train_on=all", "data.roles_to_train=[user]"], "data.roles_to_train has no use with data.train_on: all"),
        (["data.chat_template=none", "data.chat_template_date=2026-01-01"], "no use with data.chat_template: none"),
        (["train.objective=orpo", "data.completion=a"], "data.completion has no use: train.objective: orpo trains on"),
    ],
)
def test_data_keys_that_the_run_does_not_read_are_refused(file: Path, overrides: list[str], message: str) -> None:
    assert message in failure(file, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.chosen=a", "data.rejected=b"], "set train.objective, for example to dpo"),
        (
            ["train.objective=dpo", "data.messages=a"],
            "trains on pairs of answers: give data.chosen and data.rejected instead",
        ),
        (["train.objective=dpo", "train.simpo_gamma=1"], "train.simpo_gamma has no effect on train.objective: dpo"),
        (["train.objective=dpo", "train.loss_type=ipo", "train.label_smoothing=0.1"], "dpo with loss_type: ipo"),
        (["train.objective=orpo", "train.loss_type=ipo"], "train.loss_type has no effect on train.objective: orpo"),
        (["train.beta=1"], "train.beta has no effect on train.objective: sft"),
        (["train.objective=dpo", "train.desirable_weight=2"], "desirable_weight has no effect on train.objective: dpo"),
        (["data.label=c"], "data.label is for rated answers: set train.objective to kto"),
        (
            ["train.objective=kto", "data.messages=a"],
            "trains on rated answers: give data.prompt, completion and label instead",
        ),
        (["train.objective=kto", "data.train_on=all"], "leave out data.train_on: all"),
        (["train.objective=dpo", "model.config={model_type: llama}", "model.path=null"], "give model.path"),
    ],
)
def test_settings_that_do_not_fit_an_objective_are_refused(file: Path, overrides: list[str], message: str) -> None:
    assert message in failure(file, *overrides)


def test_preference_objectives_read_trl_s_fields(file: Path) -> None:
    config = read_config(file, ["train.objective=dpo", "data.prompt=question", "data.chosen=chosen", "data.rejected=b"])
    assert (config.data.prompt, config.data.chosen, config.data.rejected) == ("question", "chosen", "b")
    assert read_config(file, ["train.objective=dpo", "data.chosen=a"]).data.rejected == "rejected"
    file.write_text(dump_config(config))
    assert read_config(file) == config
    mixed = [*SOURCES, "data.prompt=null", "data.chosen=null", "data.rejected=null", "data.eval_path=x"]
    several = read_config(file, mixed)
    assert several.data.sources is not None
    assert [section.chosen for section in (several.data, *several.data.sources)] == ["chosen", "chosen"]
    file.write_text(dump_config(several))
    assert read_config(file) == several
    file.write_text(dump_config(config))
    rated = read_config(file, ["train.objective=kto", "data.chosen=null", "data.rejected=null", "data.prompt=null"])
    assert (rated.data.prompt, rated.data.completion, rated.data.label) == ("prompt", "completion", "label")
    file.write_text(dump_config(rated))
    assert read_config(file) == rated
