"""The rule about fields that Kubernetes does not know: a misspelt one is silently nothing, or refuses the object."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from aliquot.cluster.findings import Finding, finding
from aliquot.cluster.manifests import Manifest

# Kinds that the rules leave to the API server.
_OPAQUE = frozenset({"Namespace", "ServiceAccount", "LocalQueue", "ClusterQueue", "ResourceFlavor", "Topology"})


def check_fields(manifest: Manifest) -> Iterator[Finding]:
    kind = "TrainingRuntime" if manifest.kind == "ClusterTrainingRuntime" else manifest.kind
    known = _fields().get(kind)
    if known is not None:
        yield from _unknown(manifest.document, known, "", manifest)
    elif kind not in _OPAQUE:
        yield finding("not-read", manifest, f"kind {manifest.kind}", "kubectl apply --server-side --dry-run=server")


def _unknown(value: Any, known: Any, path: str, manifest: Manifest) -> Iterator[Finding]:
    """`known` maps names to what lies below them; 1: anything."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, known, f"{path}[{index}]", manifest)
    elif isinstance(value, dict) and isinstance(known, Mapping):
        for key, item in value.items():
            if key in known:
                yield from _unknown(item, known[key], f"{path}.{key}".lstrip("."), manifest)
            else:
                near = difflib.get_close_matches(str(key), list(known), 1, 0.6)
                yield finding(
                    "unknown-field", manifest, f"{path}.{key}".lstrip("."),
                    f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}",
                )  # fmt: skip


@cache
def _fields() -> dict[str, Any]:
    """Names of fields by kind, of Karpenter 1.14, Trainer 2.1 to 2.3 and Kubernetes' storage kinds."""
    loaded: dict[str, Any] = json.loads(files("aliquot.cluster").joinpath("fields.json").read_text())
    return loaded
