"""Validate objects against the schema of their kind, like the API server. Needs the extra `cluster`.

The structural schema of a custom resource is converted to a JSON schema, which keeps the additional keywords of
Kubernetes. jsonschema validates objects with it, and cel-expr-python evaluates the CEL rules. Objects of core kinds are
validated by kubernetes-validate.

Kubernetes adds functions to CEL. Only `find` is here, because the operators' rules use it; a rule with another function
cannot be judged offline. Source: kubernetes.io/docs/reference/using-api/cel, "Kubernetes regex library".
"""

from __future__ import annotations

import base64
import datetime
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

import kubernetes_validate
from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings
from jsonschema import Draft202012Validator, FormatChecker, SchemaError, ValidationError, validators
from jsonschema.protocols import Validator

from aliquot.cluster.findings import did_you_mean
from aliquot.cluster.kind_schemas import EXPECTED, KindSchema, Violation, expected_kind, is_core
from aliquot.core.decode import without_nulls
from aliquot.core.errors import ManifestError

_NOT_JUDGED = "not-judged"
_CEL = "x-kubernetes-validations"
_NO_MEMBER = re.compile(r"No matching overloads found : (?!_|!|-)")  # a CEL function that Kubernetes adds is missing
_MOST_SHOWN = 60  # maximum number of characters of a value in a message


def violations(document: dict[str, Any], kind: KindSchema) -> list[Violation]:
    """Return the violations of the schema `kind`, and the CEL rules that could not be evaluated.

    Raises UserError for a CRD with an invalid schema.
    """
    validator = _validator(kind)
    # The API server ignores nulls in objects of core kinds.
    value = admitted(without_nulls(document) if is_core(kind.group) else document, kind.schema)
    errors = list(validator.iter_errors(value))
    mistyped_paths = [error.absolute_path for error in errors if error.validator == "type"]
    # A CEL rule about a value of the wrong type would repeat the type error.
    relevant = [error for error in errors if error.validator != _CEL or error.absolute_path not in mistyped_paths]
    return list(dict.fromkeys(violation for error in relevant for violation in _violations(error)))


def core_violations(document: dict[str, Any], version: str) -> list[Violation] | None:
    """Return the violations that kubernetes-validate reports for an object of a core kind.

    `version` is a version of Kubernetes, such as "1.34". Returns None if that version does not have the kind.
    """
    return _core_violations(pickle.dumps(document), version)


@lru_cache(1000)
def _core_violations(pickled: bytes, version: str) -> list[Violation] | None:
    """Cache the results, because kubernetes-validate reads megabytes of schemas in each call."""
    try:
        kubernetes_validate.validate(pickle.loads(pickled), version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return None
    except kubernetes_validate.ValidationError as error:
        return list(_violations(error))
    return []


def admitted(value: Any, schema: dict[str, Any]) -> Any:
    """Return `value` as the API server validates it: with the schema's defaults, and with dates and keys as text.

    Defaults also replace nulls, unless the field is nullable.
    """
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, list):
        return [admitted(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    default_schema = more if isinstance(more, dict) else {}
    whole = {str(key): admitted(item, properties.get(key) or default_schema) for key, item in value.items()}
    for key, inner in properties.items():
        if "default" in inner and (key not in whole or (whole[key] is None and not inner.get("nullable"))):
            whole[key] = admitted(inner["default"], inner)
    return whole


@cache
def _validator(kind: KindSchema) -> Validator:
    if not kind.shipped:  # schemas in facts.json are valid, and the check takes seconds
        check_schema(kind)
    return _Structural(_json_schema(kind.schema), format_checker=_FORMATS)


def check_schema(kind: KindSchema) -> None:
    """Raise UserError if the schema of `kind` is invalid."""
    try:
        Draft202012Validator.check_schema(kind.schema, format_checker=_FORMATS)
    except SchemaError as error:
        place = _path(error.absolute_path)
        raise ManifestError(f"the schema of {kind.kind} is none, at {place}: {error.message}", kind.source) from None


def _json_schema(schema: Any, at_root: bool = True) -> Any:
    """Convert a structural schema of Kubernetes to a JSON schema for jsonschema."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    lists, items = ("anyOf", "allOf", "oneOf"), ("items", "additionalProperties", "not")
    result |= {key: [_json_schema(item, False) for item in schema[key]] for key in lists if key in schema}
    result |= {key: _json_schema(schema[key], False) for key in items if key in schema}
    if "properties" in schema:
        result["properties"] = {key: _json_schema(item, False) for key, item in schema["properties"].items()}
        if at_root or schema.get("x-kubernetes-embedded-resource"):
            result["properties"] = {"apiVersion": {}, "kind": {}, "metadata": {}} | result["properties"]
        opaque = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        # Schemas inside anyOf, allOf and oneOf have no type; there, other fields than `properties` are allowed.
        if "type" in schema and not opaque:
            result["additionalProperties"] = False
    kind = ["integer", "string"] if schema.get("x-kubernetes-int-or-string") else schema.get("type")
    if kind is not None:
        result["type"] = [*([kind] if isinstance(kind, str) else kind), *(["null"] if schema.get("nullable") else [])]
    return result


def _rules(validator: Validator, rules: Sequence[dict[str, Any]], value: Any, schema: Any) -> Iterator[ValidationError]:
    if value is None:
        return
    for rule in (item for item in rules if isinstance(item, dict)):
        try:
            is_met = _holds(rule, value)
        except _NotJudgedError as reason:
            yield ValidationError(f"{rule.get('rule')}: {reason}", validator=_NOT_JUDGED)
            continue
        if not is_met:
            yield ValidationError(rule.get("message") or "a rule of this kind", validator_value=rule.get("rule"))


def _keys(validator: Validator, keys: list[str], value: Any, schema: Any) -> Iterator[ValidationError]:
    """Check that the items of a list with x-kubernetes-list-map-keys differ in the values of these keys."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        yield from _twice([{key: item.get(key) for key in keys} for item in value])


def _set(validator: Validator, kind: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if kind == "set" and isinstance(value, list):
        yield from _twice(value)


def _twice(items: Sequence[Any]) -> Iterator[ValidationError]:
    for index, item in enumerate(items):
        if item in items[:index]:
            yield ValidationError(f"{_shown(item)} is there twice", path=[index], validator_value="each once")


def _pattern(validator: Validator, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(value, str):
        return
    try:
        if not re.search(pattern, value):
            yield ValidationError("does not match")
    except re.error as error:  # Go's regular expressions differ from Python's
        yield ValidationError(f"the pattern {pattern}: {error}", validator=_NOT_JUDGED)


_Structural = validators.extend(
    Draft202012Validator,
    {_CEL: _rules, "x-kubernetes-list-map-keys": _keys, "x-kubernetes-list-type": _set, "pattern": _pattern},
)


# Checks of the formats that occur in schemas. A check accepts values of other types, because `type` rejects those.
_FORMATS = FormatChecker(formats=())
_FORMATS.checks("int32")(lambda value: not isinstance(value, int) or -(1 << 31) <= value < 1 << 31)
_FORMATS.checks("int64")(lambda value: not isinstance(value, int) or -(1 << 63) <= value < 1 << 63)
_FORMATS.checks("byte", ValueError)(
    lambda value: not isinstance(value, str) or base64.b64decode(value, validate=True) is not None
)
_FORMATS.checks("date-time", ValueError)(
    lambda value: not isinstance(value, str) or datetime.datetime.fromisoformat(value) is not None
)


def _violations(error: ValidationError) -> Iterator[Violation]:
    """Convert an error of jsonschema to violations; an error about unknown fields gives one violation per field."""
    path, value, expected_value = _path(error.absolute_path), error.instance, error.validator_value
    schema = error.schema if isinstance(error.schema, dict) else {}
    is_value, is_quantity = f"{path} is {_shown(value)}", expected_kind(schema) == "quantity"
    match error.validator:
        case "additionalProperties":
            known = sorted(schema.get("properties", {}))
            some = f"known here: {', '.join(known)}" if known else "nothing may stand here"
            for key in (item for item in value if item not in known):
                yield Violation("unknown-field", f"{path}.{key}".lstrip("."), did_you_mean(key, known, some))
        case "required":
            (name,) = (item for item in expected_value if error.message.startswith(repr(item)))
            yield Violation("missing-field", f"{path}.{name}".lstrip(".") + " is missing", "give it")
        case "type":
            kinds = [expected_value] if isinstance(expected_value, str) else expected_value
            names = ["quantity"] if is_quantity else kinds
            yield Violation("malformed", is_value, " or ".join(EXPECTED[name] for name in names if name in EXPECTED))
        case "x-kubernetes-validations":
            yield Violation("cel-rule", f"{path or 'the object'}: {error.message}", f"make this hold: {expected_value}")
        case "not-judged":
            yield Violation(_NOT_JUDGED, f"{path or 'the object'}: {error.message}", "only the API server can: --live")
        case "x-kubernetes-list-map-keys" | "x-kubernetes-list-type":
            yield Violation("field-value", f"{path}: {error.message}", "each once")
        case "enum":
            allowed = [str(item) for item in expected_value]
            yield Violation("field-value", is_value, did_you_mean(value, allowed, f"one of {', '.join(allowed)}"))
        case "pattern":
            expected = EXPECTED["quantity"] if is_quantity else f"text like {expected_value}"
            yield Violation("malformed" if is_quantity else "field-value", is_value, expected)
        case "format":
            yield Violation("field-value", is_value, f"what Kubernetes calls {expected_value}")
        case "anyOf" | "oneOf" | "allOf" | "not":
            yield Violation("field-value", is_value, f"what {error.validator} of its schema allows")
        case _:  # minimum, maxLength, minItems, ...
            yield Violation("field-value", is_value, f"{error.validator}: {expected_value}")


def _path(keys: Iterable[Any]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class _NotJudgedError(Exception):
    """A CEL rule cannot be evaluated: it needs a function that Kubernetes adds to CEL, or the previous object."""


def _holds(rule: dict[str, Any], value: Any) -> bool:
    """Return whether `value` satisfies a CEL rule, an item of x-kubernetes-validations. Raises _NotJudgedError.

    A rule about changes of an object (`oldSelf`) is satisfied, because the object is new.
    """
    text = str(rule.get("rule"))
    if re.search(r"\boldSelf\b", text):
        if rule.get("optionalOldSelf"):
            raise _NotJudgedError("it compares with the object as it was")
        return True
    result = _compiled(text).eval(data={"self": value})
    if result.type() != cel.Type.ERROR:
        return result.plain_value() is True
    if _NO_MEMBER.search(str(result)):
        raise _NotJudgedError(str(result))
    return False  # an error, such as a missing key, counts as a violation, as in the API server


@cache
def _compiled(rule: str) -> cel.Expression:
    try:
        return _environment().compile(rule)
    except RuntimeError as error:
        raise _NotJudgedError(str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ERROR: ")) from None


@cache
def _environment() -> cel.Env:
    text = cel.Type.STRING
    find = cel.Overload("kubernetes_find", text, [text, text], is_member=True, impl=_find)
    return cel.NewEnv(
        variables={"self": cel.Type.DYN},
        extensions=[ext_strings.ExtStrings(), ext_optional.ExtOptional()],
        functions=[cel.FunctionDecl("find", [find])],
    )


def _find(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match.group() if match else ""
