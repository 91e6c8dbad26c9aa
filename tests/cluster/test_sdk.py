"""A run by the Kubeflow SDK: its TrainJob for our runtime is taken, its command trains, its status tells how far."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from aliquot.cluster.manifests import to_yaml
from aliquot.cluster.trainjob import cluster_training_runtime
from tests.cluster.apiserver import NEEDS_SERVER, Server, kubectl
from tests.cluster.cases import cpu_job
from tests.runs import free_port, write_config
from tests.stores.http_server import Handler, serving

pytestmark = NEEDS_SERVER

JOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs"


def fine_tune(config: str) -> None:
    import pathlib

    import aliquot

    aliquot.train(aliquot.read_config(pathlib.Path(config)))


@pytest.fixture
def runtime(trainer: str) -> Iterator[str]:
    applied = kubectl(
        "apply", "--server-side", "-f", "-", text=to_yaml(cluster_training_runtime(cpu_job(trainer=trainer)))
    )
    assert applied.returncode == 0, applied.stderr
    yield "aliquot-cpu"
    kubectl("delete", "clustertrainingruntime", "aliquot-cpu")


def test_the_sdk_runs_a_config(runtime: str, trainer: str, tmp_path: Path) -> None:
    if trainer != "2.3":
        pytest.skip("the SDK's models are those of Trainer 2.3")
    from kubeflow.common.types import KubernetesBackendConfig
    from kubeflow.trainer import CustomTrainer, TrainerClient

    client = TrainerClient(KubernetesBackendConfig(config_file=os.environ["KUBECONFIG"], namespace="default"))
    found = client.get_runtime(runtime)
    assert (found.trainer.device, found.trainer.num_nodes) == ("cpu", 4)
    config = write_config(tmp_path, train={"max_steps": 3}, launch={"threads_per_rank": 1})
    task = CustomTrainer(func=fine_tune, func_args={"config": str(config)}, num_nodes=1)
    name = client.train(runtime=runtime, trainer=task)
    server = Server(Path(os.environ["KUBECONFIG"]))
    _, job = server.request("GET", f"{JOBS}/{name}")
    assert job["spec"]["runtimeRef"]["name"] == runtime

    with controller(server, name) as url:
        (tmp_path / "token").write_text("x")
        result = subprocess.run(
            job["spec"]["trainer"]["command"], cwd=tmp_path, env=variables_of_a_pod(url, tmp_path / "token"),
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    _, job = server.request("GET", f"{JOBS}/{name}")
    status = job["status"]["trainerStatus"]
    assert status["progressPercentage"] == 100
    assert {"name": "current_step", "value": "3"} in status["metrics"]
    assert "loss" in {each["name"] for each in status["metrics"]}
    assert [each.name for each in client.list_jobs(found)] == [name]
    client.delete_job(name)


def variables_of_a_pod(url: str, token: Path) -> dict[str, str]:
    port = free_port()
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(token.parent),
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "KUBEFLOW_TRAINER_SERVER_URL": url,
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
    }


def controller(server: Server, name: str) -> AbstractContextManager[str]:
    """What Trainer's own server does with a post: it becomes the status of the TrainJob."""

    class Posts(Handler):
        def do_POST(self) -> None:
            status = {"status": json.loads(self.body())}
            code, answer = server.request("PATCH", f"{JOBS}/{name}/status", status, "application/merge-patch+json")
            assert code == 200, answer
            self.answer()

    return serving(Posts)
