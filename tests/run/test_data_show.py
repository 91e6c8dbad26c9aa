"""`aliquot data show` says what the run says of its data, and refuses what the run refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aliquot.config.read_config import read_config
from aliquot.core.errors import UserError
from aliquot.observe.run_directory import RunDirectory
from aliquot.run.resolved_run import lay_out, model_source, prepare_data
from tests import plain
from tests.conftest import REPOSITORY
from tests.data.stores import byte_level
from tests.runs import WORDS, command, trained, write_config, write_text

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
LONG = " ".join(WORDS * 4)
PAIR = {"prompt": "a ", "chosen": LONG, "rejected": "b"}
UNANSWERED: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": "a"}]}]
STREAM = {"max_steps": 1}
RATED = {"prompt": "a ", "completion": LONG, "label": True}


@pytest.mark.few(1)
@pytest.mark.parametrize("example", sorted(EXAMPLES, key=lambda path: path.stem != "happy_endings"))
def test_data_show_says_what_the_run_says(tmp_path: Path, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each example, with a tiny model and tiny texts in the place of those that are not here."""
    monkeypatch.chdir(REPOSITORY)
    config = read_config(example)
    overrides = [f"run.directory={tmp_path}/run", "train.max_steps=2", "checkpoint.export=false", "launch.nodes=1",
                 "launch.device=cpu", "shard.offload=none", "launch.ranks=1", f"data.cache_directory={tmp_path}/cache",
                 "train.compile=none", "train.precision=fp32", "observe.console=plain"]  # fmt: skip
    if config.data.sources is None:
        overrides += ["data.dataset=null", "data.dataset_config=null", f"data.path={write_text(tmp_path)}"]
        overrides += ["data.document=line", *(["data.eval_fraction=0.2"] if config.data.eval_fraction else [])]
    if config.train.objective == "dpo":
        pairs = [{"prompt": "a ", "chosen": " ".join(WORDS[:n]), "rejected": "b"} for n in range(1, 20)]
        (tmp_path / "text.txt").unlink()
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, [*pairs, PAIR])))
        overrides += [f"data.path={tmp_path}/pairs.jsonl", "data.document=null", "data.sequence_length=128"]
    if config.model.path is not None or config.run.name == "finetune":
        plain.save_llama(tmp_path / "model")
        byte_level().save_pretrained(tmp_path / "model")
        overrides += ["model.config=null", f"model.path={tmp_path}/model"]
        overrides += [] if config.train.objective == "dpo" else ["data.sequence_length=64"]
    shown = command("data", "show", example, *overrides)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    printed = trained(example, *overrides).splitlines()
    marks = ("example ", "learned > ", "        | ", "tokenising", "training the tokenizer")
    told = [line for line in shown.stdout.splitlines() if line.strip() and not line.startswith(marks)]
    assert len(told) >= 3 and [line for line in told if line not in printed] == []
    if config.train.objective == "dpo":
        assert any("or an answer than the model's 64 positions, left out" in line for line in told)


@pytest.mark.parametrize(
    ("records", "settings", "message"),
    [
        (
            [PAIR] * 3,
            {"objective": "dpo"},
            r"3 pairs are longer than data.sequence_length 48 \(the first: .*l:1\), left",
        ),
        ([{**PAIR, "rejected": LONG}, PAIR], {"objective": "simpo"}, r"1 pair is longer .*; 1 x a pair of two equal"),
        ([RATED] * 2, {"objective": "kto"}, "2 answers are longer than data.sequence_length 48"),
        ([{**RATED, "completion": "b"}], {"objective": "kto"}, "kto compares answers to different prompts"),
        ([{"text": " "}], {}, "usable document: 1 x a blank record, left out"),
        (UNANSWERED, {}, r"usable document: 1 x a record without an answer.*l:1\)"),
        (UNANSWERED, STREAM, r"usable document: 1 x a record without an answer.*l:1\)"),
    ],
)
def test_counted_reason_is_the_reason_given(
    tmp_path: Path, records: list[dict[str, Any]], settings: dict[str, Any], message: str
) -> None:
    plain.save_llama(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = {"path": str(tmp_path / "x.jsonl"), "document": None, "tokenizer_vocab_size": None, "sequence_length": 48,
            "eval_fraction": 0.0, "chat_template": "zephyr", "streaming": settings == STREAM}  # fmt: skip
    model = {"path": str(tmp_path / "model"), "config": None}
    config = read_config(write_config(tmp_path, model=model, data=data, train=settings))
    with pytest.raises(UserError, match=message) as caught:
        source = model_source(config)
        prepared = prepare_data(config, source, RunDirectory(config.run.directory).day(), None)
        lay_out(config, source, prepared, 1)
    assert "tokens/" not in str(caught.value) and "\n" not in str(caught.value)
