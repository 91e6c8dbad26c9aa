"""Damage one byte of a run or of its caches, and compare how the run goes on with an undisturbed one.

    python -m tests.tools.damages --damages 100

A run on chats, one on pairs of answers and one on a stream stop in the middle. So many times a byte of a file of the
run directory or of the caches is flipped, overwritten or cut off at the end, and the run is started again; every file
has its turn. Either the run ends with the losses and the weights of the undisturbed one, bit for bit, or it is refused
by one line that names the file, and does so when the file is as it was. Damage of the newest checkpoint must be
noticed: the run goes back one checkpoint or, every other time, takes the mirror's copy.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import aliquot
from aliquot.checkpoint.directories import directory_of
from aliquot.core.errors import UserError
from aliquot.tensor_io.manifest import verify
from tests.data.stores import damage
from tests.runs import WORDS, curve, write_config
from tests.tools.crash import CURVES, write_inputs

STEPS = 4
TEMPLATE = "{{ strftime_now('%d %B') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


class Run:
    """A run that stopped before its last checkpoint, and the curves and weights with which it ends undisturbed."""

    def __init__(self, folder: Path, sections: dict[str, dict[str, Any]]) -> None:
        # A copy of `stopped` takes its place as `live` for each damage.
        self._live, self._stopped, self._mirror = folder / "live", folder / "stopped", folder / "mirror"
        self._directory = self._live / "run"
        self._config = write_config(folder, "run", **sections, run={"directory": str(self._directory)})
        self._newest = directory_of(self._directory / "checkpoints", STEPS - 1)
        self._train()
        self._curves, self._weights = self._results()
        self._live.rename(self._stopped)
        shutil.rmtree(self._stopped / "run/checkpoints" / f"step-{STEPS:08d}")
        self.files = sorted(path.relative_to(self._stopped) for path in self._stopped.rglob("*") if path.is_file())

    def check(self, name: Path, draw: random.Random) -> str:
        """Damage a file, and go on. Return how it ended. Raises AssertionError if the damage has another outcome."""
        shutil.rmtree(self._live, ignore_errors=True)
        shutil.copytree(self._stopped, self._live, symlinks=True)
        file = self._live / name
        what, outcome = f"{name}: {damage(file, draw)}", "the same losses"
        is_newest, overrides = file.parent == self._newest, []
        if is_newest and draw.random() < 0.5:
            overrides = [f"checkpoint.mirror=file://{self._mirror}"]
            shutil.rmtree(self._mirror, ignore_errors=True)  # it has the last step of an earlier damage
            shutil.copytree(self._stopped / "run/checkpoints", self._mirror / "run")
        try:
            self._train(*overrides)
        except UserError as error:
            line, outcome = error.line, "refused"
            assert file.name in line and "\n" not in line and error.exit_code == 2, f"{what}: {line}"
            shutil.copyfile(self._stopped / name, file)
            self._train()
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        curves, weights = self._results()
        assert weights == self._weights, f"{what}: other weights"
        if file.name == "metrics.jsonl" and outcome != "refused":  # its damaged line is lost, or runs into the next one
            differing = {step for step, value in self._curves["loss"].items() if curves["loss"].get(step) != value}
            assert len(differing) <= 2 and STEPS not in differing, f"{what}: {differing}"
        else:
            assert curves == self._curves, f"{what}: {curves}"
        if is_newest:
            resumed_step = STEPS - 1 if overrides else STEPS - 2
            assert self._resumed_from() == str(directory_of(self._newest.parent, resumed_step)), what
        return outcome

    def _train(self, *overrides: str) -> None:
        os.environ["ALIQUOT_CACHE"] = str(self._live / "cache")
        aliquot.train(aliquot.read_config(self._config, list(overrides)))

    def _results(self) -> tuple[dict[str, dict[int, float]], dict[str, bytes]]:
        last = directory_of(self._newest.parent, STEPS)
        verify(last)
        return (
            {key: curve(self._directory, key) for key in CURVES},
            {path.name: path.read_bytes() for path in last.glob("*.safetensors")},
        )

    def _resumed_from(self) -> object:
        lines = (self._directory / "events.jsonl").read_text().splitlines()
        return next(event["resumed_from"] for event in map(json.loads, reversed(lines)) if "resumed_from" in event)


def damage_runs(damages: int, seed: int, folder: Path) -> Counter[str]:
    """Return the number of damages by outcome. Raises AssertionError if a damage has another outcome."""
    logging.getLogger("aliquot").setLevel(logging.ERROR)
    draw, outcomes = random.Random(seed), Counter[str]()
    common: dict[str, dict[str, Any]] = {
        "checkpoint": {"every": 1, "keep": 3, "export": False},
        "train": {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 2},
        "observe": {"report_to": ["tensorboard"], "console": "quiet"},
    }
    settings = write_inputs(folder)
    said = [" ".join(random.Random(n).choices(WORDS, k=9)) for n in range(40)]
    chats = [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")]} for text in said]
    (folder / "texts/chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    settings["texts"]["data"] = {
        "path": str(folder / "texts/chats.jsonl"), "document": None, "sequence_length": 64, "chat_template": TEMPLATE,
        "eval_fraction": 0.2,
    }  # fmt: skip
    for name, sections in settings.items():
        merged = {key: {**common.get(key, {}), **sections.get(key, {})} for key in {**common, **sections}}
        run = Run(folder / name, merged)
        files: list[Path] = []
        for _ in range(damages):
            files = files or draw.sample(run.files, len(run.files))
            outcomes[run.check(files.pop(), draw)] += 1
        print(f"{name}: {damages} damages of {len(run.files)} files", flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--damages", type=int, default=100, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = damage_runs(arguments.damages, arguments.seed, Path(folder))
    print(", ".join(f"{count} x {outcome}" for outcome, count in outcomes.items()) + ": nothing was lost")


if __name__ == "__main__":
    main()
