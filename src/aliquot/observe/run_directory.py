"""The directory of a run: what it holds, and who may write into one that exists already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aliquot.config.read import dump_config
from aliquot.config.schema import RunConfig
from aliquot.errors import UserError
from aliquot.machine.files import publish_text


@dataclass(frozen=True)
class RunDirectory:
    """runs/<name>: config.yaml, metrics.jsonl, ledger.json, tensorboard/, checkpoints/, export/, logs/."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def open(self, config: RunConfig) -> None:
        """Create it, or enter an earlier attempt of the same run; config.yaml is written complete, as run.

        Raises UserError when something else lives here or when `checkpoint.resume: never` meets an earlier run.
        """
        # logs/ alone is no run: the launcher makes it before any rank starts.
        held = {entry.name for entry in self.path.iterdir()} - {"logs"} if self.path.is_dir() else set()
        if held and "config.yaml" not in held:
            raise UserError("exists and is not a run of aliquot; choose another run.name or run.directory", self.path)
        if held and config.checkpoint.resume == "never":
            raise UserError(
                "this run exists already and checkpoint.resume is `never`; choose another run.name, or resume: auto",
                self.path,
            )
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            publish_text(self.path / "config.yaml", dump_config(config))
        except OSError as error:
            raise UserError(f"cannot write the run directory: {error.strerror}", self.path) from None
