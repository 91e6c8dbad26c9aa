"""The proof of attention runs the kernels that will train, with the model's heads and windows, and finds errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from aliquot.core.errors import SelfTestError
from aliquot.engines import attention_proof
from aliquot.engines.attention_proof import AttentionCall, attention_calls, prove_attention
from aliquot.engines.base import EngineSpec
from aliquot.models import meta
from aliquot.nn.attention.cuda_attention import CudaAttention
from aliquot.nn.attention.document_attention import Documents, Scoring
from aliquot.nn.attention.tiled_attention import TiledAttention
from tests.nn.attention.test_cuda_wiring import flex_stand_in, varlen_stand_in

WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 64}
CALL = AttentionCall(8, 2, 64, 64, Scoring(0.125, 40), False)
BF16 = EngineSpec("bf16", 512, True, document_tokens=256)


@pytest.fixture(autouse=True)
def single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_proof, "gather", lambda value: [value])


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {"num_key_value_heads": 2}, [AttentionCall(8, 2, 64, 64, Scoring(0.125), False)]),
        ("mistral", {"num_key_value_heads": 4, "sliding_window": 300},
         [AttentionCall(8, 4, 64, 64, Scoring(0.125, 300), False)]),
        ("gpt_oss", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 20, "num_local_experts": 4},
         [AttentionCall(8, 2, 32, 32, Scoring(32**-0.5, window), True) for window in (20, None)]),
    ],
)  # fmt: skip
def test_calls_have_the_heads_and_windows_of_the_model(
    model_type: str, settings: dict[str, Any], expected: list[AttentionCall]
) -> None:
    assert attention_calls(meta.build(AutoConfig.for_model(model_type, **WIDE, **settings)).model) == expected


@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_proof_passes_correct_attention(window: int | None, precision: Any, has_sinks: bool) -> None:
    call = replace(CALL, scoring=Scoring(0.125, window), has_sinks=has_sinks)
    for attention in (TiledAttention(), CudaAttention(varlen_stand_in, flex_stand_in)):
        prove_attention([call], attention, replace(BF16, precision=precision), "cpu")


class Faulty(CudaAttention):
    """As CudaAttention, but with a fault in the kernel for bf16 alone."""

    fault = ""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        if query.dtype == torch.bfloat16 and query.shape[1] == 8:
            if self.fault == "window":
                scoring = replace(scoring, window=(scoring.window or 0) + 1)
            if self.fault == "scale":
                scoring = replace(scoring, scaling=1.2 * scoring.scaling)
            if self.fault == "neighbours":
                documents = Documents((0, documents.edges[-1]), self).on(query.device)
            if self.fault == "blocks":  # a kernel that never looks back further than its first blocks
                scoring = replace(scoring, window=200)
            if self.fault == "heads":
                key, value = key.flip(1), value.flip(1)
        return super().attend(query, key, value, documents, scoring)


@pytest.mark.parametrize("fault", ["window", "scale", "neighbours", "heads"])
def test_proof_finds_a_fault_of_the_kernel_that_trains(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    attention = Faulty(varlen_stand_in, flex_stand_in)
    prove_attention([CALL], attention, replace(BF16, precision="fp32"), "cpu")
    with pytest.raises(SelfTestError, match=r"attention in bf16 on cpu is wrong for 8 heads of 64 over 2 key heads"):
        prove_attention([CALL], attention, BF16, "cpu")


def test_on_gpus_a_model_without_windows_is_proven_with_a_long_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "fault", "blocks")
    spec = replace(BF16, document_tokens=1024)
    call, attention = replace(CALL, scoring=Scoring(0.125)), Faulty(varlen_stand_in, flex_stand_in)
    cpu, tokens = torch.device("cpu"), attention_proof._TOKENS_ON_GPU
    assert attention_proof._difference(call, attention, spec, cpu, 0) is None
    assert attention_proof._difference(call, attention, spec, cpu, tokens) is not None
    lengths: list[int] = []
    monkeypatch.setattr(attention_proof, "_difference", lambda *arguments: lengths.append(arguments[-1]))
    prove_attention([call], attention, spec, "cuda")
    prove_attention([call], attention, spec, "cpu")
    assert lengths == [tokens, 0]
