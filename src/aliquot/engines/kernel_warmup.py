"""Kernels that a run is going to need are made after its first micro-batch."""

from __future__ import annotations

from aliquot.engines.base import EngineSpec
from aliquot.machine.kernels import keeps_kernels
from aliquot.nn.attention.base import AttentionBackend
from aliquot.nn.attention.tiled_attention import TiledAttention


def meet_kernels(attention: AttentionBackend | None, spec: EngineSpec, edges: tuple[int, ...]) -> None:
    """After each backward pass over a row with documents at `edges`: nothing, where all have been met."""
    if isinstance(attention, TiledAttention) and keeps_kernels(spec.precision):
        attention.meet_all(edges, spec.document_tokens)
