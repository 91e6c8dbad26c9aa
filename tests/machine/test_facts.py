"""A package, Python or system outside what pyproject.toml declares is one line, before anything is imported."""

from __future__ import annotations

import json
import os
import platform
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from aliquot.core.errors import MissingToolError
from aliquot.machine.facts import check_requirements, ec2_instance_type, machine_facts
from tests.runs import command
from tests.tools.docs_pages import ROOT


def install(folder: Path, name: str, version: str) -> None:
    """As far as importlib.metadata can see."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_facts_of_this_machine() -> None:
    facts = json.loads(json.dumps(machine_facts()))
    assert 1 <= facts["physical_cores"] <= len(os.sched_getaffinity(0))
    assert 0 < facts["memory_limit_bytes"] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts["torch"] and facts["transformers"]


@pytest.mark.parametrize(("vendor", "known"), [("Amazon EC2", "c7i.2xlarge"), ("QEMU", None), (None, None)])
def test_only_ec2_names_its_instance_type(tmp_path: Path, vendor: str | None, known: str | None) -> None:
    dmi = tmp_path / "sys/class/dmi/id"
    dmi.mkdir(parents=True)
    (dmi / "product_name").write_text("c7i.2xlarge\n")
    if vendor is not None:
        (dmi / "sys_vendor").write_text(f"{vendor}\n")
    assert ec2_instance_type(tmp_path) == known


@pytest.mark.parametrize("version", ["2.12.1", "9.0.0+cpu"])
def test_unsupported_version_is_one_line(tmp_path: Path, version: str) -> None:
    install(tmp_path, "torch", version)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    refused = command("train", "run.yaml", environment=environment, cold=True)
    line = f"aliquot: torch {version} is installed, but aliquot supports torch "
    assert refused.returncode == 2 and refused.stderr.startswith(line) and refused.stderr.count("\n") == 1
    assert command("instances", "c7i.large", environment=environment, cold=True).returncode == 0, "needs no torch"


def test_unsupported_python_or_system_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.4")
    with pytest.raises(MissingToolError, match=r"^this is Python 3\.10\.4, but aliquot supports "):
        check_requirements()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MissingToolError, match="but aliquot runs on Linux"):
        check_requirements()


def test_documented_versions_match_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(each for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    for minor in range(8, 20):
        python, release = f"3.{minor}", f"2.{minor}"
        assert (f"| {python} |" in page) == SpecifierSet(project["requires-python"]).contains(f"{python}.1"), python
        assert (f"| {release} |" in page) == torch.specifier.contains(f"{release}.0"), release
