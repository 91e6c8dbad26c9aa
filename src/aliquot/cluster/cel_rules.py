"""Evaluate the CEL rules of a CustomResourceDefinition with cel-expr-python. Needs the extra `cluster`.

Kubernetes adds functions to CEL. Only `find` is here, because the operators' rules use it; a rule with another function
cannot be judged offline. Source: kubernetes.io/docs/reference/using-api/cel, "Kubernetes regex library".
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

_NO_MEMBER = re.compile(r"No matching overloads found : (?!_|!|-)")  # a CEL function that Kubernetes adds is missing


class NotJudgedError(Exception):
    """A CEL rule cannot be evaluated: it needs a function that Kubernetes adds to CEL, or the previous object."""


def holds(rule: dict[str, Any], value: Any) -> bool:
    """Return whether `value` satisfies a CEL rule, an item of x-kubernetes-validations. Raises NotJudgedError.

    A rule about changes of an object (`oldSelf`) is satisfied, because the object is new.
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
    return False  # an error, such as a missing key, counts as a violation, as in the API server


@cache
def _compiled(rule: str) -> cel.Expression:
    try:
        return _environment().compile(rule)
    except RuntimeError as error:
        first = str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ERROR: ")
        raise NotJudgedError(first) from None


@cache
def _environment() -> cel.Env:
    text = cel.Type.STRING
    find = cel.Overload("kubernetes_find", text, [text, text], is_member=True, impl=_find)
    extensions = [ext_strings.ExtStrings(), ext_optional.ExtOptional()]
    functions = [cel.FunctionDecl("find", [find])]
    return cel.NewEnv(variables={"self": cel.Type.DYN}, extensions=extensions, functions=functions)


def _find(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match.group() if match else ""
