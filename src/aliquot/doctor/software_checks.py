"""Checks of software: C++ compiler, Python headers, versions with known problems, transformers with DeepSpeed."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from aliquot.core.python_command import python_command
from aliquot.doctor.finding import Case, Finding, Level, Subject, check, conclude
from aliquot.machine.torch_compile import cpp_compiler

_TIMEOUT_S = 180

# Known problems: package, first version without the problem, level, consequence, version to install.
_TRAPS: tuple[tuple[str, tuple[int, int], Level, str, str], ...] = (
    ("torch", (2, 9), "problem", "FSDP2 on gloo sums where it should average (pytorch#162338)", "torch 2.13"),
    ("torch", (2, 13), "warning", "aliquot is tested with torch 2.13", "torch 2.13"),
    ("transformers", (5, 23), "warning", "aliquot is tested with transformers 5.23", "transformers 5.23 or newer"),
)
_GONE = {
    "intel_extension_for_pytorch": "IPEX is discontinued: what it did is in torch from 2.5 on, and it overrides kernels"
}


@check("compiler", "C++ compiler")
def check_compiler(subject: Subject) -> Finding:
    """Check that the C++ compiler compiles with OpenMP, for torch.compile and DeepSpeed's operators."""
    name = cpp_compiler(subject.environ)
    meaning = "train.compile: layers and DeepSpeed's CPU Adam cannot be built; nothing else needs one"
    fix = "apt-get install g++, or dnf install gcc-c++"
    program = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
    failure = name and _compile(name, program, "-fopenmp")
    return conclude(
        name or "none",
        Case(name is None, "warning", meaning, fix),
        Case(failure, "warning", meaning, fix, state=f"{name} fails: {failure}"),
        ok="train.compile: layers can fuse the operations between matrix products",
    )


@check("python-headers", "Python headers")
def check_python_headers(subject: Subject) -> Finding:
    """Check for Python.h, which Inductor and DeepSpeed compile against."""
    include, name = sysconfig.get_path("include"), cpp_compiler(subject.environ)
    failure = name and _compile(name, "#include <Python.h>\nint main() { return 0; }\n", f"-I{include}")
    return conclude(
        include,
        Case(
            not (Path(include) / "Python.h").is_file(),
            "warning",
            state=f"no Python.h in {include}",
            meaning="train.compile: layers and DeepSpeed's operators cannot be built",
            fix="apt-get install python3-dev, or dnf install python3-devel",
        ),
        Case(
            failure,
            "warning",
            state=f"Python.h: {failure}",
            meaning="Inductor cannot build its wrappers",
            fix="install the headers of exactly this Python version",
        ),
        ok="Inductor can build its wrappers",
    )


@check("versions", "versions")
def check_versions(subject: Subject) -> Finding:
    """Check the installed versions for known problems."""
    versions = installed("torch", "transformers", *_GONE)
    shown = ", ".join(f"{name} {number}" for name, number in versions.items())
    numbers = {package: re.findall(r"\d+", versions.get(package, "").partition("+")[0])[:2] for package, *_ in _TRAPS}
    return conclude(
        f"Python {sys.version.split()[0]}, {shown}",
        *(
            Case(
                numbers[package] and tuple(map(int, numbers[package])) < fixed,
                level,
                meaning,
                fix=f"install {version_to_install}",
            )
            for package, fixed, level, meaning, version_to_install in _TRAPS
        ),
        *(
            Case(package in versions, "warning", meaning, fix=f"pip uninstall {package}")
            for package, meaning in _GONE.items()
        ),
        ok="no known trap",
    )


@check("deepspeed", "DeepSpeed")
def check_deepspeed(subject: Subject) -> Finding:
    """Check in another process that transformers and DeepSpeed, if installed, can be imported together."""
    versions = installed("transformers", "deepspeed")
    if "deepspeed" not in versions:
        return Finding("ok", "not installed", meaning="only shard.engine: deepspeed needs it")
    observed = ", ".join(f"{name} {number}" for name, number in versions.items())
    program = (
        "import deepspeed\n"
        "from transformers.integrations import HfDeepSpeedConfig\n"
        "HfDeepSpeedConfig({'zero_optimization': {'stage': 3}, 'train_micro_batch_size_per_gpu': 1})\n"
    )
    meaning = "transformers cannot load under ZeRO-3, and shard.engine: deepspeed may fail; the other engines do not"
    fix = "pip install --upgrade deepspeed accelerate, or the package that the message names"
    try:
        subprocess.run(python_command("-c", program), check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        return Finding(
            "warning",
            f"{observed}: {(error.stderr.strip().splitlines() or ['no message'])[-1]}",
            meaning=meaning,
            fix=fix,
        )
    except subprocess.TimeoutExpired:
        return Finding("warning", f"{observed}: not imported within {_TIMEOUT_S} s", meaning=meaning, fix=fix)
    return Finding("ok", observed, meaning="ZeRO-3 with transformers' own loading can be imported")


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of the installed packages among `packages`."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _compile(name: str, program: str, *flags: str) -> str | None:
    """Compile a program. Return the first error line of the compiler, or None."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.cpp"
        source.write_text(program)
        command = [name, *flags, str(source), "-o", str(Path(folder) / "check")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    lines = done.stderr.strip().splitlines() or ["no message"]
    return None if done.returncode == 0 else next((line for line in lines if "error" in line), lines[0])
