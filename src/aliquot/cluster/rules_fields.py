"""The rules about fields: those that Kubernetes does not know, and values that are not of a field's kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from aliquot.cluster.fields import known_fields
from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.manifests import ManifestObject

# Kinds that the rules leave to the API server.
_OPAQUE = frozenset({"Namespace", "ServiceAccount", "LocalQueue", "ClusterQueue", "ResourceFlavor", "Topology"})
_MOST_SHOWN = 60  # characters of a value


def check_fields(manifest: ManifestObject) -> Iterator[RuleFinding]:
    known = known_fields(manifest.kind)
    if known is not None:
        yield from _unknown(manifest.document, known, "", manifest)
        for path, value, expected in manifest.complaints:
            shown = "null" if value is None else repr(value)
            shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
            yield finding("malformed", manifest, f"{path} is {shown}", expected)
    elif manifest.kind not in _OPAQUE:
        yield finding("not-read", manifest, f"kind {manifest.kind}", "kubectl apply --server-side --dry-run=server")


def _unknown(value: Any, known: Any, path: str, manifest: ManifestObject) -> Iterator[RuleFinding]:
    """`known`: as in fields.json."""
    if isinstance(value, list) and isinstance(known, list):
        for index, item in enumerate(value):
            yield from _unknown(item, known[0], f"{path}[{index}]", manifest)
    elif isinstance(value, dict) and isinstance(known, Mapping):
        for key, item in value.items():
            if key in known or "*" in known:
                yield from _unknown(item, known.get(key, known.get("*")), f"{path}.{key}".lstrip("."), manifest)
            else:
                near = difflib.get_close_matches(str(key), list(known), 1, 0.6)
                yield finding(
                    "unknown-field", manifest, f"{path}.{key}".lstrip("."),
                    f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}",
                )  # fmt: skip
