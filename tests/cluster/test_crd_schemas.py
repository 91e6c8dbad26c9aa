"""Judging by a person's own CRDs: every keyword of a structural schema, rules that cannot be judged, odd files.

The shipped facts are those of the real CRDs and of Kubernetes' own schemas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from aliquot.cluster import check
from aliquot.cluster.check import check_manifests
from aliquot.cluster.findings import RuleFinding
from aliquot.cluster.kind_schemas import KindSchema, read_crds, supported
from aliquot.cluster.manifests import parse_manifests
from aliquot.cluster.schemas import admitted, check_schema, core_violations, violations
from aliquot.core.errors import UserError
from tests.cluster.crd import CRDS, needs_crds
from tests.tools.cluster_facts import FILE, facts

CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "boxes.example.com"},
    "spec": {
        "group": "example.com",
        "names": {"kind": "Box", "plural": "boxes"},
        "scope": "Namespaced",
        "versions": [
            {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
        ],
    },
}


def box(spec_schema: dict[str, Any]) -> KindSchema:
    return KindSchema("example.com/v1", "Box", "boxes", {"type": "object", "properties": {"spec": spec_schema}})


def rules_of(schema: dict[str, Any], value: Any) -> list[str]:
    document = {"apiVersion": "example.com/v1", "kind": "Box", "metadata": {"name": "a"}, "spec": value}
    return [each.rule for each in violations(document, box(schema))]


def of(rule: str) -> dict[str, Any]:
    return {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "x-kubernetes-validations": [{"rule": rule}],
    }


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    "schema, good, bad, rule",
    [
        (TEXT, "a", 1, "malformed"),
        ({"type": "integer"}, 1, True, "malformed"),
        ({"type": "string", "nullable": True}, None, 1, "malformed"),
        ({"x-kubernetes-int-or-string": True}, "10%", 1.5, "malformed"),
        ({"type": "integer", "format": "int32"}, 1 << 30, 1 << 31, "field-value"),
        ({"type": "string", "format": "byte"}, "YQ==", "%", "field-value"),
        ({"type": "string", "format": "date-time"}, "2026-01-01T00:00:00Z", "soon", "field-value"),
        ({"type": "string", "enum": ["In"]}, "In", "Inn", "field-value"),
        ({"type": "string", "pattern": "^a+$"}, "aa", "b", "field-value"),
        ({"type": "string", "maxLength": 1}, "a", "aa", "field-value"),
        ({"type": "integer", "minimum": 1}, 1, 0, "field-value"),
        ({"type": "array", "items": TEXT, "minItems": 1}, ["a"], [], "field-value"),
        ({"type": "array", "items": TEXT, "x-kubernetes-list-type": "set"}, ["a", "b"], ["a", "a"], "field-value"),
        (
            {
                "type": "array",
                "items": {"type": "object", "properties": {"name": TEXT, "value": TEXT}},
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
            [{"name": "a", "value": "x"}, {"name": "b", "value": "x"}],
            [{"name": "a", "value": "x"}, {"name": "a", "value": "y"}],
            "field-value",
        ),
        ({"type": "object", "properties": {"a": TEXT}}, {"a": "x"}, {"b": "x"}, "unknown-field"),
        ({"type": "object", "properties": {"a": TEXT}, "required": ["a"]}, {"a": "x"}, {}, "missing-field"),
        ({"type": "object", "additionalProperties": TEXT}, {"a": "x"}, {"a": 1}, "malformed"),
        ({"type": "object", "properties": {"a": {}}, "oneOf": [{"required": ["a"]}]}, {"a": 1}, {}, "field-value"),
        (of("self.all(k, k != '')"), {"a": 1}, {"": 1}, "cel-rule"),
        (of("self.a.size() > 0"), {"a": "x"}, {}, "cel-rule"),  # what is not there is no value of the rule
        (of("self.a.find('^[^@]+') == 'al2'"), {"a": "al2@x"}, {"a": "al2023@x"}, "cel-rule"),
        (of("!has(self.a) || self.?a.orValue('') != ''"), {}, {"a": ""}, "cel-rule"),
    ],
)  # fmt: skip
def test_keywords(schema: dict[str, Any], good: Any, bad: Any, rule: str) -> None:
    assert rules_of(schema, good) == []
    assert set(rules_of(schema, bad)) == {rule}


@pytest.mark.parametrize(
    "rule",
    [
        "ip(self.a).isIPv4()",
        "quantity(self.a).isGreaterThan(quantity('1'))",
        "isURL(self.a)",
        "self.b.indexOf('x') == 0",
        "self ==",
    ],
)
def test_unevaluable_rules_are_reported(rule: str) -> None:
    assert rules_of(of(rule), {"a": "x", "b": ["x"]}) == ["not-judged"]


def test_rules_about_a_change_ask_nothing_of_a_new_object() -> None:
    assert rules_of(of("self == oldSelf"), {}) == []
    optional = of("!oldSelf.hasValue() || self == oldSelf.value()")
    optional["x-kubernetes-validations"][0]["optionalOldSelf"] = True
    assert rules_of(optional, {}) == ["not-judged"]


def test_go_patterns_without_python_equivalent() -> None:
    assert rules_of({"type": "string", "pattern": r"(?i-s:a)(?s)\pL"}, "a") == ["not-judged"]


def test_objects_are_read_as_the_server_reads_them() -> None:
    (dated,) = yaml.safe_load_all("{a: 2026-01-01, b: null, 1: {d: null}}")
    schema = {
        "type": "object",
        "properties": {
            "a": TEXT,
            "b": TEXT,
            "c": {"type": "object", "default": {}, "properties": {"e": {"default": 1}}},
        },
    }
    assert admitted(dated, schema) == {"a": "2026-01-01", "b": None, "1": {"d": None}, "c": {"e": 1}}


def checked(text: str, *crds: KindSchema) -> list[RuleFinding]:
    return check_manifests(list(parse_manifests(text, "x.yaml")), crds=crds)


def test_user_supplied_crds(tmp_path: Path) -> None:
    own = tmp_path / "crds" / "example"
    own.mkdir(parents=True)
    (own / "box.yaml").write_text("# boxes\n---\n" + yaml.safe_dump(CRD))
    (own / "notes.yaml").write_text("a: [")  # no CRD: not looked at
    (box_schema,) = read_crds(tmp_path / "crds")
    assert (box_schema.api_version, box_schema.kind, box_schema.source) == (
        "example.com/v1",
        "Box",
        str(own / "box.yaml"),
    )
    good = "apiVersion: example.com/v1\nkind: Box\nmetadata: {name: a}\n"
    assert [each.rule for each in checked(good)] == ["not-read"]
    assert checked(good, box_schema) == []
    (found,) = checked(good.replace("Box", "Bocks"), box_schema)
    assert (found.rule, found.fix) == ("unknown-kind", "did you mean example.com/v1 Box?")


@pytest.mark.parametrize(
    "text, says",
    [("kind: CustomResourceDefinition\n", "without a schema"), ("kind: [CustomResourceDefinition", "cannot read"),
     ("a: 1\n", "no CustomResourceDefinition here")],
)  # fmt: skip
def test_files_without_crds_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=says):
        read_crds(tmp_path)


@pytest.mark.parametrize(
    "text, rule",
    [
        ("apiVersion: v1\nkind: Sekret\nmetadata: {name: a}\n", "unknown-kind"),
        ("apiVersion: v1\nkind: Secret\nmetadata: {name: a, labels: {a: 1}}\n", "malformed"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {}\n", "missing-field"),
        ("apiVersion: [v1]\nkind: Secret\n", "malformed"),
        ("apiVersion: ../v1\nkind: Secret\n", "malformed"),
        ("apiVersion: v1\nkind: a/b\n", "malformed"),
        ("apiVersion: storage.example.com/v1\nkind: StorageClass\nmetadata: {name: a}\n", "not-read"),
        ("apiVersion: kueue.x-k8s.io/v1beta1\nkind: LocalQeue\nmetadata: {name: a}\n", "unknown-kind"),
        ("apiVersion: karpenter.sh/v1beta1\nkind: NodePool\nmetadata: {name: a}\n", "unknown-kind"),
        ("apiVersion: example.x-k8s.io/v1\nkind: Box\nmetadata: {name: a}\n", "not-read"),
    ],
)
def test_objects_without_a_crd(text: str, rule: str) -> None:
    assert rule in {each.rule for each in checked(text)}


def test_core_kinds_are_judged_by_kubernetes_validate() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"nam": "x"}]}}
    assert core_violations(pod, "1.34") != []
    pod["spec"] = {"containers": [{"name": "x"}]}
    assert core_violations(pod, "1.34") == []
    assert core_violations({"apiVersion": "v1", "kind": "Nothing"}, "1.34") is None


def test_missing_extra_names_skipped_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    text = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: a}\nspec: {accessMode: x, volumeName: [1]}\n"
    (found,) = checked(text)
    assert (found.rule, found.level, found.fix) == ("not-judged", "warning", "pip install 'aliquot[cluster]'")


@pytest.mark.parametrize("schema", [{"properties": "x"}, {"type": "box"}, {"type": "object", "required": "a"}])
def test_invalid_schema(schema: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^boxes: the schema of Box is none, at properties\.spec"):
        rules_of(schema, {})


def test_object_with_a_status() -> None:
    """As `kubectl get -o yaml` prints it."""
    queue = (
        "apiVersion: kueue.x-k8s.io/v1beta2\nkind: LocalQueue\nmetadata: {name: a, uid: x}\nspec: {clusterQueue: b}\n"
    )
    assert checked(queue + "status: {pendingWorkloads: 1, conditions: []}\n") == []


@needs_crds
def test_facts_equal_the_crds() -> None:
    assert FILE.read_text() == facts(CRDS), "python -m tests.tools.cluster_facts --crds DIR"


@pytest.mark.long
def test_facts_are_schemas() -> None:
    """Which is not looked at again where they are used: it takes seconds."""
    assert all(each.shipped for each in supported())
    for each in supported():
        check_schema(each)
