"""Curves in W&B (offline) and on a real MLflow server; servers that are dead, and such as never answer.

The progress protocol of Kubeflow against an endpoint on loopback, and against transformers' own.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aliquot.config.read_config import dump_config
from aliquot.config.schema import RunConfig
from aliquot.core.errors import UserError
from aliquot.observe.dashboards import TOKEN, URL, KubeflowStatus, check_installed, kubeflow_status
from aliquot.observe.events import Events
from aliquot.observe.metrics import writers
from aliquot.observe.run_directory import RunDirectory
from tests import runs
from tests.runs import command, free_port, write_config
from tests.stores.http_server import Handler, serving

SERVER = """
import sys, werkzeug.serving
from mlflow.server import app
werkzeug.serving.run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)
"""


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    database = f"sqlite:///{folder}/mlflow.db"
    settings = {
        "FILE_STORE": database, "REGISTRY_STORE": database, "ARTIFACT_ROOT": "mlflow-artifacts:/",
        "SERVE_ARTIFACTS": "true", "ARTIFACT_DESTINATION": str(folder / "artifacts"),
    }  # fmt: skip
    environment = {**os.environ, **{f"_MLFLOW_SERVER_{name}": value for name, value in settings.items()}}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], env=environment, stdout=log, stderr=log)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory as it is when the first step begins."""
    config = RunConfig.model_validate(
        {"run": {"name": "seen", "directory": str(tmp_path)}, "model": {"path": "x"}, "data": {"path": "y"}}
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    return tmp_path


def attempt(run: Path, service: str, steps: range, how: str | None = "end", last_ledger: str = "{}") -> list[str]:
    """Train into `run`; the warnings."""
    warned: list[str] = []
    events = Events(run / "events.jsonl", True)
    events.write("start" if steps.start == 1 else "resume", steps.start - 1)
    file, dashboard = writers(RunDirectory(run), steps.start - 1, [service], warned.append)
    for step in steps:
        for writer in (file, dashboard):
            writer.write({"step": step, "loss": 10.0 - step, "engine": "host", "memory_bytes": [1, 2]})
        (run / "ledger.json").write_text(last_ledger)
    if how is not None:
        events.write(how, steps.stop - 1)
    file.close()
    dashboard.close()
    return warned


@pytest.mark.long
def test_silent_server_delays_nothing_and_next_attempt_resends(
    run: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from mlflow import MlflowClient

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        told = attempt(run, "mlflow", range(1, 500), how=None)
    assert "does not have all of this run" in told[-1]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 499
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    assert attempt(run, "mlflow", range(401, 403), last_ledger='{"rows": []}') == []  # from the checkpoint of step 400
    client = MlflowClient(mlflow_server)
    (found,) = client.search_runs([client.get_experiment_by_name("aliquot").experiment_id])
    assert (found.info.run_name, found.info.status) == ("seen", "FINISHED")
    assert found.data.params["train.learning_rate"] == "5e-05"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(step, 10.0 - step) for step in range(1, 403)]
    folder = tmp_path_factory.mktemp("artifacts")
    assert {file.path for file in client.list_artifacts(found.info.run_id)} == {"config.yaml", "ledger.json"}
    assert Path(client.download_artifacts(found.info.run_id, "ledger.json", str(folder))).read_text() == '{"rows": []}'


def points(directory: Path) -> list[dict[str, float]]:
    """What W&B has written of a run offline: a log as LevelDB's, of records shorter than its blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("*.wandb")
    data, found, at, whole = file.read_bytes(), [], 7, b""
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # not the last of a record
            continue
        record, whole = Record.FromString(whole), b""
        items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        found.append({name: value for name, value in items.items() if not name.startswith("_")})
    return [items for items in found if items]


def test_wandb_offline_joins_two_attempts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert attempt(run, "wandb", range(1, 4)) == []
    time.sleep(1)  # wandb names directories by the second: where it starts quickly, two would have one name
    assert attempt(run, "wandb", range(3, 5)) == []
    run_id = json.loads((run / "wandb.json").read_text())["run_id"]
    first, second = sorted((run / "wandb").glob(f"offline-run-*-{run_id}"))
    while len(points(first)) < 3 or len(points(second)) < 2:  # on a busy machine, W&B's process writes after `finish`
        time.sleep(0.1)
    assert points(first) == [{"step": step, "loss": 10.0 - step} for step in (1, 2, 3)]
    assert points(second) == [{"step": step, "loss": 10.0 - step} for step in (3, 4)]
    assert {"config.yaml", "ledger.json"} <= {file.name for file in (second / "files").iterdir()}


@pytest.mark.long
def test_wandb_without_its_server_writes_for_a_later_upload(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    wandb.teardown()  # of another test, with its environment
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr("aliquot.observe.dashboards._RETRY_S", 1.0)
    (warning,) = attempt(run, "wandb", range(1, 4))
    assert warning.endswith(f"written to {run}/wandb, for `wandb sync`; training goes on")
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1


def test_missing_client_is_refused_before_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_installed(["tensorboard"])
    with pytest.raises(UserError, match=r"observe.report_to: wandb is not installed: pip install 'aliquot\[wandb\]'"):
        check_installed(["tensorboard", "wandb"])


@pytest.mark.long
def test_a_run_of_two_ranks_goes_to_both_and_is_resumed(
    tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "whole")
    settings = {"observe": {"report_to": ["wandb", "mlflow"]}, "launch": {"ranks": 2}}
    config = runs.write_config(tmp_path, **settings)
    runs.trained(config, "train.max_steps=3", "train.lr_scheduler_type=constant")
    runs.trained(config, "train.max_steps=6", "train.lr_scheduler_type=constant")
    client = MlflowClient(mlflow_server)
    (found,) = client.search_runs([client.get_experiment_by_name("whole").experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == list(runs.curve(tmp_path / "run").items())
    assert found.info.status == "FINISHED"
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*"))) == 2


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[tuple[dict[str, str], list[dict[str, Any]]]]:
    """(the variables that the controller sets, what was posted)."""
    posts: list[dict[str, Any]] = []

    class Recorder(Handler):
        def do_POST(self) -> None:
            facts = {"path": self.path, "authorization": self.headers["Authorization"]}
            posts.append({**facts, **json.loads(self.body())})
            self.answer()

    token = tmp_path / "token"
    token.write_text("abc\n")
    with serving(Recorder) as address:
        yield {URL: f"{address}/apis/trainer/v1alpha1/namespaces/default/trainjobs/x/status", TOKEN: str(token)}, posts


def values(post: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in post["trainerStatus"]["metrics"]}


def test_posted_status(endpoint: tuple[dict[str, str], list[dict[str, Any]]]) -> None:
    environ, posts = endpoint
    status = KubeflowStatus(environ, total_steps=200)
    for step in range(1, 201):
        status.write({"step": step, "loss": 4.0 - step / 100, "eta_s": 2.0 * (200 - step), "memory_bytes": [1, 2]})
    status.close()
    assert all(post["authorization"] == "Bearer abc" and post["path"].endswith("/status") for post in posts)
    last = posts[-1]["trainerStatus"]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert values(posts[-1]) == {"loss": "2.0", "current_step": "200", "total_steps": "200"}
    assert set(last) == {"lastUpdatedTime", "progressPercentage", "estimatedRemainingSeconds", "metrics"}
    assert all(post["trainerStatus"]["progressPercentage"] < 100 for post in posts[:-1])


def test_agrees_with_transformers(
    endpoint: tuple[dict[str, str], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same fields and types as the callback that the protocol comes from."""
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations.integration_utils import KubeflowCallback

    environ, posts = endpoint
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    state = TrainerState(is_world_process_zero=True, max_steps=10, global_step=10, epoch=1.0)
    callback, arguments, control = KubeflowCallback(), TrainingArguments(use_cpu=True), TrainerControl()
    callback.on_train_begin(arguments, state, control)
    callback.on_log(arguments, state, control, logs={"loss": 2.0})
    callback.on_train_end(arguments, state, control)
    theirs = list(posts)
    posts.clear()
    status = kubeflow_status(10)
    assert status is not None
    status.write({"step": 10, "loss": 2.0, "eta_s": 0.0})
    status.close()
    assert {key: type(value) for key, value in theirs[-1]["trainerStatus"].items()} == {
        key: type(value) for key, value in posts[-1]["trainerStatus"].items()
    }
    assert {key: value for key, value in theirs[-1].items() if key != "trainerStatus"} == {
        key: value for key, value in posts[-1].items() if key != "trainerStatus"
    }


def test_a_run_reports(endpoint: tuple[dict[str, str], list[dict[str, Any]]], tmp_path: Path) -> None:
    environ, posts = endpoint
    result = command("train", write_config(tmp_path), environment=environ)
    assert result.returncode == 0, result.stderr
    assert posts[-1]["trainerStatus"]["progressPercentage"] == 100
    assert {"loss", "learning_rate", "tokens_per_s"} <= set(values(posts[-1]))


def test_nobody_listens(tmp_path: Path) -> None:
    status = KubeflowStatus({URL: "http://127.0.0.1:9/x", TOKEN: str(tmp_path / "none")}, total_steps=1)
    status.write({"step": 1})
    status.close()


def test_non_http_server_is_survived(tmp_path: Path) -> None:
    """The thread outlives it and posts again."""
    (tmp_path / "token").write_text("abc")
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while len(asked) < 2:
                connection, _ = server.accept()
                with connection:
                    asked.append(connection.recv(1 << 16))
                    connection.sendall(b"what?\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        environ = {URL: f"http://127.0.0.1:{server.getsockname()[1]}/x", TOKEN: str(tmp_path / "token")}
        status = KubeflowStatus(environ, total_steps=1)
        while not asked:
            time.sleep(0.01)
        status.write({"step": 1})
        status.close()
        thread.join(10)
    assert len(asked) == 2


def test_status_is_off_by_default() -> None:
    assert kubeflow_status(1, {}) is None
    assert kubeflow_status(1, {URL: "http://127.0.0.1:9", "DISABLE_KUBEFLOW_INTEGRATION": "TRUE"}) is None
