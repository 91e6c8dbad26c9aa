"""Which versions of Kubeflow Trainer, JobSet, Karpenter and Kueue go together.

Trainer's manifests bring the JobSet that it was built with: 2.1.0 has 0.10.1, 2.3.0 has 0.12.0. karpenter.sh/v1 exists
since Karpenter 1.0. Kueue speaks runtimePatches since 0.17 and, with them, only to Trainer 2.2 and later; up to 0.16 it
speaks podTemplateOverrides (kubernetes-sigs/kueue issues 11931 and 14722).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.manifests import ManifestObject, dig, listed

Version = tuple[int, int]

# What the name of an image holds.
# The end of an image's name.
_IMAGES = {
    "trainer": "trainer-controller-manager", "jobset": "jobset", "karpenter": "karpenter/controller", "kueue": "kueue",
}  # fmt: skip
_RUNTIME_PATCHES: Version = (2, 2)  # the first Trainer that has them
_JOBSET_OF_TRAINER: dict[Version, Version] = {(2, 1): (0, 10), (2, 3): (0, 12)}


@dataclass(frozen=True)
class Versions:
    """(major, minor) of what is installed; None: not found, or its image's tag is no version."""

    trainer: Version | None = None
    jobset: Version | None = None
    karpenter: Version | None = None
    kueue: Version | None = None

    @classmethod
    def of(cls, deployments: Sequence[Mapping[str, Any]]) -> Versions:
        """From the image tags of the cluster's Deployments."""
        found: dict[str, Version] = {}
        for deployment in deployments:
            for container in listed(dig(dict(deployment), "spec", "template", "spec", "containers")):
                image = str(container.get("image")).partition("@")[0]
                tag = re.search(r":v?(\d+)\.(\d+)[^/:]*$", image)
                for name, part in _IMAGES.items():
                    if tag is not None and f"/{image[: tag.start()]}".endswith(f"/{part}"):
                        found.setdefault(name, (int(tag[1]), int(tag[2])))
        return cls(**found)


def check_versions(installed: Versions, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    trainer, jobset = installed.trainer, installed.jobset
    if trainer is not None:
        yield from _dialect(trainer, manifests)
        wanted = _JOBSET_OF_TRAINER.get(trainer)
        if wanted is not None and jobset is not None and jobset < wanted:
            yield finding(
                "versions", "JobSet", f"{_text(jobset)} with Kubeflow Trainer {_text(trainer)}",
                f"JobSet {_text(wanted)} or later; Trainer's own manifests bring it",
            )  # fmt: skip
    if installed.karpenter is not None and installed.karpenter < (1, 0):
        yield finding(
            "versions", "Karpenter", f"{_text(installed.karpenter)} does not serve karpenter.sh/v1", "Karpenter 1.x"
        )
    queued = any(each.get("metadata", "labels", "kueue.x-k8s.io/queue-name") for each in manifests)
    if queued and trainer is not None and installed.kueue is not None:
        new_trainer, new_kueue = trainer >= _RUNTIME_PATCHES, installed.kueue >= (0, 17)
        if new_trainer != new_kueue:
            yield finding(
                "versions", "Kueue", f"{_text(installed.kueue)} with Kubeflow Trainer {_text(trainer)}",
                "Kueue 0.17 or later" if new_trainer else "Kueue 0.16, or Kubeflow Trainer 2.3",
            )  # fmt: skip


def _dialect(trainer: Version, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    wrong, right = ("runtimePatches", "2.1") if trainer < _RUNTIME_PATCHES else ("podTemplateOverrides", "2.3")
    for manifest in manifests:
        if manifest.kind == "TrainJob" and manifest.get("spec", wrong) is not None:
            yield finding(
                "trainer-dialect", manifest, f"spec.{wrong}, and Kubeflow Trainer {_text(trainer)} is installed",
                f"render with cluster.trainer={right}",
            )  # fmt: skip


def _text(version: Version) -> str:
    return ".".join(map(str, version))
