"""Faults, planted one at a time, that the tests must notice: `python -m tests.tools.planted [NAME ...]`.

Each fault is a line of the sources that is replaced in a copy of the repository. `make test`'s selection runs there,
the tests that are most likely to notice the fault first. A fault is noticed when a test fails. A table names that test
for every fault. The exit code is 1 if a fault was not noticed, and 2 if the tests of a fault could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.tools.warm import adopt_orphans

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """`line` stands once in `file` and becomes `planted`; `tests` are looked at before all others."""

    name: str
    file: str
    effect: str
    line: str
    planted: str
    tests: tuple[str, ...]


class PlantingError(Exception):
    """A fault cannot be planted, or its tests cannot run: neither says whether the tests notice the fault."""


FAULTS = (
    Fault(
        "batch-rounds-down", "data/workload.py",
        "the per-device batch that follows from the global one is rounded down, not up",
        "return BatchSize(total, -(-total // (steps * world_size)))",
        "return BatchSize(total, max(1, total // (steps * world_size)))",
        ("tests/data/test_workload.py",),
    ),
    Fault(
        "kubelet-keeps-less", "catalogue/instances.py",
        "kubelet's reserve is taken for less than it is: a pod's memory is promised to it too high",
        "(255 + 11 * max_pods)", "(255 + 10 * max_pods)",
        ("tests/catalogue",),
    ),
    Fault(
        "consolidation-default", "cluster/node_fields.py",
        "a NodePool without a consolidation policy is taken for one that leaves running jobs alone",
        'absent="WhenEmptyOrUnderutilized"', 'absent="WhenEmpty"',
        ("tests/cluster/test_check.py",),
    ),
    Fault(
        "neighbours-bytes", "tensor_io/transfer.py",
        "each piece of a part but the first is taken from one element too early",
        "piece_view = None if view is None else view[start - part.start :][:numel]",
        "piece_view = None if view is None else view[max(0, start - part.start - 1) :][:numel]",
        ("tests/tensor_io", "tests/models/test_load.py"),
    ),
    Fault(
        "rename-before-fsync", "tensor_io/publish.py",
        "a directory gets its final name before the disk has what is in it",
        "    sync(partial)\n    former", "    former",
        ("tests/tensor_io/test_publish.py",),
    ),
    Fault(
        "loosest-quota", "machine/cpu.py",
        "of nested CPU quotas the loosest counts",
        "return min(quotas, default=None)", "return max(quotas, default=None)",
        ("tests/machine",),
    ),
    Fault(
        "orphaned-ranks", "distributed/rank_process.py",
        "ranks outlive a launcher that is killed",
        "ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)",
        "ctypes.CDLL(None, use_errno=True)",
        ("tests/distributed/test_launcher.py",),
    ),
    Fault(
        "missing-barrier", "distributed/collectives/peers.py",
        "a barrier among the ranks of a host does not wait",
        "        self.wait(_BARRIER, self.sent[_BARRIER])", "        self.received(_BARRIER)",
        ("tests/distributed/collectives", "tests/engines/test_host_engine.py"),
    ),
    Fault(
        "last-host-left-out", "distributed/collectives/reduce.py",
        "the sum over hosts leaves out the last one",
        "    for values in ordered[1:]:\n", "    for values in ordered[1:-1]:\n",
        ("tests/distributed/collectives", "tests/engines/test_host_engine.py"),
    ),
    Fault(
        "layer-does-not-wait", "engines/host/host_engine.py",
        "a layer computes before its weights are updated, or have come from another host",
        "pre_hook(partial(self._wait_usable, indices))", "pre_hook(lambda *_: None)",
        ("tests/engines/test_host_engine.py", "tests/engines/test_weight_publication.py"),
    ),
    Fault(
        "copy-used-too-early", "engines/host/compute_device.py",
        "a GPU computes a layer before its copied weights have arrived",
        "        super()._use(layer)\n", "        return super()._use(layer)\n",
        ("tests/engines/test_host_engine.py", "tests/engines/test_compute_device.py"),
    ),
    Fault(
        "ties-to-zero", "optim/master_weights.py",
        "a tie is rounded towards zero when a master weight becomes bf16",
        ".add(0x8000)", ".add(0x7FFF)",
        ("tests/optim",),
    ),
    Fault(
        "mask-leaks-a-token", "nn/attention/tiles.py",
        "a query sees the token after it",
        ".triu_(keys - queries + 1)", ".triu_(keys - queries + 2)",
        ("tests/nn/attention",),
    ),
    Fault(
        "sign-in-chunked-loss", "nn/head_loss.py",
        "the loss that is computed in chunks pushes the label's logit the wrong way",
        "inside[:, None].float() * -weights", "inside[:, None].float() * weights",
        ("tests/nn/test_head_loss.py",),
    ),
    Fault(
        "export-tells-no-dtype", "models/export.py",
        "config.json of an export does not tell the dtype of the weights beside it",
        '    fields["dtype"] = str(dtype).removeprefix("torch.")\n', "",
        ("tests/models/test_export.py", "tests/run/test_train.py"),
    ),
    Fault(
        "pieces-do-not-overlap", "data/packing.py",
        "of a long document the first token of each later piece is never predicted",
        "begin = offsets[document] + nth * (sequence_length - 1)",
        "begin = offsets[document] + nth * sequence_length",
        ("tests/data/test_packing.py", "tests/data/test_batches.py"),
    ),
    Fault(
        "positions-run-on", "data/micro_batch_rows.py",
        "positions do not begin at 0 again in each document of a row",
        "positions = np.arange(edges[-1]) - np.repeat(edges[:-1], np.diff(edges))", "positions = np.arange(edges[-1])",
        ("tests/data/test_batches.py",),
    ),
    Fault(
        "tied-gradient-replaced", "engines/host/host_gradients.py",
        "of a tied weight's two gradients one replaces the other",
        "first = not self._contributions[index]\n        completes, micro_batch = self._completes(index, 0)",
        "first = True\n        completes, micro_batch = self._completes(index, 0)",
        ("tests/engines",),
    ),
    Fault(
        "gradients-divided-twice", "engines/fsdp/fsdp_engine.py",
        "engine fsdp halves every gradient",
        "module.set_gradient_divide_factor(1.0)", "module.set_gradient_divide_factor(2.0)",
        ("tests/engines/test_engines.py",),
    ),
    Fault(
        "saved-while-it-changes", "checkpoint/live_parts.py",
        "an update does not wait until a checkpoint has read what it changes",
        "lambda: self._stopped or (not self._live_reads and self._unread <= self._copies.keys()), timeout_s",
        "lambda: True, timeout_s",
        ("tests/checkpoint",),
    ),
    Fault(
        "waiting-counted-twice", "observe/step_clock.py",
        "seconds of waiting for other ranks count as own work, too",
        "mark, reduced + waited))", "mark, reduced))",
        ("tests/observe/test_step_clock.py",),
    ),
    Fault(
        "plan-forgets-other-hosts", "engines/host/host_memory.py",
        "the plan forgets the gradient sums that a rank holds for its counterparts on other hosts",
        "gradients=gradients + others * waiting * sent_itemsize(config) + summing,", "gradients=gradients + summing,",
        ("tests/engines/test_host_memory.py", "tests/planner"),
    ),
    Fault(
        "free-shm-not-looked-at", "doctor/memory_checks.py",
        "the doctor looks at the size of /dev/shm, not at what is free of it",
        "Case(free < _SHM_BYTES,", "Case(total < _SHM_BYTES,",
        ("tests/doctor",),
    ),
    Fault(
        "perplexity-of-one-rank", "run/evaluate.py",
        "perplexity is over the loss of one rank and the tokens of all",
        "for rank_sums in gathered if", "for rank_sums in gathered[:1] if",
        ("tests/run/test_train.py",),
    ),
    Fault(
        "sigterm-saves-nothing", "run/training_loop.py",
        "a run that is told to stop stops without saving",
        "is_wanted = (is_last and settings.last) or stop_signal or failure or is_best",
        "is_wanted = (is_last and settings.last) or failure or is_best",
        ("tests/run/test_train.py",),
    ),
    Fault(
        "bad-input-exits-with-1", "cli/terminal.py",
        "bad input ends with exit code 1, as a crash does",
        "raise typer.Exit(user_error.exit_code) from None", "raise typer.Exit(1) from None",
        ("tests/cli", "tests/config"),
    ),
    Fault(
        "experts-take-others-tokens", "nn/experts/sorted_experts.py",
        "an expert computes from the rows of other tokens than those that chose it",
        "token_of_slot[places] = order // per_token", "token_of_slot[places] = order % tokens",
        ("tests/nn/experts",),
    ),
    Fault(
        "experts-in-the-models-order", "models/stored_weights.py",
        "of an expert's two matrices that are published apart each is taken for the other",
        "at = (first - start) * whole", "at = ((first - start) ^ 4) * whole",
        ("tests/models/test_stored_weights.py",),
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    parser.add_argument("--table", action="store_true", help="only print the table of CONTRIBUTING.md")
    arguments = parser.parse_args()
    if arguments.table:
        print(table())
        return
    unknown = set(arguments.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    rows: list[dict[str, str | None]] = []
    for fault in FAULTS:
        if arguments.names and fault.name not in arguments.names:
            continue
        begun = time.monotonic()
        noticed_by, error = None, None
        try:
            noticed_by = plant(fault)
        except PlantingError as planting_error:
            error = str(planting_error)
        rows.append({"fault": fault.name, "file": fault.file, "noticed_by": noticed_by, "error": error})
        outcome = f"ERROR: {error}" if error else noticed_by or "NOT NOTICED"
        print(f"{fault.name:26} {time.monotonic() - begun:6.0f} s  {outcome}", flush=True)
    noticed = sum(row["noticed_by"] is not None for row in rows)
    failed = any(row["error"] for row in rows)
    print(f"{noticed} of {len(rows)} faults noticed")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(2 if failed else 1 if noticed < len(rows) else 0)


def table() -> str:
    rows = [f"| `{fault.name}` | `{fault.file}` | {fault.effect} |" for fault in FAULTS]
    return "\n".join(("| fault | file | what goes wrong |", "|--|--|--|", *rows))


def plant(fault: Fault) -> str | None:
    """The first test that notices the fault; None: all pass with it."""
    with tempfile.TemporaryDirectory() as folder, ending_orphans():
        copy = copy_repository(Path(folder))
        file = copy / "src" / "aliquot" / fault.file
        text = file.read_text()
        if text.count(fault.line) != 1:
            raise PlantingError(f"{fault.file} has the line {text.count(fault.line)} times, not once: {fault.line!r}")
        file.write_text(text.replace(fault.line, fault.planted))
        return failing_test(copy, fault.tests) or failing_test(copy, ())


@contextmanager
def ending_orphans() -> Iterator[None]:
    """Kill what programs of this block leave running, because a planted fault can keep ranks alive forever."""

    def children() -> set[int]:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))

    before = children()
    adopt_orphans(True)
    try:
        yield
    finally:
        while orphans := children() - before:  # the children of a killed orphan are adopted, too
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
        adopt_orphans(False)


def copy_repository(folder: Path) -> Path:
    """What git knows or would add, with ../shared beside it where there is one."""
    copy = folder / "repository"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    if (REPOSITORY.parent / "shared").is_dir():
        (folder / "shared").symlink_to(REPOSITORY.parent / "shared")
    return copy


def failing_test(copy: Path, tests: tuple[str, ...]) -> str | None:
    """The first failing test of `make test`'s selection under `tests`, or of the whole selection if `tests` is empty.

    The summary decides, not pytest's exit code: with -x a file that cannot be imported ends with the exit code of a
    failed test, and a failed test under xdist with the exit code of an interruption.

    Raises:
        PlantingError: no test ran, a file could not be imported, or pytest itself failed.
    """
    command = [sys.executable, "-m", "pytest", "-m", "not long", "-x", "--tb=no", "-p", "no:cacheprovider"]
    command += tests or ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    # A failed fixture is an ERROR that names its test; an ERROR that names a file is one of collection.
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - |$)", done.stdout, re.MULTILINE)
    if failed is None:
        last_lines = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise PlantingError(f"no test failed, but pytest ended with exit code {done.returncode}:\n{last_lines}")
    return failed[1]


if __name__ == "__main__":
    main()
