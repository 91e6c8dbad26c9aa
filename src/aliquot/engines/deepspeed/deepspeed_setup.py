"""Start DeepSpeed: the C++ ops that it compiles, and the optimizer that it is given."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from aliquot.core.errors import MissingToolError
from aliquot.engines.base import EngineSpec
from aliquot.optim.adamw import decays

_TOOLS = {"g++": "a C++ compiler (Debian: apt install g++)", "ninja": "pip install ninja"}
# What DeepSpeed says of its memory while it builds -> the phase of the ledger that ends there.
_PHASES = {
    "Before creating fp16 partitions": "after load",
    "After creating fp16 partitions": "after bf16 partitions",
    "After creating fp32 partitions": "after fp32 master",
    "After initializing optimizer states": "after optimizer state",
}
_YOUNG_S = 120.0  # a build on another host of a shared home directory may hold a lock that looks abandoned here
_log = logging.getLogger(__name__)


def prepare_ops() -> None:
    """Make sure that DeepSpeed can start on CPUs, where it compiles its shared-memory op whether it is used or not.

    Raises UserError where a tool is missing.
    """
    if missing := missing_tools():
        raise MissingToolError(
            f"DeepSpeed compiles C++ ops when it starts on CPUs and needs {' and '.join(missing)};"
            " the engines host and fsdp need no compiler"
        )
    for lock in locks():
        if _is_abandoned(lock):
            lock.unlink(missing_ok=True)
            _log.warning("removed %s, which a killed build had left: all later ones would wait for it forever", lock)


def missing_tools() -> list[str]:
    """How to get each tool that is not there."""
    # pip puts ninja beside Python, which need not be on the PATH of whoever starts that Python.
    beside = sysconfig.get_path("scripts")
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), beside))
    return [advice for tool, advice in _TOOLS.items() if shutil.which(tool) is None]


def locks() -> list[Path]:
    """The locks of torch's builds of DeepSpeed's ops."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"]) if "TORCH_EXTENSIONS_DIR" in os.environ else cache
    return sorted(lock for depth in ("*/lock", "*/*/lock") for lock in root.glob(depth))


def _is_abandoned(lock: Path) -> bool:
    """Old, and open in no process of this host: whoever builds keeps it open."""
    with suppress(FileNotFoundError):
        return time.time() - lock.stat().st_mtime > _YOUNG_S and lock not in _open_files()
    return False


def _open_files() -> Iterator[Path]:
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it ended meanwhile, or is another user's
            yield descriptor.readlink()


def adamw(
    weights: Sequence[tuple[str, nn.Parameter]], spec: EngineSpec, settings: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """AdamW over two groups, matrices with weight decay and the rest without, as all engines have it."""
    decaying = [w for name, w in weights if decays(name, _shape(w))]
    rest = [w for name, w in weights if not decays(name, _shape(w))]
    groups = [{"params": decaying, "weight_decay": spec.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {
        "lr": 0.0,
        "betas": (spec.adam_beta1, spec.adam_beta2),
        "eps": spec.adam_epsilon,
    }
    offload = settings["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    if offload == "none" or not settings.get("zero_force_ds_cpu_optimizer", True):
        return torch.optim.AdamW(groups, **options)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    return optimizer


def prepare_states(optimizer: Any) -> None:
    """Make the zero moments that Adam would make in its first step: the engine's parts exist from the start."""
    for flat in optimizer.fp32_partitioned_groups_flat:
        optimizer.optimizer.state[flat] = {
            "step": _step(optimizer.optimizer, 0),
            "exp_avg": torch.zeros_like(flat, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(flat, requires_grad=False),
        }


def set_steps(optimizer: Any, steps: int) -> None:
    """Set the step that Adam's bias correction counts from."""
    for flat in optimizer.fp32_partitioned_groups_flat:
        optimizer.optimizer.state[flat]["step"] = _step(optimizer.optimizer, steps)


def _step(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.tensor(float(steps)) if type(optimizer) is torch.optim.AdamW else steps


def _shape(weight: Any) -> tuple[int, ...]:
    return tuple(weight.ds_shape)


@contextmanager
def building_phases(building: Any) -> Iterator[None]:
    """Call `building` where DeepSpeed would print its memory; only a profiler of calls gets to know of that."""
    from deepspeed.runtime.utils import see_memory_usage

    code = see_memory_usage.__code__

    def listen(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is code:
            message = str(frame.f_locals.get("message", ""))
            phase = next((name for words, name in _PHASES.items() if message.startswith(words)), None)
            if phase is not None:
                building(phase)

    before = sys.getprofile()
    sys.setprofile(listen)
    try:
        yield
    finally:
        sys.setprofile(before)
