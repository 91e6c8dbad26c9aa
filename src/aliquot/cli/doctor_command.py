"""aliquot doctor: problems of this machine for training, and their fixes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from aliquot.cli.options import Debug
from aliquot.cli.terminal import one_line_errors
from aliquot.core.errors import printable


def command(
    peers: Annotated[str, typer.Option(help="Other nodes to reach: HOST or HOST:PORT, separated by commas.")] = "",
    run_directory: Annotated[
        Path, typer.Option(help="The directory for runs. The report of a run directory shows the findings.")
    ] = (Path("runs")),
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="The port where nodes meet (launch.master_port).")
    ] = 29500,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Examine whether this machine is ready for training.

    Each finding says what it means for training, and how to fix it. Exit code 1: a problem.
    """
    with one_line_errors(debug):
        from aliquot.core.errors import writing
        from aliquot.core.small_files import publish_text
        from aliquot.doctor.examine import examine
        from aliquot.doctor.finding import Subject, summary

        subject = Subject(run_directory=run_directory, peers=tuple(filter(None, peers.split(","))), port=port)
        if sys.stderr.isatty():
            print("aliquot: examining this machine, which takes up to a minute", file=sys.stderr, flush=True)
        findings = []
        for finding in examine(subject):
            findings.append(finding)
            if not as_json:
                print(printable(finding.text()), flush=True)
        text = json.dumps([asdict(finding) for finding in findings], indent=1)
        print(text if as_json else summary(findings))
        if (run_directory / "config.yaml").exists():  # it is a run directory
            with writing(run_directory / "doctor.json"):
                publish_text(run_directory / "doctor.json", text + "\n")
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)
