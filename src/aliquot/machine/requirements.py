"""Whether this machine and its packages are among those that aliquot supports, as pyproject.toml declares them."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from aliquot.core.errors import MissingToolError


def check_requirements() -> None:
    """Raise MissingToolError if the system, Python or an installed package is not supported. Imports no package."""
    if sys.platform != "linux":
        raise MissingToolError(f"this is {platform.system()}, but aliquot runs on Linux: use a Linux machine")
    python, supported = platform.python_version(), metadata("aliquot")["Requires-Python"]
    if not SpecifierSet(supported).contains(python, prereleases=True):
        raise MissingToolError(f"this is Python {python}, but aliquot supports {supported}: use one of those")
    for requirement in map(Requirement, requires("aliquot") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = "none"
        if installed == "none" or not requirement.specifier.contains(installed, prereleases=True):
            raise MissingToolError(
                f"{requirement.name} {installed} is installed, but aliquot supports {requirement.name}"
                f" {requirement.specifier}: run pip install '{requirement.name}{requirement.specifier}'"
            )
