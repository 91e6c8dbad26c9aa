"""aliquot cluster: write and check the manifests of a run on EKS, and show the state of its job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aliquot import __version__
from aliquot.cli.options import Command, ConfigCommand, ConfigFile, Debug, Overrides
from aliquot.cli.terminal import one_line_errors, run_rank, show_table, start_local_ranks
from aliquot.core.errors import ClusterError, UsageError, printable

if TYPE_CHECKING:
    from aliquot.cluster.findings import RuleFinding
    from aliquot.cluster.job import Job
    from aliquot.config.schema import RunConfig
    from aliquot.doctor.node_proof import Expected

app = typer.Typer(
    help="Manifests of a run for EKS, Karpenter and Kubeflow Trainer.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("render", cls=ConfigCommand)
def render(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML run configuration with a cluster section.")],
    overrides: Overrides = None,
    out_dir: Annotated[
        Path | None, typer.Option("-o", "--output", help="The directory to write; default: manifests/<name>.")
    ] = None,
    runtime: Annotated[
        bool,
        typer.Option("--runtime", help="Write the ClusterTrainingRuntime of this kind of node instead of the job."),
    ] = False,
    proof: Annotated[
        bool, typer.Option("--proof", help="Write a short job that compares the same nodes with the plan, instead.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the Kubernetes manifests of a run.

    They describe nodes, storage, config and job, for `kubectl apply --server-side -k DIR`. Exit code 1: the check found
    an error, and nothing was written.
    """
    with one_line_errors(debug):
        from aliquot.cluster import render as rendering
        from aliquot.cluster.check import check_job_of_config, check_manifests

        if runtime and proof:
            raise UsageError("--runtime and --proof write different jobs: give one of them")
        job = replace(_job(config, overrides), is_proof=proof)
        directory = out_dir or Path("manifests") / (f"{job.name}-proof" if proof else job.name)
        findings = check_manifests(rendering.parsed(job, runtime=True)) if runtime else check_job_of_config(job)
        if not runtime:
            print(rendering.plan_line(job))
        _print(findings)
        if any(finding.level == "error" for finding in findings):
            print("nothing was written: correct the errors first")
            raise typer.Exit(1)
        rendering.write(rendering.render(job, __version__, runtime), directory)
        print(f"wrote {directory}")
        for what, line in rendering.commands(job, directory)[: 1 if runtime else None]:
            print(f"\n# {what}\n{line}")


@app.command("check", cls=ConfigCommand)
def check(
    path: Annotated[
        Path, typer.Argument(metavar="CONFIG|DIR", help="A run configuration, a manifest, or a directory of manifests.")
    ],
    overrides: Overrides = None,
    crds: Annotated[
        list[Path] | None,
        typer.Option(
            "--crds", metavar="DIR", help="CRDs to check against; default: CRDs of the supported versions. Repeatable."
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Also ask the cluster (kubectl) and the AWS account (boto3), without changes."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Find errors that would keep a job from running. Exit code 1: there is an error."""
    with one_line_errors(debug):
        from aliquot.cluster.check import check_job_of_config, check_manifests, errors_first
        from aliquot.cluster.kind_schemas import read_crds
        from aliquot.cluster.live_cluster import ask_cluster, crds_of_cluster
        from aliquot.cluster.manifests import is_manifest, read_manifests
        from aliquot.cluster.render import parsed

        given_crds = [schema for folder in crds or [] for schema in read_crds(folder)]
        extra_crds = crds_of_cluster() if live and not crds else given_crds
        if is_manifest(path):
            manifests, job = read_manifests(path), None
            findings = check_manifests(manifests, crds=extra_crds)
        else:
            job = _job(path, overrides)
            manifests, findings = parsed(job), check_job_of_config(job, extra_crds)
        if live:
            findings = errors_first([*findings, *ask_cluster(manifests, job)])
        if as_json:
            print(json.dumps([finding.as_json() for finding in findings], indent=1))
        else:
            _print(findings)
            if not findings:
                print(f"{len(manifests)} objects, nothing found")
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the TrainJob.")]
_Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Namespace of the TrainJob.")]


@app.command("status", cls=Command)
def status(name: _Name, namespace: _Namespace = "default", debug: Debug = False) -> None:
    """Show the state of a job on the cluster, and why pods wait. Reads only, through kubectl."""
    with one_line_errors(debug):
        from aliquot.cluster.job_status import job_status
        from aliquot.cluster.live_cluster import kubectl_here

        for line in job_status(name, namespace, kubectl_here()):
            print(printable(line))


@app.command("logs", cls=Command)
def logs(
    name: _Name,
    namespace: _Namespace = "default",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log.")] = False,
    debug: Debug = False,
) -> None:
    """Print the log of rank 0 of a job on the cluster."""
    with one_line_errors(debug):
        from aliquot.cluster.job_status import job_pods
        from aliquot.cluster.live_cluster import kubectl_here
        from aliquot.cluster.pod import NODE

        kubectl = kubectl_here()
        pods = job_pods(name, namespace, kubectl)
        if not pods:
            raise ClusterError(f"{namespace}/{name} has no pods: see aliquot cluster status {name} -n {namespace}")
        arguments = ["logs", pods[0]["metadata"]["name"], "-n", namespace, "-c", NODE, *(["-f"] if follow else [])]
        raise typer.Exit(subprocess.run([kubectl.program, *arguments], check=False).returncode)


@app.command("proof", cls=Command)
def proof(
    config: ConfigFile,
    expected: Annotated[
        Path, typer.Argument(metavar="EXPECTED", help="JSON with the expectations of the plan, of `render --proof`.")
    ],
    debug: Debug = False,
) -> None:
    """Compare this node and the other nodes of a run with the plan. The pods of `render --proof` run this command.

    Exit code 2: a node, the network or the file system is not as planned.
    """
    from aliquot.config.read_config import read_config
    from aliquot.doctor.node_proof import read_expected

    with one_line_errors(debug):
        settings, plan = read_config(config, []), read_expected(expected)
        start_local_ranks(settings, settings.run.directory)
    run_rank(lambda: _prove(settings, plan), debug)


def _prove(settings: RunConfig, expected: Expected) -> None:
    from aliquot.doctor.node_proof import prove_nodes

    result = prove_nodes(settings, expected)
    if os.environ.get("RANK", "0") == "0":
        columns = {
            "": [row.subject for row in result.rows],
            "expected": [row.expected for row in result.rows],
            "measured": [row.measured for row in result.rows],
            "verdict": ["PROBLEM" if row.fix else "ok" for row in result.rows],
        }
        show_table(columns, optional=(), left_aligned=columns)
        for line in (*(f"{row.subject}: {row.fix}" for row in result.rows if row.fix), *result.notes):
            print(printable(line))
        sys.stdout.flush()
    if bad := [row.subject for row in result.rows if row.fix]:
        raise ClusterError(f"not as planned: {'; '.join(bad)}; the table above shows measurements and fixes")


def _job(config: Path, overrides: list[str] | None) -> Job:
    from aliquot.cli.instances_command import instance_planner
    from aliquot.cluster.job import cluster_section, describe, placed
    from aliquot.config.read_config import read_config

    settings = read_config(config, overrides or [])
    section = cluster_section(settings)
    plan_on = instance_planner(placed(settings))
    nodes = dict.fromkeys((section.most_nodes, section.fewest_nodes))
    return describe(settings, *(plan_on(section.instance_types[0], count) for count in nodes))


def _print(findings: list[RuleFinding]) -> None:
    from aliquot.cluster.findings import RULES

    for finding in findings:
        print(printable(f"{finding.level}: {finding.where}: {finding.message} [{finding.rule}]"))
        print(printable(f"  why: {RULES[finding.rule].reason}\n  fix: {finding.fix}"))
