"""What products run on, and whether it keeps something for each of their shapes."""

from __future__ import annotations

import pytest

from aliquot.machine import kernels


@pytest.mark.parametrize(
    ("name", "keeps"),
    [("brg_matmul:avx512_core_bf16", True), ("gemm:jit", True), ("MKL", False), ("not oneDNN", False)],
)
def test_onednn_alone_keeps_kernels(name: str, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "matmul_kernel", lambda _: name)
    assert kernels.keeps_kernels("bf16") == keeps
