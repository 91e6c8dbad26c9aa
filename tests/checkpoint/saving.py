"""Save a checkpoint at once, for tests and benchmarks; a run saves with `Saver`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.retention import Retention
from aliquot.checkpoint.save import Draft
from aliquot.core.on_rank_0 import RankGroup, run_on_all_ranks, run_on_rank_0
from aliquot.tensor_io.parts import PartSource
from aliquot.tensor_io.publish import remove_directory

# What every state holds.
PROGRESS: dict[str, Any] = {
    "step": 1, "tokens": 0, "position": {"epoch": 0, "index": 0}, "determinants": {},
    "ends": [], "evaluations": {}, "model": {"config": {}, "transformers": ""},
    "config": {"model": {"dtype": "auto"}, "data": {}, "train": {"precision": "fp32"}},
}  # fmt: skip


def save(
    root: Path,
    step: int,
    store: PartSource,
    spec: CheckpointSpec,
    state: Mapping[str, Any],
    ranks: RankGroup,
    keep: int,
) -> Path:
    """Write `root/step-<step>`, then remove all but the `keep` newest complete checkpoints. Collective.

    What `state` lacks is taken from PROGRESS.
    """
    draft = Draft(root, step, spec, PROGRESS | dict(state), ranks)
    try:
        written = run_on_all_ranks(ranks, lambda: draft.write(store)).combine(ranks)
        run_on_rank_0(ranks, lambda: draft.publish(written, Retention(keep)))
    except Exception:
        if ranks.rank == 0:
            remove_directory(draft.partial)
        raise
    return draft.target
