"""What torch.compile is told of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor import config

from aliquot.machine import inductor
from aliquot.machine.cpu import read_cpu


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    inductor.kernel_options.cache_clear()
    yield
    inductor.kernel_options.cache_clear()


@pytest.mark.parametrize(
    ("model", "isa", "march", "expected"),
    [
        ("Intel(R) Xeon(R) Processor", ("avx512f", "avx2"), None, {"cpp.march": "x86-64-v4"}),
        ("Intel(R) Core(TM) i7", ("avx2",), None, None),
        ("AMD EPYC 9R14", ("avx512f", "avx2"), None, None),
        ("Intel(R) Xeon(R) Processor", ("avx512f", "avx2"), "native", None),  # somebody has chosen
    ],
)
def test_long_vectors_on_intel(
    monkeypatch: pytest.MonkeyPatch, model: str, isa: tuple[str, ...], march: str | None, expected: Any
) -> None:
    monkeypatch.setattr(inductor, "read_cpu", lambda: replace(read_cpu(), model=model, isa=isa))
    with config.patch({"cpp.march": march}):
        assert inductor.kernel_options() == expected


def test_torch_takes_them() -> None:
    torch.compile(lambda x: x + 1, options=inductor.kernel_options() or {"cpp.march": "x86-64-v3"})
