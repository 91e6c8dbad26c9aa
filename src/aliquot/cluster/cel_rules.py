"""The CEL rules of a CRD (x-kubernetes-validations), evaluated by cel-expr-python.

Kubernetes has functions beside those of the language. A rule that uses one which is not here is not judged.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

_NO_MEMBER = re.compile(r"No matching overloads found : (?!_|!|-)")  # a function of Kubernetes for another type


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
