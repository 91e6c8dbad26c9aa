"""What a Prometheus server collects, over a real socket."""

from __future__ import annotations

import socket
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aliquot.config.schema import ObserveSection
from aliquot.core.errors import UserError
from aliquot.observe.prometheus import Exporter


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def collected(port: int) -> dict[tuple[str, str], float]:
    """(name, rank) -> value"""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels["run"] == 'a"run' for sample in samples)
    return {(sample.name, sample.labels.get("rank", "")): sample.value for sample in samples}


def test_the_last_numbers_are_served() -> None:
    port = free_port()
    exporter = Exporter(ObserveSection(prometheus=port), 'a"run')
    exporter.listen()
    try:
        exporter.write({"step": 1, "loss": 2.5, "mfu": None, "memory_bytes": [10, 20]})
        exporter.write({"step": 2, "loss": 2.25, "memory_bytes": [10, 30], "note": "not a number"})
        assert collected(port) == {
            ("aliquot_step", ""): 2, ("aliquot_loss", ""): 2.25,
            ("aliquot_memory_bytes", "0"): 10, ("aliquot_memory_bytes", "1"): 30,
        }  # fmt: skip
    finally:
        exporter.close()
    with pytest.raises(URLError):
        collected(port)


def test_names_that_prometheus_cannot_tell_apart_are_numbered() -> None:
    port = free_port()
    exporter = Exporter(ObserveSection(prometheus=port), 'a"run')
    exporter.listen()
    try:
        for loss in (1, 2):
            exporter.write({"eval_web-en_loss": loss, "eval_web_en_loss": 10 * loss})
        assert collected(port) == {("aliquot_eval_web_en_loss", ""): 2, ("aliquot_eval_web_en_loss_2", ""): 20}
    finally:
        exporter.close()


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
