"""The page of a run in whatever state it is: all numbers there, all gaps explained, nothing of the files believed."""

from __future__ import annotations

import fcntl
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.core.errors import UserError
from aliquot.observe.report import figures, run_facts
from aliquot.observe.report.charts import log_ticks, thinned, ticks
from aliquot.observe.report.figures import resumes
from aliquot.observe.report.memory_figures import memory
from aliquot.observe.report.page import MARKER, render, write_report
from aliquot.observe.report.read_run import read_run
from tests.observe.report.directories import MACHINE, MIB, plan, rows, start, step, whole_run, write_run

VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps what a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.pictures: list[str] = []  # their titles
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["svg", "title"]:
            self.pictures.append(data)
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


def page_of(*directories: Path) -> Page:
    return Page(render([read_run(directory) for directory in directories]))


def test_a_mixture_of_experts_shows_how_evenly_they_are_used(tmp_path: Path) -> None:
    def of_experts(number: int) -> dict[str, Any]:
        loads = [1.5, 4.0 - 0.25 * number]  # of two layers
        return step(number, busiest_expert=loads, unused_experts=7 - number, router_loss=0.01 * number)

    steps = [of_experts(number) for number in range(1, 6)]
    page = page_of(write_run(tmp_path / "run", steps=steps, events=[start()]))
    assert "averaged over 2 layers, at worst 2.75 times (layer 1); 2 experts got no token since" in page.text
    assert "Balancing the routers added 0.05 to the training loss" in page.text
    unlogged = page_of(write_run(tmp_path / "odd", steps=[step(1, busiest_expert=["much", None])], events=[start()]))
    assert "busiest expert" not in unlogged.text


def test_a_whole_run_has_every_picture(tmp_path: Path) -> None:
    page = page_of(whole_run(tmp_path / "run"))
    text = page.text
    assert "complete" in text and "8M parameters" in text and "of 100" in text
    assert "resumed at 40" in text and "checkpoints/step-00000040" in text
    assert "50 %" in text and "1 TFLOP/s" in text  # of the ceiling, and the ceiling
    assert "0.3 s, 30 %" in text.replace("300 ms", "0.3 s")  # the largest part of a step
    assert "brg_matmul:avx512_core_bf16" in text and "aliquot train run.yaml" in text
    assert "slow for 20 steps: rank 1" in text  # an event, as it was recorded
    assert "2.00 GiB" in text and "plan" in text
    assert "bits per byte 0.910 of held-out text" in text
    assert text.count("Not shown") == 1 and "doctor" in text.split("Not shown")[1]
    pictured = " ".join(page.pictures).lower()
    for what in (
        "loss",
        "perplexity",
        "tokens",
        "flop/s",
        "time of a step",
        "memory over the phases",
        "learning rate",
        "gradient norm",
        "memory while training",
        "bytes",
    ):
        assert what in pictured, what


def test_every_picture_has_a_text_and_a_table(tmp_path: Path) -> None:
    text = render([read_run(whole_run(tmp_path / "run"))])
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    for picture in pictures:
        assert 'role="img"' in picture
        title, described = re.search(r'aria-labelledby="(\S+) (\S+)"', picture).groups()  # type: ignore[union-attr]
        assert re.search(rf'<title id="{title}">[^<]+</title>', picture)
        assert re.search(rf'<desc id="{described}">[^<]+</desc>', picture)
    assert text.count("<details>") == len(pictures)
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(whole_run(tmp_path / "run"))
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    policy = next(
        a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none'")


def test_a_killed_run_with_half_a_line(tmp_path: Path) -> None:
    directory = write_run(
        tmp_path / "run", steps=[step(n) for n in (1, 2, 3)], events=[start()], tail='{"step": 4, "loss": 1.'
    )
    run = read_run(directory)
    assert run.status.word == "killed" and [line["step"] for line in run.steps] == [1, 2, 3]
    text = page_of(directory).text
    assert "3 of 100" in text and "killed" in text
    # All that is missing is said.
    assert "ledger.json" in text and "no evaluation" in text and "no checkpoint" in text
    # The ledger of such a run ends with the first step; later steps may have more memory.
    largest = [{**step(2), "memory_bytes": [5 << 30, 1 << 30]}]
    killed = write_run(tmp_path / "killed", steps=largest, events=[start()], ledger=rows(1))
    assert "peak memory 5.00 GiB" in page_of(killed).text


def test_rolled_back_run_shows_steps_once(tmp_path: Path) -> None:
    """Resumed at 4, then from before that, as its checkpoint of step 4 was damaged, and again."""
    slow = {"forward_s": 100.0, "backward_s": 100.0}  # of the first step of an attempt
    steps = [step(n, **(slow if n in (1, 3) else {})) for n in range(1, 7)]
    saved = [{"event": "checkpoint", "step": n, "time": 1.0, "seconds": n, "stall_s": 0.5} for n in (2, 4)]
    again = [start(event="resume", step=n, resumed_from="x", total_steps=8) for n in (4, 2, 2)]
    ends = [{"event": "failed", "step": n, "time": 2.0, "text": "why"} for n in (4, 8, 6)]
    events = [start(), *saved, ends[0], again[0], ends[1], again[1], {**saved[1], "seconds": 7}, again[2], ends[2]]
    run = read_run(write_run(tmp_path / "run", steps=steps, events=events))
    assert run.beginnings == [0, 2]
    assert (run_facts.steps_done(run), [row[:2] for row in run_facts.checkpoints(run).rows]) == (
        6,
        [["2", "2 s"], ["4", "7 s"]],
    )
    assert run.mean_parts()["forward"] == pytest.approx(0.3)
    assert resumes(run) == {2: "resumed at 2"}
    assert "The run was resumed 3 times." in figures.loss(run).says


def test_an_evaluation_between_logged_steps_is_in_the_table(tmp_path: Path) -> None:
    lines = [step(1), step(3), {"step": 4, "eval_loss": 1.5}, step(6), {"step": 6, "eval_loss": 1.25}]
    table = figures.loss(read_run(write_run(tmp_path / "run", steps=lines, events=[start()]))).table
    assert [row[0] for row in table.rows] == ["1", "3", "4", "6"]
    assert [row[1:3] for row in table.rows][2:] == [["", "1.5000"], [f"{step(6)['loss']:.4f}", "1.2500"]]


def test_step_parts_are_means_over_logged_steps(tmp_path: Path) -> None:
    """What a first step took counts neither itself nor for the next."""
    steps = [step(1), step(2, data_s=1.0), step(10, data_s=2.0), step(11), step(12, data_s=3.0)]
    again = start(event="resume", step=10, resumed_from="x")
    run = read_run(write_run(tmp_path / "run", steps=steps, events=[start(), again]))
    assert run.mean_parts()["data"] == pytest.approx((1 * 1.0 + 8 * 2.0 + 1 * 3.0) / 10)


@pytest.mark.parametrize("changes", [{}, {"tokens_per_s": None, "flops_per_s": None, "mfu": None}])
def test_a_run_of_a_single_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = write_run(tmp_path / "run", steps=[step(1, **changes)], events=[start(total_steps=1)], ledger=rows(1))
    text = page_of(directory).text
    assert "1 of 1" in text and re.search(r"\b1 s\b", text)


def test_run_without_a_logged_step(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "run")).text
    assert "empty" in text and "no step" in text and "not recorded" in text and "events.jsonl" in text


def test_lock_marks_a_run_in_progress(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=[step(1)], events=[start()])
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(directory).status.word == "running"
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert read_run(directory).status.word == "killed"
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # reading kept nothing


@pytest.mark.parametrize(
    ("event", "word", "detail"),
    [
        ({"event": "stopped", "step": 2, "text": "stopped by SIGTERM"}, "stopped", "stopped by SIGTERM"),
        ({"event": "failed", "step": 2, "text": "the loss is not finite"}, "failed", "the loss is not finite"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, event: dict[str, Any], word: str, detail: str) -> None:
    directory = write_run(tmp_path / "run", steps=[step(1), step(2)], events=[start(), event])
    assert read_run(directory).status.word == word
    assert detail in page_of(directory).text


def test_a_dead_rank_is_quoted(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=[step(1)], events=[start()])
    (directory / "logs").mkdir()
    for rank, kind in ((0, "peer_lost"), (1, "crash")):
        error = {"rank": rank, "kind": kind, "message": f"of {rank}", "traceback": "", "time": 0}
        (directory / "logs" / f"rank-{rank}.error.json").write_text(json.dumps(error))
    status = read_run(directory).status
    assert (status.word, status.detail) == ("failed", "rank 1: of 1")


def test_without_a_plan_or_a_ceiling_the_page_says_so(tmp_path: Path) -> None:
    lines = [step(n, mfu=None) for n in range(1, 9)]
    events = [start(ceiling_flops_per_s=None)]
    text = page_of(write_run(tmp_path / "run", steps=lines, events=events, ledger=rows(planned=False))).text
    assert "no plan" in text.lower() and "ledger.json" in text and "not measured" in text


def test_indistinguishable_collectives(tmp_path: Path) -> None:
    lines = [step(n, reduce_s=None) for n in range(1, 9)]
    text = page_of(write_run(tmp_path / "run", steps=lines, events=[start()])).text
    assert "Reducing is not" in text and "Reducing is not" not in page_of(whole_run(tmp_path / "whole")).text


def test_findings_of_the_doctor(tmp_path: Path) -> None:
    directory = whole_run(tmp_path / "run")
    good = {"id": "isa", "level": "ok", "found": "avx512", "meaning": "fast", "fix": ""}
    bad = {"id": "shm", "level": "problem", "found": "64 MiB", "meaning": "too small", "fix": "mount an emptyDir"}
    (directory / "doctor.json").write_text(json.dumps([good, bad]))
    text = page_of(directory).text
    assert "problem shm: 64 MiB too small fix: mount an emptyDir ok isa: avx512 fast" in text
    assert "Not shown" not in text
    (directory / "doctor.json").write_text("{}")
    assert "holds no findings" in page_of(directory).text


def test_the_page_opens_with_the_result(tmp_path: Path) -> None:
    evaluations = [
        {"step": n, "eval_loss": loss, "eval_perplexity": 2.7**loss} for n, loss in ((0, 9), (50, 1), (99, 2))
    ]
    steps = [evaluations[0], *(step(n, epoch=0.03 * n) for n in range(1, 101)), *evaluations[1:]]
    text = page_of(whole_run(tmp_path / "run", steps=steps)).text
    assert text.index("of 100; epoch 3") < text.index("Learning rate") < text.index("Plan and measurement")
    assert "training loss 1.5000 from 8.5714 at step 1" in text
    assert "evaluation loss 2.0000 from 9.0000 before training" in text
    assert "loss 9.0000 before training 2.0000 at step 99 1.0000 at step 50" in text  # first, last, best
    assert "training time 1 min 50 s" in text and "tokens 100k" in text
    assert "60 documents, 9,000 tokens" in text and "learned > hi" in text
    assert "train.max_grad_norm" not in text  # this run does not clip


def test_one_memory_picture_shows_the_largest_rank(tmp_path: Path) -> None:
    ledger = rows(3)
    for row in ledger:
        row["peak_bytes"] += int(row["rank"] == 1) * 512 * MIB
    figure, _ = memory(read_run(write_run(tmp_path / "run", steps=[step(1)], events=[start()], ledger=ledger)))
    assert "The largest rank held at most 2.06 GiB" in figure.says
    named = dict(zip(figure.table.head, figure.table.rows[-1], strict=True))
    assert (named["largest rank"], named["smallest rank"]) == ("2.06 GiB", "1.56 GiB")


def test_speed_is_the_final_figure_of_the_run(tmp_path: Path) -> None:
    ended = {"event": "end", "step": 100, "time": 1_700_000_150.0, "tokens_per_s": 3200.0, "mfu": 0.4}
    text = page_of(whole_run(tmp_path / "run", events=[start(), ended])).text
    assert "real tokens/s 3,200 over all steps since the last start but the first" in text
    assert "real tokens/s 5,000 3,200 +56 %" in text and "MFU 40 %" in text


def test_the_plan_beside_the_measurement(tmp_path: Path) -> None:
    text = page_of(whole_run(tmp_path / "run")).text
    assert "real tokens/s 5,000 4,000 +25 %" in text
    assert "a step 800 ms 1 s -20 %" in text
    assert re.search(r"peak memory of a rank 1.45 GiB [\d.]+ GiB [+-]\d+ %", text)
    assert "compute-bound; rates: measured here" in text


def test_planned_network_includes_loopback(tmp_path: Path) -> None:
    lines = [step(n, wire_bytes=5_000_000 * n) for n in range(1, 11)]
    foreseen = plan() | {"wire_bytes_per_step": 2_000_000, "local_bytes_per_step": 9_000_000}
    events = [start(engine="fsdp", world_size=2)]
    text = page_of(write_run(tmp_path / "run", steps=lines, events=events, ledger=rows(), plan=foreseen)).text
    assert "network with loopback, all ranks, a step 11 MB 10 MB +10 %" in text


HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    machine = {"cpu": HOSTILE, "isa": [HOSTILE], "matmul_kernels": {"bf16": HOSTILE}, "memory_limit_bytes": HOSTILE}
    events = [
        start(model=HOSTILE, engine=HOSTILE, placement=HOSTILE, command=HOSTILE, machine=machine, world_size=HOSTILE),
        {"event": HOSTILE, "step": 1, "text": HOSTILE},
        start(data={"summary": [HOSTILE, None], "samples": [HOSTILE, "learned > " + HOSTILE]}),
        {"event": "resume", "step": 2, "resumed_from": HOSTILE, "time": 1e300},
        {"event": "failed", "step": 3, "text": HOSTILE},
    ]
    rows_ = [{**row, "accounted_bytes": {HOSTILE: 1, "weights": HOSTILE}, "rank": HOSTILE} for row in rows(1)]
    doctor = [dict.fromkeys(("id", "level", "found", "meaning", "fix"), HOSTILE)]
    directories = [
        write_run(tmp_path / place, name=HOSTILE, steps=[step(1), step(2, loss=HOSTILE), step(3)], events=events,
                  ledger=rows_, plan=dict.fromkeys(plan(), HOSTILE), data={"path": HOSTILE},
                  train={"precision": HOSTILE})
        for place in ("a", "b")
    ]  # fmt: skip
    (directories[0] / "doctor.json").write_text(json.dumps(doctor))
    for shown in (directories[:1], directories):
        text = render([read_run(directory) for directory in shown])
        page = Page(text)
        assert page.count("script") == 1 and page.count("img") == 0
        assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
        assert "{{7*7}}" in text and "alert(1)" in page.text


@pytest.mark.parametrize("value", [None, "x", [], {}, True, 10**400, -5, 1e308, [None, "x"]])
def test_values_of_any_type_are_survived(tmp_path: Path, value: object) -> None:
    lines = [dict.fromkeys(step(1), value), {**step(2), "memory_bytes": value}, {**step(3), "tokens_per_s": value}]
    event = {**dict.fromkeys(start(), value), "event": "start"}
    ledger = [{**dict.fromkeys(row, value), "phase": row["phase"]} for row in rows(1)]
    foreseen = dict.fromkeys(plan(), value)
    directory = write_run(
        tmp_path / "run", steps=lines, events=[event], ledger=ledger, plan=foreseen, train=value, data=value
    )
    page_of(directory)
    page_of(directory, directory)


@pytest.mark.long
def test_a_long_run_of_many_ranks_stays_small(tmp_path: Path) -> None:
    lines = [step(n, loss=5 + (n % 7) / 7, memory_bytes=[500 * MIB] * 64) for n in range(1, 10_001)]
    directory = write_run(tmp_path / "run", steps=lines, events=[start(world_size=64)], ledger=rows(64))
    text = render([read_run(directory)])
    assert len(text.encode()) < 2_000_000
    assert Page(text).pictures.count("Memory over the phases") == 1  # not a picture for each of the 64


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    one = whole_run(tmp_path / "one", name="one", shard={"engine": "host"})
    two = whole_run(
        tmp_path / "two", name="two", shard={"engine": "fsdp"}, events=[start(engine="fsdp")],
        steps=[step(n, tokens_per_s=2000) for n in range(1, 51)],
    )  # fmt: skip
    page = page_of(one, two)
    text = page.text
    assert "2 runs side by side" in text and "killed" in text
    assert "shard.engine host fsdp" in text
    assert "4,000" in text and "2,000" in text
    pictured = " ".join(page.pictures).lower()
    assert all(what in pictured for what in ("loss", "perplexity", "tokens", "mfu", "time of a step", "memory"))
    assert "Not logged by two" in text  # nothing was evaluated there


def test_runs_of_one_name_are_labelled_by_directory(tmp_path: Path) -> None:
    text = page_of(whole_run(tmp_path / "a"), whole_run(tmp_path / "b")).text
    assert str(tmp_path / "a") in text and "the configs are the same" in text


def test_report_needs_run_directory_and_replaces_only_reports(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        write_report([tmp_path], tmp_path / "report.html")
    directory = whole_run(tmp_path / "run")
    other = tmp_path / "thesis.html"
    other.write_text("<p>mine</p>")
    with pytest.raises(UserError, match="not a report of aliquot"):
        write_report([directory], other)
    assert other.read_text() == "<p>mine</p>"
    write_report([directory], directory / "report.html")
    write_report([directory], directory / "report.html")
    assert MARKER in (directory / "report.html").read_text()
    assert not list(directory.glob(".report*"))


def test_unwritable_report_is_one_line(tmp_path: Path) -> None:
    directory, out = whole_run(tmp_path / "run"), tmp_path / "no/x.html"
    told = CliRunner().invoke(app, ["report", str(directory), "--out", str(out)])
    assert (told.exit_code, told.stderr) == (2, f"aliquot: {out}: cannot write: No such file or directory [disk]\n")


@example(105919649288.0, 6.103515625e-05)
@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    high = low + span
    found = ticks(low, high)
    assert len(found) <= 11
    # To the resolution of floats where they are large and lie close together.
    slack = 1e-6 * (high - low) + 2 * math.ulp(max(abs(low), abs(high)))
    assert all(low - slack <= tick <= high + slack for tick in found)


@given(st.floats(1e-9, 1e12), st.floats(1.01, 1e12))
def test_ticks_of_a_logarithmic_axis_are_few_and_inside(low: float, factor: float) -> None:
    marks = log_ticks(low, low * factor)
    assert 1 <= len(marks) <= 11 and marks == sorted(marks)
    assert all(0.999 * low <= mark <= 1.001 * low * factor for mark in marks)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=1000))
def test_thinning_keeps_the_extremes(values: list[float]) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    kept = thinned(points, 100)
    assert len(kept) <= max(100, len(points) if len(points) <= 100 else 0)
    assert {min(values), max(values)} <= {value for _, value in kept}
    assert kept == sorted(kept) and set(kept) <= set(points)


def test_report_draws_gpu_and_machine_memory(tmp_path: Path) -> None:
    told = [
        row | {"gpu": {
            "allocated_bytes": 700 * MIB, "reserved_bytes": 800 * MIB, "beside_bytes": 600 * MIB,
            "peak_bytes": (3000 + i) * MIB, "planned_bytes": 3100 * MIB, "accounted_bytes": {"weights": 512 * MIB},
        }}
        for i, row in enumerate(rows(ranks=1))
    ]  # fmt: skip
    machine = {**MACHINE, "gpus": ["Some GPU"], "gpu_memory_bytes": 4000 * MIB}
    on_host = [{"name": "first step", "private_bytes": {"process": 321 * MIB}, "shared_bytes": {}}]
    foreseen = plan() | {"phases": [], "host_phases": on_host, "ranks_per_node": 1}
    foreseen["host_peak_bytes_per_rank"] = 999 * MIB
    steps = [step(n, memory_bytes=[500 * MIB], gpu_memory_bytes=[1500 * MIB]) for n in range(1, 5)]
    run = write_run(
        tmp_path / "gpu", ledger=told, plan=foreseen, steps=steps, events=[start(machine=machine, world_size=1)]
    )
    page = Page(render([read_run(run)]))
    assert {"GPU memory over the phases", "Memory over the phases", "GPU memory while training"} <= set(page.pictures)
    assert "limit 3.91 GiB" in page.text  # of the GPU, not of the machine
    assert "context, NCCL, allocator" in page.text and "0.31 GiB" in page.text
    assert "of the machine's memory 0.98 GiB" in page.text  # planned
