"""The Job that makes a run's directories as root: what it gives away, and that it follows no link of other pods."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aliquot.cluster.job import Job
from aliquot.cluster.pod import USER
from aliquot.cluster.render import documents
from tests.cluster.cases import cpu_job

STRANGER = 4242
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, as the Job has it")


def job_on(volume: Path) -> Job:
    storage = cpu_job().section.storage.model_dump(exclude_unset=True)
    return cpu_job(storage={**storage, "mount_path": str(volume)}, huggingface_secret=None)


def started(command: list[str], user: int | None = None) -> subprocess.Popen[str]:
    """The container's process; the image is this machine."""
    return subprocess.Popen(
        [sys.executable, *command[1:]], user=user, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(command: list[str]) -> tuple[int, str]:
    process = started(command)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def made_by(job: Job) -> tuple[int, str]:
    (container,) = documents(job)["directories-job.yaml"]["spec"]["template"]["spec"]["containers"]
    return ended(container["command"])


@needs_root
def test_trainer_owns_only_its_directories(tmp_path: Path) -> None:
    for _ in range(2):  # a Job may be repeated
        code, output = made_by(job_on(tmp_path))
        assert code == 0, output
    owners = {str(each.relative_to(tmp_path)): each.stat().st_uid for each in tmp_path.rglob("*")}
    assert owners == {"runs": 0, "runs/llama3-8b": USER, "cache": USER, "huggingface": USER}


@needs_root
@pytest.mark.parametrize("place", ["runs", "runs/llama3-8b", "cache"])
def test_links_on_the_volume_are_not_followed(place: str, tmp_path: Path) -> None:
    """A pod of another run that may write to the volume plants a link to what it wants to have."""
    volume, victim = tmp_path / "volume", tmp_path / "victim"
    (victim / "llama3-8b").mkdir(parents=True)
    (volume / place).parent.mkdir(parents=True)
    (volume / place).symlink_to(victim)
    code, output = made_by(job_on(volume))
    assert code == 1 and "is a link or a file" in output and len(output.splitlines()) == 1, output
    assert [each.stat().st_uid for each in (victim, victim / "llama3-8b")] == [0, 0]


@needs_root
def test_a_directory_of_somebody_else_stays_theirs(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", STRANGER, STRANGER)
    code, output = made_by(job_on(tmp_path))
    assert code == 1 and f"belongs to user {STRANGER}" in output, output
    assert (tmp_path / "cache").stat().st_uid == STRANGER


@pytest.mark.parametrize("path", ["/elsewhere/runs", "{volume}/../runs"])
def test_only_directories_of_the_volume(path: str, tmp_path: Path) -> None:
    command = ["python3", "-P", "-m", "aliquot.cluster.make_directories", "own", "1000", str(tmp_path / "volume")]
    code, output = ended([*command, path.format(volume=tmp_path / "volume")])
    assert code == 1 and "not a directory of the volume" in output, output
    assert list(tmp_path.iterdir()) == []


def test_missing_volume_is_one_line(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    command = ["python3", "-P", "-m", "aliquot.cluster.make_directories", "own", "1000", str(volume)]
    code, output = ended([*command, str(volume / "runs")])
    assert code == 1 and "cannot write: No such file or directory" in output and len(output.splitlines()) == 1, output


def test_training_pods_wait_for_the_directories(tmp_path: Path) -> None:
    runtime = documents(job_on(tmp_path))["training-runtime.yaml"]["spec"]["template"]["spec"]["replicatedJobs"][0]
    (container,) = runtime["template"]["spec"]["template"]["spec"]["initContainers"]
    *command, seconds = container["command"][:6]
    paths = container["command"][6:]
    assert paths == [f"{tmp_path}/runs/llama3-8b", f"{tmp_path}/cache", f"{tmp_path}/huggingface"]
    code, output = ended([*command, "0", *paths])
    assert code == 1 and output.startswith(f"aliquot: {paths[0]}: user {os.getuid()} cannot write here"), output
    waiting = started([*command, seconds, *paths])
    for path in paths:
        assert waiting.poll() is None
        Path(path).mkdir(parents=True)
    assert waiting.wait(60) == 0
