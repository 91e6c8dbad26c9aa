"""A run of Weights & Biases. Project, entity, key and mode are those of its own variables (WANDB_PROJECT, ...)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb


class WandbRun:
    def __init__(
        self, directory: Path, config: dict[str, Any], run_id: str | None, tell: Callable[[str], None]
    ) -> None:
        self.run_id = run_id or secrets.token_hex(4)
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "aliquot"),
            "name": config["run"]["name"],
            "id": self.run_id,
            "resume": "allow",
            "dir": directory,
            "config": config,
            "settings": wandb.Settings(console="off"),
        }
        try:
            self._run = wandb.init(**options)
        except wandb.Error as error:  # no key, no server
            tell(f"{' '.join(str(error).split())[:200]}; written to {directory}/wandb, for `wandb sync`")
            self._run = wandb.init(**options, mode="offline")
        # A run that is resumed from an older checkpoint goes back, which W&B's own counter of steps cannot.
        self._run.define_metric("*", step_metric="step")

    def send(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self._run.log({name: value for name, value in line.items() if isinstance(value, int | float)})

    def attach(self, file: Path) -> None:
        copied = Path(self._run.dir) / file.name  # a link would be followed when the run is gone
        copied.write_bytes(file.read_bytes())
        self._run.save(str(copied), base_path=self._run.dir, policy="now")

    def end(self, how: str | None) -> None:
        self._run.finish(exit_code=0 if how == "end" else 1)
