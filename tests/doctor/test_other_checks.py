"""Each finding about the network, the software and the two ranks is provoked; and the command as a person runs it."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.core.errors import UsageError
from aliquot.doctor import examine, network_checks, software_checks, two_ranks
from aliquot.doctor.examine import CHECKS
from aliquot.doctor.finding import Finding, Subject, summary
from aliquot.machine.torch_compile import cpp_compiler
from tests.distributed.launcher import environment
from tests.doctor.machines import lay_out, machine, said, subject
from tests.runs import command
from tests.tools import warm

HERE = Subject(environ={"PATH": os.environ["PATH"]})


def test_interfaces() -> None:
    assert "lo 127.0.0.1" in network_checks.check_interface(HERE).found
    missing = network_checks.check_interface(replace(HERE, environ={"GLOO_SOCKET_IFNAME": "eth77"}))
    assert missing.level == "problem" and "eth77" in missing.meaning
    assert network_checks.check_interface(replace(HERE, environ={"GLOO_SOCKET_IFNAME": "lo"})).level == "warning"


def test_a_taken_port_is_found() -> None:
    with socket.create_server(("", 0)) as server:
        here = replace(HERE, port=server.getsockname()[1])
        assert network_checks.check_port(here).level == "warning"
    assert network_checks.check_port(here).level == "ok"


def test_peers() -> None:
    assert network_checks.check_peers(HERE).level == "ok"
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_port = server.getsockname()[1]
        found = network_checks.check_peers(replace(HERE, peers=(f"127.0.0.1:{open_port}", "localhost")))
    assert found.level == "ok" and found.found == "reached 127.0.0.1 by lo; reached localhost by lo"
    found = network_checks.check_peers(replace(HERE, peers=("no-such-host.invalid", "127.0.0.1")))
    assert found.level == "problem" and found.found.startswith(
        "no-such-host.invalid does not resolve; reached 127.0.0.1"
    )


@pytest.mark.parametrize(
    ("peer", "found"),
    [
        ("a..b", "a..b does not resolve"),
        (f"{'x' * 70}:29500", f"{'x' * 70} does not resolve"),
        ("[::1]", "::1"),
        ("[::1]:29501", "::1"),
    ],
)
def test_peers_of_any_name_get_a_finding(peer: str, found: str) -> None:
    assert found in network_checks.check_peers(replace(HERE, peers=(peer,))).found


@pytest.mark.parametrize(
    "peer", ["host:abc", "::1", "host:", "host:0", "host:65536", "[::1", ":29500", f"h:{'9' * 5000}"]
)
def test_invalid_peers_are_refused(peer: str) -> None:
    with pytest.raises(UsageError, match=r"^--peers: .* is none of HOST, HOST:PORT and \[IPv6\]:PORT"):
        next(examine.examine(replace(HERE, peers=(peer,))))  # before any other check runs


def test_efa(tmp_path: Path) -> None:
    assert network_checks.check_efa(subject(tmp_path)).found == "no EFA device"
    device = "sys/bus/pci/devices/0000:00:1d.0"
    lay_out(tmp_path, {f"{device}/vendor": "0x1d0f\n", f"{device}/device": "0xefa2\n"})
    lay_out(tmp_path, {"sys/bus/pci/devices/0000:00:05.0/vendor": "0x1d0f\n"})  # an ENA network card
    finding = network_checks.check_efa(subject(tmp_path))
    assert finding.level == "warning" and finding.found == "1 EFA device (0000:00:1d.0)"
    lay_out(tmp_path, {"dev/infiniband/uverbs0": ""})
    assert network_checks.check_efa(subject(tmp_path)).level == "ok"


def test_unseen_gpus_are_a_problem(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    assert network_checks.check_nccl(subject(tmp_path)).found == "no GPU"
    lay_out(tmp_path, {"dev/nvidia0": "", "dev/nvidiactl": ""})
    finding = network_checks.check_nccl(subject(tmp_path))
    assert finding.level == "problem" and finding.found.startswith("1 GPU, torch ")


def test_compilers(tmp_path: Path) -> None:
    none = replace(HERE, environ={"PATH": str(tmp_path)})
    assert software_checks.check_compiler(none).found == "none"
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'no assembler' >&2\nexit 1\n")
    broken.chmod(0o755)
    finding = software_checks.check_compiler(replace(HERE, environ={"PATH": str(tmp_path), "CXX": str(broken)}))
    assert finding.level == "warning" and finding.found.endswith("fails: no assembler")
    if cpp_compiler(HERE.environ) is not None:
        assert software_checks.check_compiler(HERE).level == "ok"


def test_python_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(software_checks.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "no Python.h" in software_checks.check_python_headers(HERE).found
    if cpp_compiler(HERE.environ) is None:
        pytest.skip("no compiler here")
    (tmp_path / "Python.h").write_text("#error of another version\n")
    assert "of another version" in software_checks.check_python_headers(HERE).found


@pytest.mark.parametrize(
    ("versions", "level", "words"),
    [
        ({"torch": "2.13.0+cpu", "transformers": "5.23.0"}, "ok", "no known trap"),
        ({"torch": "2.8.0", "transformers": "5.23.0"}, "problem", "pytorch#162338"),
        ({"torch": "2.9.1"}, "warning", "tested with torch 2.13"),
        ({"torch": "2.13.0", "transformers": "4.57.1"}, "warning", "transformers 5.23"),
        ({"torch": "2.13.0", "intel_extension_for_pytorch": "2.8.0"}, "warning", "pip uninstall"),
    ],
)
def test_versions(versions: dict[str, str], level: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software_checks, "installed", lambda *_: versions)
    finding = software_checks.check_versions(HERE)
    assert finding.level == level and words in said(finding)


def test_judgement_of_two_ranks() -> None:
    right = {"wrong": [[], []], "rates": {"bf16": [2e11, 1e11], "fp32": [5e10, 5e10]}, "threads": 1}
    assert two_ranks.judge_self_test(right).level == "ok"
    wrong = two_ranks.judge_self_test({**right, "wrong": [[], ["average by FSDP2 on gloo"]]})
    assert wrong.level == "problem" and wrong.found == "wrong: average by FSDP2 on gloo"


@pytest.mark.parametrize(
    ("flags", "bf16", "fp32", "level"),
    [
        # At 2 GHz: 128 GFLOP/s a core for AVX512_BF16, 2048 for AMX, 32 for AVX2 in fp32.
        ("avx512f avx512_bf16", 100e9, 60e9, "ok"),
        ("avx512f avx512_bf16", 30e9, 20e9, "warning"),
        ("avx512f avx512_bf16", 60e9, 100e9, "warning"),
        ("avx512f avx512_bf16 amx_bf16", 1200e9, 60e9, "ok"),
        ("avx512f avx512_bf16 amx_bf16", 100e9, 60e9, "warning"),
        ("avx2", 5e9, 25e9, "ok"),
        ("avx2", 5e9, 5e9, "warning"),
        ("", 5e9, 5e9, "ok"),
    ],
)
def test_matmul_rates(tmp_path: Path, flags: str, bf16: float, fp32: float, level: str) -> None:
    told = {"rates": {"bf16": [bf16, 9e15], "fp32": [fp32, 9e15]}, "threads": 1}
    finding = two_ranks.judge_matmul(told, subject(machine(tmp_path, flags=flags)))
    assert finding.level == level, said(finding)


def test_wrong_average_is_reported() -> None:
    """With one rank the "average" of two is the plain gradient: as if a backend had not divided, it is not taken."""
    program = """
import os
from types import SimpleNamespace
from aliquot.config.schema import LaunchSection
from aliquot.doctor import two_ranks
from aliquot.machine.cpu import read_cpu
from aliquot.distributed.topology import place_rank
from aliquot.distributed.ranks import Ranks
ranks = Ranks.join(place_rank(LaunchSection(), os.environ, read_cpu(), "cpu")[0], 60)
print(two_ranks._average(ranks), two_ranks._average(SimpleNamespace(rank=0, world_size=2)))
print(all(two_ranks.examine(ranks).values()))
ranks.close()
"""
    done = warm.run("-c", program, env=environment())
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


@pytest.mark.long
def test_unconnected_ranks_are_a_problem() -> None:
    told = two_ranks.run_two_ranks(Subject(environ=environment(GLOO_SOCKET_IFNAME="eth77")))
    finding = two_ranks.judge_self_test(told)
    assert finding.level == "problem" and "GLOO_SOCKET_IFNAME is eth77" in finding.found, said(finding)
    assert two_ranks.judge_matmul(told, HERE).level == "warning"


def test_the_last_line_names_what_to_read_again() -> None:
    findings = [
        Finding("ok", "", "", id="isa"),
        Finding("warning", "", "", id="smt"),
        Finding("warning", "", "", id="shm"),
    ]
    assert summary(findings) == "0 problems; 2 warnings: smt, shm"
    assert summary([*findings[:2], Finding("problem", "", "", id="port")]) == "1 problem: port; 1 warning: smt"


def test_unwritable_findings_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "examine", lambda subject: [])
    lay_out(tmp_path, {"config.yaml": "", "doctor.json/taken": ""})
    told = CliRunner().invoke(app, ["doctor", "--run-directory", str(tmp_path)])
    line = f"aliquot: {tmp_path}/doctor.json: cannot write: Is a directory [disk]\n"
    assert (told.exit_code, told.stderr) == (2, line)


@pytest.mark.long
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks on this machine, twice, its two ranks once; no test of what a particular machine has."""
    good = command("doctor", "--json", "--run-directory", tmp_path, "--port", "29533")
    findings = {finding["id"]: finding for finding in json.loads(good.stdout)}
    assert len(findings) == len(json.loads(good.stdout)) == len(CHECKS) + 2
    assert findings["self-test"]["level"] == "ok", findings["self-test"]
    assert all(finding["meaning"] and (finding["level"] == "ok" or finding["fix"]) for finding in findings.values())
    assert good.returncode == any(finding["level"] == "problem" for finding in findings.values())

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(two_ranks, "run_two_ranks", lambda subject: {"failure": "not tried"})
    arguments = ["doctor", "--run-directory", str(tmp_path), "--port", "29533", "--peers", "no-such-host.invalid"]
    bad = CliRunner().invoke(app, arguments)
    assert bad.exit_code == 1 and "Traceback" not in bad.stderr
    assert "problem  peers: no-such-host.invalid does not resolve\n" in bad.stdout
    if len(os.sched_getaffinity(0)) > 1:
        assert "warning  threads: " in bad.stdout and "fix: unset OMP_NUM_THREADS" in bad.stdout


@pytest.mark.parametrize(
    ("resolves_to", "interface", "level"),
    [
        (None, None, "warning"),
        ("127.0.1.1", "lo", "warning"),
        ("203.0.113.9", None, "warning"),
        ("203.0.113.9", "eth0", "ok"),
    ],
)
def test_own_name(resolves_to: str | None, interface: str | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str) -> str:
        if resolves_to is None:
            raise socket.gaierror(-2, "Name or service not known")
        return resolves_to

    monkeypatch.setattr(network_checks.socket, "gethostbyname", resolve)
    monkeypatch.setattr(network_checks, "interface_towards", lambda address: interface)
    finding = network_checks.check_names(HERE)
    assert finding.level == level and socket.gethostname() in finding.found, said(finding)
