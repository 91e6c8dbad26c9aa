"""What is asked of a GPU's kernels, without one: stand-ins of the same signature compute it as it is defined.

`flex_attention` itself runs on CPU, too, but only forward; it is tried as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from aliquot.engines.model_engine import ActivationMeter
from aliquot.nn.attention import cuda_attention
from aliquot.nn.attention.cuda_attention import CudaAttention, compiled_flex
from aliquot.nn.attention.document_attention import Documents, ReferenceAttention, Scoring
from tests.nn.attention.test_backends import HEAD_DIM, HEADS, SHORT, assert_equal, results

LENGTHS = (*SHORT, 257)


def varlen_stand_in(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """[T, heads, D], as `varlen_attn` documents it: a window of (W, 0) is W keys to the left, -1 all of them."""
    assert cu_seq_q.dtype == torch.int32 and cu_seq_k is not None and torch.equal(cu_seq_q, cu_seq_k)
    edges = cu_seq_q.tolist()
    assert max_q == max_k >= max(stop - start for start, stop in pairwise(edges))
    assert enable_gqa == (query.shape[1] != key.shape[1]) and scale is not None
    left, right = window_size
    assert right == 0
    scoring = Scoring(scale, None if left == -1 else left + 1)
    documents = Documents(tuple(edges), None)
    rows = (x.transpose(0, 1)[None] for x in (query, key, value))
    return ReferenceAttention().attend(*rows, documents, scoring)[0]


def flex_stand_in(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: object = None, *, return_aux: AuxRequest | None = None,
) -> tuple[Tensor, AuxOutput]:  # fmt: skip
    assert block_mask is not None and return_aux == AuxRequest(lse=True)
    group = query.shape[1] // key.shape[1]
    assert enable_gqa == (group > 1)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    at = torch.arange(query.shape[2])
    none = torch.zeros((), dtype=torch.int64)
    scores = query @ key.mT * scale
    if score_mod is not None:
        scores = score_mod(scores, none, none, at[:, None], at)
    scores = scores.masked_fill(~block_mask.mask_mod(none, none, at[:, None], at), float("-inf"))
    return scores.softmax(-1) @ value, AuxOutput(lse=scores.logsumexp(-1))


@pytest.mark.parametrize(("real", "stand_in"), [(varlen_attn, varlen_stand_in), (flex_attention, flex_stand_in)])
def test_stand_ins_are_called_as_the_kernels_are(real: Callable[..., object], stand_in: Callable[..., object]) -> None:
    assert list(inspect.signature(stand_in).parameters) == list(inspect.signature(real).parameters)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 100], ids=["whole", "itself", "window"])
def test_flash_attention_gets_edges_windows_and_heads(window: int | None, heads: str) -> None:
    """In bf16, as it asks for: both sides round the same values, in different orders of summation."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("flash attention can do this")

    exact = results(ReferenceAttention(), LENGTHS, window, HEADS[heads], torch.float64)
    found = results(CudaAttention(varlen_stand_in, refuse), LENGTHS, window, HEADS[heads], torch.bfloat16)
    assert_equal(found, exact, 2**-6)


@pytest.mark.parametrize("window", [None, 100], ids=["whole", "window"])
@pytest.mark.parametrize(
    ("softcap", "has_sinks", "value_dim"),
    [(None, False, HEAD_DIM), (0.7, False, HEAD_DIM), (None, True, HEAD_DIM), (None, False, 20), (0.7, True, 16)],
    ids=["wide", "softcap", "sinks", "narrow-values", "all"],
)
def test_flex_attention_gets_what_flash_cannot(
    window: int | None, softcap: float | None, has_sinks: bool, value_dim: int
) -> None:
    case = (LENGTHS, window, HEADS["grouped"], torch.float64, softcap, has_sinks, value_dim)
    assert_equal(results(CudaAttention(flex=flex_stand_in), *case), results(ReferenceAttention(), *case), 1e-12)


@pytest.mark.parametrize(
    ("shared_memory", "block"), [(49152, 32), (101376, 32), (166912, None), (232448, None)],
    ids=["RTX 2080", "L40S", "A100", "H100"],
)  # fmt: skip
def test_flex_attention_gets_small_blocks_where_shared_memory_is_small(
    monkeypatch: pytest.MonkeyPatch, shared_memory: int, block: int | None
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    options = cuda_attention.kernel_options.__wrapped__(torch.device("cuda", 0))
    assert options == (None if block is None else options)
    if options is not None:
        sizes = [options[f"BLOCK_{name}"] for name in ("M", "N", "M1", "N1", "M2", "N2")]
        assert sizes == [block] * 6 and options["num_stages"] == 1 and len(options) == 7
    assert cuda_attention.kernel_options(torch.device("cpu")) is None


@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
@pytest.mark.parametrize("lengths", [(1,), (128,), (640,), LENGTHS, (300, 1, 127, 212, 400), (129, 511, 5)])
def test_masks_have_the_blocks_that_torch_finds(lengths: tuple[int, ...], window: int | None) -> None:
    edges = (0, *accumulate(lengths))
    ours = cuda_attention._mask(edges, window, torch.device("cpu"))
    theirs = create_block_mask(ours.mask_mod, None, None, edges[-1], edges[-1], device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for counts, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices"),
                            ("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):  # fmt: skip
        (our_counts, our_rows), (their_counts, their_rows) = (
            (getattr(mask, counts), getattr(mask, indices)) for mask in (ours, theirs)
        )
        assert torch.equal(our_counts, their_counts) and our_counts.dtype == their_counts.dtype
        for count, our_row, their_row in zip(our_counts.flatten(), our_rows[0, 0], their_rows[0, 0], strict=True):
            assert torch.equal(our_row[:count], their_row[:count]) and our_row.dtype == their_row.dtype


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_heads_that_are_too_narrow_for_the_kernels_need_none(softcap: float | None) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("flex_attention takes 16 and more")

    case = (LENGTHS, 100, HEADS["grouped"], torch.float64, softcap, True, 5)
    assert_equal(results(CudaAttention(refuse, refuse), *case), results(ReferenceAttention(), *case), 1e-12)


@pytest.mark.parametrize("window", [None, 100], ids=["whole", "window"])
def test_flex_attention_itself_reads_the_mask_and_the_sinks_so(window: int | None) -> None:
    edges = (0, 40, 140, 300)
    query, sinks = torch.randn(1, 4, 300, HEAD_DIM), torch.randn(4)
    key, value = torch.randn(2, 1, 2, 300, HEAD_DIM)
    scoring = Scoring(0.3, window, 0.7, sinks)
    expected = ReferenceAttention().attend(query, key, value, Documents(edges, None), scoring)
    with torch.no_grad():
        found = CudaAttention(flex=flex_attention).attend(query, key, value, Documents(edges, None), scoring)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # fp32, two orders of summation


@pytest.mark.long
def test_flex_attention_is_compiled_as_one_graph_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU, then computed step by step: torch has no kernel of a CPU for the gradient, and says so. By
    one compiled function, as in a run: the startup proof's numbers, then the model's, evaluations, a row of a token;
    and under the hooks that measure a first forward pass."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    attention = CudaAttention(flex=compiled_flex("aot_eager"))
    numbers = [(5, 0.7, 0.3), (100, 20.0, 0.2), (None, 20.0, 0.2)]  # windows, soft-caps, scales
    for lengths in (LENGTHS, (1,)):
        for window, softcap, scaling in numbers:
            documents = Documents((0, *accumulate(lengths)), None)
            query = torch.randn(1, 4, sum(lengths), HEAD_DIM, dtype=torch.float64, requires_grad=True)
            key, value = torch.randn(2, 1, 2, sum(lengths), HEAD_DIM, dtype=torch.float64, requires_grad=True)
            scoring = Scoring(scaling, window, softcap, None)
            with ActivationMeter("selective", "cuda").measure():
                found = attention.attend(query, key, value, documents, scoring)
            expected = ReferenceAttention().attend(query, key, value, documents, scoring)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            weights = torch.randn_like(found)
            for ours, theirs in zip(
                torch.autograd.grad((found * weights).sum(), (query, key, value)),
                torch.autograd.grad((expected * weights).sum(), (query, key, value)),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
            with torch.no_grad():
                evaluated = attention.attend(query, key, value, Documents(documents.edges, None), scoring)
            torch.testing.assert_close(evaluated, expected, rtol=1e-12, atol=1e-12)
