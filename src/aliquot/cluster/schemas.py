"""Objects against the schema of their kind, as the API server does it, with the extra `cluster`.

A structural schema becomes a JSON schema with Kubernetes' own keywords beside; jsonschema judges it, and evaluates
CEL rules with cel-expr-python. Core kinds go through kubernetes-validate.
"""

from __future__ import annotations

import base64
import datetime
import difflib
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import kubernetes_validate
from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings
from jsonschema import Draft202012Validator, FormatChecker, SchemaError, ValidationError, validators
from jsonschema.protocols import Validator

from aliquot.cluster.crds import KindSchema, is_core
from aliquot.cluster.field_types import expected_kind
from aliquot.core.errors import ManifestError

_NOT_JUDGED = "not-judged"
_CEL = "x-kubernetes-validations"
_NO_MEMBER = re.compile(r"No matching overloads found : (?!_|!|-)")  # a function of Kubernetes for another type
_MOST_SHOWN = 60  # characters of a value
_KINDS = {
    "string": "text, in quotes where it looks like a number or true", "integer": "an integer", "number": "a number",
    "boolean": "true or false", "array": "a list", "object": "a mapping of keys to values",
}  # fmt: skip


@dataclass(frozen=True)
class Violation:
    """`rule` is one of findings.RULES."""

    rule: str
    message: str  # begins with the path of the field
    fix: str


def violations(document: dict[str, Any], kind: KindSchema) -> list[Violation]:
    """All that keeps `document` from being of `kind`, and each rule of it that could not be judged.

    Raises UserError for a CRD whose schema is none.
    """
    validator = _validator(kind)
    value = admitted(_without_nulls(document) if is_core(kind.group) else document, kind.schema)
    errors = list(validator.iter_errors(value))
    of_another_kind = [each.absolute_path for each in errors if each.validator == "type"]
    found: list[Violation] = []
    for error in errors:
        if error.validator != _CEL or error.absolute_path not in of_another_kind:  # rules would only say so again
            found += _violations(error)
    return list(dict.fromkeys(found))


def core_violations(document: dict[str, Any], version: str) -> list[Violation] | None:
    """By kubernetes-validate, for a version of Kubernetes like "1.34". None: it has no such kind."""
    found = _core_violations(pickle.dumps(document), version)
    return None if found is None else list(found)


@lru_cache(1000)
def _core_violations(pickled: bytes, version: str) -> tuple[Violation, ...] | None:
    """kubernetes-validate reads megabytes of schemas each time, and what it is asked for is often the same."""
    try:
        kubernetes_validate.validate(pickle.loads(pickled), version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return None
    except kubernetes_validate.ValidationError as error:
        return tuple(_violations(error))
    return ()


def admitted(value: Any, schema: dict[str, Any]) -> Any:
    """`value` as the API server looks at it: with defaults, also in place of nulls; dates and keys as text."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, list):
        return [admitted(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    others = more if isinstance(more, dict) else {}
    whole = {str(key): admitted(item, properties.get(key) or others) for key, item in value.items()}
    for key, each in properties.items():
        if "default" in each and (key not in whole or (whole[key] is None and not each.get("nullable"))):
            whole[key] = admitted(each["default"], each)
    return whole


def _without_nulls(value: Any) -> Any:
    """Kubernetes' own kinds read a null as nothing."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


@cache
def _validator(kind: KindSchema) -> Validator:
    if not kind.shipped:  # seconds
        check_schema(kind)
    return _Structural(_json_schema(kind.schema), format_checker=_FORMATS)


def check_schema(kind: KindSchema) -> None:
    """Raises UserError where that of `kind` is none."""
    try:
        Draft202012Validator.check_schema(kind.schema, format_checker=_FORMATS)
    except SchemaError as error:
        place = _path(error.absolute_path)
        raise ManifestError(f"the schema of {kind.kind} is none, at {place}: {error.message}", kind.source) from None


def _json_schema(schema: Any, at_root: bool = True) -> Any:
    """The JSON schema that says what a structural one means."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in ("anyOf", "allOf", "oneOf"):
        if key in schema:
            found[key] = [_json_schema(each, False) for each in schema[key]]
    for key in ("items", "additionalProperties", "not"):
        if key in schema:
            found[key] = _json_schema(schema[key], False)
    if "properties" in schema:
        found["properties"] = {key: _json_schema(each, False) for key, each in schema["properties"].items()}
        if at_root or schema.get("x-kubernetes-embedded-resource"):
            found["properties"] = {"apiVersion": {}, "kind": {}, "metadata": {}} | found["properties"]
        opaque = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if "type" in schema and not opaque:  # within anyOf and its kin properties only add to those outside
            found["additionalProperties"] = False
    kind = ["integer", "string"] if schema.get("x-kubernetes-int-or-string") else schema.get("type")
    if kind is not None:
        found["type"] = [*([kind] if isinstance(kind, str) else kind), *(["null"] if schema.get("nullable") else [])]
    return found


def _rules(validator: Validator, rules: Sequence[dict[str, Any]], value: Any, schema: Any) -> Iterator[ValidationError]:
    if value is None:
        return
    for rule in (each for each in rules if isinstance(each, dict)):
        try:
            kept = holds(rule, value)
        except NotJudgedError as reason:
            yield ValidationError(f"{rule.get('rule')}: {reason}", validator=_NOT_JUDGED)
            continue
        if not kept:
            yield ValidationError(rule.get("message") or "a rule of this kind", validator_value=rule.get("rule"))


def _keys(validator: Validator, keys: list[str], value: Any, schema: Any) -> Iterator[ValidationError]:
    """Items of a list that is a map differ in their keys."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        yield from _twice([{key: each.get(key) for key in keys} for each in value])


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
    except re.error as error:  # Go's expressions are not quite Python's
        yield ValidationError(f"the pattern {pattern}: {error}", validator=_NOT_JUDGED)


_Structural = validators.extend(
    Draft202012Validator,
    {_CEL: _rules, "x-kubernetes-list-map-keys": _keys, "x-kubernetes-list-type": _set, "pattern": _pattern},
)


def _base64(value: str) -> bool:
    base64.b64decode(value, validate=True)
    return True


def _date_time(value: str) -> bool:
    datetime.datetime.fromisoformat(value)
    return True


# Of Kubernetes' formats those that occur; what a format is not about is left to `type`.
_FORMATS = FormatChecker(formats=())
_FORMATS.checks("int32")(lambda value: not isinstance(value, int) or -(1 << 31) <= value < 1 << 31)
_FORMATS.checks("int64")(lambda value: not isinstance(value, int) or -(1 << 63) <= value < 1 << 63)
_FORMATS.checks("byte", ValueError)(lambda value: not isinstance(value, str) or _base64(value))
_FORMATS.checks("date-time", ValueError)(lambda value: not isinstance(value, str) or _date_time(value))


def _violations(error: ValidationError) -> Iterator[Violation]:
    """One in words, or as many as it stands for."""
    path, value, wanted = _path(error.absolute_path), error.instance, error.validator_value
    schema = error.schema if isinstance(error.schema, dict) else {}
    is_value = f"{path} is {_shown(value)}"
    if error.validator == "additionalProperties":
        known = sorted(schema.get("properties", {}))
        for key in (each for each in value if each not in known):
            near = difflib.get_close_matches(str(key), known, 1, 0.6)
            some = f"known here: {', '.join(known)}" if known else "nothing may stand here"
            yield Violation("unknown-field", f"{path}.{key}".lstrip("."), f"did you mean {near[0]}?" if near else some)
    elif error.validator == "required":
        (name,) = (each for each in wanted if error.message.startswith(repr(each)))
        yield Violation("missing-field", f"{path}.{name}".lstrip(".") + " is missing", "give it")
    elif error.validator == "type":
        kind = expected_kind(schema)
        names = [wanted] if isinstance(wanted, str) else wanted
        expected = " or ".join(_KINDS[each] for each in names if each in _KINDS)
        yield Violation("malformed", is_value, "an amount like 31, 500m or 56Gi" if kind == "quantity" else expected)
    elif error.validator == _CEL:
        yield Violation("cel-rule", f"{path or 'the object'}: {error.message}", f"make this hold: {wanted}")
    elif error.validator == _NOT_JUDGED:
        yield Violation(_NOT_JUDGED, f"{path or 'the object'}: {error.message}", "only the API server can: --live")
    elif error.validator in ("x-kubernetes-list-map-keys", "x-kubernetes-list-type"):
        yield Violation("field-value", f"{path}: {error.message}", "each once")
    elif error.validator == "enum":
        near = difflib.get_close_matches(str(value), [str(each) for each in wanted], 1, 0.6)
        some = "one of " + ", ".join(str(each) for each in wanted)
        yield Violation("field-value", is_value, f"did you mean {near[0]}?" if near else some)
    elif error.validator == "pattern":
        quantity = expected_kind(schema) == "quantity"
        expected = "an amount like 31, 500m or 56Gi" if quantity else f"text like {wanted}"
        yield Violation("malformed" if quantity else "field-value", is_value, expected)
    elif error.validator == "format":
        yield Violation("field-value", is_value, f"what Kubernetes calls {wanted}")
    elif error.validator in ("anyOf", "oneOf", "allOf", "not"):
        yield Violation("field-value", is_value, f"what {error.validator} of its schema allows")
    else:  # minimum, maxLength, minItems, ...
        yield Violation("field-value", is_value, f"{error.validator}: {wanted}")


def _path(keys: Iterable[Any]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# The CEL rules of a CRD (x-kubernetes-validations). Kubernetes adds functions to the language; a rule with a function
# that is missing here is not judged.


class NotJudgedError(Exception):
    """The rule needs what is not known here: a function of Kubernetes, the object as it was before."""


def holds(rule: dict[str, Any], value: Any) -> bool:
    """Whether `value` meets `rule`, an item of x-kubernetes-validations.

    Rules about a change ask nothing of a new object. Raises NotJudgedError.
    """
    text = str(rule.get("rule"))
    if re.search(r"\boldSelf\b", text):
        if rule.get("optionalOldSelf"):
            raise NotJudgedError("it compares with the object as it was")
        return True
    result = _compiled(text).eval(data={"self": value})
    if result.type() != cel.Type.ERROR:
        return result.plain_value() is True
    if _NO_MEMBER.search(str(result)):
        raise NotJudgedError(str(result))
    return False  # as the API server has it: a key that is not there, text that is no number


@cache
def _compiled(rule: str) -> cel.Expression:
    try:
        return _environment().compile(rule)
    except RuntimeError as error:
        first = str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ERROR: ")
        raise NotJudgedError(first) from None


@cache
def _environment() -> cel.Env:
    string = cel.Type.STRING
    find = cel.FunctionDecl(
        "find", [cel.Overload("string_find", string, [string, string], is_member=True, impl=_find)]
    )  # one of Kubernetes' own that Karpenter uses
    extensions = [ext_strings.ExtStrings(), ext_optional.ExtOptional()]
    return cel.NewEnv(variables={"self": cel.Type.DYN}, extensions=extensions, functions=[find])


def _find(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match.group() if match else ""
