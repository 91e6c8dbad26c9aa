"""Callbacks: what they see, how they stop a run, and how they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import aliquot
from aliquot.checkpoint.directories import complete_directories
from aliquot.core.errors import CallbackError, UsageError
from aliquot.run.callbacks import check_callbacks
from tests.runs import curve, free_port, write_config
from tests.tools import warm

# Two ranks run this script. `Failing` fails while a save is in progress: it begins after step 2.
SCRIPT = """\
import sys
import aliquot

class Stopping(aliquot.Callback):
    def on_step_end(self, run):
        print("step", run.step)
        if run.step == 3:
            run.stop()

class Failing(aliquot.Callback):
    def on_log(self, run):
        if run.step == 3:
            self.fail(run)

    def fail(self, run):
        run.metrics["no such metric"]

try:
    result = aliquot.train(aliquot.read_config(sys.argv[1]), callbacks=[globals()[sys.argv[2]]()])
    print("result", result.steps, result.export)
except aliquot.UserError as error:
    sys.exit(error.line)
"""


class Recorder(aliquot.Callback):
    """Keeps the states, and in how far they were true when they came."""

    def __init__(self) -> None:
        self.states: list[tuple[str, aliquot.RunState]] = []

    def on_step_end(self, run: aliquot.RunState) -> None:
        self.states.append(("step", run))

    def on_log(self, run: aliquot.RunState) -> None:
        self.states.append(("log", run))

    def on_evaluate(self, run: aliquot.RunState) -> None:
        self.states.append(("evaluate", run))

    def on_save(self, run: aliquot.RunState) -> None:
        assert run.checkpoint in complete_directories(run.directory / "checkpoints")
        self.states.append(("save", run))


def settings(folder: Path) -> Path:
    checkpoint = {"every": 2, "async": False, "keep": 9}
    train = {"eval_steps": 3, "logging_steps": 2}
    return write_config(folder, train=train, checkpoint=checkpoint)


def test_callbacks_see_the_run(tmp_path: Path) -> None:
    recorder, hook = Recorder(), sys.excepthook
    result = aliquot.train(aliquot.read_config(settings(tmp_path)), callbacks=[recorder])
    assert sys.excepthook is hook, "torch's prefix of tracebacks is of the run alone"
    events = [(event, state.step) for event, state in recorder.states]
    assert events == [
        ("step", 1), ("log", 1), ("step", 2), ("log", 2), ("save", 2), ("step", 3), ("evaluate", 3),
        ("step", 4), ("log", 4), ("save", 4), ("step", 5), ("step", 6), ("log", 6), ("evaluate", 6), ("save", 6),
    ]  # fmt: skip
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [dict(state.metrics) for event, state in recorder.states if event in ("log", "evaluate")] == lines
    first, last = recorder.states[0][1], recorder.states[-1][1]
    assert first.checkpoint is None and last.checkpoint == result.directory / "checkpoints" / "step-00000006"
    assert first.metrics["loss"] == curve(result.directory)[1] and last.metrics.keys() == {"seconds", "stall_s"}
    assert (first.directory, first.last_step, first.tokens) == (result.directory, 6, lines[0]["tokens"])
    assert first.epoch == lines[0]["epoch"] and last.epoch == lines[-2]["epoch"]
    with pytest.raises(TypeError):
        first.metrics["loss"] = 0.0  # type: ignore[index]


def run_script(folder: Path, config: Path, callback: str) -> list[tuple[int, str, str]]:
    """Run SCRIPT as two ranks; (exit code, output, errors) by rank."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        warm.popen(
            script, config, callback,
            env={**os.environ, **world, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [(process.returncode, *output) for process in ranks for output in [process.communicate(timeout=120)]]


def test_stop_ends_all_ranks_after_the_step(tmp_path: Path) -> None:
    config = settings(tmp_path)
    ranks = run_script(tmp_path, config, "Stopping")
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    assert "step 3\n" in ranks[0][1] and "step 3\n" not in ranks[1][1]
    assert all(f"result 3 {tmp_path}/run/export" in output for _, output, _ in ranks)
    assert list(curve(tmp_path / "run")) == [1, 2, 3] and list(curve(tmp_path / "run", "eval_loss")) == [3]
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["text"] for event in events if event["event"] == "stopped_early"] == [
        "callback Stopping called stop()"
    ]
    assert events[-1]["event"] == "end"
    assert aliquot.train(aliquot.read_config(config)).steps == 6  # starting again continues


def test_an_exception_ends_all_ranks_with_one_line(tmp_path: Path) -> None:
    config = yaml.safe_load(settings(tmp_path).read_text())
    config["checkpoint"]["async"], config["train"]["logging_steps"] = True, 1
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    ranks = run_script(tmp_path, tmp_path / "run.yaml", "Failing")
    line = (
        f"{tmp_path}/train.py:16: Failing.on_log failed after step 3: KeyError: 'no such metric'. Correct the callback"
        " and start again: the run continues after its newest checkpoint [callback]"
    )
    assert [code for code, _, _ in ranks] == [1, 1], ranks
    assert all(errors.splitlines()[-1] == line for _, _, errors in ranks), ranks
    assert [path.name for path in complete_directories(tmp_path / "run" / "checkpoints")] == ["step-00000002"]
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], f"{last['text']} [callback]") == ("failed", line)


def test_a_failing_callback_is_not_called_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The save of step 2 is completed after the failure in step 3, and would call the callback again."""

    class Failing(Recorder):
        def on_step_end(self, run: aliquot.RunState) -> None:
            super().on_step_end(run)
            if run.step == 3:
                raise ValueError

    failing = Failing()
    with pytest.raises(CallbackError, match=r"test_callbacks.py:\d+: Failing.on_step_end failed after step 3: ValueE"):
        config = aliquot.read_config(settings(tmp_path), ["checkpoint.async=true", "launch.ranks=2"])
        aliquot.train(config, callbacks=[failing])
    assert failing.states[-1][1].step == 3
    assert "launch.ranks is 2 and launch.nodes is 1, but this process trains as the only" in capsys.readouterr().err


def test_objects_that_are_no_callbacks_are_refused() -> None:
    class Wrong(aliquot.Callback):
        def on_train_end(self) -> None:
            pass

    for callback, message in (
        (Recorder, "Recorder is not an object of aliquot.Callback: pass Recorder(), not the class"),
        (print, "builtin_function_or_method is not an object of aliquot.Callback"),
        (Wrong(), "Wrong.on_train_end would never be called: a run calls on_step_end, on_log, on_evaluate, on_save"),
    ):
        with pytest.raises(UsageError) as caught:
            check_callbacks([callback])
        assert message in str(caught.value)
