"""Start DeepSpeed: check the tools for its C++ ops, create its optimizer, and report its initialization phases."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from aliquot.core.errors import MissingToolError
from aliquot.engines.base import EngineSpec
from aliquot.engines.deepspeed.deepspeed_settings import offloads_optimizer
from aliquot.optim.adamw import decays, parameter_groups

_TOOLS = {"g++": "a C++ compiler (Debian: apt install g++)", "ninja": "pip install ninja"}
# The message of a DeepSpeed memory report -> the phase of the memory ledger that ends with this report.
_PHASES = {
    "Before creating fp16 partitions": "after load",
    "After creating fp16 partitions": "after bf16 partitions",
    "After creating fp32 partitions": "after fp32 master",
    "After initializing optimizer states": "after optimizer state",
}
_WITHOUT_COMPILER = "with zero_force_ds_cpu_optimizer: false in its JSON, torch's AdamW runs instead"
_YOUNG_S = 120.0  # a younger lock may belong to a build on another host with the same home directory
_log = logging.getLogger(__name__)


def prepare_ops(device: str = "cpu") -> None:
    """Check that DeepSpeed can compile its C++ ops, and remove the locks of killed builds.

    On CPUs, DeepSpeed compiles its shared-memory op at every start, even if nothing uses the op. On GPUs, it compiles
    only its AdamW for offloaded states. Raises MissingToolError if a build tool is not installed.
    """
    on_gpu = device == "cuda"
    if missing := missing_tools():
        raise MissingToolError(
            f"DeepSpeed compiles {'its AdamW for offloaded states' if on_gpu else 'C++ ops when it starts on CPUs'} and"
            f" needs {' and '.join(missing)}; {_WITHOUT_COMPILER if on_gpu else 'the engines host and fsdp need none'}"
        )
    if on_gpu:
        _log.warning("DeepSpeed compiles its AdamW for offloaded states at its first start; %s", _WITHOUT_COMPILER)
    for lock in locks():
        if _is_abandoned(lock):
            lock.unlink(missing_ok=True)
            _log.warning("removed %s, the lock of a killed build: later builds would wait for it forever", lock)


def missing_tools() -> list[str]:
    """Return an installation hint for each missing build tool."""
    # pip installs ninja in the directory of Python, which need not be on the PATH.
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), scripts))
    return [advice for tool, advice in _TOOLS.items() if shutil.which(tool) is None]


def locks() -> list[Path]:
    """Return the lock files of extension builds by torch, which also builds DeepSpeed's ops."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"]) if "TORCH_EXTENSIONS_DIR" in os.environ else cache
    return sorted(lock for depth in ("*/lock", "*/*/lock") for lock in root.glob(depth))


def _is_abandoned(lock: Path) -> bool:
    """Whether a lock is old and no process of this host has it open; a running build keeps its lock open."""
    with suppress(FileNotFoundError):
        return time.time() - lock.stat().st_mtime > _YOUNG_S and lock not in _open_files()
    return False


def _open_files() -> Iterator[Path]:
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            yield descriptor.readlink()


def adamw(
    weights: Sequence[tuple[str, nn.Parameter]], spec: EngineSpec, settings: Mapping[str, Any], device: str
) -> torch.optim.Optimizer:
    """Return AdamW over two parameter groups, with and without weight decay.

    For offloaded states this is DeepSpeedCPUAdam, unless the settings disable it; otherwise it is torch's AdamW, which
    on a GPU is one kernel for all weights.
    """
    decaying = [decays(name, tuple(cast(Any, w).ds_shape)) for name, w in weights]
    groups = parameter_groups([w for _, w in weights], decaying, [1.0] * len(weights), spec.weight_decay)
    options: dict[str, Any] = {"lr": 0.0, "betas": (spec.adam_beta1, spec.adam_beta2), "eps": spec.adam_epsilon}
    if not compiles_adam(settings):
        return torch.optim.AdamW(groups, **options, fused=device == "cuda" and not offloads_optimizer(settings))
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return cast("torch.optim.Optimizer", DeepSpeedCPUAdam(groups, adamw_mode=True, **options))


def compiles_adam(settings: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed updates the weights with its own AdamW, which it compiles."""
    return offloads_optimizer(settings) and bool(settings.get("zero_force_ds_cpu_optimizer", True))


def prepare_states(optimizer: Any) -> None:
    """Create zero moments before Adam's first step, so that a checkpoint can be restored into the moments."""
    for flat in optimizer.fp32_partitioned_groups_flat:
        optimizer.optimizer.state[flat] = {
            "step": _step(optimizer.optimizer, 0, flat.device),
            "exp_avg": torch.zeros_like(flat, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(flat, requires_grad=False),
        }


def set_steps(optimizer: Any, steps: int) -> None:
    """Set the number of completed steps, which Adam's bias correction needs."""
    for flat in optimizer.fp32_partitioned_groups_flat:
        optimizer.optimizer.state[flat]["step"] = _step(optimizer.optimizer, steps, flat.device)


def _step(optimizer: torch.optim.Optimizer, steps: int, device: torch.device) -> Any:
    # torch's fused AdamW needs the number on the device of the weights; the other variants accept that, too.
    return torch.tensor(float(steps), device=device) if type(optimizer) is torch.optim.AdamW else steps


@contextmanager
def report_phases(end_phase: Callable[[str], object]) -> Iterator[None]:
    """Call `end_phase` whenever DeepSpeed reports its memory while the context is active.

    DeepSpeed has no hook for memory reports, so a profile function watches for calls of see_memory_usage.
    """
    from deepspeed.runtime.utils import see_memory_usage

    code = see_memory_usage.__code__

    def listen(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is code:
            message = str(frame.f_locals.get("message", ""))
            phase = next((name for words, name in _PHASES.items() if message.startswith(words)), None)
            if phase is not None:
                end_phase(phase)

    before = sys.getprofile()
    sys.setprofile(listen)
    try:
        yield
    finally:
        sys.setprofile(before)
