"""Run the ranks of a small world as real processes over gloo, and collect their measurements."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.smoke import SMOKE

Measured = dict[str, Any]


def run_world(
    script: str,
    world_size: int,
    *arguments: str,
    timeout_s: float = 900,
    environ: Mapping[str, str] = MappingProxyType({}),
    prefixes: Sequence[Sequence[str]] = (),
) -> list[Measured]:
    """Run `python SCRIPT --rank ARGUMENTS...` on each rank and return the measurements.

    A failure returns [{"failed": "rank N <how it ended>"}]. `environ` is added to the inherited environment;
    `prefixes[rank]` precedes a rank's command.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ranks, threads = [], str(max(1, len(os.sched_getaffinity(0)) // world_size))
        for rank in range(world_size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": threads,
                "RESULT": f"{folder}/{rank}.json",
                **environ,
            }
            command = [*(prefixes[rank] if prefixes else ()), sys.executable, script, "--rank", *arguments]
            with Path(folder, f"{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        if (failed := _failure(ranks, timeout_s)) is not None:
            number, how = failed
            lines = Path(folder, f"{number}.log").read_text(errors="replace").strip().splitlines()
            # The exception comes first; then gloo's unjoined threads abort the interpreter.
            said = [line for line in lines if not line.startswith("terminate called")] or lines
            last = said[-1].strip()[:200] if said else "without a word"
            if SMOKE and "ModuleNotFoundError" not in last:  # a missing peer is no fault of the benchmark
                raise SystemExit(f"{script} {' '.join(arguments)}: rank {number} {how}: {last}")
            return [{"failed": f"rank {number} {how}: {last}"}]
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def _failure(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> tuple[int, str] | None:
    """Return the first failed rank and how it ended, after killing the others; None if all ranks ended well."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [rank.poll() for rank in ranks]
        found = next(((number, _ending(code)) for number, code in enumerate(codes) if code), None)
        if found is None and None in codes and time.monotonic() > deadline:
            found = codes.index(None), f"did not end within {timeout_s:g} s"
        if found is not None:
            for rank in ranks:
                rank.kill()
                rank.wait()
            return found
        if None not in codes:
            return None
        time.sleep(0.05)


def _ending(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


def tell(measured: Measured) -> None:
    """Write this rank's measurements for the parent process."""
    Path(os.environ["RESULT"]).write_text(json.dumps(measured))


@contextmanager
def watched(measured: Measured, barrier: Callable[[], None]) -> Iterator[None]:
    """Add seconds from a common start to a common end, requested and read bytes, and peak private bytes.

    Private memory is the sampled RssAnon of /proc/self/status. `peak_over_start_bytes` is exact but includes pages of
    mapped files: it is the rise of the high-water mark over the resident memory at the start.
    """
    from aliquot.machine.memory import memory_use, peak_rss, reset_peak_rss

    peak = _Peak()
    before_io, before_rss = _io(), memory_use().rss_bytes
    reset_peak_rss()
    barrier()
    began = time.perf_counter()
    with peak:
        yield
        barrier()
        measured["seconds"] = time.perf_counter() - began
    after_io = _io()
    measured |= {
        "asked_bytes": after_io["rchar"] - before_io["rchar"] - peak.asked_bytes,
        "written_bytes": after_io["wchar"] - before_io["wchar"],
        "peak_private_bytes": peak.bytes,
        "private_over_start_bytes": peak.bytes - peak.start_bytes,
        "peak_over_start_bytes": peak_rss() - before_rss,
    }


class _Peak:
    """The peak of private memory, sampled by a thread every few milliseconds."""

    def __init__(self) -> None:
        self.asked_bytes = 0  # bytes read by the samples
        self.start_bytes = self.bytes = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, self._now())

    def _now(self) -> int:
        text = Path("/proc/self/status").read_text()
        self.asked_bytes += len(text)
        for line in text.splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise OSError("/proc/self/status has no RssAnon")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, self._now())


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def warm(directory: Path) -> None:
    """Read the files into the page cache."""
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb", buffering=0) as source:
            while source.read(64 << 20):
                pass


def cold() -> str | None:
    """Empty the page cache; return the reason if that is impossible."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        return f"the page cache cannot be emptied: {error.strerror}"
    return None


class PeakPss:
    """Watch the PSS of this process until `stop`: `bytes` is its peak."""

    def __init__(self) -> None:
        from aliquot.machine.memory import PssSampler

        self.bytes = 0
        self._sampler, self._over = PssSampler(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.bytes = max(self.bytes, self._sampler.bytes())
