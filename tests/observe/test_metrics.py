"""metrics.jsonl and TensorBoard are one clean curve whatever happened to the run before; what Prometheus collects."""

from __future__ import annotations

import json
import math
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from aliquot.config.schema import ObserveSection
from aliquot.core.errors import StorageError, UserError
from aliquot.observe.metrics import Exporter, MetricsFile, TensorBoard, writers
from aliquot.observe.recorder import Recorder
from aliquot.observe.run_directory import RunDirectory
from tests.runs import free_port


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@given(written=st.integers(0, 12), resumed=st.integers(0, 15), cut=st.integers(0, 20))
def test_resumed_curve_is_clean(tmp_path_factory: pytest.TempPathFactory, written: int, resumed: int, cut: int) -> None:
    """The first attempt is killed with a line half written, then continues from a checkpoint at `resumed`."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(1, written + 1):
        first.write({"step": step, "loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 99, "loss": 1}'[:cut])
    second = MetricsFile(path, resumed_step=resumed)
    second.write({"step": resumed + 1})
    assert steps(path) == [*range(1, min(written, resumed) + 1), resumed + 1]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).write({"step": 1, "loss": math.nan, "more": {"norms": [math.inf, 1.0]}})
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line == {"step": 1, "loss": None, "more": {"norms": [None, 1.0]}}


def test_tensorboard_curve_is_clean_after_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(tmp_path)
    for step in range(1, 6):
        first.write({"step": step, "loss": float(step), "note": "text is left out"})
    first.close()
    second = TensorBoard(tmp_path, resumed_step=3)
    second.write({"step": 4, "loss": 40.0})
    second.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, 40)]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # a traceback on the console
def test_tensorboard_resumes_after_a_full_disk(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.write({"step": 1, "loss": 1.0})
    for bytes_left in (0, 7):  # none, and less than a record
        with full_disk(next(tmp_path.iterdir()).stat().st_size + bytes_left):
            for step in range(2, 200):
                with pytest.raises(StorageError, match="cannot write"):
                    board.write({"step": step, "loss": 2.0})
    board.write({"step": 300, "loss": 3.0})
    board.close()
    assert [event.step for event in EventAccumulator(str(tmp_path)).Reload().Scalars("loss")] == [1, 300]


@contextmanager
def full_disk(most_bytes: int = 0) -> Iterator[None]:
    """No file of this process can grow beyond that, and no right to mount a small disk is needed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named_and_no_line_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write({"step": 1})
    with full_disk(), pytest.raises(StorageError, match=f"^{path}: cannot write: "):
        metrics.write({"step": 2})
    metrics.write({"step": 3})
    assert steps(path) == [1, 2, 3]
    metrics.write({"step": 4})
    with full_disk():
        with pytest.raises(StorageError, match="cannot write"):
            metrics.write({"step": 5})
        with pytest.raises(StorageError, match="cannot write"):
            metrics.close()


@pytest.mark.parametrize("report_to", [["tensorboard"], []])
def test_writer_creates_only_the_enabled_files(tmp_path: Path, report_to: list[str]) -> None:
    for writer in writers(RunDirectory(tmp_path), 0, report_to, print):
        writer.write({"step": 1, "loss": 2.0})
        writer.close()
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", *report_to}


@pytest.fixture
def served() -> Iterator[tuple[Exporter, int]]:
    """An exporter and its port."""
    port = free_port()
    exporter = Exporter(ObserveSection(prometheus=port), 'a"run')
    exporter.listen()
    yield exporter, port
    exporter.close()
    with pytest.raises(URLError):
        collected(port)


def collected(port: int) -> dict[tuple[str, str], float]:
    """(name, rank) -> value"""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels["run"] == 'a"run' for sample in samples)
    return {(sample.name, sample.labels.get("rank", "")): sample.value for sample in samples}


def test_the_last_numbers_are_served(served: tuple[Exporter, int]) -> None:
    exporter, port = served
    exporter.write({"step": 1, "loss": 2.5, "mfu": None, "memory_bytes": [10, 20]})
    exporter.write({"step": 2, "loss": 2.25, "memory_bytes": [10, 30], "note": "not a number"})
    assert collected(port) == {
        ("aliquot_step", ""): 2, ("aliquot_loss", ""): 2.25,
        ("aliquot_memory_bytes", "0"): 10, ("aliquot_memory_bytes", "1"): 30,
    }  # fmt: skip


def test_colliding_prometheus_names_are_numbered(served: tuple[Exporter, int]) -> None:
    exporter, port = served
    for loss in (1, 2):
        exporter.write({"eval_web-en_loss": loss, "eval_web_en_loss": 10 * loss})
    assert collected(port) == {("aliquot_eval_web_en_loss", ""): 2, ("aliquot_eval_web_en_loss_2", ""): 20}


def test_a_taken_port_is_bad_input() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        exporter = Exporter(ObserveSection(prometheus=taken.getsockname()[1]), "run")
        with pytest.raises(UserError, match=r"observe.prometheus: cannot listen on 127.0.0.1:\d+.*choose another port"):
            exporter.listen()


def test_nothing_listens_without_a_port() -> None:
    exporter = Exporter(ObserveSection(), "run")
    exporter.listen()
    exporter.write({"step": 1})
    exporter.close()


def test_full_disk_does_not_stop_prometheus(tmp_path: Path, served: tuple[Exporter, int]) -> None:
    exporter, port = served
    file = MetricsFile(tmp_path / "metrics.jsonl")
    recorder: Any = SimpleNamespace(_writers=[file, exporter], _tolerating_full_disk=nullcontext)
    with full_disk(), pytest.raises(StorageError, match=r"metrics\.jsonl"):
        Recorder._write_metrics(recorder, {"loss": 2.0})
    assert collected(port) == {("aliquot_loss", ""): 2.0}
    file.close()
