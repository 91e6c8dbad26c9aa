"""Every `aws` command of the documentation exists, with its parameters, in botocore's models of the services."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import botocore.session
import pytest
from botocore import xform_name

from tests.conftest import REPOSITORY
from tests.tools.docs_pages import blocks

# Commands that the AWS CLI adds to the services' operations: their options are not in botocore.
OF_THE_CLI = {
    "eks update-kubeconfig",
    "ecr get-login-password",
    "cloudformation deploy",
    "s3 cp",
    "s3 ls",
    "s3 mb",
    "s3 rb",
    "s3 sync",
}
GLOBAL = {"query", "output", "region", "profile"}
PAGES = [page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if re.search(r"\baws [a-z]", page.read_text())]
_COMMAND = re.compile(r"(?:^|[(|]|until |while )\s*aws (.*?)(?=\)(?:\s|\"|$)|\||\n|$)", re.MULTILINE)
SESSION = botocore.session.get_session()


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page):
        if block.language == "sh":
            for match in _COMMAND.finditer(block.text.replace("\\\n", " ")):
                yield shlex.split(match[1].partition(" #")[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_aws_commands_exist(page: Path) -> None:
    for service, operation, *words in commands(page):
        assert not operation.startswith("-"), (service, operation)
        if f"{service} {operation}" in OF_THE_CLI:
            continue
        model = SESSION.get_service_model(service)
        if operation == "wait":
            assert service in SESSION.get_component("data_loader").list_available_services("waiters-2"), service
            waiters = SESSION.get_waiter_model(service)
            known = {xform_name(name, "-"): waiters.get_waiter(name).operation for name in waiters.waiter_names}
            name, *words = words
            assert name in known, f"aws {service} wait {name}"
            operation = xform_name(known[name], "-")
        names = {xform_name(name, "-"): name for name in model.operation_names}
        assert operation in names, f"aws {service} {operation}"
        shape = model.operation_model(names[operation]).input_shape
        members = {xform_name(name, "-"): member for name, member in shape.members.items()}
        given = {word[2:] for word in words if word.startswith("--")}
        unknown = {name for name in given - GLOBAL - members.keys() if name.removeprefix("no-") not in members}
        assert not unknown, f"aws {service} {operation}: no {unknown}, there is {sorted(members)}"
        required = {xform_name(name, "-") for name in shape.required_members}
        assert required <= given, f"aws {service} {operation}: {required - given} is required"
        for option, value in pairwise(words):
            member = members.get(option.removeprefix("--"))
            if option.startswith("--") and member is not None and member.type_name == "structure":
                keys = set(re.findall(r"(?:^|,)(\w+)=", re.sub(r"\{.*?\}", "", value)))
                assert keys <= set(member.members), f"{option}: {keys - set(member.members)}"


def test_a_misspelt_parameter_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for wrong in ("fsx wait file-system-available", "fsx describe-file-systems --file-system x",
                  "ec2 create-tags --resources x"):  # fmt: skip
        page.write_text(f"```sh\n# needs: cluster\nexport A=$(aws {wrong})\n```\n")
        with pytest.raises(AssertionError):
            test_aws_commands_exist(page)
