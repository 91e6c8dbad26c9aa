"""Software: the compiler, Python's headers, versions with known traps, transformers with DeepSpeed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from aliquot.core.interpreter import python_command
from aliquot.doctor.finding import Finding, Level, Subject

_COMPILERS = ("g++", "clang++", "c++")
_DEEPSPEED_TIMEOUT_S = 180

# Known problems: package, first version without the problem, level, consequence, version to install.
_TRAPS: tuple[tuple[str, tuple[int, int], Level, str, str], ...] = (
    ("torch", (2, 9), "problem", "FSDP2 on gloo sums where it should average (pytorch#162338)", "torch 2.13"),
    ("torch", (2, 13), "warning", "aliquot is tested with torch 2.13", "torch 2.13"),
    ("transformers", (5, 23), "warning", "aliquot is tested with transformers 5.23", "transformers 5.23 or newer"),
)
_GONE = {
    "intel_extension_for_pytorch": "IPEX is discontinued: what it did is in torch from 2.5 on, and it overrides kernels"
}


def check_compiler(subject: Subject) -> Finding:
    """Check that the C++ compiler compiles with OpenMP, for torch.compile and DeepSpeed's operators."""
    name = compiler(subject.environ)
    meaning = "train.compile: layers and DeepSpeed's CPU Adam cannot be built; nothing else needs one"
    fix = "apt-get install g++, or dnf install gcc-c++"
    if name is None:
        return Finding("compiler", "C++ compiler", "warning", "none", meaning, fix)
    failure = _compile(name, "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n", "-fopenmp")
    if failure is not None:
        return Finding("compiler", "C++ compiler", "warning", f"{name} fails: {failure}", meaning, fix)
    return Finding(
        "compiler", "C++ compiler", "ok", name, "train.compile: layers can fuse the operations between matrix products"
    )


def check_python_headers(subject: Subject) -> Finding:
    """Check for Python.h, which Inductor and DeepSpeed compile against."""
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        fix = "apt-get install python3-dev, or dnf install python3-devel"
        meaning = "train.compile: layers and DeepSpeed's operators cannot be built"
        return Finding("python-headers", "Python headers", "warning", f"no Python.h in {include}", meaning, fix)
    name = compiler(subject.environ)
    failure = name and _compile(name, "#include <Python.h>\nint main() { return 0; }\n", f"-I{include}")
    if failure:
        meaning, fix = "Inductor cannot build its wrappers", "install the headers of exactly this Python version"
        return Finding("python-headers", "Python headers", "warning", f"Python.h: {failure}", meaning, fix)
    return Finding("python-headers", "Python headers", "ok", include, "Inductor can build its wrappers")


def check_versions(subject: Subject) -> Finding:
    """Check the installed versions for known problems."""
    return judge_versions(installed("torch", "transformers", *_GONE))


def judge_versions(versions: Mapping[str, str]) -> Finding:
    """Judge versions by package, without packages that are not installed."""
    shown = ", ".join(f"{name} {number}" for name, number in versions.items())
    observed = f"Python {sys.version.split()[0]}, {shown}"
    for package, fixed, level, meaning, version_to_install in _TRAPS:
        if package in versions and _numbers(versions[package]) < fixed:
            return Finding("versions", "versions", level, observed, meaning, f"install {version_to_install}")
    for package, meaning in _GONE.items():
        if package in versions:
            return Finding("versions", "versions", "warning", observed, meaning, f"pip uninstall {package}")
    return Finding("versions", "versions", "ok", observed, "no known trap")


def check_deepspeed(subject: Subject) -> Finding:
    """Check in another process that transformers and DeepSpeed, if installed, can be imported together."""
    versions = installed("transformers", "deepspeed")
    if "deepspeed" not in versions:
        return Finding("deepspeed", "DeepSpeed", "ok", "not installed", "only shard.engine: deepspeed needs it")
    observed = ", ".join(f"{name} {number}" for name, number in versions.items())
    program = (
        "import deepspeed\n"
        "from transformers.integrations import HfDeepSpeedConfig\n"
        "HfDeepSpeedConfig({'zero_optimization': {'stage': 3}, 'train_micro_batch_size_per_gpu': 1})\n"
    )
    meaning = "transformers cannot load under ZeRO-3, and shard.engine: deepspeed may fail; the other engines do not"
    fix = "pip install --upgrade deepspeed accelerate, or the package that the message names"
    try:
        subprocess.run(
            python_command("-c", program), check=True, capture_output=True, text=True, timeout=_DEEPSPEED_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("deepspeed", "DeepSpeed", "warning", f"{observed}: {last}", meaning, fix)
    except subprocess.TimeoutExpired:
        text = f"{observed}: not imported within {_DEEPSPEED_TIMEOUT_S} s"
        return Finding("deepspeed", "DeepSpeed", "warning", text, meaning, fix)
    return Finding("deepspeed", "DeepSpeed", "ok", observed, "ZeRO-3 with transformers' own loading can be imported")


def compiler(environ: Mapping[str, str]) -> str | None:
    """Return the C++ compiler that torch would use, or None."""
    names = (environ.get("CXX", ""), *_COMPILERS)
    return next((name for name in names if name and shutil.which(name, path=environ.get("PATH"))), None)


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of the installed packages among `packages`."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:2])


def _compile(name: str, program: str, *flags: str) -> str | None:
    """Compile a program. Return the first error line of the compiler, or None."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.cpp"
        source.write_text(program)
        command = [name, *flags, str(source), "-o", str(Path(folder) / "check")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    lines = done.stderr.strip().splitlines() or ["no message"]
    return None if done.returncode == 0 else next((line for line in lines if "error" in line), lines[0])
