"""Observability of a real run: parts of steps, events, a profile, exported metrics, reports."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

import aliquot
from aliquot.distributed.liveness.watchdog import Activity, PhaseNotice
from aliquot.observe.step_clock import PARTS
from aliquot.planner.compute_ceiling import Ceiling
from tests.observe.test_gpu_ledger import Recorded
from tests.runs import command, curve, free_port, has_steps, refused, trained, wait_for, write_config
from tests.tools import warm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Two ranks; six steps, then two more."""
    config = write_config(folder, "run", launch={"ranks": 2}, checkpoint={"every": 3}, observe={"profile": 2})
    trained(config)
    (folder / "run" / "export" / "NOTES.md").write_text("mine")
    trained(config, "train.max_steps=8", "observe.profile=0")
    return folder / "run"


def is_served(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30):
            return True
    except OSError:
        return False


def events(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def test_the_parts_of_each_step_are_in_the_metrics(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 8
    for line in steps:
        parts = {part: line[f"{part}_s"] for part in PARTS}
        assert all(seconds >= 0 for seconds in parts.values()), parts
        assert parts["forward"] > 0 and parts["backward"] > 0 and parts["reduce"] > 0 and parts["optimizer"] > 0
        assert len(line["own_work_s"]) == 2


def test_ceiling_is_not_measured_in_the_full_memory_of_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement takes 400 MiB. Steps that are faster than the ceiling ask for it."""
    asked: list[object] = []
    monkeypatch.setattr("aliquot.run.prepared_run.current_gpu", lambda device: Recorded())
    monkeypatch.setattr("aliquot.run.trainer.ceiling", lambda *_, **__: asked.append(Ceiling(1.0, True)) or asked[-1])
    monkeypatch.setattr("aliquot.observe.throughput.Meter.beats_ceiling", True)
    aliquot.train(aliquot.read_config(write_config(folder, "gpu", launch={"ranks": 1})))
    assert len(curve(folder / "gpu")) == 6 and not asked


def test_an_export_that_holds_a_persons_files_is_kept(run: Path) -> None:
    assert (run / "export-1" / "NOTES.md").read_text() == "mine"
    assert {path.name for path in (run / "export-1").iterdir()} - {"NOTES.md"} == {
        path.name for path in (run / "export").iterdir()
    }


def test_events_hold_both_starts(run: Path) -> None:
    logged = events(run)
    kinds = [event["event"] for event in logged if event["event"] not in ("slow_ranks", "warning")]
    assert kinds == ["start", "checkpoint", "checkpoint", "end", "resume", "checkpoint", "end"]
    start, resume = (event for event in logged if event["event"] in ("start", "resume"))
    assert start["world_size"] == 2 and start["engine"] == "host" and start["total_steps"] == 6
    assert str(start["command"]).startswith("aliquot train ") and str(start["command"]).endswith("run.yaml")
    assert resume["step"] == 6 and str(resume["resumed_from"]).endswith("step-00000006")
    saved = [event for event in logged if event["event"] == "checkpoint"]
    assert [event["step"] for event in saved] == [3, 6, 8]
    assert all(0 <= float(str(event["stall_s"])) <= float(str(event["seconds"])) for event in saved)


def test_a_report_is_made_at_the_end(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "resumed at 6" in page and '<span class="state complete">' in page
    assert len(page) < 2_000_000
    missing = re.findall(r"Not shown:</strong> (.*)", page)
    assert all("no doctor.json" in why or "no plan" in why for why in missing), missing


def test_the_profile_of_each_rank(run: Path) -> None:
    for rank in range(2):
        with gzip.open(run / "profile" / f"rank-{rank}.json.gz", "rt") as file:
            trace = json.load(file)
        ranges = [event["name"] for event in trace["traceEvents"] if str(event.get("name", "")).startswith("aliquot:")]
        assert {f"aliquot: {part}" for part in ("data", "forward", "backward", "wait", "optimizer")} <= set(ranges)
        assert ranges.count("aliquot: optimizer") == 2
        assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
        table = (run / "profile" / f"rank-{rank}.txt").read_text()
        assert "mean of 2 profiled steps" in table and "aten::mm" in table
        assert all(re.search(rf"^{part}\s+[\d.]+ ms", table, re.M) for part in PARTS)


def test_a_run_too_short_to_trace_says_so(folder: Path) -> None:
    result = command("train", write_config(folder, "short", train={"max_steps": 2}, observe={"profile": 1}))
    assert result.returncode == 0 and "before the steps to trace began" in result.stderr
    assert not (folder / "short" / "profile").exists()


def test_metrics_are_served_and_killed_run_is_reported(folder: Path) -> None:
    port = free_port()
    config = write_config(folder, "served", launch={"ranks": 2}, observe={"prometheus": port})
    directory = folder / "served"
    process = warm.popen(
        "-m", "aliquot", "train", config, "train.max_steps=100000",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: has_steps(directory, 3), process)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert re.search(r'^aliquot_loss\{run="served"\} [\d.]+', text, re.M)
        assert re.search(r'^aliquot_memory_bytes\{rank="1",run="served"\} ', text, re.M)
        assert command("report", directory, "--out", folder / "going.html").returncode == 0
        assert '<span class="state running">' in (folder / "going.html").read_text()
        other = write_config(folder, "other", observe={"prometheus": port})
        assert f"cannot listen on 127.0.0.1:{port}" in refused(other)
        assert not (folder / "other").exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    while is_served(port):  # the ranks end when they miss their launcher
        time.sleep(0.05)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')
    result = command("report", directory)
    assert result.returncode == 0 and result.stdout.strip() == str(directory / "report.html")
    page = (directory / "report.html").read_text()
    assert '<span class="state killed">' in page and "Memory over the phases" in page


def test_several_runs_on_one_page(folder: Path, run: Path) -> None:
    result = command("report", run, folder / "served", "--out", folder / "both.html")
    assert result.returncode == 0, result.stderr
    assert "2 runs side by side" in (folder / "both.html").read_text()
    result = command("report", folder)
    assert result.returncode == 2 and "not a run directory" in result.stderr and "Traceback" not in result.stderr


def test_quiet_says_nothing(folder: Path) -> None:
    config = write_config(folder, "quiet", train={"max_steps": 1})
    result = command("train", config, "--quiet")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.long
def test_steps_far_behind_the_plan_are_a_warning(folder: Path) -> None:
    """The process stands still for most of the time from before its first step on."""
    config = write_config(folder, "behind", train={"max_steps": 6})
    process = warm.popen(
        "-m", "aliquot", "train", config,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    wait_for((folder / "behind" / "events.jsonl").exists, process)
    while process.poll() is None:
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(0.01)
    _, errors = process.communicate()
    assert re.search(r"warning: a step takes [\d.]+ m?s, by the plan [\d.]+ m?s: look for other processes", errors), (
        errors
    )


@pytest.mark.long
def test_a_rank_that_is_held_up_is_named(folder: Path) -> None:
    config = write_config(folder, "slow", launch={"ranks": 2}, train={"max_steps": 100000})
    process = warm.popen(
        "-m", "aliquot", "train", config,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    directory = folder / "slow"
    try:
        wait_for(lambda: has_steps(directory, 2), process)
        ranks = psutil.Process(process.pid).children()
        second = next(rank for rank in ranks if any(file.path.endswith("rank-1.log") for file in rank.open_files()))
        while not any(event["event"] == "slow_ranks" for event in events(directory)):
            assert process.poll() is None
            second.suspend()
            time.sleep(0.05)
            second.resume()
            time.sleep(0.01)
        logged = next(event for event in events(directory) if event["event"] == "slow_ranks")
        assert re.search(r"rank 1 \([\d.]+ x the median\)", str(logged["text"])), logged
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert "warning: slow for 20 steps, the others wait: rank 1" in errors
    assert events(directory)[-1]["event"] == "stopped"
    assert '<span class="state stopped">' in (directory / "report.html").read_text()


@pytest.mark.parametrize("on_error", ["warn", pytest.param("stop", marks=pytest.mark.long)])
def test_metrics_that_cannot_be_written(folder: Path, on_error: str) -> None:
    """A file size limit acts like a full disk: metrics.jsonl cannot grow."""
    config = write_config(folder, on_error, checkpoint={"on_error": on_error}, train={"max_steps": 100000})
    directory = folder / on_error
    process = warm.popen(
        "-m", "aliquot", "train", config, "train.logging_steps=1",
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None

    def written() -> int:
        assert process.poll() is None
        return (directory / "metrics.jsonl").stat().st_size if (directory / "metrics.jsonl").exists() else 0

    try:
        while not written() > 2 * sum(file.stat().st_size for file in directory.glob("events.jsonl")) > 0:
            time.sleep(0.05)
        unlimited = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (written(), unlimited[1]))
        if on_error == "warn":
            logged = process.stderr.readline()
            assert logged.startswith("warning: metrics and events are not recorded until this error ends: "), logged
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
            size = written()
            while written() == size:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=240)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert "Traceback" not in errors and "not recorded" not in errors
    last = events(directory)[-1]
    if on_error == "warn":
        assert (process.returncode, last["event"]) == (143, "stopped"), errors
        assert list(curve(directory)) == list(range(1, int(str(last["step"])) + 1))
    else:
        line = f"{directory}/metrics.jsonl: cannot write: File too large"
        assert (process.returncode, errors.splitlines()[-1]) == (2, f"aliquot: {line} [disk]"), errors
        assert (last["event"], last["text"]) == ("failed", line)


def test_a_stage_that_lasts_is_shown_once() -> None:
    activity, shown = Activity(), list[str]()
    notice = PhaseNotice(activity, shown.append)
    for stage in ("planning", *3 * ["loading weights"], *2 * ["planning"]):
        activity.enter(stage)
        notice.check()
    assert shown == ["still loading weights", "still planning"]
