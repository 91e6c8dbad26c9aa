"""Run the tests and benchmarks of a GPU node within a time limit, the most important parts first.

python benchmarks/gpu_all.py --seconds 840 --directory gpu [--first PART]

Each part is a process of its own, and its results are in a file as soon as it ends, so that a hard stop loses only the
running part. The directory gets parts.json (state and seconds of each part), log.txt (all output; pytest prints the
name of each test that ends), and the results of the benchmarks, such as gpu.json. A part is skipped if less time is
left than the part usually takes, and killed after its limit. Parts on the CPU need AMX, because this repository has
figures of other processors. With torch before 2.13, benchmarks/older_torch supplies the names that torch lacks.

--device cpu --shape tiny runs every part without a GPU, as a test; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from aliquot.core.small_files import publish_text
from aliquot.machine.cpu import read_cpu

REPOSITORY = Path(__file__).resolve().parents[1]
PEER = "FSDP2 + flex_attention"
STEPS = "host, packed 2048 x 1;host;plain FSDP2, tuned"  # contestants of benchmarks/step.py
OLDEST_TORCH = (2, 13)
TEST_PACKAGES = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")


@dataclass(frozen=True)
class Part:
    """A process, and how long it may take."""

    name: str
    arguments: tuple[str, ...]  # of Python
    usual_s: int = 60  # on one H200, estimated
    limit_s: int = 200
    obstacle: str = ""  # why the part cannot run here
    environ: tuple[tuple[str, str], ...] = ()


def parts(device: str, shape: str, folder: Path) -> list[Part]:
    """Return all parts, the most important first."""
    from benchmarks.gpu_contestants import CONTESTANTS, FLASH_MODULES

    tiny = shape == "tiny"
    no_amx = "" if tiny or "amx_bf16" in read_cpu().isa else "this CPU has no AMX"
    wide, small, large = ("tiny",) * 3 if tiny else ("8b-width", "125m", "8b")

    def gpu(what: str, shape: str, *more: str, file: str = "gpu.json") -> tuple[str, ...]:
        where = ("--device", device, "--shape", shape, "--steps", "1" if tiny else "10", "--json", str(folder / file))
        return ("benchmarks/gpu.py", what, *where, *more)

    def speed(
        who: str, shape: str = shape, rows: int = 1, documents: str = "packed", file: str = "gpu.json"
    ) -> tuple[str, ...]:
        return gpu("speed", shape, "--rows", str(rows), "--documents", documents, "--only", who, file=file)

    def cpu(name: str, *more: str) -> tuple[str, ...]:
        smoke = ("--smoke",) if tiny else ()
        return (f"benchmarks/{name}.py", *smoke, *more, "--json", str(folder / f"cpu-{name}.json"))

    workers = str(min(12, len(os.sched_getaffinity(0))))
    tests = ("-m", "pytest", "-p", "no:cacheprovider", "-vv", "--color=no")
    chosen = ("tests/gpu/test_kernels.py" if tiny else "tests/gpu", "-m", "not long and not alone")
    return [
        Part("tests", (*tests, *chosen, "-n", workers, "--dist", "loadgroup"), 120, 240),
        Part("tests that run alone", (*tests, "tests/gpu", "-m", "alone"), 40, 90),
        Part("aliquot, sharded", speed("aliquot, sharded")),
        Part("engine host", speed("aliquot, engine host", rows=4)),
        Part("engine host, width of 8 B", speed("aliquot, engine host", wide, rows=4), 90, 120),
        Part("copied layers, width of 8 B", speed("aliquot, copied layers", wide, rows=4), 90, 120),
        Part("aliquot", speed("aliquot")),
        Part("FSDP2", speed(PEER)),
        Part("aliquot, four rows", speed("aliquot", rows=4)),
        Part("aliquot, width of 8 B", speed("aliquot", wide)),
        Part(
            "aliquot, fp8, width of 8 B",
            speed("aliquot, fp8", wide),
            obstacle="" if "aliquot, fp8" in CONTESTANTS else "torchao is not installed",
        ),
        Part("plan", gpu("plan", shape)),
        Part("plan, 125 M", gpu("plan", small)),
        Part("load", gpu("load", large), 90, 240),
        Part("offload", speed("aliquot, offloaded", rows=4)),
        Part("CPU step", cpu("step", "--shapes", small, "--rounds", "1", "--only", STEPS), 90, 180, no_amx),
        Part("CPU parts", cpu("parts"), 40, 180, no_amx),
        Part("CPU attention", cpu("attention"), 40, 120, no_amx),
        *(
            Part(name, speed(name), obstacle="" if name in CONTESTANTS else "this kernel is not installed")
            for name in (f"aliquot, {kernel}" for kernel in FLASH_MODULES)
        ),
        Part(
            "aliquot, torch's own allocator settings",
            speed("aliquot", file="gpu-allocator.json"),
            environ=(("PYTORCH_ALLOC_CONF", "expandable_segments:False"),),
        ),
        Part("FSDP2, four rows", speed(PEER, rows=4)),
        Part("FSDP2, width of 8 B", speed(PEER, wide)),
        Part("aliquot, short documents", speed("aliquot", documents="short")),
        Part("aliquot, one document", speed("aliquot", documents="full")),
    ]


def missing_packages() -> list[str]:
    """Return the packages that the parts need and this Python lacks, as `pip install` takes them."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pinned = dict(
        line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line
    )
    names = [re.split(r"[^\w.-]", text)[0] for text in (*project["dependencies"], *TEST_PACKAGES)]
    missing = []
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(f"{name}=={pinned[name]}" if name in pinned else name)
    return missing


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=840)
    arguments.add_argument("--directory", type=Path, default=REPOSITORY / "build" / "gpu")
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments.add_argument("--shape", choices=["1b", "125m", "tiny"], default="1b")
    arguments.add_argument("--first", help="begin with this part")
    given = arguments.parse_args()
    if missing := missing_packages():  # before minutes of a GPU are spent
        arguments.error(f"this Python lacks packages. Bring their wheels, and: pip install {' '.join(missing)}")
    folder = given.directory.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    listed = parts(given.device, given.shape, folder)
    names = [part.name for part in listed]
    if given.first not in (None, *names):
        arguments.error(f"--first {given.first}: take one of {', '.join(names)}")
    end = time.monotonic() + given.seconds
    states: dict[str, str] = {}
    for part in listed[names.index(given.first) if given.first else 0 :]:
        left_s = end - time.monotonic()
        if part.obstacle:
            states[part.name] = f"skipped: {part.obstacle}"
        elif left_s < part.usual_s:
            states[part.name] = f"skipped: it takes about {part.usual_s} s, and {max(0, left_s):.0f} s are left"
        else:
            environ, limit_s = environment(given.device, part), min(part.limit_s, left_s)
            states[part.name] = run(part, environ, folder / "log.txt", limit_s)
        print(f"{part.name}: {states[part.name]}", flush=True)
        publish_text(folder / "parts.json", json.dumps(states, indent=1) + "\n")


def environment(device: str, part: Part) -> dict[str, str]:
    """Return the environment of a part: the sources beside this file, and the tests on the device."""
    older = tuple(map(int, version("torch").split(".")[:2])) < OLDEST_TORCH
    paths = [REPOSITORY / "benchmarks" / "older_torch"] if older else []
    paths += [REPOSITORY / "src", REPOSITORY]
    added = {
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, paths), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",  # the log has the output of a killed part
        **({"ALIQUOT_GPU_TESTS": "cpu"} if device == "cpu" else {}),
    }
    return {**os.environ, **added, **dict(part.environ)}


def run(part: Part, environ: dict[str, str], log: Path, limit_s: float) -> str:
    """Run a part, at most `limit_s`, and return how it ended."""
    began = time.monotonic()
    with log.open("a") as output:
        print(f"\n== {part.name}: python {' '.join(part.arguments)}", file=output, flush=True)
        process = subprocess.Popen(
            [sys.executable, *part.arguments], cwd=REPOSITORY, env=environ, stdout=output, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    how = "killed" if code is None else "done" if code == 0 else f"failed with exit code {code}"
    state = f"{how} after {time.monotonic() - began:.0f} s"
    last = log.read_text(errors="replace").strip().splitlines()[-1].strip("= ")[:160]
    return f"{state}: {last}" if code != 0 or "pytest" in part.arguments else state


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `run` then kills the running part
    main()
