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

# What is known to go wrong: package, first version without it, how bad it is, what happens, what to do.
_TRAPS: tuple[tuple[str, tuple[int, int], Level, str, str], ...] = (
    ("torch", (2, 9), "problem", "FSDP2 on gloo sums where it should average (pytorch#162338)", "torch 2.13"),
    ("torch", (2, 13), "warning", "aliquot is tested with torch 2.13", "torch 2.13"),
    ("transformers", (5, 23), "warning", "aliquot is tested with transformers 5.23", "transformers 5.23 or newer"),
)
_GONE = {
    "intel_extension_for_pytorch": "IPEX is discontinued: what it did is in torch from 2.5 on, and it overrides kernels"
}


def check_compiler(subject: Subject) -> Finding:
    """A C++ compiler that really compiles, with OpenMP, as torch.compile and DeepSpeed's operators need it."""
    name = compiler(subject.environ)
    meaning = "train.compile: layers and DeepSpeed's CPU Adam cannot be built; nothing else needs one"
    fix = "apt-get install g++, or dnf install gcc-c++"
    if name is None:
        return Finding("compiler", "C++ compiler", "warning", "none", meaning, fix)
    trouble = _compile(name, "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n", "-fopenmp")
    if trouble is not None:
        return Finding("compiler", "C++ compiler", "warning", f"{name} fails: {trouble}", meaning, fix)
    return Finding("compiler", "C++ compiler", "ok", name, "train.compile: layers fuses what lies between products")


def check_python_headers(subject: Subject) -> Finding:
    """Python.h, which Inductor and DeepSpeed compile against."""
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        fix = "apt-get install python3-dev, or dnf install python3-devel"
        meaning = "train.compile: layers and DeepSpeed's operators cannot be built"
        return Finding("python-headers", "Python headers", "warning", f"no Python.h in {include}", meaning, fix)
    name = compiler(subject.environ)
    trouble = name and _compile(name, "#include <Python.h>\nint main() { return 0; }\n", f"-I{include}")
    if trouble:
        meaning, fix = "Inductor cannot build its wrappers", "headers of just this Python version"
        return Finding("python-headers", "Python headers", "warning", f"Python.h: {trouble}", meaning, fix)
    return Finding("python-headers", "Python headers", "ok", include, "Inductor can build its wrappers")


def check_versions(subject: Subject) -> Finding:
    """Versions with known traps."""
    return judge_versions(installed("torch", "transformers", *_GONE))


def judge_versions(versions: Mapping[str, str]) -> Finding:
    """The finding for these versions by package; those that are not installed are left out."""
    shown = ", ".join(f"{name} {number}" for name, number in versions.items())
    found = f"Python {sys.version.split()[0]}, {shown}"
    for package, fixed, level, meaning, wanted in _TRAPS:
        if package in versions and _numbers(versions[package]) < fixed:
            return Finding("versions", "versions", level, found, meaning, f"install {wanted}")
    for package, meaning in _GONE.items():
        if package in versions:
            return Finding("versions", "versions", "warning", found, meaning, f"pip uninstall {package}")
    return Finding("versions", "versions", "ok", found, "no known trap")


def check_deepspeed(subject: Subject) -> Finding:
    """Whether transformers and DeepSpeed, if it is there, can be used together: another process imports them."""
    versions = installed("transformers", "deepspeed")
    if "deepspeed" not in versions:
        return Finding("deepspeed", "DeepSpeed", "ok", "not installed", "only shard.engine: deepspeed needs it")
    found = ", ".join(f"{name} {number}" for name, number in versions.items())
    program = (
        "import deepspeed\n"
        "from transformers.integrations import HfDeepSpeedConfig\n"
        "HfDeepSpeedConfig({'zero_optimization': {'stage': 3}, 'train_micro_batch_size_per_gpu': 1})\n"
    )
    meaning = "transformers cannot load under ZeRO-3, and shard.engine: deepspeed may fail; the other engines do not"
    fix = "pip install --upgrade deepspeed accelerate, or what the message names"
    try:
        subprocess.run(
            python_command("-c", program), check=True, capture_output=True, text=True, timeout=_DEEPSPEED_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("deepspeed", "DeepSpeed", "warning", f"{found}: {last}", meaning, fix)
    except subprocess.TimeoutExpired:
        text = f"{found}: not imported within {_DEEPSPEED_TIMEOUT_S} s"
        return Finding("deepspeed", "DeepSpeed", "warning", text, meaning, fix)
    return Finding("deepspeed", "DeepSpeed", "ok", found, "ZeRO-3 with transformers' own loading can be imported")


def compiler(environ: Mapping[str, str]) -> str | None:
    """The C++ compiler that torch would take."""
    names = (environ.get("CXX", ""), *_COMPILERS)
    return next((name for name in names if name and shutil.which(name, path=environ.get("PATH"))), None)


def installed(*packages: str) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:2])


def _compile(name: str, program: str, *flags: str) -> str | None:
    """The line that says what the compiler complains of; None: it compiled."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.cpp"
        source.write_text(program)
        command = [name, *flags, str(source), "-o", str(Path(folder) / "check")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    lines = done.stderr.strip().splitlines() or ["no message"]
    return None if done.returncode == 0 else next((line for line in lines if "error" in line), lines[0])
