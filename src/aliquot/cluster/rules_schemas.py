"""The rule of rules: an object is what its kind's schema says, CEL rules included.

Without the extra `cluster` only names and kinds of fields are looked at, and a finding says so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from aliquot.cluster.crds import KindSchema
from aliquot.cluster.fields import schema_below, schemas_of_kind
from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.manifests import ManifestObject, mapping
from aliquot.cluster.pools import LABEL_VALUE

KUBERNETES = "1.34"  # whose core kinds are judged

_NEEDED = {"kubernetes_validate": "kubernetes-validate", "cel_expr_python": "cel-expr-python"}
_CORE_GROUP = re.compile(r"^([a-z]*|[a-z.]+\.k8s\.io)$")  # those of operators have another domain, or x-k8s.io
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")


def check_schemas(manifests: Sequence[ManifestObject], known: Sequence[KindSchema]) -> Iterator[RuleFinding]:
    """`known`: where a kind is there twice, as of two versions of an operator, that one counts which fits best."""
    missing = [name for module, name in _NEEDED.items() if find_spec(module) is None]
    if missing:
        yield finding(
            "not-judged", "schemas", f"only names and kinds of fields are: {' and '.join(missing)} are not installed",
            "pip install 'aliquot[cluster]'",
        )  # fmt: skip
    for manifest in manifests:
        api_version, kind = manifest.document.get("apiVersion"), manifest.document.get("kind")
        if not isinstance(api_version, str) or not isinstance(kind, str):
            yield finding("malformed", manifest, f"apiVersion is {api_version!r}, kind is {kind!r}", "words, both")
            continue
        yield from _check_names(manifest)
        if missing:
            yield from _names_and_kinds(manifest, known)
        else:
            yield from _judged(manifest, known)


def _judged(manifest: ManifestObject, known: Sequence[KindSchema]) -> Iterator[RuleFinding]:
    from aliquot.cluster.schemas import Violation, core_violations, violations

    candidates = schemas_of_kind(manifest.document, known)
    results = [(violations(manifest.document, each), each.source) for each in candidates]
    found: list[Violation] = []
    source = f"Kubernetes {KUBERNETES}"
    if results:
        found, source = min(results, key=lambda result: len(result[0]))
    if not found:
        stub = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest.document.get("metadata")}
        of_core = core_violations(stub if _is_custom(candidates) else manifest.document, KUBERNETES)
        if of_core is None:
            yield from _unknown(manifest, known)
        found = of_core or []
    for each in found:
        yield finding(each.rule, manifest, f"{each.message} ({source})", each.fix)


def _is_custom(candidates: Sequence[KindSchema]) -> bool:
    return any(not _CORE_GROUP.match(each.group) or each.group.endswith(".x-k8s.io") for each in candidates)


def _unknown(manifest: ManifestObject, known: Sequence[KindSchema]) -> Iterator[RuleFinding]:
    """A kind that a known group lacks is an error; of a group that nobody knows, nothing is known."""
    api_version = str(manifest.document["apiVersion"])
    group = api_version.rpartition("/")[0]
    kinds = sorted({f"{each.api_version} {each.kind}" for each in known if each.group == group})
    if not kinds and (not _CORE_GROUP.match(group) or group.endswith(".x-k8s.io")):
        near = difflib.get_close_matches(group, {each.group for each in known}, 1, 0.8)
        fix = f"did you mean {near[0]}?" if near else "--crds DIR with its CRD, or --live"
        yield finding("not-read", manifest, f"{manifest.kind} of {api_version}", fix)
        return
    near = difflib.get_close_matches(f"{api_version} {manifest.kind}", kinds, 1, 0.6)
    fix = f"did you mean {near[0]}?" if near else "see `kubectl api-resources`"
    yield finding("unknown-kind", manifest, f"{api_version} has no {manifest.kind}", fix)


def _check_names(manifest: ManifestObject) -> Iterator[RuleFinding]:
    """What the API server asks of metadata, and no schema says."""
    metadata = mapping(manifest.document.get("metadata"))
    name = metadata.get("name")
    if name is None and metadata.get("generateName") is None:
        yield finding("missing-field", manifest, "metadata.name is missing", "give it")
    elif isinstance(name, str) and (len(name) > 253 or not _NAME.match(name)):
        yield finding("field-value", manifest, f"metadata.name is {name!r}", "small letters, digits, - and .")
    for part in ("labels", "annotations"):
        for key, value in mapping(metadata.get(part)).items():
            if not _KEY.match(str(key)):
                yield finding("field-value", manifest, f"metadata.{part} has {key!r}", "a name, or domain/name")
            if part == "labels" and isinstance(value, str) and not (LABEL_VALUE.match(value) and len(value) < 64):
                fix = "at most 63 letters, digits, -, _ and ."
                yield finding("field-value", manifest, f"metadata.labels.{key} is {value!r}", fix)


def _names_and_kinds(manifest: ManifestObject, known: Sequence[KindSchema]) -> Iterator[RuleFinding]:
    candidates = schemas_of_kind(manifest.document, known)
    if not candidates:
        yield from _unknown(manifest, known)
        return
    results = [list(_unknown_fields(manifest.document, each.schema, "")) for each in candidates]
    for path, near in min(results, key=len):
        yield finding("unknown-field", manifest, path, f"did you mean {near}?" if near else "see `kubectl explain`")
    for path, value, expected in manifest.complaints:
        yield finding("malformed", manifest, f"{path} is {value!r}", expected)


def _unknown_fields(value: object, schema: dict[str, object], path: str) -> Iterator[tuple[str, str | None]]:
    """Paths, each with the nearest known name."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            inner = schema.get("items")
            yield from _unknown_fields(item, inner if isinstance(inner, dict) else {}, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            below = schema_below(schema, key)
            here = f"{path}.{key}".lstrip(".")
            if below is not None:
                yield from _unknown_fields(item, below, here)
            else:
                near = difflib.get_close_matches(str(key), list(mapping(schema["properties"])), 1, 0.6)
                yield here, near[0] if near else None
