"""CRC-32 of a concatenation from the CRCs of its pieces, without the bytes: zlib's crc32_combine in Python.

A CRC is a polynomial over GF(2) modulo P; appending n bytes multiplies it by x^(8n) (zlib 1.2.12, crc32.c). Bits are
reflected: the highest bit of the word is the coefficient of x^0.
"""

from __future__ import annotations

from functools import cache, lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of a + b, given those of a and b and the length of b."""
    return _multiply(_shift(second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """a times b modulo P."""
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)  # pieces come in few lengths
def _shift(length_bytes: int) -> int:
    """x^(8 length) modulo P."""
    result = _ONE
    power = 3  # 8 = 2^3
    while length_bytes:
        if length_bytes & 1:
            result = _multiply(_squared(power), result)
        length_bytes >>= 1
        power += 1
    return result


@cache
def _squared(times: int) -> int:
    """x^(2^times) modulo P."""
    if times == 0:
        return _ONE >> 1
    root = _squared(times - 1)
    return _multiply(root, root)
