"""This version resumes, reports and loads the runs of earlier versions, and keeps every name that they promised.

docs/reference/compatibility.md states the promise; tests/tools/make_fixture.py made the files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aliquot.config.evaluation_config import read_evaluation_config
from aliquot.config.read_config import read_config
from aliquot.models.export import export_checkpoint
from aliquot.observe.report.read_run import read_run
from aliquot.planner.automatic_settings import with_settings
from aliquot.run.evaluate import evaluate_model
from tests.runs import curve
from tests.tools import warm
from tests.tools.docs_pages import ROOT
from tests.tools.make_fixture import FIXTURES, PAGES, promised_names

VERSIONS = sorted(path.name for path in FIXTURES.iterdir())
# Relative, of losses that another CPU may compute with other kernels: `model` computes in fp32, `adapter` in bf16.
TOLERANCE = {"model": 1e-4, "adapter": 1e-2}


@pytest.fixture(params=VERSIONS)
def earlier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a fixture as the working directory, because the paths in a fixture are relative."""
    copy = tmp_path / request.param
    shutil.copytree(FIXTURES / request.param, copy)
    monkeypatch.chdir(copy)
    return copy


def lines_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", TOLERANCE)
def test_resumed(earlier: Path, name: str) -> None:
    """The resumed steps have the losses that the earlier version logged, under the same metric names."""
    run = earlier / name
    before = {key: curve(run, key) for key in ("loss", "grad_norm", "learning_rate", "tokens", "eval_loss")}
    metric_names = {key for line in lines_of(run) for key in line}
    weights = load_file(next((run / "export").glob("*.safetensors")))
    shutil.copy(run / "config.yaml", earlier / "again.yaml")
    resumed = warm.run("-m", "aliquot", "train", "again.yaml", cwd=earlier)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resume"] == [3]
    for key, values in before.items():
        assert curve(run, key) == pytest.approx(values, rel=TOLERANCE[name] * (10 if key == "grad_norm" else 1)), key
    assert {key for line in lines_of(run) for key in line} >= metric_names
    torch.testing.assert_close(load_file(next((run / "export").glob("*.safetensors"))), weights, atol=1e-3, rtol=0.01)


@pytest.mark.parametrize("name", TOLERANCE)
def test_reported(earlier: Path, name: str) -> None:
    run = read_run(earlier / name)
    assert run.status.word == "complete"
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4, 5] and list(run.checkpoints) == [3]
    assert run.rows == json.loads((run.path / "ledger.json").read_text())["rows"]
    assert run.evaluation_sets and run.plan and run.machine and run.about["aliquot"] == earlier.name
    report = warm.run("-m", "aliquot", "report", str(run.path))
    assert report.returncode == 0 and (run.path / "report.html").stat().st_size > 10_000, report.stderr


def test_loaded(earlier: Path) -> None:
    """An export is evaluated as at the end of its run; a checkpoint of an adapter is merged into its model."""
    settings = read_evaluation_config("model/export", "model.yaml", ["train.precision=fp32"])
    assert evaluate_model(settings)[""].loss == pytest.approx(curve(earlier / "model", "eval_loss")[5], rel=1e-4)
    adapter, base, merged = earlier / "adapter/checkpoints/step-00000003", earlier / "model/export", earlier / "merged"
    export_checkpoint(adapter, merged, "float32", merge=True, base=str(base))
    assert load_file(merged / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()


def test_configs_are_read(earlier: Path) -> None:
    for file in sorted(earlier.glob("*.yaml")):
        config, recorded = read_config(file), read_config(earlier / file.stem / "config.yaml")
        assert config.train.compile == "auto"  # a run records its choices in place of `auto`
        keys = ("compile", "gradient_checkpointing", "per_device_train_batch_size", "precision")
        assert with_settings(config, {f"train.{key}": getattr(recorded.train, key) for key in keys}) == recorded


@pytest.mark.parametrize("version", VERSIONS)
def test_every_promised_name_is_there(version: str) -> None:
    """Config keys, commands and their options, ids of errors and of the doctor's findings."""
    promised = json.loads((FIXTURES / version / "names.json").read_text())
    names = {name for page in PAGES for name in promised_names(ROOT / page)}
    missing = {name for page_names in promised.values() for name in page_names} - names
    assert not missing, sorted(missing)
