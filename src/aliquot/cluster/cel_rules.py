"""Evaluate the CEL rules of a CustomResourceDefinition with cel-expr-python. Needs the extra `cluster`.

Kubernetes adds functions to CEL. Those for text and URLs are here; a rule with another one cannot be judged. Source:
kubernetes.io/docs/reference/using-api/cel, "Kubernetes URL library".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

_NO_MEMBER = re.compile(r"No matching overloads found : (?!_|!|-)")  # a CEL function that Kubernetes adds is missing
_ABSOLUTE_URL = re.compile(r"(/|[A-Za-z][A-Za-z0-9+.-]*:.)\S*")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


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
    text, flag = cel.Type.STRING, cel.Type.BOOL
    query = cel.Type.Map(text, cel.Type.List(text))
    # name: types of the result and of the arguments, whether it is called on the first argument, implementation.
    # The type of url(...) is text here: the functions below parse it again.
    added: dict[str, tuple[cel.Type, list[cel.Type], bool, Callable[..., Any]]] = {
        "find": (text, [text, text], True, _find),
        "findAll": (cel.Type.List(text), [text, text], True, _find_all),
        "isURL": (flag, [text], False, _is_url),
        "url": (text, [text], False, _url),
        "getScheme": (text, [text], True, lambda url: urlsplit(url).scheme),
        "getHost": (text, [text], True, lambda url: urlsplit(url).netloc.rpartition("@")[2]),
        "getHostname": (text, [text], True, lambda url: urlsplit(url).hostname or ""),
        "getPort": (text, [text], True, lambda url: str(urlsplit(url).port or "")),
        "getEscapedPath": (text, [text], True, lambda url: urlsplit(url).path),
        "getQuery": (query, [text], True, lambda url: parse_qs(urlsplit(url).query, keep_blank_values=True)),
    }
    functions = [
        cel.FunctionDecl(name, [cel.Overload(f"kubernetes_{name}", result, types, is_member=member, impl=code)])
        for name, (result, types, member, code) in added.items()
    ]
    extensions = [ext_strings.ExtStrings(), ext_optional.ExtOptional()]
    return cel.NewEnv(variables={"self": cel.Type.DYN}, extensions=extensions, functions=functions)


def _find(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match.group() if match else ""


def _find_all(text: str, pattern: str) -> list[str]:
    return [match.group() for match in re.finditer(pattern, text)]


def _is_url(text: str) -> bool:
    try:
        _url(text)
    except ValueError:
        return False
    return True


def _url(text: str) -> str:
    """Return `text` if it is an absolute URL or path, as Go's url.ParseRequestURI asks.

    Raises ValueError otherwise, which CEL turns into an error, and the API server into a violation.
    """
    parts = urlsplit(text)  # raises ValueError for a bad IPv6 address, and `port` for a bad port
    if not _ABSOLUTE_URL.fullmatch(text) or (parts.port or 0) < 0 or _BAD_ESCAPE.search(parts.path):
        raise ValueError(f"{text!r} is no absolute URL")
    return text
