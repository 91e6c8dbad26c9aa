"""Each finding about CPU, memory, storage and limits is provoked, on machines laid out as files and on this one."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aliquot.core.errors import LaunchError
from aliquot.distributed.topology import check_locked_memory
from aliquot.doctor import cpu_checks, memory_checks, storage_checks
from aliquot.doctor.finding import Finding, Subject
from tests.doctor.machines import GIB_KB, lay_out, machine, said, subject

V1 = "4:memory:/pod\n3:cpu,cpuacct:/pod\n"


def test_a_good_machine_has_nothing_to_fix(tmp_path: Path) -> None:
    good = subject(machine(tmp_path))
    checks = (
        cpu_checks.check_isa, cpu_checks.check_amx, cpu_checks.check_cores, cpu_checks.check_smt,
        cpu_checks.check_numa, cpu_checks.check_threads, cpu_checks.check_pinning,
        memory_checks.check_memory, memory_checks.check_huge_pages,
    )  # fmt: skip
    for check in checks:
        finding = check(good)
        assert (finding.level, finding.fix) == ("ok", ""), said(finding)


@pytest.mark.parametrize(
    ("flags", "level"),
    [("avx512f amx_bf16", "ok"), ("avx512f avx512_bf16", "ok"), ("avx2 avx512f", "ok"), ("avx2", "ok"),
     ("sse4_2", "problem")],
)  # fmt: skip
def test_instructions(tmp_path: Path, flags: str, level: str) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the flags of an x86 CPU")
    finding = cpu_checks.check_isa(subject(machine(tmp_path, flags=flags)))
    assert finding.level == level, said(finding)
    assert bool(finding.fix) == (level != "ok")


def test_refused_amx_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_amx = subject(machine(tmp_path, flags="avx512f amx_bf16"))
    finding = cpu_checks.check_amx(with_amx)
    if "amx_bf16" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has AMX: it is not refused")
    assert finding.level == "problem" and "the kernel refuses it" in finding.found  # this CPU has none to give


@pytest.mark.long
def test_slow_kernels_are_a_warning(tmp_path: Path) -> None:
    """A real product on this CPU, said to have AMX; and oneDNN told to leave instructions unused."""
    if "amx_bf16" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has AMX")
    with_amx = subject(machine(tmp_path, flags="avx512f amx_bf16"))
    assert cpu_checks.check_kernels(with_amx).level == "warning"
    if "avx512_bf16" not in Subject().cpu.isa:
        pytest.skip("needs a CPU with AVX512_BF16")
    assert cpu_checks.check_kernels(Subject()).level == "ok"
    finding = alone("cpu_checks.check_kernels", ONEDNN_MAX_CPU_ISA="AVX2")
    assert finding["level"] == "warning" and "unset ONEDNN_MAX_CPU_ISA" in finding["fix"]


@pytest.mark.parametrize(
    ("files", "level", "words"),
    [
        ({}, "ok", "no CPU quota"),
        ({"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "50000 100000"}, "problem", "quota of 0.5"),
        ({"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "250000 100000"}, "warning", "quota of 2.5"),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": "300000",
          "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us": "100000"}, "warning", "quota of 3 CPUs"),
    ],
)  # fmt: skip
def test_quota(tmp_path: Path, files: dict[str, str], level: str, words: str) -> None:
    throttled = subject(lay_out(machine(tmp_path), files))
    finding = cpu_checks.check_cores(throttled)
    assert finding.level == level and words in finding.found, said(finding)
    assert cpu_checks.check_pinning(throttled).level == ("ok" if level != "warning" else "warning")


def test_affinity_of_one_core(tmp_path: Path) -> None:
    finding = cpu_checks.check_cores(subject(machine(tmp_path), cpus=1))
    assert finding.level == "warning" and "1 of 4 logical CPUs allowed" in finding.found
    if len(os.sched_getaffinity(0)) > 1:
        real = alone("cpu_checks.check_cores", prefix=["taskset", "-c", str(min(os.sched_getaffinity(0)))])
        assert real["level"] == "warning" and real["found"].startswith("1 physical cores, 1 of ")


def test_half_cores(tmp_path: Path) -> None:
    two_threads = machine(tmp_path, cores=2, threads=2)
    assert cpu_checks.check_smt(subject(two_threads, cpus=4)).level == "ok"
    finding = cpu_checks.check_smt(subject(two_threads, cpus=3))
    assert finding.level == "warning" and finding.meaning.startswith("1 of 2 cores are shared")


def test_two_numa_nodes(tmp_path: Path) -> None:
    root = machine(tmp_path)
    lay_out(root, {"sys/devices/system/node/node0/cpulist": "0,1", "sys/devices/system/node/node1/cpulist": "2,3"})
    finding = cpu_checks.check_numa(subject(root))
    assert finding.found == "2 NUMA nodes with 2, 2 cores" and finding.level in ("ok", "warning")
    assert "default" in Path("/proc/self/numa_maps").read_text().splitlines()[0]  # as it was before


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [
        ({}, "ok", "4 x 1 threads for 4 cores"),
        ({"OMP_NUM_THREADS": "1"}, "warning", "OMP_NUM_THREADS=1: a rank computes on 1 of 4 cores"),
        ({"MKL_NUM_THREADS": "1"}, "warning", "MKL_NUM_THREADS=1"),
        ({"OMP_NUM_THREADS": "4"}, "warning", "take turns"),
        ({"OMP_NUM_THREADS": "many"}, "problem", "'many'"),
    ],
)
def test_threads(tmp_path: Path, environ: dict[str, str], level: str, words: str) -> None:
    finding = cpu_checks.check_threads(subject(machine(tmp_path), **environ))
    assert finding.level == level and words in said(finding), said(finding)


@pytest.mark.parametrize(
    ("files", "level", "words"),
    [
        ({}, "ok", "64.00 GiB by RAM, 60.00 GiB"),
        ({"proc/meminfo": f"MemTotal: {64 * GIB_KB} kB\nMemAvailable: {1 * GIB_KB} kB\n"}, "problem", "1.00 GiB of it"),
        ({"sys/fs/cgroup/pod/memory.max": str(8 << 30), "sys/fs/cgroup/pod/memory.current": str(7 << 30)},
         "problem", "8.00 GiB by a control group, 1.00 GiB"),
        # What the page cache holds does not count.
        ({"sys/fs/cgroup/pod/memory.max": str(8 << 30), "sys/fs/cgroup/pod/memory.current": str(7 << 30),
          "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {4 << 30}\n"}, "warning", "5.00 GiB of it"),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": str(32 << 30),
          "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": str(1 << 30)}, "ok", "32.00 GiB by a control group, 31.00"),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": str(3 << 30),
          "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": "0"}, "warning", "3.00 GiB by a control group"),
    ],
)  # fmt: skip
def test_memory(tmp_path: Path, files: dict[str, str], level: str, words: str) -> None:
    finding = memory_checks.check_memory(subject(lay_out(machine(tmp_path), files)))
    assert finding.level == level and words in finding.found, said(finding)


@pytest.mark.parametrize(
    ("text", "level"), [("[always] madvise never", "ok"), ("always [madvise] never", "ok"), ("x [never]", "warning")]
)
def test_huge_pages(tmp_path: Path, text: str, level: str) -> None:
    root = lay_out(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert memory_checks.check_huge_pages(subject(root)).level == level


def test_allocator(tmp_path: Path) -> None:
    assert memory_checks.check_allocator(subject(tmp_path)).level == "warning"
    lay_out(tmp_path, {"usr/lib64/libjemalloc.so.2": ""})
    finding = memory_checks.check_allocator(subject(tmp_path))
    assert finding.level == "ok" and "libjemalloc.so.2" in finding.found
    assert memory_checks.check_allocator(subject(tmp_path, ALIQUOT_ALLOCATOR="none")).level == "warning"
    assert memory_checks.check_allocator(subject(tmp_path / "bare", LD_PRELOAD="/x/libtcmalloc.so.4")).level == "ok"


def test_shm(tmp_path: Path) -> None:
    assert "missing" in memory_checks.check_shm(subject(tmp_path)).found
    finding = memory_checks.check_shm(Subject())
    stat = os.statvfs("/dev/shm")
    assert (finding.level == "ok") == (stat.f_bavail * stat.f_frsize >= 1 << 30)


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
@pytest.mark.parametrize(
    ("size", "used", "found"), [("64m", "0", "0.06 GiB, 0.06 GiB free"), ("1040m", "32M", "1.02 GiB, 0.98 GiB free")]
)
def test_small_or_full_shm(size: str, used: str, found: str) -> None:
    """What counts is what is free."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && head -c {used} /dev/zero > /dev/shm/used && exec "$@"'
    shell = ["unshare", "-m", "sh", "-c", mount, "sh"]
    if subprocess.run([*shell, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    finding = alone("memory_checks.check_shm", prefix=shell)
    assert finding["level"] == "warning" and finding["found"] == found
    assert "emptyDir" in finding["fix"]


@pytest.mark.parametrize(("files", "level"), [(200, "problem"), (512, "warning"), (1024, "ok")])
def test_open_files(files: int, level: str) -> None:
    finding = alone("memory_checks.check_open_files", prefix=["prlimit", f"--nofile={files}:{files}"])
    assert finding["level"] == level and finding["found"].startswith(f"{files} open files")


def test_locked_memory(tmp_path: Path) -> None:
    assert memory_checks.check_locked_memory(subject(tmp_path)).level == "ok"
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, hard))
    try:
        assert memory_checks.check_locked_memory(subject(tmp_path)).level == "problem"
        with pytest.raises(LaunchError, match="may lock 8 MiB"):
            check_locked_memory(tmp_path)
        check_locked_memory(tmp_path / "no-such-card")
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_storage_leaves_nothing_behind(tmp_path: Path) -> None:
    here = replace(subject(tmp_path), root=Path("/"), run_directory=tmp_path / "runs/not/there")
    finding = storage_checks.check_storage(here)
    assert finding.level in ("ok", "warning") and str(tmp_path) in finding.found and "durable in" in finding.found
    assert storage_checks.check_storage_clock(here).level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_storage_with_local_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This machine's own disk may be nearly full, or slow.
    monkeypatch.setattr(storage_checks, "_LEAST_BYTES", 0)
    monkeypatch.setattr(storage_checks, "_GOOD_BYTES", 0)
    monkeypatch.setattr(storage_checks, "_SLOW_FSYNC_S", 1e9)
    (tmp_path / "proc").mkdir()
    for option, level in (("flock", "ok"), ("localflock", "warning")):
        (tmp_path / "proc" / "mounts").write_text(f"srv:/x {tmp_path} lustre rw,{option} 0 0\n")
        finding = storage_checks.check_storage(
            replace(subject(tmp_path), root=tmp_path, run_directory=tmp_path / "runs")
        )
        assert "(lustre)" in finding.found and ("locks of this machine alone" in finding.found) == (level == "warning")
        assert level == "ok" or (finding.level == "warning" and "Lustre: -o flock" in str(finding.fix))


def test_unwritable_storage_is_a_problem(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        finding = storage_checks.check_storage(Subject(run_directory=Path("/proc/sys")))
    else:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        finding = storage_checks.check_storage(Subject(run_directory=tmp_path))
    assert finding.level == "problem" and finding.fix


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_storage_without_space(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=64m tmpfs {tmp_path} && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", mount, "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    prefix = ["unshare", "-m", "sh", "-c", mount, "sh"]
    finding = alone("storage_checks.check_storage", prefix=prefix, run_directory=tmp_path)
    assert finding["level"] == "problem" and "(tmpfs): 0.1 GiB free" in finding["found"]


def test_clock_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(storage_checks.time, "time", lambda: real() + 60)  # this machine's clock is fast
    finding = storage_checks.check_storage_clock(replace(subject(tmp_path), run_directory=tmp_path))
    assert finding.level == "warning" and finding.found.endswith("s behind this machine's")


def test_text_of_a_finding() -> None:
    finding = Finding("warning", "64 MiB", "too small", "mount more", id="shm", title="/dev/shm")
    assert finding.text() == "warning  shm: 64 MiB\n         too small\n         fix: mount more"


def alone(
    check: str, prefix: list[str] | None = None, run_directory: Path = Path("runs"), **environ: str
) -> dict[str, str]:
    """The finding of one check in a process of its own."""
    program = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path;"
        "from aliquot.doctor import cpu_checks, memory_checks, storage_checks;"
        "from aliquot.doctor.finding import Subject;"
        f"print(json.dumps(asdict({check}(Subject(run_directory=Path(sys.argv[1]))))))"
    )
    done = subprocess.run(
        [*(prefix or []), sys.executable, "-c", program, str(run_directory)],
        env={**os.environ, **environ}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])
