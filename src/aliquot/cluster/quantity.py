"""Convert Kubernetes quantities ("31", "500m", "57179Mi") to integers and back."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

MIB = 1 << 20
GIB = 1 << 30

_SCALE = {
    "": Fraction(1), "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15),
    "E": Fraction(10**18), "Ei": Fraction(2**60),
    "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40), "Pi": Fraction(2**50),
}  # fmt: skip
_LARGEST = Fraction(2**63 - 1)  # larger quantities are read as this value
_QUANTITY = re.compile(r"^([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]{1,3})|([numkMGTPE]|[KMGTPE]i))?$")


def parse(value: object) -> Fraction | None:
    """Parse a quantity; None if `value` is no quantity."""
    match = _QUANTITY.match(str(value))
    if match is None or isinstance(value, bool):
        return None
    number, exponent, suffix = match.groups()
    return min(_LARGEST, Fraction(Decimal(number + (exponent or ""))) * _SCALE[suffix or ""])


def parse_bytes(value: object) -> int | None:
    """Parse bytes, rounded up; None if `value` is no quantity."""
    number = parse(value)
    return None if number is None else -int(-number // 1)


def mebibytes(size_bytes: int) -> str:
    """Format mebibytes, rounded down, because a limit must not exceed the available memory."""
    return f"{size_bytes // MIB}Mi"
