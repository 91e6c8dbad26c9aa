"""The progress protocol against an endpoint on loopback that records what it gets, and against transformers' own."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from aliquot.observe.kubeflow import TOKEN, URL, KubeflowStatus, kubeflow_status
from tests.runs import command, write_config


class Recorder(BaseHTTPRequestHandler):
    posts: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posts.append({"path": self.path, "authorization": self.headers["Authorization"], **json.loads(body)})
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[tuple[dict[str, str], list[dict[str, Any]]]]:
    """(the variables that the controller sets, what was posted)."""
    posts: list[dict[str, Any]] = []
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (Recorder,), {"posts": posts}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    token = tmp_path / "token"
    token.write_text("abc\n")
    address = f"http://127.0.0.1:{server.server_port}/apis/trainer/v1alpha1/namespaces/default/trainjobs/x/status"
    yield {URL: address, TOKEN: str(token)}, posts
    server.shutdown()
    server.server_close()


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
