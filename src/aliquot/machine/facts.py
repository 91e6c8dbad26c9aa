"""Read facts of this machine, its file systems and its software, to record them and to check the requirements."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from aliquot.core.errors import MissingToolError
from aliquot.machine.allocator import allocator_description
from aliquot.machine.cpu import read_cpu
from aliquot.machine.memory import memory_limit

# Mount options of Lustre, NFS, OCFS2 and GFS2 with which only one machine sees a flock.
_LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all", "localflocks"}
_ESCAPED = re.compile(r"\\([0-7]{3})")


def machine_facts() -> dict[str, Any]:
    """Return facts of this machine as JSON values. Call this before pinning, because it counts the allowed cores."""
    import torch

    from aliquot.machine.matmul import matmul_kernel

    cpu = read_cpu()
    return {
        "host": platform.node(),
        "instance": ec2_instance_type(),
        "kernel": platform.release(),
        "cpu": cpu.model,
        "physical_cores": len(cpu.cores),
        "cpu_quota": cpu.quota,
        "numa_nodes": cpu.numa_nodes,
        "isa": list(cpu.isa),
        "matmul_kernels": {"bf16": matmul_kernel("bf16"), "fp32": matmul_kernel("fp32")},
        "allocator": allocator_description(),
        "memory_limit_bytes": memory_limit(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if torch.cuda.device_count() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def ec2_instance_type(root: Path = Path("/")) -> str | None:
    """Return the type of this EC2 instance, which Nitro gives as the product name; None on other machines."""
    dmi = root / "sys/class/dmi/id"
    try:
        vendor, product = ((dmi / name).read_text().strip() for name in ("sys_vendor", "product_name"))
    except OSError:
        return None
    return product if vendor == "Amazon EC2" else None


def check_requirements() -> None:
    """Raise MissingToolError if pyproject.toml does not support the system, Python or an installed package.

    The versions come from metadata: no package is imported.
    """
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


@dataclass(frozen=True)
class Mount:
    """The type and the options of a mounted file system."""

    kind: str
    options: frozenset[str] = frozenset()

    @property
    def locks_are_local(self) -> bool:
        """Whether a flock is visible on this machine only, although other machines share the file system."""
        return not self.options.isdisjoint(_LOCAL_LOCKS)


def mount_of(path: Path, root: Path = Path("/")) -> Mount:
    """Return the mount that holds the absolute `path`, from /proc/mounts."""
    longest, mount = "", Mount("unknown file system")
    mounts = root / "proc/mounts"
    # Names of mount points may contain any byte; space, tab, newline and backslash are escaped.
    for line in os.fsdecode(mounts.read_bytes()).split("\n") if mounts.exists() else ():
        words = line.split(" ")
        if len(words) < 4:
            continue
        _, point, kind, options, *_ = words
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), point)
        if path.is_relative_to(point) and len(point) >= len(longest):
            longest, mount = point, Mount(kind, frozenset(options.split(",")))
    return mount
